// @ts-check
// One colour for each thing that fills memory, the same in every picture, and the part the pointer is on.

import { html, signal } from "./html.js";

// As in the reports' palette (report/palette.py).
const COLOURS = {
  parameters: "#4e79a7",
  gradients: "#76b7b2",
  "optimizer state": "#59a14f",
  "half copies of weights": "#9c755f",
  "gathered parameters": "#79706e",
  "communication buffers": "#d37295",
  activations: "#f28e2b",
  attention: "#edc948",
  "logits and loss": "#e15759",
  temporaries: "#b07aa1",
  workspaces: "#ff9da7",
  inputs: "#86bcb6",
};
const OTHER = "#9aa0a6"; // rounding, context

export const PROGRAMS = {
  nanogpt: "nanoGPT",
  oomph: "oomph train",
  hf: "transformers' Trainer",
  trl: "TRL's SFTTrainer",
  torch: "a plain PyTorch loop",
  nanochat: "nanochat",
  torchtitan: "torchtitan",
  torchtune: "torchtune",
  litgpt: "litgpt",
  unsloth: "Unsloth",
};
export const lit = signal(null); // the part that is pointed at, wherever it is drawn

export const colourOf = (part) => COLOURS[part] ?? OTHER;
export const isUnused = (part) => part.startsWith("reserved");

/** Black or white, whichever is read better on a part's colour. */
export function inkOn(part) {
  if (isUnused(part)) return "var(--ink)";
  const channel = (at) => {
    const share = parseInt(colourOf(part).slice(at, at + 2), 16) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  };
  const luminance = 0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5);
  return luminance > 0.179 ? "#000" : "#fff"; // where both contrast alike
}

/** What a plan's total is made of: the buffers at the peak, what the allocator keeps beside them, the context. */
export function partsOf(memory, kind) {
  const parts = memory.breakdown.map(({ name, mib }) => [name, mib]);
  const unused = memory.reserved_mib - memory.allocated_mib;
  if (unused > 0) parts.push(["reserved, unused", unused]);
  if (memory.context_mib > 0) parts.push([kind === "cpu" ? "Python with torch" : "CUDA context", memory.context_mib]);
  return parts;
}

/** What to put on an element that stands for a part: pointing at one lights it everywhere. */
export const pointing = (part) => ({
  onPointerEnter: () => (lit.value = part),
  onPointerLeave: () => (lit.value = null),
});

export const Swatch = ({ part }) =>
  html`
    <span class=${isUnused(part) ? "swatch hatched" : "swatch"} style=${{ "--colour": colourOf(part) }}
      aria-hidden="true">
    </span>`;
