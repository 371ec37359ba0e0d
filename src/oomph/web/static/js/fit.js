// @ts-check
// Fit: the search for the best setting on this card, for the largest model, or for a run from a budget.

import { batch, classes, html, signal, useEffect, useState, without } from "./html.js";
import { download, post, Refused, sentence } from "./api.js";
import { Choice, Exact } from "./controls.js";
import { integer } from "./format.js";
import { fitQuestion } from "./fixes.js";
import { Card } from "./card.js";
import { Source } from "./knobs.js";
import { Options } from "./options.js";
import { command } from "./plan.js";
import { Scatter } from "./scatter.js";
import { ask, notice, question, search, tab, takeOver } from "./state.js";

const MODES = [
  ["same", "this run"],
  ["largest", "the largest model"],
  ["budget", "from a budget"],
];

const found = signal(null); // {body, result}
const failed = signal([]);
const searching = signal(false);
let under = null; // the search that is under way, to be broken off by the next

/** What is asked of /api/fit; a budget asks for a model from nothing, so it carries no config. */
function bodyOf() {
  const { find, hours, tokens } = search.value;
  const run = fitQuestion();
  if (find === "same") return run;
  if (find === "largest") return { ...run, largest: true };
  const { gpu, gpu_mib, gpu_tflops, gpu_gbs, gpu_watts, reserve_mib } = run;
  return JSON.parse(JSON.stringify({ gpu, gpu_mib, gpu_tflops, gpu_gbs, gpu_watts, reserve_mib, hours, tokens }));
}

async function look(body) {
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

/** Give the search up. No older answer stays. */
function cancel() {
  under?.abort();
  found.value = null;
}

export function FitView() {
  const text = JSON.stringify(bodyOf());
  useEffect(() => {
    if (found.value?.body === text) return undefined;
    const timer = setTimeout(() => look(JSON.parse(text)), 250); // a name is typed to its end first
    return () => clearTimeout(timer);
  }, [text]);
  useEffect(() => () => under?.abort(), []);
  const shown = found.value;
  const stale = searching.value || shown?.body !== text;
  const { find } = search.value;
  return html`
    <div class="fit">
      <div class="ask">
        ${find === "budget" ? html`<${Budget} />` : html`<${Source} />`}
        <${Card} />
        <div class="field">
          <span class="field-name">Find</span>
          <${Choice} label="What to find" options=${MODES} value=${find}
            onValue=${(value) => (search.value = { ...search.value, find: value })} />
        </div>
      </div>
      ${find !== "budget" && Object.keys(question.value.set).length > 0 && html`<${Changed} />`}
      ${failed.value.map((problem) => html`<p class="problem" role="alert">${sentence(problem)}</p>`)}
      ${
        searching.value &&
        html`<p class="searching" role="status">
        <span class="spin" aria-hidden="true"></span>searching: thousands of settings are planned…
        <button type="button" class="quiet" onClick=${cancel}>cancel</button></p>`
      }
      ${
        !searching.value &&
        !shown &&
        !failed.value.length &&
        html`<p class="waiting"><button type="button" class="button plain" onClick=${() => look(bodyOf())}>Search</button></p>`
      }
      <div aria-busy=${stale} class=${classes("found", shown && stale && "stale")}>
        ${shown ? html`<${Found} result=${shown.result} asked=${JSON.parse(shown.body)} />` : null}
      </div>
    </div>`;
}

function Budget() {
  const change = (key) => (value) => (search.value = { ...search.value, [key]: value });
  return html`
    <section class="panel pair" aria-label="Budget">
      <div class="field">
        <label for="budget-hours">Hours</label>
        <${Exact} wide id="budget-hours" label="Hours" placeholder="any" value=${search.value.hours}
          onValue=${change("hours")} />
      </div>
      <div class="field">
        <label for="budget-tokens">Tokens, such as 3.68B</label>
        <${Exact} wide id="budget-tokens" label="Tokens" kind="count" placeholder="20 a parameter" value=${search.value.tokens}
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
  const [lit, setLit] = useState(null); // the option that is pointed at, in the picture or the table
  const capacity = result.now?.memory?.capacity_mib;
  return html`
    <p class=${`answer ${fits === false ? "changed" : "fine"}`}>${result.verdict}.</p>
    <${Scatter} options=${result.options} best=${result.best} capacity=${capacity} device=${result.now?.device?.name}
      lit=${lit} onLit=${setLit} />
    <${Options} options=${result.options} best=${result.best} safest=${result.safest} capacity=${capacity}
      onApply=${apply} onDownload=${save} lit=${lit} onLit=${setLit} caption="Settings by rank" />
    <p class="aside">
      What fits comes first, then what keeps the mathematics, then the fastest. Best is the fastest that
      surely fits and keeps the training under the program you asked for; percentages are against it.
      ${` ${integer(result.evaluated)} plans were made.`}
    </p>
    <section class="block why">
      <h2>Why</h2>
      <ul class="notes">${result.why.map((reason) => html`<li key=${reason}>${reason}.</li>`)}</ul>
    </section>
    <p class="command"><code dir="ltr">${command("fit", asked)}</code></p>`;
}

/** Take an option over into the plan's question. Back undoes it. */
function apply(option) {
  const before = question.value;
  batch(() => {
    if (search.value.find === "budget") ask({ preset: "gpt2", config: undefined, filename: undefined, set: {} });
    takeOver(option.changes, option.trainer);
    search.value = { ...search.value, find: "same" };
    tab.value = "plan";
  });
  notice.value = { text: `Applied: ${option.name}.`, undo: () => (question.value = before) };
}

/** The config with an option's changes, as a file. */
async function save(option) {
  const asked = without(JSON.parse(found.value.body), "hours", "tokens", "largest");
  const format = /\.toml$/.test(asked.filename ?? "") || option.trainer === "oomph" ? "toml" : "py";
  try {
    const file = await post("/api/config", { ...asked, trainer: option.trainer, changes: option.changes, format });
    download(file.name, file.text);
    notice.value = { text: `Saved as ${file.name}.` };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    notice.value = { text: error.message };
  }
}
