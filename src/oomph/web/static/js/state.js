// @ts-check
// What the page knows: the question that is asked of the planner, and its answer. Everything drawn follows from these.

import { batch, computed, effect, signal } from "./html.js";
import { get, post, Refused } from "./api.js";
import { fromHash, toHash } from "./link.js";

const LOOK_AGAIN_MS = 2000; // while this machine is being measured
/** @type {{preset?: string, gpu?: string, set: Object<string, any>, [key: string]: any}} */
const EXAMPLE = { preset: "gpt2", gpu: "GeForce RTX 4070", set: {} };

export const tab = signal("plan");
export const question = signal(EXAMPLE); // the body of POST /api/plan
export const chosenRuns = signal([]); // names, in the runs tab
export const search = signal({ find: "same", hours: 24, tokens: undefined }); // what the fit tab looks for
export const known = signal({ gpus: [], keys: {}, presets: [], machine: null });

export const answer = signal(null); // the last good plan: {plan, timeline, summary, keys}; of two programs also {other, other_timeline}
export const problems = signal([]); // of the question as it stands; the last answer to the same config stays, dimmed
export const busy = signal(false); // a plan is under way: what is drawn answers an older question
export const cancelled = signal(false); // the question as it stands was given up
export const tookMs = signal(null);
export const notice = signal(null); // {text, undo?}: what was just done for the user

// --- the question ---------------------------------------------------------------------------

/** Change parts of the question; undefined takes a part away. */
export function ask(changes) {
  question.value = { set: {}, ...clean({ ...question.value, ...changes }) };
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
  const said = ([key, value]) => value !== undefined && (value !== "" || key === "config"); // which may yet be typed
  return Object.fromEntries(Object.entries(fields).filter(said));
}

/** The plans by program, whichever was chosen: two of nanoGPT and oomph train, one of any other. */
export const plans = computed(() => {
  if (!answer.value) return null;
  const { plan, other } = answer.value;
  const both = [plan, other].filter(Boolean);
  return Object.fromEntries(both.map((each) => [each.config.trainer, each]));
});

const ONLY_OOMPH = new Set(["checkpoint_layers", "loss_chunk"]);

/** A key's value: what was set here, else what the chosen plan settled. What nanoGPT lacks is read from oomph's plan. */
export function valueOf(key) {
  const set = question.value.set;
  if (key in set) return set[key];
  if (!answer.value) return undefined;
  const plan = ONLY_OOMPH.has(key) ? (plans.value.oomph ?? answer.value.plan) : answer.value.plan;
  return plan.config[key];
}

/** Whether a key matters under the chosen program. */
export const matters = (key) => !answer.value || answer.value.keys.includes(key);

export const problemOf = (key) => problems.value.find(({ where }) => where === `set.${key}` || where === key);

// --- asking ---------------------------------------------------------------------------------

let asked = 0; // questions so far; an answer carries the number of its question
let shown = 0; // the number of the last answer: no older one is ever drawn over it
let answered = null; // the question of the answer on the page
let flights = []; // questions under way, {number, control}, the oldest first

/** Ask at once. The oldest question goes on, so that a slider in motion draws something; those between are aborted. */
export async function askPlanner() {
  flights.slice(1).forEach(({ control }) => control.abort());
  asked += 1;
  const mine = { number: asked, control: new AbortController() };
  flights = [...flights.slice(0, 1), mine];
  batch(() => {
    busy.value = true;
    cancelled.value = false;
  });
  const started = performance.now();
  const asking = question.peek();
  try {
    const found = await post("/api/plan", asking, mine.control.signal);
    arrive(mine, () => {
      answered = asking;
      answer.value = found;
      problems.value = [];
      tookMs.value = performance.now() - started;
    });
  } catch (error) {
    if (error instanceof Refused) arrive(mine, () => refuse(asking, error.problems));
    else if (error.name !== "AbortError") throw error;
  } finally {
    flights = flights.filter((each) => each !== mine);
    if (mine.number === asked) busy.value = false;
  }
}

/** Give the question up. No older answer stays. */
export function cancel() {
  flights.forEach(({ control }) => control.abort());
  batch(() => {
    cancelled.value = true;
    answer.value = null;
    problems.value = [];
  });
}

/** Tell what is wrong. A plan of another config than the one asked about does not stay. */
function refuse(asking, wrong) {
  problems.value = wrong;
  if (answered?.preset !== asking.preset || answered?.config !== asking.config) answer.value = null;
}

/** Draw an answer, unless a newer one is there already; older questions need none any more. */
function arrive({ number }, draw) {
  if (number < shown) return;
  shown = number;
  for (const each of flights) if (each.number < number) each.control.abort();
  batch(draw);
}

// --- the address ----------------------------------------------------------------------------

// A committed change is an entry of the browser's history, so that Back undoes it. A slider in motion and a text being
// typed are one entry each; what the page decides by itself is none.

const IN_MOTION = "input[type=range], textarea";
let timer = 0;
let gesture = null; // the control in motion that has an entry already
let ended = false; // that control was let go
let byItself = true;

const hashNow = () => toHash(tab.value, question.value, chosenRuns.value, search.value);

/** Change something without an entry of the history. */
export function silently(change) {
  byItself = true;
  change();
}

/** Write what is asked, unless the user has gone elsewhere since: then what the address says comes first. */
async function writeAddress(since) {
  const hash = await hashNow();
  const quietly = byItself;
  byItself = false;
  if (hash === window.location.hash || window.location.hash !== since) return;
  const control = document.activeElement?.matches(IN_MOTION) ? document.activeElement : null;
  const goesOn = control !== null && control === gesture;
  gesture = ended ? null : control;
  ended = false;
  if (quietly || goesOn) history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
}

function letGo() {
  ended = gesture !== null;
}

async function readAddress() {
  clearTimeout(timer);
  const here = window.location.hash;
  if (here === (await hashNow())) return;
  const found = await fromHash(here, known.value.keys);
  if (!found || here !== window.location.hash) return; // the user has gone on
  gesture = null;
  silently(() =>
    batch(() => {
      tab.value = found.tab;
      if (found.question) question.value = found.question;
      if (found.search) search.value = found.search;
      if (found.tab === "runs") chosenRuns.value = found.runs;
    }),
  );
}

/** Read the address, learn what the server knows, and keep answer and address in step with the question. */
export async function begin() {
  const asking = ["keys", "gpus", "presets"].map((name) => get(`/api/${name}`));
  const tables = Promise.all(asking);
  tables.catch(() => {}); // told below
  await asking[0].then(learnKeys, () => {}); // their kinds tell how a link's values are meant
  await readAddress();
  window.addEventListener("hashchange", readAddress);
  document.addEventListener("change", letGo, true);
  follow();
  try {
    const [, gpus, presets] = await tables;
    known.value = { ...known.value, gpus, presets };
    const machine = await learnMachine();
    if (question.value === EXAMPLE && machine.gpu && machine.gpu.kind !== "cpu") {
      silently(() => ask({ gpu: machine.gpu.name }));
    }
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    problems.value = error.problems;
  }
}

function learnKeys(keys) {
  known.value = { ...known.value, keys: Object.fromEntries(keys.map((key) => [key.name, key])) };
}

/** This machine; where it has yet to be measured, once more when that is done, and a plan for it is asked again. */
async function learnMachine() {
  const machine = await get("/api/machine");
  known.value = { ...known.value, machine };
  if (machine.measuring) setTimeout(() => lookAgain().catch(() => {}), LOOK_AGAIN_MS);
  return machine;
}

async function lookAgain() {
  const { measuring } = await learnMachine();
  if (!measuring && !question.value.gpu) askPlanner();
}

function follow() {
  effect(() => {
    question.value;
    if (tab.value === "plan" || tab.value === "fit") askPlanner();
  });
  effect(() => {
    [tab.value, question.value, chosenRuns.value, search.value];
    clearTimeout(timer);
    timer = setTimeout(writeAddress, 150, window.location.hash);
  });
}
