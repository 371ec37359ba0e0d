// @ts-check
// Numbers as people read them, each with its unit. The same rounding as the terminal's reports.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const digits = (n) => new Intl.NumberFormat("en-US", { minimumFractionDigits: n, maximumFractionDigits: n });
const ONE = digits(1);
const TWO = digits(2);
/** @type {[number, string][]} */
const SIZES = [
  [1e12, "T"],
  [1e9, "B"],
  [1e6, "M"],
  [1e3, "k"],
];
const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 12,648 or 8.3: MiB without their unit. */
export function mib(value) {
  if (!isNumber(value)) return "–";
  return Math.abs(value) >= 10 || value === 0 ? whole.format(value) : ONE.format(value);
}

export const integer = (value) => (isNumber(value) ? whole.format(value) : "–");

/** Three significant digits, without an exponent. */
export function figure(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return whole.format(value);
  if (size >= 100) return digits(0).format(value);
  if (size >= 10) return ONE.format(value);
  if (size >= 1) return TWO.format(value);
  return size === 0 ? "0" : String(Number(value.toPrecision(3)));
}

/** 10.49 B, 123.6 M, 524,288. */
export function count(value) {
  if (!isNumber(value)) return "–";
  for (const [size, letter] of SIZES.slice(0, 3)) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))} ${letter}`;
  }
  return whole.format(value);
}

/** 8.96 × 10¹⁸. */
export function power(value) {
  if (!isNumber(value) || value <= 0) return "–";
  const exponent = Math.floor(Math.log10(value));
  if (exponent < 6) return whole.format(value);
  const raised = [...String(exponent)].map((digit) => SUPERSCRIPTS[digit]).join("");
  return `${TWO.format(value / 10 ** exponent)} × 10${raised}`;
}

/** 310 ms, 9.94 s, 12 min. */
export function milliseconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1000) return `${figure(value)} ms`;
  return seconds(value / 1000);
}

export function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1) return `${figure(value * 1000)} ms`;
  if (value < 120) return `${figure(value)} s`;
  if (value < 7200) return `${figure(value / 60)} min`;
  return hours(value / 3600);
}

/** 55.6 h, and days beside long ones. */
export function hours(value) {
  if (!isNumber(value)) return "–";
  if (value < 1 / 60) return `${figure(value * 3600)} s`;
  if (value < 2) return `${figure(value * 60)} min`;
  return value >= 72 ? `${figure(value)} h (${figure(value / 24)} days)` : `${figure(value)} h`;
}

export const percent = (fraction, places = 1) =>
  isNumber(fraction) ? `${digits(places).format(fraction * 100)} %` : "–";

/** +6.2 %, −26 %: how far the second is from the first. */
export function deviation(expected, found) {
  if (!isNumber(expected) || !isNumber(found) || expected === 0) return "";
  const share = (found / expected - 1) * 100;
  return `${share < 0 ? "−" : "+"}${digits(Math.abs(share) < 10 ? 1 : 0).format(Math.abs(share))} %`;
}

export const money = (value, currency) => (isNumber(value) ? `${TWO.format(value)} ${currency ?? ""}`.trim() : "–");

/** "an RTX 4070", "a Tesla T4": by how its first letters are spoken. */
export function withArticle(name) {
  const [word] = name.split(" ");
  const spelt = word === word.toUpperCase() && !/^(TITAN|QUADRO)/.test(word);
  return `${(spelt ? /^[AEFHILMNORSX]/ : /^[aeio]/i).test(word) ? "an" : "a"} ${name}`;
}

/** A config's value as it stands in a file. */
export function setting(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? String(value) : `'${value}'`;
}

/** "Wed 18 Nov 08:26" in so many seconds, on this machine's clock. */
export function clockAt(secondsFromNow) {
  if (!isNumber(secondsFromNow)) return "–";
  const at = new Date(Date.now() + secondsFromNow * 1000);
  if (Number.isNaN(at.getTime())) return "–";
  /** @type {Intl.DateTimeFormatOptions} */
  const options = {
    weekday: "short",
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
    hour12: false,
  };
  return at.toLocaleString("en-GB", options).replace(",", "");
}

/** How long ago a unix time was. */
export function ago(unix) {
  if (!isNumber(unix)) return "";
  const past = Math.max(0, Date.now() / 1000 - unix);
  if (past < 60) return "just now";
  if (past < 3600) return `${Math.round(past / 60)} min ago`;
  if (past < 172800) return `${Math.round(past / 3600)} h ago`;
  return `${Math.round(past / 86400)} days ago`;
}

/** A tick's label: 524k, 10.5B, 3e18. */
export function short(value) {
  if (!isNumber(value)) return "";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  for (const [unit, letter] of SIZES) {
    if (size >= unit) return `${Number((value / unit).toPrecision(4))}${letter}`;
  }
  return String(Number(value.toPrecision(4)));
}

/** Round places from low to high: 1, 2 or 5 times a power of ten apart. */
export function ticks(low, high, about = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / about;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => unit * times).find((size) => size >= 0.7 * rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9); at += 1) {
    found.push(at * step || 0); // no minus before nought
  }
  return found;
}
