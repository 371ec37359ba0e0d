// @ts-check
// Runs: the folders of oomph train as they grow; one against its plan, several against each other.

import { classes, html, signal, useEffect, useMemo, useRef } from "./html.js";
import { sentence } from "./api.js";
import { Comparison } from "./compare.js";
import { Choice } from "./controls.js";
import {
  ago,
  clockAt,
  count,
  deviation,
  figure,
  hours,
  integer,
  isNumber,
  mib,
  milliseconds,
  percent,
  power,
  seconds,
} from "./format.js";
import { failures, folder, keepListing, lost, runOf, watch } from "./live.js";
import { LINES, Plot } from "./plot.js";
import { chosenRuns, silently } from "./state.js";

const AXES = [
  ["step", "steps"],
  ["tokens", "tokens"],
  ["hours", "hours"],
  ["flops", "FLOPs"],
];
const SMOOTHINGS = [
  [0, "none"],
  [0.8, "some"],
  [0.95, "much"],
];
const SAY_X = {
  step: (value) => `step ${integer(value)}`,
  tokens: (value) => `${count(value)} tokens`,
  hours: (value) => hours(value),
  flops: (value) => `${power(value)} FLOP`,
};
const LABELS = Object.fromEntries(AXES);
const loss = (value) => (isNumber(value) ? value.toFixed(4) : "–");

const axis = signal("step");
const smoothing = signal(0);

export function RunsView() {
  const listed = folder.value;
  const chosen = chosenRuns.value;
  useEffect(keepListing, []);
  useEffect(() => {
    watch(chosen);
    return () => watch([]);
  }, [chosen.join("\n")]);
  const picked = useRef(false); // the newest is shown until the user picks another, or none
  useEffect(() => {
    if (!picked.current && !chosen.length && listed?.runs.length) silently(() => (chosenRuns.value = [listed.runs[0].name]));
    picked.current ||= chosen.length > 0;
  }, [listed?.runs.length, chosen.length]);
  const wrong = new Set([...lost.value, ...chosen.flatMap((name) => failures.value[name] ?? [])].map(sentence));
  return html`
    <div class="runs">
      <${List} listed=${listed} chosen=${chosen} />
      <div class="watched">
        ${[...wrong].map((words) => html`<p class="problem" role="alert" key=${words}>${words}</p>`)}
        ${
          chosen.length > 0 &&
          html`
          <div class="plot-tools">
            <div>
              <span>over</span>
              <${Choice} label="What plots run over" name="axis" options=${AXES} value=${axis.value}
                onValue=${(value) => (axis.value = value)} />
            </div>
            <div>
              <span>smoothing</span>
              <${Choice} label="Smoothing of losses" name="smoothing" options=${SMOOTHINGS} value=${smoothing.value}
                onValue=${(value) => (smoothing.value = value)} />
            </div>
          </div>`
        }
        ${chosen.length === 1 && html`<${OneRun} key=${chosen[0]} name=${chosen[0]} />`}
        ${chosen.length > 1 && html`<${SeveralRuns} names=${chosen} />`}
      </div>
    </div>`;
}

function List({ listed, chosen }) {
  if (!listed) return html`<aside class="run-list"><p class="aside">looking for runs…</p></aside>`;
  const turn = (name, on) => (chosenRuns.value = on ? [...chosen, name] : chosen.filter((each) => each !== name));
  return html`
    <aside class="run-list" aria-label="Runs">
      <h2>Runs <span class="soft" title=${listed.folder}>in <bdi>${listed.folder.split("/").at(-1)}</bdi></span></h2>
      ${
        !listed.runs.length &&
        html`<p
        class="aside">None yet. <code dir="ltr">oomph train</code> puts them here, and they appear by themselves.</p>`
      }
      <ul>${listed.runs.map(
        (run) => html`
        <li key=${run.name} class=${classes("run", chosen.includes(run.name) && "chosen")} data-run=${run.name}>
          <input type="checkbox" class="tick" aria-label=${`compare ${run.name}`} checked=${chosen.includes(run.name)}
            onChange=${(event) => turn(run.name, event.target.checked)} />
          <button type="button" onClick=${() => (chosenRuns.value = [run.name])}>
            <span class="run-name"><bdi>${run.name}</bdi><span class=${`state ${run.state}`} title=${run.reason}>${run.state}</span></span>
            <span class="soft">
              ${lossOf(run)} · step ${integer(run.steps)}
              ${run.max_iters ? ` of ${integer(run.max_iters)}` : ""}
            </span>
            <span class="soft">${ago(run.updated)}</span>
          </button>
        </li>`,
      )}
      </ul>
      ${listed.runs.length > 1 && html`<p class="aside">Tick two or more to compare them.</p>`}
    </aside>`;
}

function lossOf(run) {
  if (isNumber(run.val_loss)) return `val ${loss(run.val_loss)}`;
  return isNumber(run.loss) ? `loss ${loss(run.loss)}` : "no loss yet";
}

const WINDOW = 20; // logged steps whose pace is told
const last = (column = []) => column.findLast(isNumber);

/** What a run's memory is held against: on a GPU what torch allocates; on a CPU the process, where that was measured. */
function plannedMemory(plan) {
  if (plan?.device?.kind !== "cpu") return plan?.memory?.allocated_mib;
  return plan.memory?.context_mib ? plan.memory.total_mib : undefined;
}

/** Whose memory a plot shows: a run on a CPU logs its process, one on a GPU what torch allocates. */
function memoryUnit(runs) {
  const onCpu = runs.filter(({ plan }) => plan?.device?.kind === "cpu").length;
  if (!onCpu) return "MiB allocated";
  return onCpu === runs.length ? "MiB, the process" : "MiB; on a CPU, the process";
}

/** The pace of the latest steps: what a step takes, tokens a second and use of the device, all from the same steps. */
function pace({ step, hours: at, tokens, step_ms: ms, mfu }) {
  const end = step.length - 1;
  const start = Math.max(0, end - WINDOW);
  const took = (at[end] - at[start]) * 3600; // seconds of the steps after the first of them
  const steps = step[end] - step[start];
  if (!(took > 0) || !(steps > 0)) return { steps: end < 0 ? 0 : 1, ms: ms[end] };
  const used = mfu.slice(start + 1).filter(isNumber);
  return {
    steps,
    ms: (1000 * took) / steps,
    tokensPerS: isNumber(tokens[end]) && isNumber(tokens[start]) ? (tokens[end] - tokens[start]) / took : undefined,
    mfu: used.length ? used.length / used.reduce((sum, each) => sum + 1 / each, 0) : undefined, // by time
  };
}

/** Where a run stands, and what is left of it at its latest pace. */
function standing({ metrics, config, state, steps }) {
  const { columns, evals } = metrics;
  const step = Math.max(steps ?? 0, metrics.steps ?? 0);
  const most = config?.max_iters;
  const latest = pace(columns);
  const left = state === "running" && most && latest.ms ? Math.max(0, ((most - step) * latest.ms) / 1000) : undefined;
  const best = evals.map((each) => each.val_loss).filter(isNumber);
  return {
    step,
    most,
    left,
    latest,
    loss: last(columns.loss),
    val: evals.at(-1)?.val_loss,
    best: best.length ? Math.min(...best) : undefined,
  };
}

function OneRun({ name }) {
  const run = runOf(name).value;
  if (!run) return failures.value[name]?.length ? null : html`<p class="waiting">reading ${name}…</p>`;
  const plan = run.plan;
  const now = standing(run);
  const { columns } = run.metrics;
  const { latest } = now;
  const figures = [
    ["loss", loss(now.loss), now.best === undefined ? "" : `val ${loss(now.val)}, best ${loss(now.best)}`],
    ["a step", milliseconds(latest.ms), against(plan?.time?.step_ms, latest.ms, milliseconds)],
    ["tokens/s", integer(latest.tokensPerS), against(plan?.time?.tokens_per_s, latest.tokensPerS, integer)],
    ["memory, MiB", mib(last(columns.memory_mib)), against(plannedMemory(plan), last(columns.memory_mib), mib)],
    ["use of the device", percent(latest.mfu), against(plan?.time?.mfu, latest.mfu, percent)],
    now.left === undefined
      ? [
          "took",
          run.result ? seconds(run.result.seconds) : hours(last(columns.hours)),
          plan?.time ? `plan ${hours(plan.time.hours)}` : "",
        ]
      : ["left", seconds(now.left), `done ${clockAt(now.left)}`],
  ];
  return html`
    <header class="run-head" data-step=${now.step}>
      <h2><bdi>${name}</bdi></h2>
      <span class=${`state ${run.state}`}>${run.state}</span>
      <span class="soft">step ${integer(now.step)}${now.most ? ` of ${integer(now.most)}` : ""}</span></header>
    <${Alarms} run=${run} />
    ${
      now.most &&
      html`<progress class="progress" max=${now.most} value=${now.step} aria-label="steps done">
    </progress>`
    }
    <dl class="tiles">
      ${figures.map(
        ([label, value, beside]) => html`<div key=${label}>
        <dt>${label}</dt>
        <dd><b><bdi>${value}</bdi></b><span class="soft">${beside}</span></dd>
      </div>`,
      )}
    </dl>
    ${latest.steps > 1 && html`<p class="aside">Pace over the last ${integer(latest.steps)} steps.</p>`}
    <${Plots} runs=${[run]} />`;
}

const MILD = new Set(["scale lowered"]); // happens in every run of float16

/** What went wrong: why the run ended, and what it told of on its way, the newest first. */
function Alarms({ run: { state, reason, metrics } }) {
  const told = metrics.events.filter(({ event }) => !MILD.has(event));
  const ended = state === "failed" || state === "stopped";
  if (!told.length && !(ended && reason)) return null;
  return html`
    <section class="alarms" aria-label="Alarms">
      ${ended && reason && html`<p class=${state === "failed" ? "problem" : "aside"} role="alert">${state}: ${reason}</p>`}
      ${
        told.length > 0 &&
        html`<details open=${state === "running"}>
        <summary>${told.length === 1 ? "1 alarm" : `${integer(told.length)} alarms`}</summary>
        <ul class="notes">${told
          .slice(-5)
          .reverse()
          .map(({ step, event, reason: why }) => html`<li>step ${integer(step)}: ${why || event}</li>`)}</ul>
      </details>`
      }
    </section>`;
}

const against = (expected, found, say) =>
  isNumber(expected) ? `plan ${say(expected)} ${isNumber(found) ? `(${deviation(expected, found)})` : ""}` : "";

function SeveralRuns({ names }) {
  const runs = names.map((name) => runOf(name).value).filter(Boolean);
  const ended = runs.map(({ name, state }) => `${name} ${state}`).join("\n"); // made anew when a run ends
  return html`
    <header class="run-head"><h2>${names.length} runs</h2></header>
    <${Plots} runs=${runs} />
    ${runs.length === names.length && html`<${Comparison} names=${names} fresh=${ended} />`}`;
}

/** Exponential smoothing that starts at the first value. */
function smoothed(values, weight) {
  let kept;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    kept = kept === undefined ? value : weight * kept + (1 - weight) * value;
    return kept;
  });
}

function lossLines(runs, key, weight) {
  const many = runs.length > 1;
  return runs.flatMap(({ name, metrics: { columns, evals } }, index) => {
    const colour = LINES[index % LINES.length];
    const line = { label: many ? name : "train", xs: columns[key], ys: columns.loss, colour };
    const val = {
      label: many ? `${name}, val` : "val",
      xs: evals.map((each) => each[key]),
      ys: evals.map((each) => each.val_loss),
      colour: many ? colour : LINES[1],
      dots: true,
      dash: many ? [4, 3] : undefined,
    };
    const trains = weight
      ? [
          { ...line, label: `${line.label}, as logged`, faint: true, silent: true },
          { ...line, ys: smoothed(columns.loss, weight) },
        ]
      : [line];
    return val.xs.length ? [...trains, val] : trains;
  });
}

function Plots({ runs }) {
  const key = axis.value;
  const weight = smoothing.value;
  const x = { label: LABELS[key], say: SAY_X[key] };
  const plan = runs.length === 1 ? runs[0].plan : null;
  const column = (name, times = 1) =>
    runs.map(({ name: run, metrics: { columns } }, index) => ({
      label: runs.length > 1 ? run : "measured",
      xs: columns[key],
      ys: times === 1 ? columns[name] : columns[name].map((value) => (isNumber(value) ? value * times : value)),
      colour: LINES[index % LINES.length],
    }));
  const shown = useMemo(
    () => ({
      loss: lossLines(runs, key, weight),
      speed: column("tokens_per_s"),
      memory: column("memory_mib"),
      use: column("mfu", 100),
      rate: column("lr"),
      norm: column("grad_norm"),
    }),
    [...runs, runs.length, key, weight],
  );
  const level = (value) => (isNumber(value) ? { value, label: "plan" } : undefined);
  return html`
    <div class="plots">
      <${Plot} title="Loss" unit="nats" lines=${shown.loss} say=${loss} x=${x} />
      <${Plot} title="Throughput" unit="tokens/s" lines=${shown.speed} say=${integer} x=${x}
        reference=${level(plan?.time?.tokens_per_s)} fromZero />
      <${Plot} title="Memory" unit=${memoryUnit(runs)} lines=${shown.memory} say=${(value) => `${mib(value)} MiB`} x=${x}
        reference=${level(plannedMemory(plan))} fromZero />
      <${Plot} title="Use of the device" unit="% of its peak" lines=${shown.use} say=${(value) => `${figure(value)} %`}
        x=${x} reference=${level(isNumber(plan?.time?.mfu) ? plan.time.mfu * 100 : undefined)} fromZero />
      <${Plot} title="Learning rate" lines=${shown.rate} say=${(value) => value.toExponential(2)} x=${x} fromZero />
      <${Plot} title="Gradient norm" lines=${shown.norm} say=${figure} x=${x} fromZero />
    </div>`;
}
