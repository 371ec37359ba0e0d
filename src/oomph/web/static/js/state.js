// What the page knows: the question that is asked of the planner, and its answer. Everything drawn follows from these.

import { batch, computed, effect, signal } from "./html.js";
import { get, post, Refused } from "./api.js";
import { fromHash, toHash } from "./link.js";

const EXAMPLE = { preset: "gpt2", gpu: "GeForce RTX 4070", set: {} };

export const tab = signal("plan");
export const question = signal(EXAMPLE); // the body of POST /api/plan
export const chosenRuns = signal([]); // names, in the runs tab
export const known = signal({ gpus: [], keys: {}, presets: [], machine: null });

export const answer = signal(null); // the last good plan: {plan, other, timeline, summary}
export const problems = signal([]); // of the question as it stands; the last answer stays on the page, dimmed
export const tookMs = signal(null);
export const notice = signal(null); // {text, undo?}: what was just done for the user

// --- the question ---------------------------------------------------------------------------

/** Change parts of the question; undefined takes a part away. */
export function ask(changes) {
  question.value = clean({ ...question.value, ...changes });
}

/** Set config keys over the config; undefined gives a key back to it. */
export function setKeys(changes) {
  const next = { ...question.value.set };
  for (const [key, value] of Object.entries(changes)) {
    if (value === undefined) delete next[key];
    else next[key] = value;
  }
  ask({ set: next });
}

/** Take over what `fit` proposes: config keys, and the trainer beside them. */
export function takeOver(changes, trainer) {
  const before = question.value;
  const { trainer: changed, ...keys } = changes;
  batch(() => {
    setKeys(keys);
    ask({ trainer: changed ?? trainer ?? before.trainer });
  });
  return () => {
    question.value = before;
  };
}

function clean(fields) {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined && value !== ""));
}

/** The two plans by program, whichever was chosen. */
export const plans = computed(() => {
  if (!answer.value) return null;
  const { plan, other } = answer.value;
  const both = [plan, other].filter(Boolean);
  return Object.fromEntries(both.map((each) => [each.config.trainer, each]));
});

/** A key's value: what was set here, else what the planner settled. What nanoGPT lacks is read from oomph's plan. */
export function valueOf(key) {
  const set = question.value.set;
  if (key in set) return set[key];
  const settled = plans.value;
  if (!settled) return undefined;
  return (settled.oomph ?? settled.nanogpt).config[key];
}

export const problemOf = (key) => problems.value.find(({ where }) => where === `set.${key}` || where === key);

// --- asking ---------------------------------------------------------------------------------

let asking = false; // an answer is under way
let waiting = false; // the question changed while an answer was under way

/** One request at a time; of the questions that come meanwhile only the last is asked. */
async function askPlanner() {
  if (asking) {
    waiting = true;
    return;
  }
  asking = true;
  do {
    waiting = false;
    const started = performance.now();
    try {
      const found = await post("/api/plan", question.peek());
      batch(() => {
        answer.value = found;
        problems.value = [];
        tookMs.value = performance.now() - started;
      });
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      problems.value = error.problems;
    }
  } while (waiting);
  asking = false;
}

// --- the address ----------------------------------------------------------------------------

let written = "";
let timer = 0;

async function writeAddress() {
  const hash = await toHash(tab.value, question.value, chosenRuns.value);
  if (hash === window.location.hash) return;
  written = hash;
  history.replaceState(null, "", hash);
}

async function readAddress() {
  if (window.location.hash === written) return;
  const found = await fromHash(window.location.hash);
  if (!found) return;
  batch(() => {
    tab.value = found.tab;
    if (found.question) question.value = found.question;
    if (found.tab === "runs") chosenRuns.value = found.runs;
  });
}

/** Read the address, learn what the server knows, and keep answer and address in step with the question. */
export async function begin() {
  await readAddress();
  window.addEventListener("hashchange", readAddress);
  follow();
  try {
    const [gpus, keys, presets] = await Promise.all(["gpus", "keys", "presets"].map((name) => get(`/api/${name}`)));
    known.value = { ...known.value, gpus, keys: Object.fromEntries(keys.map((key) => [key.name, key])), presets };
    const machine = await get("/api/machine");
    known.value = { ...known.value, machine };
    if (question.value === EXAMPLE && machine.gpu && machine.gpu.kind !== "cpu") ask({ gpu: machine.gpu.name });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    problems.value = error.problems;
  }
}

function follow() {
  effect(() => {
    question.value;
    if (tab.value === "plan" || tab.value === "fit") askPlanner();
  });
  effect(() => {
    [tab.value, question.value, chosenRuns.value];
    clearTimeout(timer);
    timer = setTimeout(writeAddress, 150);
  });
}
