// @ts-check
// How the page looks: light or dark, kept in this browser; from left to right or right to left, as its language runs.

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

const FROM_THE_RIGHT = /^(ar|arc|ckb|dv|fa|ha-arab|he|iw|ks|ps|sd|ug|ur|yi)\b/i;
document.documentElement.dir = FROM_THE_RIGHT.test(navigator.language) ? "rtl" : "ltr";

export const scheme = signal(
  oneOf(asked.get("theme") ?? stored("theme"), ["light", "dark"], system.matches ? "dark" : "light"),
);

system.addEventListener("change", ({ matches }) => {
  if (!stored("theme")) scheme.value = matches ? "dark" : "light";
});

export function turnScheme() {
  scheme.value = scheme.value === "dark" ? "light" : "dark";
  store("theme", scheme.value);
}

effect(() => {
  document.documentElement.dataset.theme = scheme.value;
});
