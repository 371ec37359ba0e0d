// @ts-check
// A plan as a link: #plan?preset=gpt2&gpu=RTX+4070&batch_size=8. A config of one's own travels inside it, deflated.

export const TABS = ["plan", "fit", "explain", "runs"];
export const FLAGS = [
  "gpu_mib",
  "gpu_tflops",
  "gpu_gbs",
  "gpu_watts",
  "reserve_mib",
  "step_ms",
  "watts",
  "price_kwh",
  "price_hour",
  "currency",
];
const BUDGET = ["hours", "tokens"];
const FINDS = ["same", "largest", "budget"];
const OWN = new Set(["preset", "gpu", "trainer", "config", "filename", "run", ...FLAGS]);
const LONGEST = 200_000; // characters of a link that are read: a config is a few thousand

export async function toHash(tab, question, runs, search) {
  const fields = new URLSearchParams();
  if (tab === "runs") {
    for (const run of runs) fields.append("run", run);
  } else if (tab !== "explain") {
    for (const key of ["preset", "filename", "gpu", "trainer", ...FLAGS]) {
      if (question[key] !== undefined && question[key] !== "") fields.set(key, question[key]);
    }
    if (question.config) fields.set("config", await packed(question.config));
    for (const [key, value] of Object.entries(question.set)) fields.set(key, value);
    if (tab === "fit" && search.find !== "same") {
      fields.set("find", search.find);
      for (const key of BUDGET) if (search.find === "budget" && search[key] !== undefined) fields.set(key, search[key]);
    }
  }
  const text = fields.toString();
  return `#${tab}${text ? `?${text}` : ""}`;
}

/** What a link says, by the kinds of a config's `keys`; null where it says nothing of a tab. The server tells a key that is
 * none. */
export async function fromHash(hash, keys) {
  const [tab, text = ""] = hash.slice(1, LONGEST).split(/\?(.*)/s);
  if (!TABS.includes(tab)) return null;
  const fields = new URLSearchParams(text);
  const question = { set: {} };
  for (const [key, value] of fields) {
    if (tab === "fit" && (key === "find" || BUDGET.includes(key))) continue;
    if (key === "config") question.config = await unpacked(value);
    else if (FLAGS.includes(key)) question[key] = read(value, key === "currency" ? "str" : "float");
    else if (OWN.has(key)) question[key] = value;
    else question.set[key] = read(value, keys[key]?.kind);
  }
  delete question.run;
  const asks = text && tab !== "runs";
  return {
    tab,
    runs: fields.getAll("run"),
    question: asks ? question : null,
    search: asks && tab === "fit" ? searchOf(fields) : null,
  };
}

/** What the fit tab is to look for. */
function searchOf(fields) {
  const found = fields.get("find");
  const [hours, tokens] = BUDGET.map((key) => (fields.has(key) ? read(fields.get(key)) : undefined));
  return { find: FINDS.includes(found) ? found : "same", hours: found === "budget" ? hours : 24, tokens };
}

/** A value of a link or a field: a number or a word, as --key=value takes them; a text stays one, "007" too. */
export function read(text, kind) {
  if (kind === "str") return text;
  if (text === "true" || text === "True") return true;
  if (text === "false" || text === "False") return false;
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

async function packed(text) {
  const bytes = new Uint8Array(await through(new Blob([text]), new CompressionStream("deflate-raw")));
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpacked(text) {
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
    return new TextDecoder().decode(await through(new Blob([bytes]), new DecompressionStream("deflate-raw")));
  } catch {
    return "# the config in this link is damaged\n";
  }
}

const through = (blob, stream) => new Response(blob.stream().pipeThrough(stream)).arrayBuffer();
