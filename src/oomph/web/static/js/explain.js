// @ts-check
// Explain: a log, an nvidia-smi screen or an out-of-memory message, pasted; what happened, why, and what would fit.

import { batch, classes, html, signal, useId, without } from "./html.js";
import { copy, download, post, Refused, sentence } from "./api.js";
import { Exact } from "./controls.js";
import { figure, integer, mib, setting } from "./format.js";
import { Options } from "./options.js";
import { known, notice, question, tab } from "./state.js";

const MOST = 7_500_000; // characters: the server takes 8 MB
const EXAMPLE = `Overriding config with config/train_fineweb.py:
batch_size = 16
gradient_accumulation_steps = 32
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
number of parameters: 123.59M
using fused AdamW: True
compiling the model... (takes a ~minute)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of 11.56 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 10.53 GiB memory in use. Of the allocated memory 10.14 GiB is allocated by PyTorch, and 158.21 MiB is reserved by PyTorch but unallocated.
`;
const MARKS = { error: ["✗", "error"], warning: ["!", "warning"], info: ["i", "to know"] };
const HOWS = { read: "read", inferred: "inferred", given: "given" };

const text = signal("");
const gpu = signal("");
const config = signal(null); // {name, text}: the config that the run had
const given = signal({}); // keys that the text does not tell
const found = signal(null); // {body, told}
const failed = signal([]);
const busy = signal(false);
let under = null;

const bodyOf = () =>
  JSON.parse(
    JSON.stringify({
      text: text.value,
      gpu: gpu.value || undefined,
      config: config.value?.text,
      filename: config.value?.name,
      set: given.value,
    }),
  );

export async function takeLog(file) {
  if (file.size > MOST) {
    failed.value = [
      {
        what: `${file.name} is too large to paste; in a terminal: oomph explain ${file.name}`,
        found: `${integer(file.size)} bytes`,
      },
    ];
    return;
  }
  const content = await file.text();
  batch(() => {
    text.value = content;
    given.value = {};
  });
  explain();
}

async function takeConfig(file) {
  config.value = { name: file.name, text: await file.text() };
  explain();
}

async function explain() {
  if (!text.value.trim()) return;
  under?.abort();
  const mine = (under = new AbortController());
  busy.value = true;
  failed.value = [];
  const body = bodyOf();
  try {
    found.value = { body: JSON.stringify(body), told: await post("/api/explain", body, mine.signal) };
  } catch (error) {
    if (error instanceof Refused) {
      failed.value = error.problems;
      found.value = null;
    } else if (error.name !== "AbortError") throw error;
  } finally {
    if (under === mine) busy.value = false;
  }
}

export function ExplainView() {
  const area = useId();
  const card = useId();
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) explain();
  };
  const tryExample = () => {
    batch(() => {
      text.value = EXAMPLE;
      gpu.value = "GeForce RTX 4070";
      config.value = null;
      given.value = {};
    });
    explain();
  };
  return html`
    <div class="explain">
      <section class="paste">
        <label for=${area}>A log, an nvidia-smi screen, an out-of-memory message, or all of them together</label>
        <textarea id=${area} class="code" rows=${found.value ? 8 : 16} dir="ltr" spellcheck=${false}
          placeholder="paste here, or drop a file"
          value=${text.value} onInput=${(event) => (text.value = event.target.value)} onKeyDown=${keys}></textarea>
        <div class="paste-foot">
          <div class="field"><label for=${card}>Card, where the text does not name it</label>
            <input type="text" id=${card} list="explain-cards" autocomplete="off" dir="ltr" placeholder="as read"
              value=${gpu.value} onInput=${(event) => (gpu.value = event.target.value)} />
            <datalist id="explain-cards">
              ${known.value.gpus.map(({ name }) => html`<option key=${name} value=${name}></option>`)}
            </datalist>
          </div>
          <button type="button" class="button" disabled=${!text.value.trim()} title="Ctrl+Enter"
            onClick=${busy.value ? () => under.abort() : explain}>
            ${busy.value ? "Cancel" : "Explain"}
          </button>
          <label class="button plain file-button">
            Open a file
            <input type="file" class="hidden"
              onChange=${(event) => event.target.files[0] && takeLog(event.target.files[0])} />
          </label>
          <label class="button plain file-button">
            ${config.value ? config.value.name : "Its config"}
            <input type="file" class="hidden" aria-label="The config that the run had"
              accept=".py,.toml,.json,.yaml,.yml,.txt"
              onChange=${(event) => event.target.files[0] && takeConfig(event.target.files[0])} />
          </label>
          ${config.value && html`<button type="button" class="quiet" onClick=${() => (config.value = null)}>without it</button>`}
          <button type="button" class="quiet" onClick=${tryExample}>an example</button>
        </div>
        <${Missing} />
        ${failed.value.map((problem) => html`<p class="problem" role="alert">${sentence(problem)}</p>`)}
      </section>
      ${busy.value && html`<p class="searching" role="status"><span class="spin" aria-hidden="true"></span>reading…</p>`}
      <div aria-live="polite" aria-busy=${busy.value} class=${isStale() ? "stale" : ""}>
        ${found.value && html`<${Report} found=${found.value.told} />`}
      </div>
    </div>`;
}

/** Whether the report is about another text than the one that stands above it. */
const isStale = () => found.value !== null && found.value.body !== JSON.stringify(bodyOf());

/** Fields for exactly what the text does not tell. */
function Missing() {
  /** @type {string[]} */
  const keys = [...new Set([...(found.value?.told.run.missing ?? []), ...Object.keys(given.value)])];
  if (!keys.length) return null;
  const change = (key) => (value) => {
    const others = without(given.value, key);
    given.value = value === undefined ? others : { ...others, [key]: value };
    explain();
  };
  return html`
    <fieldset class="missing">
      <legend>The text does not tell</legend>
      ${keys.map((key) => {
        const id = `missing-${key}`;
        return html`<div class="field" key=${key}>
          <label for=${id} title=${known.value.keys[key]?.help}><code>${key}</code></label>
          <${Exact} wide id=${id} label=${key} kind=${known.value.keys[key]?.kind} value=${given.value[key]} placeholder="not said"
            onValue=${change(key)} />
        </div>`;
      })}
    </fieldset>`;
}

function Report({ found: { run, plan, findings, fixes = [], report } }) {
  const urgent = findings.filter(({ severity }) => severity !== "info");
  const other = findings.filter(({ severity }) => severity === "info");
  const take = (option) => toPlan(run, plan, option.changes, option.trainer);
  return html`
    <div class="report">
      ${urgent.length > 0 && html`<section><h2>What is wrong</h2><${Findings} label="What is wrong" findings=${urgent} /></section>`}
      ${
        fixes.length > 0 &&
        html`<section class="block">
        <h2>What would fit</h2>
        <${Options} options=${fixes} capacity=${plan?.memory?.capacity_mib} onApply=${take} few=${5}
          caption="Fixes, the best first" />
      </section>`
      }
      ${
        other.length > 0 &&
        html`<section class="block">
        <h2>${urgent.length ? "Also" : "Findings"}</h2>
        <${Findings} label="Findings" findings=${other} wide />
      </section>`
      }
      <div class="columns">
        <section class="block"><h2>What was read</h2><${WasRead} run=${run} /></section>
        ${
          plan &&
          html`<section class="block"><h2>What the run needs</h2><${Need} plan=${plan} />
          <div class="actions">
            <button type="button" class="button plain" onClick=${() => toPlan(run, plan, {})}>Open in Plan</button>
          </div>
        </section>`
        }
      </div>
      ${
        report &&
        html`<div class="actions">
        <button type="button" class="quiet" onClick=${() => download("report.md", report)}>download the report</button>
        <button type="button" class="quiet" onClick=${async () => {
          await copy(report);
          notice.value = { text: "Report copied as Markdown" };
        }}>copy it</button></div>`
      }
    </div>`;
}

const Findings = ({ findings, label, wide }) => html`
  <section class=${classes("findings", wide && "wide")} aria-label=${label}>
    ${findings.map((finding) => html`<${Finding} key=${finding.id + finding.title} finding=${finding} />`)}
  </section>`;

function Finding({ finding: { severity, title, text: words } }) {
  const [mark, name] = MARKS[severity] ?? MARKS.info;
  return html`
    <article class=${`finding ${severity}`}>
      <span class="finding-mark" role="img" aria-label=${name}>${mark}</span>
      <div><h3>${title}</h3>${words && html`<p>${words}</p>`}</div>
    </article>`;
}

function WasRead({ run }) {
  const told = Object.entries(run.config ?? {}).filter(([, { how }]) => how in HOWS);
  return html`
    ${
      run.gpu?.name &&
      html`<p class="aside">
      ${run.gpu.name}, ${run.gpu.how}
      ${run.steps?.count ? `; ${integer(run.steps.count)} logged steps` : ""}
    </p>`
    }
    <table class="figures"><tbody>
      ${told.map(
        ([key, { value, how, where }]) => html`<tr key=${key} title=${where}>
        <th scope="row"><code>${key}</code></th>
        <td><code dir="ltr">${setting(value)}</code></td>
        <td class="soft number">${HOWS[how]}</td>
      </tr>`,
      )}
    </tbody></table>`;
}

const Need = ({ plan: { memory, device, time } }) => html`
  <table class="figures"><tbody>
    <tr>
      <th scope="row">on ${device.name}</th>
      <td class="number">${memory.fits === false ? "does not fit" : "fits"}</td>
    </tr>
    ${memory.p_fits !== undefined &&
    html`<tr><th scope="row">fits with</th><td class="number">${Math.round(100 * memory.p_fits)} %</td></tr>`}
    <tr><th scope="row">predicted</th><td class="number">${mib(memory.total_mib)} MiB</td></tr>
    <tr><th scope="row">there are</th><td class="number">${mib(memory.capacity_mib)} MiB</td></tr>
    <tr><th scope="row">fullest in</th><td class="number wrap">${memory.peak_at}</td></tr>
    ${time && html`<tr><th scope="row">tokens a second</th><td class="number">${figure(time.tokens_per_s)}</td></tr>`}
  </tbody></table>`;

/** The run as it was read becomes the plan's question. */
function toPlan(run, plan, changes, trainer) {
  const told = Object.entries(run.config ?? {}).filter(
    ([key, { how, value }]) => how in HOWS && key !== "trainer" && value !== null,
  );
  const { trainer: changed, ...keys } = changes;
  const set = Object.fromEntries(told.map(([key, { value }]) => [key, value]));
  batch(() => {
    question.value = {
      preset: "gpt2",
      gpu: plan?.device?.name ?? "",
      trainer: changed ?? trainer ?? plan?.config?.trainer ?? "nanogpt",
      set: { ...set, ...keys },
    };
    tab.value = "plan";
  });
}
