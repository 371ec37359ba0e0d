// @ts-check
// Two or more runs: who wins at what and why, what cannot be compared, and every setting that differs.

import { html, useEffect, useState } from "./html.js";
import { post, Refused, sentence } from "./api.js";
import { figure, isNumber, percent, setting } from "./format.js";

/** The answer of oomph compare, asked again when one of the runs ends. */
export function Comparison({ names, fresh }) {
  const [answer, setFound] = useState(null);
  const [failed, setFailed] = useState([]);
  useEffect(() => {
    const asked = new AbortController();
    post("/api/compare", { runs: names }, asked.signal)
      .then((result) => {
        setFound({ names: names.join("\n"), result });
        setFailed([]);
      })
      .catch((error) => {
        if (error instanceof Refused) setFailed(error.problems);
        else if (error.name !== "AbortError") throw error;
      });
    return () => asked.abort();
  }, [names.join("\n"), fresh]);
  if (failed.length) return failed.map((problem) => html`<p class="problem" role="alert">${sentence(problem)}</p>`);
  const found = answer?.names === names.join("\n") ? answer.result : null; // never of other runs
  if (!found) return html`<p class="waiting" role="status" aria-busy="true">comparing…</p>`;
  const { runs, verdicts, differences, metrics, not_comparable: not, notes } = found;
  const measured = Object.entries(metrics).map(([name, { unit, values }]) => [
    named(name, unit),
    values.map((value) => worth(value, name)),
  ]);
  const settings = Object.entries(differences).map(([name, values]) => [
    html`<code>${name}</code>`,
    values.map(setting),
  ]);
  return html`
    <section class="block verdict-list" aria-label="Who wins at what"><h2>Who wins at what</h2>
      <table class="figures">
        <thead>
          <tr>
            <th scope="col">goal</th>
            <th scope="col">winner</th>
            <th scope="col" class="number">by</th>
            <th scope="col" class="reason">because</th>
          </tr>
        </thead>
        <tbody>${verdicts.map(
          ({ goal, winner, margin, unit, reason }) => html`
          <tr key=${goal}>
            <th scope="row">${goal}</th>
            <td><b><bdi>${winner ?? "neither"}</bdi></b></td>
            <td class="number"><bdi>${by(margin, unit)}</bdi></td>
            <td class="reason">${reason}.</td>
          </tr>`,
        )}</tbody></table>
    </section>
    ${
      not.length > 0 &&
      html`<section class="block">
      <h2>Not comparable</h2>
      <ul class="notes">${not.map((text) => html`<li key=${text}>${text}</li>`)}</ul>
    </section>`
    }
    <div class="columns">
      <section class="block">
        <h2>Measured</h2>
        <${Side} runs=${runs} rows=${measured} />
      </section>
      <section class="block">
        <h2>Settings that differ</h2>
        <${Side} runs=${runs} rows=${settings} />
      </section>
    </div>
    ${notes?.length > 0 && html`<ul class="notes">${notes.map((text) => html`<li key=${text}>${text}</li>`)}</ul>`}`;
}

const Side = ({ runs, rows }) => html`
  <div class="scroll"><table class="figures">
    <thead><tr><td></td>${runs.map((name) => html`<th scope="col" class="number"><bdi>${name}</bdi></th>`)}</tr></thead>
    <tbody>
      ${rows.map(
        ([name, values], index) => html`<tr key=${index}>
        <th scope="row">${name}</th>
        ${values.map((value) => html`<td class="number"><bdi>${value}</bdi></td>`)}
      </tr>`,
      )}
    </tbody>
  </table></div>`;

const WORDS = {
  params: "parameters",
  tokens_per_s: "throughput",
  step_ms: "a step",
  predicted_step_ms: "a step, predicted",
  memory_mib: "memory",
  predicted_memory_mib: "memory, predicted",
  tflops: "arithmetic",
  mfu: "use",
  val_noise: "noise of val loss",
};
const named = (name, unit) =>
  html`${WORDS[name] ?? name.replaceAll("_", " ")} ${unit !== name && html`<span class="soft">${unit}</span>`}`;
const worth = (value, name) => (name === "mfu" ? percent(value) : isNumber(value) ? figure(value) : "–");
const by = (margin, unit) =>
  !isNumber(margin) ? "" : unit === "ratio" ? `${figure(1 + margin)} ×` : `${figure(margin)} ${unit}`;
