"""The runs folder: which runs there are, what each holds, and its metrics.jsonl as columns for a plot. Nothing outside
the folder is ever read."""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec

from oomph.errors import InputError, Problem, nearest

METRICS, PLAN, CONFIG, RESULT = "metrics.jsonl", "plan.json", "config.toml", "result.json"
CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(r"step_(\d{8,15})\.pt")
MAX_RUNS = 1000  # listed
MAX_JSON_BYTES = 4 * 2**20
TAIL_BYTES = 64 * 2**10  # enough for the last lines of a run
MAX_LINE_BYTES = 2**20
IDLE_S = 300.0  # a run without a result that has not written for this long counts as stopped
READ = ("config.toml", METRICS, "train.log", "log.txt")  # what reading a run's folder opens
ROWS = 2000  # of a whole run, for a plot
EVALUATIONS = 5000
EVENTS = 500
MS_PER_HOUR = 3.6e6
FIGURES = ("tokens", "loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "memory_mib")
COLUMNS = ("step", "hours", "flops", *FIGURES)


State = Literal["planned", "running", "finished", "stopped"]


class NoSuchRunError(InputError):
    """The runs folder holds no run of that name."""


class MetricColumns(msgspec.Struct, frozen=True):
    """A run's metrics.jsonl for a plot."""

    columns: dict[str, list[float | None]]  # a list for each of COLUMNS
    evals: list[dict[str, float | None]]
    events: list[dict[str, Any]]
    count: int  # of logged steps, before thinning
    steps: int | None


class RunGlance(msgspec.Struct, frozen=True):
    """The last figures of a run."""

    name: str
    steps: int | None
    max_iters: Any  # as its config has it
    loss: float | None
    val_loss: float | None
    updated: float
    state: State


class RunList(msgspec.Struct, frozen=True):
    """The runs in the runs folder, the last written first."""

    folder: str
    runs: list[RunGlance]


class RunDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one run."""

    name: str
    config: dict[str, Any] | None
    plan: Any  # plan.json and result.json as they are in the folder
    result: Any
    state: State
    updated: float
    steps: int | None
    flops_per_token: float | None
    metrics: MetricColumns
    hours: float
    offset: int  # bytes of metrics.jsonl read: where its events go on


class RunsFolder:
    """One folder of runs; the folder itself may be a run too (nanoGPT's out_dir is "out")."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> dict[str, Path]:
        """Every run by name, the last written first."""
        try:
            entries = [entry for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return {}
        found = {
            readable_name(entry.name): Path(entry.path)
            for entry in entries[: 10 * MAX_RUNS]
            if _is_run(Path(entry.path))
        }
        own = readable_name(self.root.resolve().name)
        if own and own not in found and _is_run(self.root):
            found[own] = self.root
        newest = sorted(found.items(), key=lambda item: -_written(item[1]))
        return dict(newest[:MAX_RUNS])

    def path_of(self, name: str) -> Path:
        """The folder of a run. A name is looked up, never joined: no path leads out."""
        names = self.names()
        if name not in names:
            raise NoSuchRunError(
                Problem("run", "no such run", repr(name[:100]), nearest=nearest(name[:100], list(names)))
            )
        return names[name]

    def readable(self, name: str) -> Path:
        """The same, for a reader that follows links: none of its files may be one."""
        path = self.path_of(name)
        for file in READ:
            if (path / file).is_symlink():
                raise InputError(Problem(f"{name}/{file}", "a link, which may lead out of the runs folder"))
        return path

    def listing(self) -> RunList:
        """What the page shows of each run before one is chosen."""
        runs = [_glance(name, path) for name, path in self.names().items()]
        return RunList(readable_name(str(self.root)), runs)

    def run(self, name: str) -> RunDetails:
        """Everything of one run, its figures thinned out for a plot."""
        path = self.path_of(name)
        plan, result = read_json(path / PLAN), read_json(path / RESULT)
        each = flops_per_token(plan)
        figures, clock, offset = read_metrics(path / METRICS, each)
        return RunDetails(
            name=name,
            config=_config(path),
            plan=plan,
            result=result,
            state=state(path, result),
            updated=_written(path),
            steps=steps_done(path, result, figures),
            flops_per_token=each,
            metrics=figures.columns(),
            hours=clock.hours,
            offset=offset,
        )


def readable_name(name: str) -> str:
    """A file's name as text that can be sent: bytes that are no UTF-8 are written out, as \\xff."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def open_file(path: Path) -> BinaryIO:
    """A regular file opened for reading; a link or a pipe is refused. Raises `OSError`."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def read_metrics(path: Path, flops_per_token: float | None, start: int = 0) -> tuple[Figures, Clock, int]:
    """The file's figures, its clock at the end, and how many bytes were read: whole lines only."""
    clock = Clock()
    try:
        with open_file(path) as stream:
            stream.seek(start)
            lines = _WholeLines(stream, start)
            return read_lines(lines, clock, flops_per_token), clock, lines.offset
    except OSError:
        return Figures(), clock, start


class _WholeLines:
    """The lines of a file that end in a newline, and where the last of them ends."""

    def __init__(self, stream: BinaryIO, offset: int) -> None:
        self.stream, self.offset = stream, offset

    def __iter__(self) -> Iterator[bytes]:
        whole = True  # a line longer than any of ours is passed over, piece by piece
        while piece := self.stream.readline(MAX_LINE_BYTES):
            ends = piece.endswith(b"\n")
            if not ends and len(piece) < MAX_LINE_BYTES:
                return
            self.offset += len(piece)
            if whole and ends:
                yield piece
            whole = ends


def flops_per_token(plan: Any) -> float | None:
    """What the run's own plan says an average token costs."""
    try:
        found = float(plan["compute"]["flops_per_token"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def state(path: Path, result: Any) -> State:
    """finished, stopped (before its end), running, or planned (nothing written yet)."""
    if isinstance(result, dict) and not _resumed(path):
        return "finished" if result.get("finished") else "stopped"
    if not (path / METRICS).is_file():
        return "planned"
    return "running" if time.time() - _written(path) < IDLE_S else "stopped"


def _resumed(path: Path) -> bool:
    """Whether figures were written after the result: the run goes on."""
    try:
        return (path / METRICS).stat().st_mtime > (path / RESULT).stat().st_mtime + 1.0
    except OSError:
        return False


def steps_done(path: Path, result: Any, figures: Figures) -> int | None:
    """How many steps the run has done, as far as its folder tells: not every step is logged, but an evaluation, an
    event, a checkpoint and the result say so too. None before anything is written."""
    told = [figures.steps, _checkpointed(path)]
    if isinstance(result, dict) and not _resumed(path):
        told.append(result.get("steps"))
    return max((steps for steps in told if type(steps) is int), default=None)


def _checkpointed(path: Path) -> int | None:
    """The steps in the checkpoint that was written last: after going back to an earlier one, later ones lie about."""
    folder = path / CHECKPOINTS
    try:
        if folder.is_symlink():
            return None
        names = [(entry.stat(follow_symlinks=False).st_mtime_ns, entry.name) for entry in os.scandir(folder)]
    except OSError:
        return None
    named = [_CHECKPOINT.fullmatch(name) for _, name in sorted(names)]
    return next((int(found[1]) for found in reversed(named) if found), None)


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS, PLAN, RESULT))


def _written(path: Path) -> float:
    """When the run last wrote a figure."""
    for name in (METRICS, PLAN, RESULT):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def read_json(path: Path) -> Any:
    """A JSON file of ours; None where it is missing, too large or broken."""
    try:
        with open_file(path) as stream:
            data = stream.read(MAX_JSON_BYTES + 1)
        return msgspec.json.decode(data) if len(data) <= MAX_JSON_BYTES else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _config(path: Path) -> dict[str, Any] | None:
    import tomllib

    try:
        with open_file(path / CONFIG) as stream:
            return tomllib.loads(stream.read(2**18).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None


def _glance(name: str, path: Path) -> RunGlance:
    """The last figures of a run, from the end of its file."""
    result = read_json(path / RESULT)
    config = _config(path) or {}
    try:
        with open_file(path / METRICS) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            tail = stream.read().split(b"\n")[1 if size > TAIL_BYTES else 0 :]
        last = read_lines(tail, Clock(), None)
    except OSError:
        last = Figures()
    row = last.rows[-1] if last.rows else None
    values = last.evals[-1] if last.evals else {}
    return RunGlance(
        name=name,
        steps=steps_done(path, result, last),
        max_iters=config.get("max_iters"),
        loss=None if row is None else row[COLUMNS.index("loss")],
        val_loss=values.get("val_loss"),
        updated=_written(path),
        state=state(path, result),
    )


Count = Annotated[int, msgspec.Meta(ge=0, le=10**18)]  # beyond it no float would be exact, and none is of a run


class MetricsRecord(msgspec.Struct):
    """One line. A figure that is not finite is written as null."""

    step: Count
    tokens: Count | None = None
    loss: float | msgspec.UnsetType | None = msgspec.UNSET
    lr: float | None = None
    grad_norm: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_mib: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    event: str | None = None
    reason: str | None = None


class Clock(msgspec.Struct):
    """Training hours so far: a logged step tells the mean time of the steps since the one before."""

    hours: float = 0.0
    last_step: int = -1

    def tick(self, line: MetricsRecord) -> float:
        """Training hours up to and with this line's step."""
        if line.step_ms is not None and line.step > self.last_step:
            self.hours += line.step_ms * (line.step - self.last_step) / MS_PER_HOUR
            self.last_step = line.step
        return self.hours


class Figures(msgspec.Struct):
    """What lines of metrics.jsonl tell: logged steps, evaluations and events."""

    rows: list[list[float | None]] = msgspec.field(default_factory=list)  # in the order of COLUMNS
    evals: list[dict[str, float | None]] = msgspec.field(default_factory=list)
    events: list[dict[str, Any]] = msgspec.field(default_factory=list)
    count: int = 0
    steps: int | None = None  # done, as the last of the lines has it

    def columns(self) -> MetricColumns:
        """The figures as the page gets them."""
        rows = thinned(self.rows, ROWS)
        columns = {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
        return MetricColumns(columns, self.evals[-EVALUATIONS:], self.events[-EVENTS:], self.count, self.steps)


_decode = msgspec.json.Decoder(MetricsRecord).decode


def read_lines(lines: Iterable[bytes], clock: Clock, flops_per_token: float | None) -> Figures:
    """What the lines tell. One that cannot be read is passed over: a run may be writing it."""
    found = Figures()
    for text in lines:
        try:
            line = _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        found.steps = line.step + (line.loss is not msgspec.UNSET)  # a step is logged once it is done
        flops = line.tokens * flops_per_token if line.tokens is not None and flops_per_token else None
        if line.event is not None:
            found.events.append({"step": line.step, "event": line.event[:200], "reason": (line.reason or "")[:500]})
        if line.val_loss is not None or line.train_loss is not None:
            found.evals.append(
                {
                    "step": line.step,
                    "tokens": line.tokens,
                    "hours": clock.hours,
                    "flops": flops,
                    "train_loss": line.train_loss,
                    "val_loss": line.val_loss,
                }
            )
        if line.loss is not msgspec.UNSET:
            hours = clock.tick(line)
            found.count += 1
            found.rows.append([line.step, hours, flops, *(getattr(line, name) for name in FIGURES)])
            if len(found.rows) >= 8 * ROWS:  # memory stays bounded, however long the run
                found.rows = thinned(found.rows, 4 * ROWS)
        if len(found.evals) >= 2 * EVALUATIONS:
            found.evals = found.evals[::2]
        if len(found.events) >= 2 * EVENTS:
            found.events = found.events[-EVENTS:]
    return found


_LOSS = COLUMNS.index("loss")


def thinned(rows: list[list[float | None]], most: int) -> list[list[float | None]]:
    """At most that many of the rows, real ones: the first, the last, and of each bucket the least and greatest loss, so
    that no spike is lost."""
    if len(rows) <= most:
        return rows
    buckets = most // 2 - 1
    inner = len(rows) - 2
    kept = [rows[0]]
    for bucket in range(buckets):
        start, end = 1 + bucket * inner // buckets, 1 + (bucket + 1) * inner // buckets
        places = sorted(range(start, end), key=lambda at: _loss(rows[at]))
        kept += [rows[at] for at in sorted({places[0], places[-1]})]
    return [*kept, rows[-1]]


def _loss(row: list[float | None]) -> float:
    loss = row[_LOSS]
    return float("inf") if loss is None else loss
