// @ts-check
// One line chart, drawn by uPlot: units on the axes, exact values in its legend wherever the pointer is.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { short } from "./format.js";
import { scheme } from "./preferences.js";
import { useWidth } from "./timeline.js";

const HEIGHT = 224;
// Told apart in light and dark and by most eyes; dashes where they come round again.
export const LINES = ["#4e79a7", "#e15759", "#59a14f", "#f28e2b", "#b07aa1", "#3f9c95", "#9c755f", "#c49a1a"];

let library = null; // loaded when the first chart is drawn: the planner needs none of it
const loaded = () => (library ??= import("uplot").then((module) => module.default));

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * lines: [{label, xs, ys, colour, faint, dots, dash}], say: a value with its unit, x: {label, say},
 * reference: {value, label} is a level, such as the plan's.
 */
export function Plot({ title, unit, lines, say, x, reference, fromZero }) {
  const [place, width] = useWidth(420);
  const target = useRef(null);
  const chart = useRef(null);
  const [at, setAt] = useState(null);
  const level = reference?.value;
  const levelNow = useRef(level);
  levelNow.current = level;
  const widthNow = useRef(width); // the chart is made later than it is asked for
  widthNow.current = width;
  const zoom = useRef(null); // {min, max} along x, once the user has chosen some
  const over = useRef(x.label);
  if (over.current !== x.label) zoom.current = null; // steps are no hours
  over.current = x.label;
  const data = useMemo(() => joined(lines), [lines]);
  const shape = JSON.stringify([
    lines.map(({ label, colour: stroke, faint, dots, dash }) => [label, stroke, faint, dots, dash]),
    x.label,
    unit,
    fromZero,
  ]);

  useEffect(() => {
    let gone = false;
    loaded().then((UPlot) => {
      if (gone) return;
      chart.current = new UPlot(
        options({ width: widthNow.current, lines, x, fromZero, levelNow, setAt, zoom }),
        data,
        target.current,
      );
      if (zoom.current) chart.current.setScale("x", zoom.current);
    });
    return () => {
      gone = true;
      chart.current?.destroy();
      chart.current = null;
    };
  }, [shape, scheme.value]);
  useEffect(() => {
    chart.current?.setData(data, !zoom.current); // what was zoomed into stays in sight
    if (zoom.current) chart.current?.setScale("x", zoom.current);
  }, [data, level]);
  useLayoutEffect(() => chart.current?.setSize({ width, height: HEIGHT }), [width]);

  return html`
    <figure class="plot">
      <figcaption><b>${title}</b>${unit && html` <span class="soft">${unit}</span>`}
        <span class="legend">
          ${lines.map(
            (line, index) =>
              !line.silent &&
              html`<${Entry} key=${line.label} line=${line}
            value=${valueAt(data, index + 1, at)} say=${say} />`,
          )}
          ${
            reference &&
            level !== undefined &&
            html`<span class="entry">
            <i class="level" aria-hidden="true"></i>
            <bdi>${reference.label} <b>${say(level)}</b></bdi>
          </span>`
          }
        </span>
        <span class="soft where">${at === null ? "" : `${x.say(data[0][at])}`}</span>
      </figcaption>
      <div ref=${place} class="plot-place" dir="ltr" role="img" aria-label=${`${title}${unit ? `, ${unit}` : ""}, over ${x.label}`}
        data-zoomed=${zoom.current !== null}><div ref=${target}></div></div>
    </figure>`;
}

const Entry = ({ line, value, say }) =>
  html`
    <span class="entry">
      <i style=${{ background: line.colour }} aria-hidden="true"></i>
      <bdi>${line.label} <b>${value === null ? "–" : say(value)}</b></bdi>
    </span>`;

/** Lines over one axis of x. A line says nothing where it has no point of its own. */
function joined(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.xs.filter(Number.isFinite)))].sort((a, b) => a - b);
  const place = new Map(xs.map((value, index) => [value, index]));
  const columns = lines.map((line) => {
    const column = new Array(xs.length).fill(null);
    line.xs.forEach((value, index) => {
      if (place.has(value) && Number.isFinite(line.ys[index])) column[place.get(value)] = line.ys[index];
    });
    return column;
  });
  return [xs, ...columns];
}

/** A line's value at a place, or the last before it; at no place, its newest. */
function valueAt(data, column, at) {
  for (let index = at ?? data[0].length - 1; index >= 0; index -= 1) {
    if (data[column][index] !== null) return data[column][index];
  }
  return null;
}

function options({ width, lines, x, fromZero, levelNow, setAt, zoom }) {
  const ink = colour("--ink-3");
  const axis = {
    stroke: ink,
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
    font: `11px ${colour("--sans")}`,
    gap: 6,
  };
  const range = (_, low, high) => {
    const level = levelNow.current ?? low;
    const top = Math.max(high ?? 1, level);
    const bottom = fromZero ? 0 : Math.min(low ?? 0, level);
    const margin = (top - bottom || Math.abs(top) || 1) * 0.06;
    return [fromZero ? 0 : bottom - margin, top + margin];
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 10, 0, 0],
    scales: { x: { time: false }, y: { range } },
    axes: [
      {
        ...axis,
        values: (_, values) => values.map(short),
        size: 28,
        label: x.label,
        labelSize: 16,
        labelGap: 0,
        labelFont: axis.font,
      },
      { ...axis, values: (_, values) => values.map(short), size: 52 },
    ],
    cursor: { sync: { key: "runs" }, drag: { x: true, y: false }, points: { size: 7 } },
    series: [
      { label: x.label },
      ...lines.map((line) => ({
        label: line.label,
        stroke: line.faint ? `${line.colour}55` : line.colour,
        width: line.faint ? 1 : 1.8,
        dash: line.dash,
        spanGaps: true,
        points: { show: line.dots === true, size: 6, fill: line.colour },
      })),
    ],
    hooks: {
      setScale: [
        (plot, axis) => {
          const all = plot.data[0];
          const { min, max } = plot.scales.x;
          if (axis === "x" && all.length) zoom.current = min > all[0] || max < all.at(-1) ? { min, max } : null;
        },
      ],
      setCursor: [(plot) => setAt(plot.cursor.idx ?? null)],
      draw: [(plot) => drawLevel(plot, levelNow.current)],
    },
  };
}

function drawLevel(plot, level) {
  if (level === undefined) return;
  const y = plot.valToPos(level, "y", true);
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour("--ink-2");
  ctx.setLineDash([5, 4]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
}
