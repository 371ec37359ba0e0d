// The runs that are looked at, kept up to date by server-sent events.

import { signal } from "./html.js";
import { get, Refused } from "./api.js";

const EVERY_MS = 3000; // how often the list of runs is looked at
const GROWING = new Set(["running", "planned"]);

export const folder = signal(null); // {folder, runs}
export const lost = signal([]); // what went wrong
const runs = new Map(); // name → signal of a run, or null while it is fetched
const streams = new Map(); // name → EventSource

export const runOf = (name) => {
  if (!runs.has(name)) runs.set(name, signal(null));
  return runs.get(name);
};

const address = (name, rest = "") => `/api/runs/${encodeURIComponent(name)}${rest}`;

/** Look at these runs from now on, and at no others. */
export function watch(names) {
  for (const [name, stream] of streams) {
    if (!names.includes(name)) {
      stream.close();
      streams.delete(name);
    }
  }
  names.filter((name) => !streams.has(name)).forEach(open);
}

async function open(name) {
  const run = runOf(name);
  streams.set(name, { close() {} }); // its place is taken while the run is fetched
  try {
    run.value = await get(address(name));
    lost.value = [];
  } catch (error) {
    streams.delete(name);
    if (!(error instanceof Refused)) throw error;
    lost.value = error.problems;
    return;
  }
  if (!streams.has(name) || !GROWING.has(run.value.state)) return;
  const stream = new EventSource(address(name, `/events?from=${run.value.offset ?? 0}`));
  streams.set(name, stream);
  stream.addEventListener(
    "metrics",
    ({ data }) => (run.value = { ...run.value, metrics: grown(run.value.metrics, JSON.parse(data)) }),
  );
  stream.addEventListener("state", ({ data }) => {
    const { state, result, steps } = JSON.parse(data);
    run.value = { ...run.value, state, steps: steps ?? run.value.steps, result: result ?? run.value.result };
    if (!GROWING.has(state)) stream.close();
  });
  stream.addEventListener("reset", () => {
    stream.close();
    streams.delete(name);
    open(name);
  });
}

function grown(metrics, more) {
  const length = metrics.columns.step.length;
  const columns = {};
  for (const key of new Set([...Object.keys(metrics.columns), ...Object.keys(more.columns)])) {
    const before = metrics.columns[key] ?? new Array(length).fill(null);
    columns[key] = [...before, ...(more.columns[key] ?? new Array(more.columns.step.length).fill(null))];
  }
  return {
    ...metrics,
    columns,
    steps: more.steps ?? metrics.steps,
    evals: [...metrics.evals, ...(more.evals ?? [])],
    events: [...metrics.events, ...(more.events ?? [])],
  };
}

/** Keep the list of runs fresh while it is in sight; what it returns stops that. */
export function keepListing() {
  let gone = false;
  let timer = 0;
  const look = async () => {
    if (document.visibilityState === "visible") {
      try {
        folder.value = await get("/api/runs");
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        lost.value = error.problems;
      }
    }
    if (!gone) timer = setTimeout(look, EVERY_MS);
  };
  look();
  return () => {
    gone = true;
    clearTimeout(timer);
  };
}
