// @ts-check
// The card picker: a field that searches the catalogue by name and memory, a list to choose from, and own numbers.

import { classes, html, useId, useMemo, useState } from "./html.js";
import { sentence } from "./api.js";
import { FlagKnob } from "./controls.js";
import { ask, known, problemOf, question } from "./state.js";

const SHOWN = 60; // of the cards found: more than anyone scrolls through
const MAKERS = /^(?:NVIDIA|AMD|GeForce|Radeon|Instinct|Quadro|Tesla|Intel|Apple) /;

const gib = (mib) => Math.round(mib / 1024);

/** The cards whose name or memory has every word: "24" and "3090 24 gib" find the same card. */
function search(cards, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [...cards].reverse(); // the newest first
  const has = ({ name, vendor, memory_mib: mib }) => {
    const about = `${vendor ?? ""} ${name} ${gib(mib)}gib ${gib(mib)} gib`.toLowerCase();
    return words.every((word) => about.includes(word));
  };
  const starts = ({ name }) => !name.toLowerCase().replace(MAKERS, "").startsWith(words.join(" "));
  return cards.filter(has).sort((a, b) => Number(starts(a)) - Number(starts(b)));
}

export function Card() {
  const id = useId();
  const wrong = problemOf("gpu");
  const near = wrong?.nearest;
  const { gpu = "" } = question.value;
  const chosen = known.value.gpus.find(({ name }) => name === gpu || name.replace(MAKERS, "") === gpu);
  const take = (text) => text !== gpu && ask({ gpu: text || undefined });
  return html`
    <section class=${classes("panel", wrong && "wrong")} aria-label="Card">
      <div class="field">
        <label for=${id}>Card${chosen && html` <span class="unit">${gib(chosen.memory_mib)} GiB</span>`}</label>
        <${Picker} id=${id} value=${gpu} onTake=${take} />
      </div>
      ${
        wrong &&
        html`<p class="problem" role="alert">${sentence({ ...wrong, nearest: "" })}
        ${near && html` <button type="button" class="quiet" onClick=${() => take(near)}>${near}</button>`}</p>`
      }
      <${OwnNumbers} />
    </section>`;
}

/** A combobox: type to search, arrows and Enter to choose, Escape to leave it as it was. */
function Picker({ id, value, onTake }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null)); // what is typed; null: nothing
  const [open, setOpen] = useState(false);
  const [at, setAt] = useState(-1);
  const list = `${id}-cards`;
  const found = useMemo(() => search(known.value.gpus, draft ?? "").slice(0, SHOWN), [known.value.gpus, draft]);
  const close = () => {
    setOpen(false);
    setAt(-1);
    setDraft(null);
  };
  const take = (text) => {
    close();
    onTake(text);
  };
  const move = (step) => {
    const next = Math.min(found.length - 1, Math.max(0, at + step));
    setOpen(true);
    setAt(next);
    document.getElementById(`${list}-${next}`)?.scrollIntoView({ block: "nearest" });
  };
  const keys = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
    if (step) {
      event.preventDefault();
      move(step);
    } else if (event.key === "Enter") take(at >= 0 ? found[at].name : (draft ?? value).trim());
    else if (event.key === "Escape") close();
  };
  const typed = (event) => {
    setDraft(event.target.value);
    setOpen(true);
    setAt(-1);
  };
  const leave = () => (draft !== null ? take(draft.trim()) : close());
  const shown = open && found.length > 0;
  return html`
    <div class="picker">
      <input type="text" id=${id} role="combobox" autocomplete="off" spellcheck=${false} dir="ltr"
        aria-expanded=${shown} aria-controls=${list} aria-autocomplete="list"
        aria-activedescendant=${shown && at >= 0 ? `${list}-${at}` : undefined}
        placeholder="this machine's" value=${draft ?? value}
        onInput=${typed} onKeyDown=${keys} onBlur=${leave} onClick=${() => setOpen(true)}
        onFocus=${(event) => event.target.select()} />
      <ul id=${list} class="cards" role="listbox" aria-label="Cards" hidden=${!shown}>
        ${
          shown &&
          found.map(
            ({ name, memory_mib: mib, bandwidth_gbs: gbs }, index) => html`
          <li key=${name} id=${`${list}-${index}`} role="option" aria-selected=${index === at}
            class=${classes(index === at && "lit", name === value && "chosen")}
            onPointerDown=${(event) => event.preventDefault()} onClick=${() => take(name)}>
            <span>${name}</span><span class="card-size">${gib(mib)} GiB${gbs ? ` · ${Math.round(gbs)} GB/s` : ""}</span>
          </li>`,
          )
        }
      </ul>
    </div>`;
}

const NUMBERS = [
  ["gpu_mib", "Memory", "MiB", "as catalogued"],
  ["gpu_tflops", "Half-precision peak", "TFLOPS", "as catalogued"],
  ["gpu_gbs", "Bandwidth", "GB/s", "as catalogued"],
  ["gpu_watts", "Power limit", "W", "as catalogued"],
];

/** A card that is not in the list, by its numbers. */
function OwnNumbers() {
  const given = NUMBERS.some(([name]) => name in question.value);
  return html`
    <details class="more" open=${given}>
      <summary>By its own numbers</summary>
      <div class="two">
        ${NUMBERS.map(
          ([name, label, unit, placeholder]) => html`<${FlagKnob} key=${name} name=${name} label=${label}
          unit=${unit} placeholder=${placeholder} />`,
        )}
      </div>
    </details>`;
}
