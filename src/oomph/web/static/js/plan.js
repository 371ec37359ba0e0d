// The planner: the verdict first, then what fills the memory, when, and what the run takes.

import { classes, html } from "./html.js";
import { copy } from "./api.js";
import { count, figure, hours, integer, mib, milliseconds, money, percent, power } from "./format.js";
import { Card, Knobs, Source } from "./knobs.js";
import { MemoryBars, PartsTable } from "./memory.js";
import { PROGRAMS } from "./parts.js";
import { answer, ask, known, notice, plans, problems, question, tookMs } from "./state.js";
import { Timeline } from "./timeline.js";

export function PlanView() {
  const found = answer.value;
  return html`
    <div class="planner">
      <aside class="inputs"><${Source} /><${Card} /></aside>
      <aside class=${classes("inputs turn", !found && "stale")}><${Knobs} /></aside>
      <div class=${classes("results", problems.value.length > 0 && "stale")}>
        ${found ? html`<${Result} found=${found} />` : html`<${Waiting} />`}
      </div>
    </div>`;
}

const Waiting = () => (problems.value.length ? null : html`<p class="waiting">planning…</p>`);

function Result({ found }) {
  const chosen = found.plan.config.trainer;
  const both = plans.value;
  const dashed = found.other_timeline ? `; dashed: ${PROGRAMS[chosen === "oomph" ? "nanogpt" : "oomph"]}` : "";
  const beside = `allocated, by what holds it${dashed}`;
  return html`
    <${Headline} found=${found} />
    <${Verdicts} both=${both} chosen=${chosen} />
    <${MemoryBars} plans=${both} chosen=${chosen} />
    <section class="block" aria-labelledby="over-time">
      <h2 id="over-time">${PROGRAMS[chosen]} over one step <span class="soft">${beside}</span></h2>
      <${Timeline} timeline=${found.timeline} otherTimeline=${found.other_timeline} plan=${found.plan} />
    </section>
    <div class="columns">
      <section class="block"><h2>What fills it</h2><${PartsTable} plans=${both} /></section>
      <section class="block"><h2>Held at the peak</h2><${Holders} peak=${found.timeline.peak} /></section>
    </div>
    <div class="columns">
      <section class="block"><h2>Time and money</h2><${Needs} both=${both} /></section>
      <div class="stack">
        <section class="block"><h2>How sure</h2><${Paces} paces=${found.summary?.paces ?? []} /></section>
        <${Notes} notes=${found.plan.notes} />
      </div>
    </div>
    <section class="block"><h2>In words</h2><${Facts} facts=${found.summary?.facts ?? []} /></section>
    <${Command} />`;
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
  const word = fits === undefined ? "no limit known" : fits ? "fits" : "does not fit";
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
  const rows = NEEDS.map(([label, say, meaning]) => [label, meaning, shown.map((name) => say(both[name]))]).filter(
    ([, , values]) => values.some(Boolean),
  );
  return html`
    <table class="figures">
      <thead>
        <tr><th></th>${shown.map((name) => html`<th scope="col" class="number">${PROGRAMS[name]}</th>`)}</tr>
      </thead>
      <tbody>${rows.map(
        ([label, meaning, values]) => html`
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
          <th></th>
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
