// @ts-check
// Settings that fit, as a table: sorted by a click on a column; a row opens, and can be applied or downloaded.

import { classes, html, useState } from "./html.js";
import { hours, integer, mib, setting } from "./format.js";
import { PROGRAMS } from "./parts.js";

const KINDS = { same: "the same mathematics", nearly: "nearly the same", different: "another run" };

// [heading, what it is sorted by, largest first]
/** @type {[string, (option: any) => any, boolean][]} */
const COLUMNS = [
  ["", (option) => option.rank, false],
  ["Setting", (option) => option.name, false],
  ["Program", (option) => option.trainer, false],
  ["Batch", (option) => option.batch_size, true],
  ["Memory, MiB", (option) => option.total_mib, false],
  ["Left, MiB", (option) => option.headroom_mib ?? 0, true],
  ["Tokens/s", (option) => option.tokens_per_s ?? 0, true],
  ["The run", (option) => option.hours ?? Infinity, false],
  ["Training", (option) => Object.keys(KINDS).indexOf(option.kind), false],
];

export function Options({ options, best, safest, capacity, onApply, onDownload, caption, lit, onLit, few }) {
  const [all, setAll] = useState(few === undefined);
  const [open, setOpen] = useState(best ?? null); // the row that tells more
  const [by, setBy] = useState({ column: 0, turned: false });
  const ranked = options.map((option, rank) => ({ ...option, rank }));
  const [, key, largestFirst] = COLUMNS[by.column];
  const sign = largestFirst === by.turned ? 1 : -1;
  const rows = [...ranked].sort((a, b) => sign * compare(key(a), key(b)) || a.rank - b.rank);
  const full = Math.max(capacity ?? 0, ...options.map(({ total_mib }) => total_mib));
  const turn = (column) => setBy(by.column === column ? { column, turned: !by.turned } : { column, turned: false });
  const direction = (column) => (column === by.column ? (sign > 0 ? "ascending" : "descending") : "none");
  return html`
    <div class="scroll">
      <table class="options">
        <caption class="hidden">${caption}</caption>
        <thead><tr>
          ${COLUMNS.map(
            ([heading], column) => html`
            <th key=${column} scope="col" aria-sort=${direction(column)}
              class=${classes(column > 2 && column < 8 && "number")}>
              <button type="button" onClick=${() => turn(column)} aria-label=${heading || "Rank"}>
                ${heading || "#"}
                <span class="arrow" aria-hidden="true">${column === by.column ? (sign > 0 ? "↑" : "↓") : ""}</span>
              </button>
            </th>`,
          )}
        </tr></thead>
        <tbody>
          ${rows.slice(0, all ? rows.length : few).map(
            (option) => html`<${Row} key=${option.rank} option=${option} isBest=${option.rank === best}
            isSafest=${option.rank === safest} capacity=${capacity} full=${full} isOpen=${open === option.rank}
            isLit=${lit === option.rank} onLit=${onLit} onApply=${onApply} onDownload=${onDownload}
            onTurn=${() => setOpen(open === option.rank ? null : option.rank)} />`,
          )}
        </tbody>
      </table>
      ${
        !all &&
        rows.length > few &&
        html`<button type="button" class="quiet" onClick=${() => setAll(true)}>all ${rows.length} settings</button>`
      }
    </div>`;
}

const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

function Row({ option, isBest, isSafest, isOpen, isLit, capacity, full, onTurn, onLit, onApply, onDownload }) {
  const { rank, name, changes, trainer, patched, fits, total_mib, headroom_mib, tokens_per_s, hours: run } = option;
  const told = Object.entries(changes).filter(([key]) => key !== "trainer");
  const look = classes(isBest && "best", !fits && "no", isLit && "lit", isOpen && "open");
  const light = (at) => () => onLit?.(at);
  return html`
    <tr class=${look} onClick=${onTurn} data-rank=${rank} onPointerEnter=${light(rank)} onPointerLeave=${light(null)}>
      <td class="rank">${rank + 1}</td>
      <td>
        <div class="named"><button type="button" class="take" aria-expanded=${isOpen} onClick=${(event) => {
          event.stopPropagation();
          onTurn();
        }}>${name}</button>
        ${isBest && html`<span class="badge good">best</span>`}
        ${isSafest && html`<span class="badge">safest</span>`}
        ${!fits && html`<span class="badge bad">does not fit</span>`}
      </div>
        <div class="changes">
          ${told.map(([key, value]) => html`<code key=${key} dir="ltr">${key} = ${setting(value)}</code>`)}
          ${!told.length && html`<span class="soft">nothing changed</span>`}
        </div>
      </td>
      <td>${PROGRAMS[trainer]}${patched && html`<div class="soft">with its patch</div>`}</td>
      <td class="number"><bdi>${integer(option.batch_size)} × ${integer(option.gradient_accumulation_steps)}</bdi></td>
      <td class="number memory">
        ${mib(total_mib)}
        <span class="phone"> MiB</span>
        <span class="mini" aria-hidden="true">
          <span class=${fits ? "" : "no"} style=${{ width: `${(100 * total_mib) / full}%` }}></span>
          ${capacity && html`<i style=${{ insetInlineStart: `${(100 * capacity) / full}%` }}></i>`}
        </span>
      </td>
      <td class="number">${mib(headroom_mib)}</td>
      <td class="number">${integer(tokens_per_s)}</td>
      <td class="number"><bdi>${hours(run)}</bdi></td>
      <td class="kinds"><span class=${`kind ${option.kind}`}>${KINDS[option.kind]}</span></td>
    </tr>
    ${isOpen && html`<${More} option=${option} onApply=${onApply} onDownload=${onDownload} />`}`;
}

const sentenceOf = (words) => `${words.charAt(0).toUpperCase()}${words.slice(1)}.`;

/** What an opened row tells, and what can be done with it. */
function More({ option, onApply, onDownload }) {
  const { effect, reason, high_mib: high, saved_mib: saved, effective_batch: batch } = option;
  return html`
    <tr class="more-row"><td colspan=${COLUMNS.length}>
      <p>${sentenceOf(effect.replace(/^none: /, ""))} ${sentenceOf(reason)}</p>
      <p class="soft">
        ${integer(batch)} sequences a step; at most ${mib(high)} MiB in 95 of 100 runs${saved > 0 ? `, ${mib(saved)} MiB less than as asked` : ""}.
      </p>
      <div class="actions">
        <button type="button" class="button" onClick=${() => onApply(option)}>Apply</button>
        ${onDownload && html`<button type="button" class="button plain" onClick=${() => onDownload(option)}>Download</button>`}
      </div>
    </td></tr>`;
}
