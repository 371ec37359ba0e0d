// @ts-check
// The planner's panel: where the config comes from, and the settings people turn.

import { batch, html, signal, useEffect, useId, useState } from "./html.js";
import { sentence } from "./api.js";
import { ChoiceKnob, FieldKnob, FlagKnob, ListKnob, SliderKnob, SwitchKnob } from "./controls.js";
import { integer } from "./format.js";
import { answer, ask, known, matters, plans, problems, question, setKeys, valueOf } from "./state.js";

const BATCHES = [1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128];
const ACCUMULATIONS = [1, 2, 4, 5, 8, 10, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 480, 512];
const BLOCKS = [64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192, 16384];
const LAYERS = [...Array.from({ length: 36 }, (_, index) => index + 1), 40, 44, 48, 56, 64, 72, 80, 96];
const CHUNKS = [0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
const DTYPES = [
  ["bfloat16", "bf16"],
  ["float16", "fp16"],
  ["float32", "fp32"],
];
// A model's sizes beside its depth; of each model those that it has.
const SIZES = {
  vocab_size: "Vocabulary",
  n_embd: "Width",
  n_head: "Heads",
  num_key_value_heads: "Key and value heads",
  head_dim: "Head size",
  intermediate_size: "MLP width",
  num_experts: "Experts",
  num_experts_per_tok: "Experts a token",
  moe_intermediate_size: "Expert width",
};
const OF_GPT2 = new Set(["vocab_size", "n_head"]); // beside its width
const FEATURED = new Set([
  ...Object.keys(SIZES),
  "batch_size",
  "gradient_accumulation_steps",
  "block_size",
  "n_layer",
  "dtype",
  "compile",
  "checkpoint_layers",
  "loss_chunk",
  "attention",
  "optimizer",
  "max_iters",
  "dataset_tokens",
  "trainer",
]);

/** Whether a knob in sight says this problem itself. */
function isSaidElsewhere({ where = "" }) {
  const [, key] = /^set\.(.+)$/s.exec(where) ?? [];
  return where === "gpu" || (FEATURED.has(key) && matters(key));
}

const MAX_BYTES = 1_500_000; // of a file that is dropped or chosen

export const sameBatch = signal(true); // micro-batch and accumulation move together, at the same tokens a step

/** Take a file that was dropped or chosen: data, read by the server and never run. */
export async function takeFile(file) {
  const tooLarge = file.size > MAX_BYTES;
  const config = tooLarge ? undefined : await file.text().catch(() => undefined);
  if (config !== undefined) {
    ask({ preset: undefined, config, filename: file.name, set: {}, trainer: undefined });
    return;
  }
  const what = tooLarge ? `${file.name} is too large for a config` : `${file.name} cannot be read`;
  batch(() => {
    answer.value = null;
    problems.value = [{ what, found: `${integer(file.size)} bytes`, allowed: `a file of ${integer(MAX_BYTES)} bytes` }];
  });
}

export function Source() {
  const { preset, config, filename } = question.value;
  const [open, setOpen] = useState(false);
  const chooser = useId();
  const wrong = problems.value.filter((problem) => !isSaidElsewhere(problem));
  useEffect(() => setOpen(config !== undefined && open), [config]);
  const choose = (name) => {
    if (name === "own") ask({ preset: undefined, config: config ?? "" });
    else ask({ preset: name, config: undefined, filename: undefined, set: {}, trainer: undefined });
    setOpen(name === "own");
  };
  return html`
    <section class="panel" aria-label="Config">
      <div class="field">
        <label for=${chooser}>Config</label>
        <select id=${chooser} value=${config === undefined ? preset : "own"}
          onChange=${(event) => choose(event.target.value)}>
          <${Presets} chosen=${preset} />
          <option value="own">${config === undefined ? "your own: paste or drop…" : (filename ?? "your own")}</option>
        </select>
      </div>
      <div class="actions">
        <label class="quiet file">
          open a file
          <input type="file" class="hidden" accept=".py,.toml,.json,.yaml,.yml,.txt"
            onChange=${(event) => event.target.files[0] && takeFile(event.target.files[0])} />
        </label>
        <button type="button" class="quiet" aria-expanded=${open}
          onClick=${() => (config === undefined ? choose("own") : setOpen(!open))}>
          ${open ? "close the text" : "paste or edit"}
        </button>
      </div>
      ${
        open &&
        config !== undefined &&
        html`
        <textarea class="code" rows="9" dir="ltr" spellcheck=${false} aria-label="Config text" value=${config}
          placeholder="paste a config here" onInput=${(event) => ask({ config: event.target.value })}></textarea>
        <p class="aside">
          nanoGPT .py, TOML, JSON or YAML: what it is, its content tells. It is read, never run, and stays on this machine.
        </p>`
      }
      ${answer.value?.read_as && !problems.value.length && html`<${ReadAs} found=${answer.value} />`}
      ${wrong.map((problem) => html`<${Wrong} problem=${problem} />`)}
    </section>`;
}

/** The presets by group, and one that a link names and the list does not: of nanochat any depth will do. */
function Presets({ chosen }) {
  const { presets } = known.value;
  const groups = [...new Set(presets.map(({ group }) => group))];
  const option = ({ name }) => html`<option key=${name} value=${name}>${name}</option>`;
  return html`
    ${chosen && !presets.some(({ name }) => name === chosen) && option({ name: chosen })}
    ${groups.map(
      (label) => html`
      <optgroup key=${label} label=${label}>${presets.filter(({ group }) => group === label).map(option)}</optgroup>`,
    )}`;
}

/** What a text was taken for, in a line: its format, the model, the program. */
function ReadAs({ found }) {
  const [model] = found.summary.title.split(",");
  const programs = found.summary.verdicts.map(({ program }) => program).join(" and ");
  return html`<p class="aside read-as">Read as ${found.read_as}: ${model}, planned for ${programs}.</p>`;
}

/** What no knob in sight says of itself: of the config, of a link's keys, of a key among all the others. */
function Wrong({ problem }) {
  const [, key] = /^set\.(.+)$/s.exec(problem.where ?? "") ?? [];
  const near = key !== undefined && !(key in known.value.keys) ? problem.nearest : undefined;
  const instead = near && { [key]: undefined, [near]: question.value.set[key] };
  const words = near ? { ...problem, nearest: "" } : problem;
  return html`
    <p class="problem" role="alert">${sentence(words)}
      ${instead && html` <button type="button" class="quiet" onClick=${() => setKeys(instead)}>${near}</button>`}
      ${
        key in question.value.set &&
        html` <button type="button" class="quiet" onClick=${() => setKeys({ [key]: undefined })}>drop it</button>`
      }</p>`;
}

/** Micro-batch and accumulation: with the batch held, only sizes that divide it. */
function Batch() {
  const batch = valueOf("batch_size");
  const accumulation = valueOf("gradient_accumulation_steps");
  const held =
    sameBatch.value && Number.isInteger(batch) && Number.isInteger(accumulation) && batch > 0 && accumulation > 0;
  const all = held ? batch * accumulation : 0;
  const dividing = held ? divisors(all) : [];
  const keep = (key, other) => (value) => {
    const rest = held && Number.isInteger(value) && value > 0 && all % value === 0 ? { [other]: all / value } : {};
    setKeys({ [key]: value, ...rest });
  };
  return html`
    <${SliderKnob} name="batch_size" label="Micro-batch" unit="sequences"
      scale=${held ? dividing.filter((size) => size <= 256) : BATCHES}
      onValue=${keep("batch_size", "gradient_accumulation_steps")} />
    <${SliderKnob} name="gradient_accumulation_steps" label="Accumulation" unit="micro-steps"
      scale=${held ? dividing : ACCUMULATIONS}
      onValue=${keep("gradient_accumulation_steps", "batch_size")} />
    <label class="hold">
      <input type="checkbox" class="tick" checked=${sameBatch.value}
        onChange=${(event) => (sameBatch.value = event.target.checked)} />
      <bdi>keep the batch${held ? html` of <b>${integer(all)}</b> sequences` : ""}</bdi></label>`;
}

function divisors(number) {
  const low = [];
  const high = [];
  for (let size = 1; size * size <= number; size += 1) {
    if (number % size) continue;
    low.push(size);
    if (size * size !== number) high.unshift(number / size);
  }
  return [...low, ...high];
}

/** Width moves in whole heads, so that it always divides; a typed one keeps the heads where it can. */
function Width() {
  const width = valueOf("n_embd");
  const heads = valueOf("n_head");
  const each = width % heads === 0 && (width / heads) % 8 === 0 ? width / heads : 64;
  const scale = Array.from({ length: Math.max(4, Math.floor(4096 / each)) }, (_, index) => (index + 1) * each);
  const take = (value) => setKeys(value % each === 0 ? { n_embd: value, n_head: value / each } : { n_embd: value });
  const words = (value) => `${value}, ${value / each} heads of ${each}`;
  const heading = `${heads ?? "–"} heads of ${Number.isInteger(width / heads) ? width / heads : "–"}`;
  return html`
    <${SliderKnob} name="n_embd" label="Width" unit=${heading} scale=${scale} words=${words} onValue=${take} />`;
}

/** What saves memory: of any number of blocks in oomph train, of all or none in transformers' programs. */
function Saving() {
  const layers = valueOf("n_layer");
  const blocks = Number.isInteger(layers) && layers > 0 && layers <= 1000 ? layers : 12;
  const ours = plans.value && !plans.value.oomph ? "" : ", oomph train";
  return html`
    ${
      matters("checkpoint_layers") &&
      html`<${SliderKnob} name="checkpoint_layers" label="Checkpointed" unit=${`blocks${ours || ", all or none"}`}
      scale=${ours ? Array.from({ length: blocks + 1 }, (_, index) => index) : [0, blocks]}
      words=${(value) => `${value} of ${blocks} blocks`} />`
    }
    ${
      matters("loss_chunk") &&
      html`<${SliderKnob} name="loss_chunk" label="Loss chunk" unit=${`tokens${ours}; 0 is all at once`}
      scale=${CHUNKS} words=${(value) => (value ? `${value} tokens` : "all at once")} />`
    }`;
}

export function Knobs() {
  const ownHeads = answer.value !== null && answer.value.plan.config.model_type !== "gpt2"; // not tied to the width
  const sizes = Object.entries(SIZES).filter(
    ([key]) => matters(key) && valueOf(key) !== undefined && (ownHeads || OF_GPT2.has(key)),
  );
  return html`
    <section class="panel knobs" aria-label="Settings">
      <${Batch} />
      <${SliderKnob} name="block_size" label="Block" unit="tokens" scale=${BLOCKS} />
      ${!ownHeads && html`<${Width} />`}
      <${SliderKnob} name="n_layer" label="Depth" unit="layers" scale=${LAYERS} />
      <div class="two">
        <${ChoiceKnob} name="dtype" label="Precision" options=${DTYPES} />
        <${SwitchKnob} name="compile" label="Compile" />
      </div>
      <${Saving} />
      <div class="two">
        ${
          matters("optimizer") &&
          html`<${ListKnob} name="optimizer" label="Optimizer"
          options=${known.value.keys.optimizer?.choices ?? ["adamw"]} />`
        }
        <${ListKnob} name="attention" label="Attention" options=${known.value.keys.attention?.choices ?? ["flash"]} />
      </div>
      <div class="two">
        <${FieldKnob} name="max_iters" label="Steps" />
        <${FieldKnob} name="dataset_tokens" label="Data" unit="tokens" />
        ${sizes.map(([key, label]) => html`<${FieldKnob} key=${key} name=${key} label=${label} />`)}
      </div>
      <${Money} />
      <${EveryKey} />
    </section>`;
}

/** What is not in a config: memory that others hold, a measured step, prices. */
function Money() {
  const fields = [
    ["reserve_mib", "Kept free", "MiB", "0"],
    ["step_ms", "Measured step", "ms", "predicted"],
    ["price_kwh", "Electricity", "a kWh", "0.16"],
    ["currency", "Currency", "", "USD"],
    ["watts", "Measured draw", "W", "predicted"],
    ["price_hour", "Rent", "an hour", "as published"],
  ];
  return html`
    <details class="more">
      <summary>Desktop, prices, a measured step</summary>
      <div class="two">
        ${fields.map(
          ([name, label, unit, placeholder]) => html`<${FlagKnob} key=${name} name=${name} label=${label}
          unit=${unit} placeholder=${placeholder} />`,
        )}
      </div>
    </details>`;
}

/** Every other key of a config, found by name or meaning. */
function EveryKey() {
  const [open, setOpen] = useState(false);
  const [wanted, setWanted] = useState("");
  const text = wanted.toLowerCase();
  const found = Object.values(known.value.keys).filter(
    (key) => !FEATURED.has(key.name) && matters(key.name) && `${key.name} ${key.help}`.toLowerCase().includes(text),
  );
  return html`
    <details class="more" onToggle=${(event) => setOpen(event.target.open)}>
      <summary>Every other key</summary>
      ${
        open &&
        html`
        <input type="search" class="wide" placeholder="find a key" aria-label="Find a key" value=${wanted}
          onInput=${(event) => setWanted(event.target.value)} />
        <div class="all">${found.map((key) => html`<${FieldKnob} key=${key.name} name=${key.name} />`)}</div>`
      }
    </details>`;
}
