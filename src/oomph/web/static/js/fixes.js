// @ts-check
// Where a run does not fit: the three best changes, each a click away, before and after.

import { html, signal, useEffect, without } from "./html.js";
import { post, Refused } from "./api.js";
import { figure, hours, setting } from "./format.js";
import { PROGRAMS } from "./parts.js";
import { busy, notice, question, takeOver } from "./state.js";

const SHOWN = 3;
const PAUSE_MS = 500; // the knobs are at rest: a search takes seconds
const found = signal(null); // {body, options}: the best first

const gib = (mib) => (mib / 1024).toFixed(1);

/** The question of the plan as one of /api/fit. */
export const fitQuestion = () => without(question.value, "step_ms", "watts", "price_kwh", "price_hour", "currency");

export function Fixes({ plan }) {
  const body = JSON.stringify(fitQuestion());
  useEffect(() => {
    if (found.value?.body === body || busy.value) return undefined;
    const control = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const { options, best } = await post("/api/fit", JSON.parse(body), control.signal);
        const first = options.filter((option, rank) => rank === best && isSure(option));
        found.value = { body, options: [...first, ...options.filter((each) => isSure(each) && !first.includes(each))] };
      } catch (error) {
        if (error instanceof Refused) found.value = { body, options: [], failed: error.message };
        else if (error.name !== "AbortError") throw error;
      }
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [body, busy.value]);
  const own = found.value?.body === body ? found.value : null;
  return html`
    <section class="block fixes" aria-label="What would fit" aria-busy=${!own}>
      <h2>What would fit</h2>
      ${!own && html`<p class="searching"><span class="spin" aria-hidden="true"></span>looking for settings that fit…</p>`}
      ${own?.failed && html`<p class="problem" role="alert">${own.failed}</p>`}
      ${
        own &&
        !own.failed &&
        !own.options.length &&
        html`<p class="aside">Nothing that surely fits keeps this training. <a href="#fit">Fit</a> shows all that was tried.</p>`
      }
      <ul>
        ${own?.options.slice(0, SHOWN).map((option) => html`<${Fix} key=${option.name} option=${option} plan=${plan} />`)}
      </ul>
    </section>`;
}

/** Of options that keep the training: those that fit even where the prediction is low by its whole margin. */
const isSure = ({ fits, kind, high_mib: high, total_mib: total, headroom_mib: left }) =>
  fits && kind !== "different" && (left === undefined || high <= total + left);

function Fix({ option, plan }) {
  const { name: called, changes, trainer, patched, total_mib: after, hours: run, kind } = option;
  const keys = without(changes, "trainer");
  const name = `${called}${patched ? ", with its patch" : ""}`;
  const apply = () => {
    const undo = takeOver(changes, trainer);
    const less = `${gib(plan.memory.total_mib)} → ${gib(after)} GiB`;
    notice.value = { text: `${name}: ${less}`, undo };
  };
  const days = plan.time?.hours >= 72;
  const span = (value) => (days ? `${figure(value / 24)} days` : hours(value));
  return html`
    <li>
      <div>
        <b>${name}</b> <span class="soft">${PROGRAMS[trainer]}${kind === "nearly" ? ", nearly the same training" : ""}</span>
        <div class="changes">${Object.entries(keys).map(([key, value]) => html`<code key=${key} dir="ltr">${key} = ${setting(value)}</code>`)}</div>
      </div>
      <span class="number"><bdi>${gib(plan.memory.total_mib)} → <b>${gib(after)} GiB</b></bdi></span>
      <span class="number">${run !== undefined && html`<bdi>${plan.time ? `${span(plan.time.hours)} → ` : ""}<b>${span(run)}</b></bdi>`}</span>
      <button type="button" class="button plain" onClick=${apply} aria-label=${`Apply ${name}`}>Apply</button>
    </li>`;
}
