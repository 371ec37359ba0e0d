// @ts-check
// The runs that are looked at, kept up to date by server-sent events (hub.js).

import { signal } from "./html.js";
import { get, Refused } from "./api.js";

const EVERY_MS = 3000; // how often the list of runs is looked at
const GROWING = new Set(["running", "planned"]);

const AT_REST = {}; // of a run that does not grow, or cannot be read

export const folder = signal(null); // {folder, runs}
export const lost = signal([]); // what went wrong with the list
export const failures = signal({}); // name → what went wrong with a run
const runs = new Map(); // name → signal of a run, or null while it is fetched
const places = new Map(); // name → {run, position, number} of a run that grows

export const runOf = (name) => {
  if (!runs.has(name)) runs.set(name, signal(null));
  return runs.get(name);
};

const address = (name, rest = "") => `/api/runs/${encodeURIComponent(name)}${rest}`;

/** Look at these runs from now on, and at no others. */
export function watch(names) {
  for (const name of places.keys()) if (!names.includes(name)) places.delete(name);
  names.filter((name) => !places.has(name)).forEach(open);
  tell();
}

async function open(name) {
  const place = {}; // taken while the run is fetched
  places.set(name, place);
  const found = await fetched(name);
  if (places.get(name) !== place) return;
  if (found) runOf(name).value = found;
  fetches += 1;
  const grows = found && GROWING.has(found.state);
  places.set(name, grows ? { run: name, position: found.position, number: fetches } : AT_REST);
  tell();
}

let fetches = 0; // an event carries the number of the fetch that it goes on from
let port = null;
let told = "[]";

/** Tell the one who listens to the server which runs grow. Where each has got to, it knows itself. */
function tell() {
  const now = JSON.stringify([...places.values()].filter(({ number }) => number !== undefined));
  if (now === told) return;
  told = now;
  port ??= connect();
  port.postMessage(JSON.parse(now));
}

function connect() {
  let found;
  if (window.SharedWorker) {
    found = new SharedWorker("/static/js/worker.js", { type: "module", name: "oomph" }).port;
  } else {
    const { port1, port2 } = new MessageChannel();
    import("./hub.js").then(({ serve }) => serve(port2));
    found = port1;
  }
  found.onmessage = ({ data }) => take(data);
  window.addEventListener("pagehide", () => found.postMessage([]));
  window.addEventListener("pageshow", ({ persisted }) => persisted && again());
  return found;
}

/** Fetch anew what grew: the page was away. */
function again() {
  told = "[]";
  for (const [name, { number }] of [...places]) if (number !== undefined) open(name);
}

function take({ kind, run: name, number, data }) {
  const run = runOf(name);
  if (places.get(name)?.number !== number) return;
  if (kind === "metrics") run.value = { ...run.value, metrics: grown(run.value.metrics, data) };
  if (kind === "state") {
    const { state, reason, result, steps } = data;
    run.value = { ...run.value, state, reason, steps: steps ?? run.value.steps, result: result ?? run.value.result };
    if (!GROWING.has(state)) rest(name);
  }
  if (kind === "reset") open(name);
  if (kind === "lost") rest(name);
}

function rest(name) {
  places.set(name, AT_REST);
  tell();
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
    if (places.get(now.name) !== AT_REST) continue;
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
