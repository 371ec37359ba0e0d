// @ts-check
// The planner: the verdict first, then what fills the memory, when, and what the run takes.

import { classes, html, useEffect, useState } from "./html.js";
import { copy, download, post, Refused } from "./api.js";
import { count, figure, hours, integer, mib, milliseconds, money, percent, power, withArticle } from "./format.js";
import { Fixes } from "./fixes.js";
import { Card } from "./card.js";
import { Knobs, Source } from "./knobs.js";
import { MemoryBars, PartsTable } from "./memory.js";
import { PROGRAMS } from "./parts.js";
import {
  answer,
  ask,
  askPlanner,
  busy,
  cancel,
  cancelled,
  known,
  notice,
  plans,
  problems,
  question,
  tookMs,
} from "./state.js";
import { Timeline, moment } from "./timeline.js";

export function PlanView() {
  const found = answer.value;
  return html`
    <div class="planner">
      <aside class="inputs" aria-label="What is planned"><${Source} /><${Card} /></aside>
      <aside class=${classes("inputs turn", !found && "stale")} aria-label="Knobs"><${Knobs} /></aside>
      <div class=${classes("results", (problems.value.length > 0 || busy.value) && "stale")} aria-busy=${busy.value}>
        ${busy.value && html`<${Slow} />`}
        ${found ? html`<${Result} found=${found} />` : html`<${Waiting} />`}
      </div>
    </div>`;
}

function Waiting() {
  if (problems.value.length || busy.value) return null;
  return html`<p class="waiting">${cancelled.value ? "Not planned. " : "planning…"}
    ${cancelled.value && html`<button type="button" class="button plain" onClick=${askPlanner}>Plan it</button>`}</p>`;
}

const SLOW_MS = 1000;

/** After a while the wait is told, and can be ended. */
function Slow() {
  const [late, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), SLOW_MS);
    return () => clearTimeout(timer);
  }, []);
  if (!late) return null;
  return html`<p class="searching" role="status"><span class="spin" aria-hidden="true"></span>planning…
    <button type="button" class="quiet" onClick=${cancel}>cancel</button></p>`;
}

function Result({ found }) {
  const chosen = found.plan.config.trainer;
  const both = plans.value;
  const dashed = found.other_timeline ? `; dashed: ${PROGRAMS[chosen === "oomph" ? "nanogpt" : "oomph"]}` : "";
  const beside = `allocated, by what holds it${dashed}`;
  return html`
    <${Opening} plan=${found.plan} other=${found.other} />
    ${found.summary.warning && html`<p class="qualified" role="note">${found.summary.warning}.</p>`}
    <${Headline} found=${found} />
    <${Verdicts} both=${both} chosen=${chosen} />
    <${MemoryBars} plans=${both} chosen=${chosen} />
    ${found.plan.memory.fits === false && html`<${Fixes} plan=${found.plan} />`}
    <section class="block" aria-labelledby="over-time">
      <h2 id="over-time">${PROGRAMS[chosen]} over one step <span class="soft">${beside}</span></h2>
      <${Timeline} timeline=${found.timeline} otherTimeline=${found.other_timeline} plan=${found.plan} />
    </section>
    <div class="columns">
      <section class="block"><h2>What fills it</h2><${PartsTable} plans=${both} /></section>
      <${Held} peak=${found.timeline.peak} />
    </div>
    <div class="columns">
      <section class="block"><h2>Time and money</h2><${Needs} both=${both} /></section>
      <div class="stack">
        <section class="block"><h2>How sure</h2><${Paces} paces=${found.summary?.paces ?? []} /></section>
        <${Notes} notes=${found.plan.notes} />
      </div>
    </div>
    <section class="block"><h2>In words</h2><${Facts} facts=${found.summary?.facts ?? []} /></section>
    <${Command} />
    <${Files} />`;
}

const gib = (mib) => (mib / 1024).toFixed(1);

/** Said of a verdict that the prediction's error could turn. */
const unsure = ({ capacity_mib: room, low_mib: low, high_mib: high }) =>
  room && low <= room && room < high ? ", not surely" : "";

/** The answer in a sentence or two. */
function Opening({ plan, other }) {
  const { memory, device, model, config } = plan;
  const { total_mib: need, capacity_mib: room, headroom_mib: left } = memory;
  const name = question.value.preset ?? config.model_type;
  const run = `${name}, ${count(model.params_nanogpt)} parameters, under ${PROGRAMS[config.trainer]}`;
  const needs = room ? `needs ${gib(need)} of ${gib(room)} GiB on ${withArticle(device.name.replace(/^GeForce /, ""))}` : `needs ${gib(need)} GiB`;
  const verdict = memory.fits === undefined ? "" : ` and ${memory.fits ? "fits" : "does not fit"}${unsure(memory)}`;
  const costs = ({ time, energy }) =>
    `${time ? `${hours(time.hours)}` : ""}${time && energy ? `, ${money(energy.cost, energy.currency)} of power` : ""}`;
  const helps = memory.fits === false && other?.memory.fits;
  const spare = other?.memory.headroom_mib;
  return html`
    <p class="opening">${run}, ${needs}${verdict}${memory.fits !== false && costs(plan) ? `: ${costs(plan)}` : ""}.
      ${memory.fits && left !== undefined ? ` ${gib(left)} GiB are left.` : ""}
      ${helps ? ` ${PROGRAMS[other.config.trainer]} fits with ${gib(spare)} GiB to spare${costs(other) ? `: ${costs(other)}` : ""}.` : ""}
    </p>`;
}

/** The picture and the snapshot of this plan, as files. */
function Files() {
  const fetchFile = (verb, type) => async () => {
    try {
      const { name, text, content } = await post(`/api/${verb}`, question.value);
      download(name, text ?? Uint8Array.from(atob(content), (each) => each.charCodeAt(0)), type);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      notice.value = { text: error.message };
    }
  };
  const snapshot = fetchFile("snapshot", "application/octet-stream");
  return html`
    <div class="actions">
      <button type="button" class="quiet" onClick=${fetchFile("picture", "image/svg+xml")}>picture (SVG)</button>
      <button type="button" class="quiet" onClick=${snapshot} title="for pytorch.org/memory_viz">memory snapshot</button>
    </div>`;
}

const TOOK = "from the change to the answer";

function Headline({ found }) {
  const { plan } = found;
  const { config, model, data } = plan;
  return html`
    <p class="headline">
      <b>${count(model.params_nanogpt)}</b>
      ${` parameters: ${config.n_layer} layers × ${config.n_embd}, ${config.n_head} heads, `}
      ${`block ${integer(config.block_size)}, vocabulary ${integer(config.vocab_size)}. `}
      ${`${integer(config.batch_size)} × ${integer(config.gradient_accumulation_steps)} sequences = `}
      <b>${integer(data.tokens_per_step)}</b>
      ${` tokens a step, ${config.dtype}, ${config.optimizer}, `}
      ${config.compile ? `compiled with torch ${config.torch_version}. ` : "not compiled. "}
      ${tookMs.value !== null && html`<span class="soft took" title=${TOOK}>${figure(tookMs.value)} ms</span>`}
    </p>`;
}

/** Two programs side by side, or one; the one that is picked is drawn in time and written into links and configs. */
function Verdicts({ both, chosen }) {
  return html`
    <div class="verdicts" role="radiogroup" aria-label="Program">
      ${Object.keys(PROGRAMS)
        .filter((name) => both[name])
        .map((name) => html`<${Verdict} key=${name} name=${name} plan=${both[name]} chosen=${name === chosen} />`)}
    </div>`;
}

function Verdict({ name, plan, chosen }) {
  const { memory, time, energy, device } = plan;
  const fits = memory.fits;
  const left = memory.headroom_mib;
  const word = fits === undefined ? "no limit known" : `${fits ? "fits" : "does not fit"}${unsure(memory)}`;
  return html`
    <label class=${classes("verdict", chosen && "chosen", fits === false ? "no" : "yes")} data-program=${name}>
      <input type="radio" name="program" value=${name} checked=${chosen} onChange=${() => ask({ trainer: name })} />
      <span class="program">${PROGRAMS[name]}</span>
      <span class="word">
        <span class="mark" aria-hidden="true">${fits === false ? "✗" : "✓"}</span>
        <bdi>${word}</bdi>
      </span>
      <span class="need"><bdi><b>${mib(memory.total_mib)}</b> MiB</bdi></span>
      <span class="left">${left !== undefined && html`<${Left} left=${left} capacity=${memory.capacity_mib} />`}</span>
      <span class="range" title="in 95 of 100 runs it needs between these; and how probable it is that it fits">
        ${mib(memory.low_mib)} – ${mib(memory.high_mib)}${chance(memory.p_fits)}
      </span>
      <span class="pace">
        ${time ? `${milliseconds(time.step_ms)} a step, ${hours(time.hours)}` : `no rates known for ${device.name}`}
        ${energy ? `, ${money(energy.cost, energy.currency)}` : ""}
      </span>
    </label>`;
}

/** ", fits: 97 %", where the device's memory is known. */
const chance = (p) => {
  if (p === undefined) return "";
  const percent = p > 0.99 ? ">\u00a099" : p < 0.01 ? "<\u00a01" : Math.round(100 * p);
  return `, fits:\u00a0${percent}\u00a0%`;
};

const Left = ({ left, capacity }) =>
  left >= 0
    ? html`<b>${mib(left)}</b> left of ${mib(capacity)}`
    : html`<b>${mib(-left)}</b> too many for ${mib(capacity)}`;

/** The largest buffers alive at the fullest moment: the peak's owners. */
/** What is alive at the peak, or at the moment of the timeline that was clicked. */
function Held({ peak }) {
  const at = moment.value;
  return html`
    <section class="block" aria-live="polite" aria-busy=${at?.holders === null}>
      <h2>${at ? "Held at the moment you clicked" : "Held at the peak"}
        ${at && html` <button type="button" class="quiet" onClick=${() => (moment.value = null)}>the peak again</button>`}
      </h2>
      ${at && html`<p class="aside">${at.op}${at.holders === null ? "…" : `: ${mib(at.mib)} MiB`}</p>`}
      ${at?.problem && html`<p class="problem" role="alert">${at.problem}</p>`}
      <${Holders} peak=${at ? { holders: at.holders ?? [] } : peak} />
    </section>`;
}

function Holders({ peak }) {
  const most = Math.max(...peak.holders.map(({ mib: size }) => size), 1);
  return html`
    <p class="aside">${peak.at ?? peak.op}</p>
    <table class="figures holders"><tbody>
      ${peak.holders.map(
        ({ name, mib: size, count: times }) => html`
        <tr key=${name}>
          <th scope="row"><bdi>${name}</bdi>${times > 1 && html` <span class="soft">× ${times}</span>`}</th>
          <td class="meter" aria-hidden="true"><span style=${{ width: `${(100 * size) / most}%` }}></span></td>
          <td class="number">${mib(size)} MiB</td>
        </tr>`,
      )}
    </tbody></table>`;
}

// [label, what a plan says of it, what it means]
/** @type {[string, (plan: any) => any, string][]} */
const NEEDS = [
  ["a step", ({ time }) => time && milliseconds(time.step_ms), "one optimizer step, all its micro-steps"],
  ["tokens a second", ({ time }) => time && integer(time.tokens_per_s), "over all devices"],
  ["use of the card", ({ time }) => time && percent(time.mfu), "of this device's own peak"],
  [
    "mfu nanoGPT prints",
    ({ time, config }) => time && config.trainer === "nanogpt" && percent(time.mfu_nanogpt),
    "it divides by an A100's 312 TFLOPS, whatever the card",
  ],
  ["the run", ({ time }) => time && hours(time.hours), "evaluations included"],
  ["energy", ({ energy }) => energy && `${figure(energy.kwh)} kWh`, "watts × hours / 1000"],
  ["electricity, the card", ({ energy }) => energy && money(energy.cost, energy.currency), "kWh × the price of one"],
  [
    "electricity, the machine",
    ({ energy }) => energy && money(energy.machine_cost, energy.currency),
    "the card, the rest of the machine, and what its power supply loses",
  ],
  ["rented instead", ({ energy }) => energy && rent(energy), "hours × the price of one"],
  ["tokens", ({ data }) => count(data.total_tokens), "tokens a step × steps"],
  [
    "passes over the data",
    ({ data }) => data.epochs !== undefined && figure(data.epochs),
    "tokens / tokens in the data",
  ],
  ["tokens a parameter", ({ data }) => figure(data.tokens_per_param), "Chinchilla's rule of thumb is 20"],
  ["arithmetic", ({ compute }) => `${power(compute.total_flops)} FLOP`, "nanoGPT's count, the whole run"],
];

/** At the price that was given, else at the published ones. */
function rent({ rent: given, rent_usd_low: low, rent_usd_high: high, currency }) {
  if (given !== undefined) return money(given, currency);
  if (low === undefined) return "";
  return low === high ? money(low, "USD") : `${money(low)} – ${money(high, "USD")}`;
}

function Needs({ both }) {
  const shown = Object.keys(PROGRAMS).filter((name) => both[name]);
  const told = NEEDS.map(([label, say, meaning]) => ({ label, meaning, values: shown.map((name) => say(both[name])) }));
  const rows = told.filter(({ values }) => values.some(Boolean));
  return html`
    <table class="figures">
      <thead>
        <tr><td></td>${shown.map((name) => html`<th scope="col" class="number">${PROGRAMS[name]}</th>`)}</tr>
      </thead>
      <tbody>${rows.map(
        ({ label, meaning, values }) => html`
        <tr key=${label} title=${meaning}>
          <th scope="row">${label}</th>
          ${values.map((value) => html`<td class="number"><bdi>${value || "–"}</bdi></td>`)}
        </tr>`,
      )}
      </tbody>
    </table>`;
}

const UNKNOWN = "The rates of this device are not known, so no time is guessed.";

function Paces({ paces }) {
  if (!paces.length) {
    const measured = known.value.machine?.measuring && !question.value.gpu;
    return html`<p class="aside">${measured ? "This machine is being measured…" : UNKNOWN}</p>`;
  }
  return html`
    <table class="figures">
      <thead>
        <tr>
          <td></td>
          <th scope="col" class="number">a step</th>
          <th scope="col" class="number">tokens/s</th>
          <th scope="col" class="number">the run</th>
          <th scope="col" class="number">done, if started now</th>
        </tr>
      </thead>
      <tbody>${paces.map(
        ({ case: name, step, tokens_per_s, run, finish }) => html`
        <tr key=${name}>
          <th scope="row">${name}</th>
          ${[step, tokens_per_s, run, finish].map((value) => html`<td class="number"><bdi>${value}</bdi></td>`)}
        </tr>`,
      )}</tbody>
    </table>`;
}

function Facts({ facts }) {
  const repeats = (index) => index > 0 && facts[index - 1][0] === facts[index][0];
  return html`
    <dl class="facts">
      ${facts.map(
        ([heading, sentence], index) => html`<div>
        <dt>${repeats(index) ? "" : heading}</dt>
        <dd>${sentence}.</dd>
      </div>`,
      )}
    </dl>`;
}

function Notes({ notes }) {
  if (!notes.length) return null;
  return html`
    <section class="block" aria-label="To know">
      <h2>To know</h2>
      <ul class="notes">${notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>
    </section>`;
}

/** The same question in a terminal. */
export function command(verb = "plan", asked = question.value) {
  const { preset, filename, gpu, trainer, config, set = {}, largest, ...flags } = asked;
  const quoted = (text) => (/^[\w.,:/=+-]+$/.test(text) ? text : `"${String(text).replace(/["\\$`]/g, "\\$&")}"`);
  const pasted = config?.trimStart().startsWith("{") ? "config.json" : "run.py";
  const source = preset ?? filename ?? (config === undefined ? undefined : pasted);
  const words = ["oomph", verb, ...(source === undefined ? [] : [quoted(source)])];
  if (gpu) words.push("--gpu", quoted(gpu));
  for (const [key, value] of Object.entries(flags)) words.push(`--${key}`, quoted(String(value)));
  if (largest) words.push("--largest");
  if (trainer) words.push(`--trainer=${trainer}`);
  for (const [key, value] of Object.entries(set))
    words.push(`--${key}=${quoted(value === true ? "True" : value === false ? "False" : String(value))}`);
  return words.join(" ");
}

function Command() {
  const text = command();
  const take = async () => {
    await copy(text);
    notice.value = { text: "Command copied" };
  };
  return html`
    <div class="command">
      <code dir="ltr">${text}</code>
      <button type="button" class="quiet" onClick=${take}>copy</button>
    </div>`;
}
