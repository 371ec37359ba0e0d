"""The runs folder: the list of runs, and one run's files. Nothing outside the folder is ever read."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from oomph.errors import InputError, Problem, nearest
from oomph.web.metrics import (
    COLUMNS,
    METRICS,
    Clock,
    Figures,
    MetricColumns,
    MetricsFile,
    open_file,
    position,
    read_lines,
)
from oomph.web.standing import PLAN, RESULT, State, standing, steps_done, written

CONFIG = "config.toml"
MAX_RUNS = 1000  # listed
MAX_JSON_BYTES = 4 * 2**20
TAIL_BYTES = 64 * 2**10  # enough for the last lines of a run
KEPT_RUNS = 16  # whose metrics are kept in memory
READ = ("config.toml", METRICS, "train.log", "log.txt")  # files that the reader of a run's folder opens


class NoSuchRunError(InputError):
    """The runs folder holds no run of that name."""


class RunGlance(msgspec.Struct, frozen=True):
    """The last figures of a run."""

    name: str
    steps: int | None
    max_iters: Any  # as its config has it
    loss: float | None
    val_loss: float | None
    updated: float
    state: State
    reason: str | None  # why it ended before its end


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
    reason: str | None
    updated: float
    steps: int | None
    flops_per_token: float | None
    metrics: MetricColumns
    hours: float
    position: str  # where its events go on, for /api/events


class RunsFolder:
    """A folder of runs. It may itself be a run: nanoGPT's out_dir is "out"."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._glances: dict[Path, tuple[Marks, Glimpse]] = {}
        self._files: OrderedDict[Path, MetricsFile] = OrderedDict()

    def names(self) -> dict[str, Path]:
        """Every run by name, most recently written first."""
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
        newest = sorted(found.items(), key=lambda item: -written(item[1]))
        return dict(newest[:MAX_RUNS])

    def path_of(self, name: str) -> Path:
        """A run's folder. The name is looked up in the list of runs, never joined to a path."""
        return self.paths_of([name])[0]

    def paths_of(self, names: list[str]) -> list[Path]:
        """The folders of several runs."""
        known = self.names()
        missing = [
            Problem("run", "no such run", repr(name[:100]), nearest=nearest(name[:100], list(known)))
            for name in names
            if name not in known
        ]
        if missing:
            raise NoSuchRunError(missing)
        return [known[name] for name in names]

    def readable(self, name: str) -> Path:
        """A run's folder, for a reader that follows symlinks. Raises if one of its files is a symlink."""
        path = self.path_of(name)
        for file in READ:
            if (path / file).is_symlink():
                raise InputError(Problem(f"{name}/{file}", "a link, which may lead out of the runs folder"))
        return path

    def listing(self) -> RunList:
        """A glance at each run, for the list. Runs whose files have not changed are not read again."""
        found = [(name, path, self._glimpse(path)) for name, path in self.names().items()]
        self._glances = {path: self._glances[path] for _, path, _ in found}
        return RunList(readable_name(str(self.root)), [_glance(name, path, last) for name, path, last in found])

    def _glimpse(self, path: Path) -> Glimpse:
        marks = _marks(path)
        kept = self._glances.get(path)
        if kept is None or kept[0] != marks:
            kept = self._glances[path] = marks, _look(path)
        return kept[1]

    def run(self, name: str) -> RunDetails:
        """All details of one run, its figures thinned for a plot."""
        path = self.path_of(name)
        plan, result = read_json(path / PLAN), read_json(path / RESULT)
        each = flops_per_token(plan)
        file = self._metrics(path, each)
        now = standing(path, result, file.figures)
        return RunDetails(
            name=name,
            config=_config(path),
            plan=plan,
            result=result,
            state=now.state,
            reason=now.reason,
            updated=written(path),
            steps=steps_done(path, result, file.figures),
            flops_per_token=each,
            metrics=file.figures.columns(),
            hours=file.clock.hours,
            position=position(file.offset, file.clock),
        )

    def _metrics(self, path: Path, flops_per_token: float | None) -> MetricsFile:
        """The run's metrics.jsonl up to its end. If it was read before, only what was appended is read."""
        kept = self._files.pop(path, None)
        if kept is None or kept.flops_per_token != flops_per_token:
            kept = MetricsFile(path / METRICS, flops_per_token)
        kept.update()
        self._files[path] = kept
        while len(self._files) > KEPT_RUNS:
            self._files.popitem(last=False)
        return kept


def readable_name(name: str) -> str:
    """A file name as valid text: bytes that are not UTF-8 are escaped, as \\xff."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def flops_per_token(plan: Any) -> float | None:
    """FLOPs per token, from the run's own plan."""
    try:
        found = float(plan["compute"]["flops_per_token"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS, PLAN, RESULT))


def read_json(path: Path) -> Any:
    """The content of one of our JSON files; None if it is missing, too large or broken."""
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


class Glimpse(msgspec.Struct, frozen=True):
    """What the list needs of a run's files."""

    result: Any
    max_iters: Any
    last: Figures


Marks = tuple[int, ...]


def _marks(path: Path) -> Marks:
    """Modification time and size of each file of the run, to notice changes."""
    found = []
    for name in (METRICS, RESULT, CONFIG):
        try:
            told = os.lstat(path / name)
            found += [told.st_mtime_ns, told.st_size, told.st_ino]
        except OSError:
            found += [0, 0, 0]
    return tuple(found)


def _look(path: Path) -> Glimpse:
    """Read the end of the run's metrics.jsonl, its config and its result."""
    try:
        with open_file(path / METRICS) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            tail = stream.read()
        last = read_lines(tail.partition(b"\n")[2] if size > TAIL_BYTES else tail, Clock(), None)
    except OSError:
        last = Figures()
    last.rows, last.evals, last.events = last.rows[-1:], last.evals[-1:], last.events[-1:]
    return Glimpse(read_json(path / RESULT), (_config(path) or {}).get("max_iters"), last)


def _glance(name: str, path: Path, found: Glimpse) -> RunGlance:
    """The last figures of a run."""
    last, now = found.last, standing(path, found.result, found.last)
    return RunGlance(
        name=name,
        steps=steps_done(path, found.result, last),
        max_iters=found.max_iters,
        loss=last.rows[-1][COLUMNS.index("loss")] if last.rows else None,
        val_loss=last.evals[-1].get("val_loss") if last.evals else None,
        updated=written(path),
        state=now.state,
        reason=now.reason,
    )
