// @ts-check
// The few names every part of the page is written with.

import { h, render, Fragment } from "preact";
import { useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { batch, computed, effect, signal } from "@preact/signals";
import htm from "htm";

export const html = htm.bind(h);
export {
  render,
  Fragment,
  useEffect,
  useId,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
  batch,
  computed,
  effect,
  signal,
};

/** A copy of an object without some of its fields. */
export const without = (whole, ...names) =>
  Object.fromEntries(Object.entries(whole).filter(([name]) => !names.includes(name)));

/** Class names of those that hold: classes("row", chosen && "chosen"). */
export const classes = (...names) => names.filter(Boolean).join(" ");
