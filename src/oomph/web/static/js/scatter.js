// @ts-check
// Options as points: memory across, speed up, the card's line between what fits and what does not.

import { classes, html } from "./html.js";
import { integer, mib, short, ticks } from "./format.js";
import { hideTip, showTip } from "./tip.js";
import { useWidth } from "./timeline.js";

const HEIGHT = 220;
const KINDS = { same: "the same training", nearly: "nearly the same", different: "another training" };
const MARGIN = { left: 58, right: 14, top: 20, bottom: 34 };

export function Scatter({ options, best, capacity, device, lit, onLit }) {
  const [place, width] = useWidth();
  const timed = options.map((option, rank) => ({ ...option, rank })).filter(({ tokens_per_s: speed }) => speed > 0);
  timed.sort((a, b) => Number(a.rank === best) - Number(b.rank === best)); // the best is drawn over the others
  if (timed.length < 2) return html`<div ref=${place}></div>`;
  const most = Math.max(capacity ?? 0, ...timed.map(({ total_mib: size }) => size)) * 1.05;
  const fastest = Math.max(...timed.map(({ tokens_per_s: speed }) => speed)) * 1.08;
  const x = (size) => MARGIN.left + (size / most) * (width - MARGIN.left - MARGIN.right);
  const y = (speed) => HEIGHT - MARGIN.bottom - (speed / fastest) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const point = (event, option) => {
    onLit(option.rank);
    showTip(event, option.name, [
      [null, "memory", `${mib(option.total_mib)} MiB`],
      [null, "speed", `${integer(option.tokens_per_s)} tokens/s`],
    ]);
  };
  const leave = () => {
    onLit(null);
    hideTip();
  };
  const fitting = timed.filter(({ fits }) => fits).length;
  const label = `Memory against speed: ${timed.length} settings, ${fitting} of which fit. The table below has the same.`;
  return html`
    <div class="scatter" ref=${place} dir="ltr">
      <svg width=${width} height=${HEIGHT} role="img" aria-label=${label}>
        ${ticks(0, fastest, 4).map(
          (at) => html`<g key=${`y${at}`}>
          <line class="grid" x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${y(at)} y2=${y(at)} />
          <text class="tick-y" x=${MARGIN.left - 8} y=${y(at) + 4}>${short(at)}</text></g>`,
        )}
        ${ticks(0, most, width > 560 ? 8 : 4).map(
          (at) => html`<text key=${`x${at}`} class="tick-x" x=${x(at)} y=${HEIGHT - 16}>${integer(at)}</text>`,
        )}
        <text class="tick-y" x=${MARGIN.left - 8} y="12">tokens/s</text>
        <text class="tick-x" x=${width - MARGIN.right} y=${HEIGHT - 2} text-anchor="end">MiB</text>
        ${
          capacity &&
          html`<line class="room" x1=${x(capacity)} x2=${x(capacity)} y1=${MARGIN.top - 6} y2=${HEIGHT - MARGIN.bottom} />
          <text class="room-name" x=${x(capacity) - 6} y=${MARGIN.top - 4} text-anchor="end">
            ${width > 560 ? `${device}: ` : ""}${integer(capacity)} MiB</text>`
        }
        ${timed.map(
          (option) => html`<circle key=${option.rank} cx=${x(option.total_mib)} cy=${y(option.tokens_per_s)}
          r=${option.rank === lit ? 8 : option.rank === best ? 7 : 5}
          class=${classes("dot", option.kind, !option.fits && "no", option.rank === best && "best")}
          onPointerEnter=${(event) => point(event, option)} onPointerLeave=${leave} />`,
        )}
      </svg>
      <${Legend} options=${timed} best=${best} />
    </div>`;
}

/** What the dots' colours say, of the kinds in the picture. */
function Legend({ options, best }) {
  const kinds = Object.keys(KINDS).filter((kind) => options.some((option) => option.fits && option.kind === kind));
  const rows = kinds.map((kind) => [kind, KINDS[kind]]);
  if (options.some(({ fits }) => !fits)) rows.push(["no", "does not fit"]);
  if (options.some(({ rank }) => rank === best)) rows.push(["best", "★ best"]);
  return html`
    <ul class="legend" aria-label="What the dots are">
      ${rows.map(
        ([kind, words]) => html`<li key=${kind}>
        <svg width="14" height="14" aria-hidden="true"><circle class=${`dot ${kind}`} cx="7" cy="7" r="5" /></svg>${words}</li>`,
      )}
    </ul>`;
}
