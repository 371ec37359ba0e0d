// Fit: the search for the best setting on this card, for the largest model, or for a run from a budget.

import { html, signal, useEffect } from "./html.js";
import { download, post, Refused, sentence } from "./api.js";
import { Choice, Exact } from "./controls.js";
import { integer } from "./format.js";
import { Card, Source } from "./knobs.js";
import { Options } from "./options.js";
import { command } from "./plan.js";
import { ask, notice, question, tab, takeOver } from "./state.js";

const MODES = [
  ["same", "this run"],
  ["largest", "the largest model"],
  ["budget", "from a budget"],
];

const mode = signal("same");
const budget = signal({ hours: 24, tokens: undefined });
const found = signal(null); // {body, result}
const failed = signal([]);
const searching = signal(false);
let under = null; // the search that is under way, to be broken off by the next

/** What is asked of /api/fit; a budget asks for a model from nothing, so it carries no config. */
function bodyOf() {
  const { step_ms, watts, price_kwh, price_hour, currency, ...run } = question.value; // a plan's alone
  if (mode.value === "same") return run;
  if (mode.value === "largest") return { ...run, largest: true };
  const { gpu, gpu_mib, gpu_tflops, gpu_gbs, gpu_watts, reserve_mib } = question.value;
  return JSON.parse(JSON.stringify({ gpu, gpu_mib, gpu_tflops, gpu_gbs, gpu_watts, reserve_mib, ...budget.value }));
}

async function search(body) {
  under?.abort();
  const mine = (under = new AbortController());
  searching.value = true;
  failed.value = [];
  try {
    const result = await post("/api/fit", body, mine.signal);
    found.value = { body: JSON.stringify(body), result };
  } catch (error) {
    if (error instanceof Refused) {
      failed.value = error.problems;
      found.value = null;
    } else if (error.name !== "AbortError") throw error;
  } finally {
    if (under === mine) searching.value = false;
  }
}

export function FitView() {
  const text = JSON.stringify(bodyOf());
  useEffect(() => {
    if (found.value?.body === text) return undefined;
    const timer = setTimeout(() => search(JSON.parse(text)), 250); // a name is typed to its end first
    return () => clearTimeout(timer);
  }, [text]);
  useEffect(() => () => under?.abort(), []);
  const shown = found.value;
  return html`
    <div class="fit">
      <div class="ask">
        ${mode.value === "budget" ? html`<${Budget} />` : html`<${Source} />`}
        <${Card} />
        <div class="field">
          <span class="field-name">Find</span>
          <${Choice} label="What to find" options=${MODES} value=${mode.value}
            onValue=${(value) => (mode.value = value)} />
        </div>
      </div>
      ${mode.value !== "budget" && Object.keys(question.value.set).length > 0 && html`<${Changed} />`}
      ${failed.value.map((problem) => html`<p class="problem" role="alert">${sentence(problem)}</p>`)}
      <div aria-busy=${searching.value} class=${searching.value && shown ? "stale" : ""}>
        ${shown ? html`<${Found} result=${shown.result} asked=${JSON.parse(shown.body)} />` : null}
      </div>
      ${
        searching.value &&
        html`<p class="searching" role="status">
        <span class="spin" aria-hidden="true"></span>searching: thousands of settings are planned…</p>`
      }
    </div>`;
}

function Budget() {
  const change = (key) => (value) => (budget.value = { ...budget.value, [key]: value });
  return html`
    <section class="panel pair" aria-label="Budget">
      <div class="field">
        <label for="budget-hours">Hours</label>
        <${Exact} wide id="budget-hours" label="Hours" placeholder="any" value=${budget.value.hours}
          onValue=${change("hours")} />
      </div>
      <div class="field">
        <label for="budget-tokens">Tokens, such as 3.68B</label>
        <${Exact} wide id="budget-tokens" label="Tokens" kind="count" placeholder="20 a parameter" value=${budget.value.tokens}
          onValue=${change("tokens")} />
      </div>
    </section>`;
}

/** What was changed on the plan's knobs counts here too, and is told. */
const Changed = () => html`
  <p class="aside changed-keys">
    ${"with "}
    ${Object.entries(question.value.set).map(
      ([key, value]) => html`
      <code dir="ltr" key=${key}>${key} = ${String(value)}</code>${" "}`,
    )}
    <button type="button" class="quiet" onClick=${() => ask({ set: {} })}>drop these changes</button></p>`;

function Found({ result, asked }) {
  const fits = result.now?.memory?.fits;
  return html`
    <p class=${`answer ${fits === false ? "changed" : "fine"}`}>${result.verdict}.</p>
    <${Options} options=${result.options} best=${result.best} safest=${result.safest}
      capacity=${result.now?.memory?.capacity_mib} onTake=${take} caption="Settings by rank" />
    <p class="aside">
      What fits comes first, then what keeps the mathematics, then the fastest. Best is the fastest that keeps the
      training under the program you asked for.
      ${` ${integer(result.evaluated)} plans were made. `}
      A row takes its setting over into Plan and downloads the config.
    </p>
    <section class="block why">
      <h2>Why</h2>
      <ul class="notes">${result.why.map((reason) => html`<li key=${reason}>${reason}.</li>`)}</ul>
    </section>
    <p class="command"><code dir="ltr">${command("fit", asked)}</code></p>`;
}

/** Take a row over: into the question, which a click undoes, and as a file. */
async function take(option) {
  const { hours, tokens, largest, ...asked } = JSON.parse(found.value.body);
  const format = /\.toml$/.test(asked.filename ?? "") || option.trainer === "oomph" ? "toml" : "py";
  try {
    const file = await post("/api/config", { ...asked, trainer: option.trainer, changes: option.changes, format });
    download(file.name, file.text);
    const before = question.value;
    if (mode.value === "budget") ask({ preset: "gpt2", config: undefined, filename: undefined, set: {} });
    takeOver(option.changes, option.trainer);
    notice.value = {
      text: `Taken over: ${option.name}. Saved as ${file.name}.`,
      undo: () => (question.value = before),
    };
    mode.value = "same";
    tab.value = "plan";
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    notice.value = { text: error.message };
  }
}
