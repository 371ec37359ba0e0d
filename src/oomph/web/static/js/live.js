// The runs that are looked at, kept up to date by server-sent events.

import { signal } from "./html.js";
import { get, Refused } from "./api.js";

const EVERY_MS = 3000; // how often the list of runs is looked at
const GROWING = new Set(["running", "planned"]);

const AT_REST = { close() {} }; // stands for the stream of a run that does not grow, or cannot be read

export const folder = signal(null); // {folder, runs}
export const lost = signal([]); // what went wrong with the list
export const failures = signal({}); // name → what went wrong with a run
const runs = new Map(); // name → signal of a run, or null while it is fetched
const streams = new Map(); // name → EventSource, or what stands for one

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
  const place = { close() {} }; // taken while the run is fetched
  streams.set(name, place);
  const found = await fetched(name);
  if (streams.get(name) !== place) return;
  if (found) run.value = found;
  if (!found || !GROWING.has(found.state)) {
    streams.set(name, AT_REST);
    return;
  }
  const stream = new EventSource(address(name, `/events?from=${found.offset ?? 0}`));
  streams.set(name, stream);
  const rest = () => {
    stream.close();
    if (streams.get(name) === stream) streams.set(name, AT_REST);
  };
  stream.addEventListener(
    "metrics",
    ({ data }) => (run.value = { ...run.value, metrics: grown(run.value.metrics, JSON.parse(data)) }),
  );
  stream.addEventListener("state", ({ data }) => {
    const { state, result, steps } = JSON.parse(data);
    run.value = { ...run.value, state, steps: steps ?? run.value.steps, result: result ?? run.value.result };
    if (!GROWING.has(state)) rest();
  });
  stream.addEventListener("reset", () => {
    rest();
    open(name);
  });
  stream.addEventListener("error", () => stream.readyState === EventSource.CLOSED && rest());
}

/** A run as it stands; null where it cannot be had, and why is told. */
async function fetched(name) {
  try {
    const found = await get(address(name));
    failures.value = { ...failures.value, [name]: [] };
    return found;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    failures.value = { ...failures.value, [name]: error.problems };
    return null;
  }
}

/** Look again at runs at rest that have changed since: one that stopped may go on, one that was silent may speak. */
function wake(listed) {
  for (const now of listed) {
    if (streams.get(now.name) !== AT_REST) continue;
    const run = runOf(now.name).peek();
    if (!run || now.state !== run.state || now.updated !== run.updated) open(now.name);
  }
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
        lost.value = [];
        wake(folder.value.runs);
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
