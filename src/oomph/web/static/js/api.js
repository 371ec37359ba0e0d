// @ts-check
// Questions to the server. What is wrong comes back as problems: what, where, the value found, the values allowed.

export class Refused extends Error {
  constructor(problems) {
    super(problems.map(sentence).join("; "));
    this.problems = problems;
  }
}

/** One problem in words. */
export function sentence({ where, what, found, allowed, nearest }) {
  const parts = [`${where ? `${where.replace(/^set\./, "")}: ` : ""}${what}`];
  if (found !== undefined && found !== null && found !== "") parts.push(`found ${found}`);
  if (allowed) parts.push(`try: ${allowed}`);
  if (nearest) parts.push(`did you mean ${nearest}?`);
  return parts.join("; ");
}

async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused([{ what: "The server does not answer. Is oomph serve still running?" }]);
  }
  const body = await response.json().catch(() => null);
  if (response.ok) return body;
  const problems = body?.problems?.length ? body.problems : [{ what: `The server answered ${response.status}` }];
  throw new Refused(problems);
}

export const get = (path) => answer(path, {});

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return answer(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Hand a text, or bytes, to the browser as a file. */
export function download(name, content, type = "text/plain;charset=utf-8") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Copy, also where the page is not served over a secure connection and the clipboard is closed to it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
