// @ts-check
// The one tooltip: exact values of what the pointer is on.

import { html, signal, useLayoutEffect, useRef } from "./html.js";

export const tip = signal(null); // {x, y, title, rows: [[swatch, name, value]…]}

export const showTip = (event, title, rows = []) => {
  tip.value = { x: event.clientX, y: event.clientY, title, rows };
};
export const hideTip = () => {
  tip.value = null;
};

export function Tip() {
  const box = useRef(null);
  const shown = tip.value;
  useLayoutEffect(() => {
    if (!box.current || !shown) return;
    const { width, height } = box.current.getBoundingClientRect();
    const left = shown.x + 14 + width > window.innerWidth ? Math.max(4, shown.x - 14 - width) : shown.x + 14;
    const top = Math.min(Math.max(4, shown.y - height / 2), window.innerHeight - height - 4);
    box.current.style.transform = `translate(${left}px, ${top}px)`;
  }, [shown]);
  if (!shown) return null;
  return html`
    <div class="tip" ref=${box} role="status">
      <div class="tip-title">${shown.title}</div>
      ${
        shown.rows.length > 0 &&
        html`<table>
        ${shown.rows.map(
          ([mark, name, value]) => html`<tr>
          <td>${mark}</td>
          <td>${name}</td>
          <td class="number">${value}</td>
        </tr>`,
        )}
      </table>`
      }
    </div>`;
}
