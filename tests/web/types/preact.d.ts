// What the page uses of preact and its signals, for the type checker alone: the page loads the .js files beside this one.
export interface Signal<T> {
  value: T;
  peek(): T;
}
// deno-lint-ignore-file no-explicit-any
export function signal<T = any>(value: T): Signal<T extends null | never[] ? any : T>;
export function computed<T>(make: () => T): Signal<T>;
export function effect(run: () => unknown): () => void;
export function batch<T>(run: () => T): T;
export function h(...parts: any[]): any;
export function render(what: any, where: Element | null): void;
export const Fragment: any;
export function useEffect(run: () => unknown, of?: unknown[]): void;
export function useLayoutEffect(run: () => unknown, of?: unknown[]): void;
export function useId(): string;
export function useMemo<T>(make: () => T, of: unknown[]): T;
export function useRef<T = any>(value: T): { current: T extends null ? any : T };
export function useState<T = any>(value: T): [any, (value: any) => void];
