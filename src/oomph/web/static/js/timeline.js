// @ts-check
// Allocated memory over one optimizer step: a stacked area by kind, the peak marked and named, the card's line.

import { effect, html, signal, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { post, Refused } from "./api.js";
import { integer, mib, ticks } from "./format.js";
import { PROGRAMS, Swatch, colourOf, lit } from "./parts.js";
import { answer, question } from "./state.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 250;
const MARGIN = { left: 56, right: 12, top: 26, bottom: 42 };
const MIB = 2 ** 20;

export const moment = signal(null); // {at, op, mib, holders}: what is alive at an operation that was picked
effect(() => {
  answer.value;
  moment.value = null; // of another plan
});

/** Ask what is alive while that operation runs. */
async function pickMoment(at, op) {
  const mine = (moment.value = { at, op, holders: null });
  try {
    const found = await post("/api/moment", { ...question.value, at });
    if (moment.value === mine) moment.value = { at, op: found.op, mib: found.bytes / MIB, holders: found.holders };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (moment.value === mine) moment.value = { at, op, holders: [], problem: error.message };
  }
}

/** The width an element is given, followed as it changes. */
export function useWidth(initial = 800) {
  const place = useRef(null);
  const [width, setWidth] = useState(initial);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(240, Math.floor(entry.contentRect.width))));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  return [place, width];
}

export function Timeline({ timeline, plan, otherTimeline }) {
  const [place, width] = useWidth();
  const [at, setAt] = useState(null); // the point that is read, by pointer or arrow keys
  const scale = useMemo(() => makeScale(timeline, otherTimeline, plan, width), [timeline, otherTimeline, plan, width]);
  const { points, ops } = timeline;
  const read = (event) => {
    const box = place.current.getBoundingClientRect();
    const index = scale.nearest(event.clientX - box.left);
    setAt(index);
    showTip(event, ops[index], tipRows(timeline, index));
  };
  const leave = () => {
    setAt(null);
    hideTip();
  };
  const pick = () => at !== null && pickMoment(points[at][0], ops[at]);
  const keys = (event) => {
    if (event.key === "Enter") pick();
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
    const peak = points.findIndex(([index]) => index === timeline.peak.index);
    const ends = { Home: 0, End: points.length - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    event.preventDefault();
    const next = ends ?? (at === null ? peak : Math.min(points.length - 1, Math.max(0, at + step)));
    setAt(next);
    const box = place.current.getBoundingClientRect();
    showTip(
      { clientX: box.left + scale.x(points[next][0]), clientY: box.top + HEIGHT / 2 },
      ops[next],
      tipRows(timeline, next),
    );
  };
  const program = PROGRAMS[plan.config.trainer];
  const highest = `the peak is ${mib(plan.memory.allocated_mib)} MiB in ${timeline.peak.at}`;
  const label = `Memory over one step of ${program}: ${highest}. The arrow keys read single operations, Enter tells what is alive.`;
  return html`
    <div class="timeline" ref=${place} dir="ltr">
      <svg width=${width} height=${HEIGHT} tabindex="0" role="img" aria-label=${label}
        onPointerMove=${read} onClick=${pick} onPointerLeave=${leave} onKeyDown=${keys} onBlur=${leave}>
        <${Areas} timeline=${timeline} scale=${scale} />
        ${otherTimeline && html`<path class="outline" d=${outline(otherTimeline, scale)} />`}
        <${Axes} timeline=${timeline} scale=${scale} />
        <${Peak} timeline=${timeline} plan=${plan} scale=${scale} />
        ${
          moment.value &&
          html`<line class="crosshair picked" x1=${scale.x(moment.value.at)} x2=${scale.x(moment.value.at)}
          y1=${MARGIN.top} y2=${HEIGHT - MARGIN.bottom} />`
        }
        ${
          at !== null &&
          html`<line class="crosshair" x1=${scale.x(points[at][0])} x2=${scale.x(points[at][0])}
          y1=${MARGIN.top} y2=${HEIGHT - MARGIN.bottom} />`
        }
      </svg>
    </div>`;
}

function makeScale(timeline, other, plan, width) {
  const { points } = timeline;
  const last = Math.max(1, (timeline.length ?? points.at(-1)[0] + 1) - 1);
  const { capacity_mib: capacity, context_mib: context } = plan.memory;
  const room = capacity ? capacity - context : null; // what tensors can have on this card
  const fullest = (line) => Math.max(...line.points.map(([, bytes]) => bytes)) / MIB;
  const highest = Math.max(fullest(timeline), other ? fullest(other) : 0, room ?? 0) * 1.04;
  const inner = width - MARGIN.left - MARGIN.right;
  const x = (index) => MARGIN.left + (index / last) * inner;
  const y = (size) => HEIGHT - MARGIN.bottom - (size / highest) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const nearest = (pixel) => {
    const wanted = ((pixel - MARGIN.left) / inner) * last;
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < wanted) low = middle;
      else high = middle;
    }
    return wanted - points[low][0] < points[high][0] - wanted ? low : high;
  };
  return { x, y, nearest, highest, room, width, name: plan.device.name };
}

/** Kinds from the ground up, as shapes between the edges of their stack: each edge is written once. */
function layers({ points, kinds }, scale) {
  const xs = points.map(([index]) => tenths(scale.x(index)));
  const filled = points.map(() => 0);
  const edge = () => xs.map((x, at) => `${x},${tenths(scale.y(filled[at]))}`);
  let below = edge();
  return Object.entries(kinds).map(([name, column]) => {
    column.forEach((bytes, at) => {
      filled[at] += bytes / MIB;
    });
    const above = edge();
    const d = `M${above.join("L")}L${below.reverse().join("L")}Z`;
    below = above;
    return { name, d };
  });
}

const tenths = (value) => Math.round(value * 10) / 10; // of a pixel

function Areas({ timeline, scale }) {
  const shapes = useMemo(() => layers(timeline, scale), [timeline, scale]);
  const look = (name) => (lit.value && lit.value !== name ? "area dim" : "area");
  return html`
    ${shapes.map(({ name, d }) => html`<path key=${name} class=${look(name)} d=${d} fill=${colourOf(name)} />`)}`;
}

/** The other program's total over the same width, op by op of its own. */
function outline(other, scale) {
  const last = Math.max(1, (other.length ?? other.points.at(-1)[0] + 1) - 1);
  const whole = scale.x(0);
  const inner = scale.width - MARGIN.left - MARGIN.right;
  const place = ([index, bytes]) => `${tenths(whole + (index / last) * inner)},${tenths(scale.y(bytes / MIB))}`;
  return `M${other.points.map(place).join("L")}`;
}

function Axes({ timeline, scale }) {
  const bottom = HEIGHT - MARGIN.bottom;
  const right = scale.width - MARGIN.right;
  const peakIsLate = scale.x(timeline.peak.index) > scale.width * 0.6;
  let free = -Infinity; // labels that would run into one another take the second line
  const phases = timeline.phases.map(({ name, start, end }) => {
    const x = scale.x(start);
    const second = x < free;
    const space = Math.max(scale.x(end) - x, second ? right - x : 0);
    const text = name.slice(0, Math.max(0, Math.floor(Math.max(space, 150) / 5.6)));
    const long = text.length * 5.6 + 8;
    if (!second) free = x + long;
    return { x, text: text.length > 2 ? text : "", second, atEnd: x + long > right };
  });
  return html`
    ${ticks(0, scale.highest, 4).map(
      (at) => html`
      <g key=${at}>
        <line class="grid" x1=${MARGIN.left} x2=${right} y1=${scale.y(at)} y2=${scale.y(at)} />
        <text class="tick-y" x=${MARGIN.left - 8} y=${scale.y(at) + 4}>${integer(at)}</text>
      </g>`,
    )}
    <text class="tick-y" x=${MARGIN.left - 8} y="12">MiB</text>
    ${phases.map(
      ({ x, text, second, atEnd }) => html`
      <g key=${x}>
        <line class="phase" x1=${x} x2=${x} y1=${MARGIN.top} y2=${bottom + (second ? 22 : 6)} />
        <text class="phase-name" x=${atEnd ? right : x + 4} y=${bottom + (second ? 32 : 16)}
          text-anchor=${atEnd ? "end" : "start"}>
          ${text}
        </text>
      </g>`,
    )}
    ${
      scale.room &&
      html`
      <g><line class="room" x1=${MARGIN.left} x2=${right} y1=${scale.y(scale.room)} y2=${scale.y(scale.room)} />
      <text class="room-name" x=${peakIsLate ? MARGIN.left + 4 : right} y=${scale.y(scale.room) - 5}
        text-anchor=${peakIsLate ? "start" : "end"}>
        ${integer(scale.room)} MiB${scale.width > 560 ? " beside the context" : ""}
      </text>
    </g>`
    }`;
}

/** The peak as torch counts it: the allocator's rests that are too small to be split off are part of it. */
function Peak({ timeline, plan, scale }) {
  const { peak } = timeline;
  const x = scale.x(peak.index);
  const y = scale.y(peak.bytes / MIB);
  const text = `${mib(plan.memory.allocated_mib)} MiB · ${peak.at ?? peak.op}`;
  const long = text.length * 6.6; // about, in pixels: near an edge the label is moved inside
  const start = Math.min(Math.max(x > scale.width / 2 ? x - long - 8 : x + 8, 2), scale.width - long - 2);
  return html`
    <g class="peak"><circle cx=${x} cy=${y} r="4" />
      <text x=${Math.max(2, start)} y=${Math.max(12, y - 8)}>${text}</text></g>`;
}

function tipRows({ points, kinds }, at) {
  /** @type {[string, number][]} */
  const sizes = Object.entries(kinds).map(([name, column]) => [name, column[at] / MIB]);
  const rows = sizes.filter(([, size]) => size > 0.05).sort((a, b) => b[1] - a[1]);
  const shown = rows.slice(0, 8).map(([name, size]) => [html`<${Swatch} part=${name} />`, name, `${mib(size)} MiB`]);
  return [[null, "tensors", `${mib(points[at][1] / MIB)} MiB`], ...shown];
}
