// deno-lint-ignore-file no-explicit-any
declare const uPlot: any;
export default uPlot;
