// @ts-check
// One stream of events for every run that any tab looks at. A browser opens six connections to a server, for all tabs
// together: a stream for each run would leave none for questions. In a shared worker where there are such, else in the page.

const watched = new Map(); // a tab's port → Map of run → {position, number}
let source = null;
let asked = []; // [port, run, number], in the order of the stream's own runs
let timer = 0;

/** Serve a tab: it says which runs it looks at and from where, and is told of each event. Of a run that it has said
 * before, under the same number, the position known here is the newer one. */
export function serve(port) {
  port.onmessage = ({ data }) => {
    const before = watched.get(port);
    const now = data.map(({ run, position, number }) => {
      const known = before?.get(run);
      return [run, known?.number === number ? known : { position, number }];
    });
    if (now.length) watched.set(port, new Map(now));
    else watched.delete(port);
    clearTimeout(timer);
    timer = setTimeout(open, 20); // tabs that come together share the next stream
  };
  port.start?.();
}

function open() {
  source?.close();
  source = null;
  asked = [...watched].flatMap(([port, runs]) => [...runs].map(([run, { number }]) => [port, run, number]));
  if (!asked.length) return;
  const fields = new URLSearchParams();
  for (const [, run] of asked) fields.append("run", run);
  for (const [port, run] of asked) fields.append("from", watched.get(port).get(run).position);
  const mine = (source = new EventSource(`/api/events?${fields}`));
  for (const kind of ["metrics", "state", "reset"]) {
    mine.addEventListener(kind, (event) => mine === source && pass(kind, event));
  }
  mine.addEventListener("error", () => {
    if (mine.readyState !== EventSource.CLOSED || mine !== source) return; // else the browser tries again
    for (const [port, run, number] of asked) port.postMessage({ kind: "lost", run, number });
    watched.clear();
  });
}

/** Hand an event to the tab it is for, and remember where every run has been read to. */
function pass(kind, { data, lastEventId }) {
  const { run: at, data: told } = JSON.parse(data);
  lastEventId.split(",").forEach((position, index) => {
    const [port, run, number] = asked[index];
    const known = watched.get(port)?.get(run);
    if (known?.number === number) known.position = position;
  });
  const [port, run, number] = asked[at];
  port.postMessage({ kind, run, number, data: told });
}
