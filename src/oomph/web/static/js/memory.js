// @ts-check
// What fills the memory: a bar for each program against the card's line, and the figures under it.

import { classes, html } from "./html.js";
import { integer, mib, percent, ticks } from "./format.js";
import { PROGRAMS, Swatch, colourOf, inkOn, isUnused, lit, partsOf, pointing } from "./parts.js";
import { hideTip, showTip } from "./tip.js";

const LABELLED = 0.07; // of the width: a part narrower than that is named by the table alone

const share = (value, full) => `${(100 * value) / full}%`;

export function MemoryBars({ plans, chosen }) {
  const shown = Object.keys(PROGRAMS)
    .filter((name) => plans[name])
    .map((name) => [name, plans[name]]);
  const device = shown[0][1].device;
  const capacity = shown[0][1].memory.capacity_mib;
  const full =
    Math.max(...shown.map(([, { memory }]) => Math.max(memory.high_mib ?? 0, memory.total_mib)), capacity ?? 0) * 1.02;
  return html`
    <figure class="bars" aria-label="What fills the memory">
      <div class="bars-plot">
        ${shown.map(
          ([name, plan]) => html`<${Bar} key=${name} name=${name} plan=${plan} full=${full}
          chosen=${name === chosen} />`,
        )}
        ${
          capacity &&
          html`
          <div class="line-place"><div class="card-line" style=${{ insetInlineStart: share(capacity, full) }}>
            <span class=${capacity / full > 0.6 ? "before" : ""}>
              ${device.name}: <bdi>${integer(capacity)} MiB</bdi>
            </span>
          </div></div>`
        }
        <div class="bars-scale" aria-hidden="true">
          ${ticks(0, full * 0.97, 6).map(
            (at) => html`<span style=${{ insetInlineStart: share(at, full) }}>
            ${integer(at)}
          </span>`,
          )}
          <span class="scale-unit">MiB</span>
        </div>
      </div>
    </figure>`;
}

function Bar({ name, plan, full, chosen }) {
  const { memory, device } = plan;
  const spread = memory.high_mib - memory.low_mib;
  const over = memory.capacity_mib ? memory.total_mib - memory.capacity_mib : 0; // MiB beyond the card's line
  return html`
    <div class=${classes("bar-row", chosen && "chosen")} data-program=${name}>
      <span class="bar-name">${PROGRAMS[name]}</span>
      <div class="bar" role="img" aria-label=${`${PROGRAMS[name]}: ${mib(memory.total_mib)} MiB`}>
        ${partsOf(memory, device.kind).map(
          ([part, size]) => html`
          <div key=${part}
            class=${classes("segment", isUnused(part) && "hatched", lit.value && lit.value !== part && "dim")}
            style=${{ width: share(size, full), "--colour": colourOf(part) }}
            ...${pointing(part)}
            onPointerMove=${(event) =>
              showTip(event, part, [
                [null, PROGRAMS[name], `${mib(size)} MiB`],
                [null, "of its total", percent(size / memory.total_mib)],
              ])}
            onPointerOut=${hideTip}>
            ${size / full > LABELLED && html`<span class="segment-name" style=${{ color: inkOn(part) }}>${part}</span>`}
          </div>`,
        )}
        ${
          over > 0 &&
          html`<div class="over"
          style=${{ insetInlineStart: share(memory.capacity_mib, full), width: share(over, full) }}></div>`
        }
        <div class="whisker" title=${`from ${mib(memory.low_mib)} to ${mib(memory.high_mib)} MiB`}
          style=${{ insetInlineStart: share(memory.low_mib, full), width: share(spread, full) }}></div>
      </div>
    </div>`;
}

/** The same figures as a table, side by side. */
export function PartsTable({ plans }) {
  const shown = Object.keys(PROGRAMS).filter((name) => plans[name]);
  const columns = shown.map((name) => new Map(partsOf(plans[name].memory, plans[name].device.kind)));
  const names = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort(
    (a, b) => order(a, columns) - order(b, columns),
  );
  return html`
    <table class="figures parts">
      <thead>
        <tr>
          <th scope="col">MiB at the peak</th>
          ${shown.map((name) => html`<th scope="col" class="number">${PROGRAMS[name]}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${names.map(
          (part) => html`
          <tr key=${part} class=${classes(lit.value === part && "lit")} ...${pointing(part)}>
            <th scope="row"><${Swatch} part=${part} /><bdi>${part}</bdi></th>
            ${columns.map((column) => html`<td class="number">${column.has(part) ? mib(column.get(part)) : "–"}</td>`)}
          </tr>`,
        )}
      </tbody>
      <tfoot>
        <tr>
          <th scope="row">in all</th>
          ${shown.map((name) => html`<td class="number">${mib(plans[name].memory.total_mib)}</td>`)}
        </tr>
      </tfoot>
    </table>`;
}

const order = (part, columns) => Math.max(...columns.map((column) => [...column.keys()].indexOf(part)));
