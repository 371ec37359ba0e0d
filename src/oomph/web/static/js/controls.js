// @ts-check
// The knobs: a slider with its exact number beside it, a choice of a few, a switch. All are native inputs underneath.

import { classes, html, useId, useState } from "./html.js";
import { sentence } from "./api.js";
import { read } from "./link.js";
import { ask, known, problemOf, question, setKeys, valueOf } from "./state.js";

const LETTERS = new Set(["str", "count"]); // kinds that a keyboard of digits cannot type: a name, 3.68B

/** The place on a scale nearest to a value, by ratio. */
export function nearest(scale, value) {
  let best = 0;
  scale.forEach((each, index) => {
    const apart = (at) => Math.abs(Math.log((at + 1) / (value + 1)));
    if (apart(each) < apart(scale[best])) best = index;
  });
  return best;
}

/** Label, "changed here" mark, and what is wrong with the value. */
export function Knob({ name, label, unit, id, children, problem, onReset, changed, help }) {
  return html`
    <div class=${classes("knob", changed && "changed", problem && "wrong")} data-key=${name}>
      <div class="knob-head">
        <label for=${id} title=${help}>${label}${unit && html` <span class="unit">${unit}</span>`}</label>
        ${
          changed &&
          html`<button type="button" class="reset" title="back to the config's value"
          aria-label=${`${label}: back to the config's value`} onClick=${onReset}>↺</button>`
        }
      </div>
      ${children}
      ${problem && html`<p class="problem" role="alert">${sentence({ ...problem, where: "" })}</p>`}
    </div>`;
}

function usual(key) {
  return {
    name: key,
    help: `${key}: ${known.value.keys[key]?.help ?? ""}`,
    changed: key in question.value.set,
    problem: problemOf(key),
    onReset: () => setKeys({ [key]: undefined }),
  };
}

/** A slider over a scale of good values, and a field that takes any. */
export function SliderKnob({ name, label, unit, scale, words = String, onValue, extra }) {
  const id = useId();
  const value = valueOf(name);
  const change = onValue ?? ((next) => setKeys({ [name]: next }));
  const place = typeof value === "number" ? nearest(scale, value) : 0;
  return html`
    <${Knob} ...${usual(name)} label=${label} unit=${unit} id=${id}>
      <div class="slide">
        <input type="range" id=${id} min="0" max=${scale.length - 1} step="1" value=${place}
          style=${{ "--filled": scale.length > 1 ? place / (scale.length - 1) : 0 }}
          aria-valuetext=${`${words(value ?? scale[place])}`}
          onInput=${(event) => change(scale[Number(event.target.value)])} />
        <${Exact} label=${`${label}, exactly`} value=${value} onValue=${change} />
        ${extra}
      </div>
    <//>`;
}

/** A number, or a text by its `kind`, to type. It is taken when the field is left or Enter pressed; the arrows count. */
export function Exact({ label, value, onValue, id, placeholder, wide, kind }) {
  const [draft, setDraft] = useState(null);
  const take = (text) => {
    setDraft(null);
    const next = read(text, kind);
    if (text.trim() !== "" && next !== value) onValue(next);
    else if (text.trim() === "" && placeholder !== undefined) onValue(undefined);
  };
  const keys = (event) => {
    const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (step && typeof value === "number") {
      event.preventDefault();
      setDraft(null);
      onValue(Math.max(0, value + step * (event.shiftKey ? 10 : 1)));
    } else if (event.key === "Enter") take(event.target.value);
    else if (event.key === "Escape") setDraft(null);
  };
  return html`
    <input type="text" id=${id} class=${classes("exact", wide && "wide")} inputmode=${LETTERS.has(kind) ? "text" : "decimal"} autocomplete="off"
      spellcheck=${false} dir="ltr"
    aria-label=${label} placeholder=${placeholder} value=${draft ?? value ?? ""}
    onInput=${(event) => setDraft(event.target.value)} onChange=${(event) => take(event.target.value)}
    onKeyDown=${keys} />`;
}

/** One of a few, all in sight. */
export function Choice({ label, options, value, onValue, name }) {
  const group = useId();
  return html`
    <div class="choice" role="radiogroup" aria-label=${label} data-name=${name}>
      ${options.map(
        ([option, word]) => html`
        <label key=${option} class=${classes("option", option === value && "chosen")}>
          <input type="radio" name=${group} value=${option} checked=${option === value}
            onChange=${() => onValue(option)} />
          <span>${word}</span>
        </label>`,
      )}
    </div>`;
}

export function ChoiceKnob({ name, label, options }) {
  return html`
    <${Knob} ...${usual(name)} label=${label}>
      <${Choice} label=${label} name=${name} options=${options} value=${valueOf(name)}
        onValue=${(value) => setKeys({ [name]: value })} />
    <//>`;
}

/** One of several, in a list. */
export function ListKnob({ name, label, options }) {
  const id = useId();
  return html`
    <${Knob} ...${usual(name)} label=${label} id=${id}>
      <select id=${id} value=${valueOf(name)} onChange=${(event) => setKeys({ [name]: event.target.value })}>
        ${options.map((option) => html`<option key=${option} value=${option}>${option}</option>`)}
      </select>
    <//>`;
}

export function SwitchKnob({ name, label }) {
  const id = useId();
  return html`
    <${Knob} ...${usual(name)} label=${label} id=${id}>
      <input type="checkbox" role="switch" class="switch" id=${id} checked=${valueOf(name) === true}
        onChange=${(event) => setKeys({ [name]: event.target.checked })} />
    <//>`;
}

/** Any key at all, by its kind. */
export function FieldKnob({ name, label = name, unit }) {
  const id = useId();
  const key = known.value.keys[name];
  if (key?.kind === "bool") return html`<${SwitchKnob} name=${name} label=${label} />`;
  if (key?.choices?.length) return html`<${ListKnob} name=${name} label=${label} options=${key.choices} />`;
  return html`
    <${Knob} ...${usual(name)} label=${label} unit=${unit} id=${id}>
      <${Exact} wide id=${id} label=${label} value=${valueOf(name)} kind=${key?.kind}
        placeholder=${key?.optional ? "not said" : undefined} onValue=${(value) => setKeys({ [name]: value })} />
    <//>`;
}

/** What the question has beside the config's keys: a card's number, a price. */
export function FlagKnob({ name, label, unit, placeholder }) {
  const id = useId();
  return html`
    <${Knob} name=${name} label=${label} unit=${unit} id=${id} changed=${name in question.value}
      problem=${problemOf(name)} onReset=${() => ask({ [name]: undefined })}>
      <${Exact} wide id=${id} label=${label} value=${question.value[name]} placeholder=${placeholder}
        kind=${name === "currency" ? "str" : "float"} onValue=${(value) => ask({ [name]: value })} />
    <//>`;
}
