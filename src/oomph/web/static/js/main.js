// @ts-check
// The frame of the page: its tabs, its look, and what is dropped on it.

import { classes, html, render, useEffect, useState } from "./html.js";
import { copy } from "./api.js";
import { ExplainView, takeLog } from "./explain.js";
import { FitView } from "./fit.js";
import { mib } from "./format.js";
import { takeFile } from "./knobs.js";
import { toHash } from "./link.js";
import { PROGRAMS } from "./parts.js";
import { PlanView } from "./plan.js";
import { scheme, turnScheme } from "./preferences.js";
import { RunsView } from "./runs.js";
import { begin, busy, chosenRuns, known, notice, plans, problems, question, search, tab } from "./state.js";
import { Tip } from "./tip.js";

const VIEWS = {
  plan: ["Plan", PlanView],
  fit: ["Fit", FitView],
  explain: ["Explain", ExplainView],
  runs: ["Runs", RunsView],
};

function Page() {
  const [name, View] = VIEWS[tab.value];
  useEffect(() => {
    document.title = `${name} · oomph`;
  }, [name]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>to the content</a>
    <header class="top">
      <a class="brand" href="#plan" aria-label="oomph">oomph<span class="brand-bar" aria-hidden="true"></span></a>
      <nav aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([id, [word]]) => html`<a key=${id} href=${`#${id}`}
          aria-current=${id === tab.value ? "page" : undefined}>
          ${word}
        </a>`,
        )}
      </nav>
      <div class="tools">
        <button type="button" class="tool" onClick=${share} title="copy a link to this page as it stands">Share</button>
        <button type="button" class="tool" onClick=${turnScheme} aria-pressed=${scheme.value === "dark"}
          title="light or dark" aria-label="Dark">
          ${scheme.value === "dark" ? "☀" : "☾"}
        </button>
      </div>
    </header>
    <main id="main" tabindex="-1"><h1 class="hidden">${name}</h1><${View} /></main>
    <${Footer} />
    <${Pocket} />
    <${Notice} />
    <${Tip} />
    <${DropTarget} />`;
}

async function share() {
  const hash = await toHash(tab.value, question.value, chosenRuns.value, search.value);
  await copy(`${window.location.origin}${window.location.pathname}${hash}`);
  notice.value = { text: "Link copied: it holds the whole plan" };
}

function Footer() {
  return html`
    <footer class="foot">
      <p>
        ${"Everything is computed on this machine; nothing is uploaded. "}
        ${"Predictions carry their bounds; what they rest on is in the notes. MiB = 2²⁰ bytes."}
      </p>
      <p><a href="/openapi.json">API</a> · oomph ${known.value.machine?.version ?? ""}</p>
    </footer>`;
}

/** On a phone the verdict stays in sight while the knobs are turned. */
function Pocket() {
  if (tab.value !== "plan" || !plans.value || problems.value.length) return null;
  return html`
    <div class=${classes("pocket", busy.value && "stale")} aria-hidden="true">
      ${Object.entries(plans.value).map(
        ([name, { memory }]) => html`
        <span key=${name} class=${memory.fits === false ? "no" : "yes"}>
          ${memory.fits === false ? "✗" : "✓"} ${PROGRAMS[name]} <b>${mib(memory.total_mib)}</b>
        </span>`,
      )}
    </div>`;
}

function Notice() {
  const shown = notice.value;
  useEffect(() => {
    if (!shown) return undefined;
    const timer = setTimeout(() => (notice.value = null), shown.undo ? 8000 : 3000);
    return () => clearTimeout(timer);
  }, [shown]);
  const undo = () => {
    shown.undo();
    notice.value = null;
  };
  return html`<div class=${classes("notice", shown && "shown")} role="status" aria-live="polite">
    ${
      shown &&
      html`${shown.text}
    ${shown.undo && html` <button type="button" class="quiet" onClick=${undo}>undo</button>`}`
    }
  </div>`;
}

/** A file dropped anywhere: a config where a plan is made, a log where one is explained. */
function DropTarget() {
  const [over, setOver] = useState(false);
  useEffect(() => {
    const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    const drag = (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (event) => event.relatedTarget === null && setOver(false);
    const drop = (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      setOver(false);
      const [file] = event.dataTransfer.files;
      if (!file) return;
      const isConfig = /\.(py|toml|json|ya?ml)$/i.test(file.name);
      if (tab.value === "explain" || !isConfig) {
        tab.value = "explain";
        takeLog(file);
      } else {
        if (tab.value === "runs") tab.value = "plan";
        takeFile(file);
      }
    };
    /** @type {[string, (event: any) => void][]} */
    const listeners = [
      ["dragover", drag],
      ["dragleave", leave],
      ["drop", drop],
    ];
    listeners.forEach(([name, listener]) => window.addEventListener(name, listener));
    return () => listeners.forEach(([name, listener]) => window.removeEventListener(name, listener));
  }, []);
  return over
    ? html`<div class="drop" aria-hidden="true"><span>drop a config to plan it, a log to explain it</span></div>`
    : null;
}

render(html`<${Page} />`, document.getElementById("page"));
begin();
