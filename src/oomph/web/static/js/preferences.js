// How the page looks: light or dark, left to right or right to left. Kept in this browser.

import { effect, signal } from "./html.js";

const stored = (name) => {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // storage is closed to the page: it forgets, and works
  }
};
const store = (name, value) => {
  try {
    localStorage.setItem(name, value);
  } catch {
    // as above
  }
};
const asked = new URLSearchParams(window.location.search);
const oneOf = (value, allowed, otherwise) => (allowed.includes(value) ? value : otherwise);
const system = window.matchMedia("(prefers-color-scheme: dark)");

export const direction = signal(oneOf(asked.get("dir") ?? stored("dir"), ["ltr", "rtl"], "ltr"));
export const scheme = signal(
  oneOf(asked.get("theme") ?? stored("theme"), ["light", "dark"], system.matches ? "dark" : "light"),
);

system.addEventListener("change", ({ matches }) => {
  if (!stored("theme")) scheme.value = matches ? "dark" : "light";
});

export function turnDirection() {
  direction.value = direction.value === "rtl" ? "ltr" : "rtl";
  store("dir", direction.value);
}

export function turnScheme() {
  scheme.value = scheme.value === "dark" ? "light" : "dark";
  store("theme", scheme.value);
}

effect(() => {
  document.documentElement.dir = direction.value;
  document.documentElement.dataset.theme = scheme.value;
});
