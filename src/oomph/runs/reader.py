"""Reading a run: any mix of logs, screens, error messages and config files, line by line, in constant memory."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from oomph.errors import InputError, Problem
from oomph.runs import metrics, nanogpt, oom, settings, smi, step_lines
from oomph.runs.builder import Builder
from oomph.runs.lines import pieces
from oomph.runs.model import Run, Source

Override = tuple[str, str, str]  # key, value as written, where: ("batch_size", "8", "--batch_size=8")
Readable = str | os.PathLike[str] | BinaryIO
Handler = Callable[[Builder, str], None]

STDIN = "-"
_CONFIGS = (".py", ".toml")
_SNAPSHOTS = (".pickle", ".pkl")
_IN_FOLDER = ("config.toml", "metrics.jsonl", "train.log", "log.txt")  # what a run's folder may hold
_PICKLE = b"\x80"


def _by_handler() -> tuple[tuple[Handler, tuple[str, ...]], ...]:
    """Each handler with the words that call it, so that a line with two of its words calls it once."""
    table: dict[Handler, list[str]] = {}
    for module in (nanogpt, step_lines, metrics, settings, smi, oom):
        for word, handler in module.HANDLERS:
            table.setdefault(handler, []).append(word)
    return tuple((handler, tuple(words)) for handler, words in table.items())


_HANDLERS = _by_handler()


def read(*sources: Readable, name: str | None = None, overrides: Sequence[Override] = ()) -> Run:
    """The run that `sources` tell of, taken together.

    A source is a file's path, "-" for standard input, an open binary file, a run's folder, a config (.py, .toml) or a
    torch memory snapshot (.pickle). `overrides` are settings that the user gives (`config.split_override`). Lines that
    cannot be read are counted and sampled in the result; raises `InputError` where a source cannot be opened at all,
    or an override is wrong.
    """
    builder = Builder(name or _name(sources))
    problems: list[Problem] = []
    for source in _opened_folders(sources):
        try:
            _read_source(builder, source)
        except InputError as error:
            problems.extend(error.problems)
        except OSError as error:
            problems.append(Problem(str(source), "cannot be read", error.strerror or type(error).__name__))
    problems.extend(_override(builder, overrides))
    if problems:
        raise InputError(problems)
    return _finish(builder)


def read_text(text: str, name: str = "text") -> Run:
    """The run that a pasted text tells of."""
    builder = Builder(name)
    read_stream(builder, io.BytesIO(text.encode("utf-8", "replace")), name)
    return _finish(builder)


def _finish(builder: Builder) -> Run:
    run = builder.run
    if builder.pending_val_loss is not None:  # the log ends between an evaluation and its step line
        run.evals.append(step=(run.last_step or 0) + 1, val_loss=builder.pending_val_loss)
    run.unreadable.sort(key=lambda entry: (entry.source, entry.line))
    if run.steps.backward:
        times = "once" if run.steps.backward == 1 else f"{run.steps.backward:,} times"
        run.notes.append(f"the step goes back {times}: the run was started again, or two runs share the log")
    if run.unreadable_count:
        lines = "1 line looks" if run.unreadable_count == 1 else f"{run.unreadable_count:,} lines look"
        run.notes.append(f"{lines} like a known format but could not be read")
    for failure in run.ooms:
        if failure.total_mib is not None:
            builder.gpu(failure.gpu).torch_total_mib = failure.total_mib
    return run


def _name(sources: Sequence[Readable]) -> str:
    for source in sources:
        if isinstance(source, str | os.PathLike) and os.fspath(source) != STDIN:
            path = Path(source)
            return path.stem if path.suffix else path.name or str(path)
    return "standard input"


def _opened_folders(sources: Iterable[Readable]) -> Iterable[Readable]:
    for source in sources:
        if isinstance(source, str | os.PathLike) and os.path.isdir(source):
            inside = [Path(source) / name for name in _IN_FOLDER if (Path(source) / name).is_file()]
            if not inside:
                allowed = ", ".join(_IN_FOLDER)
                raise InputError(Problem(str(source), "a folder that holds no run", allowed=f"a folder with {allowed}"))
            yield from inside
        else:
            yield source


def _read_source(builder: Builder, source: Readable) -> None:
    if not isinstance(source, str | os.PathLike):
        read_stream(builder, source, str(getattr(source, "name", "stream")))
        return
    path = os.fspath(source)
    if path == STDIN:
        read_stream(builder, sys.stdin.buffer, "standard input")
    elif path.endswith(_CONFIGS):
        _read_config(builder, path)
    else:
        with open(path, "rb") as stream:
            start = stream.peek(1)[:1]
            if path.endswith(_SNAPSHOTS) or start == _PICKLE:
                _read_snapshot(builder, path)
            else:
                read_stream(builder, stream, path)


def _read_config(builder: Builder, path: str) -> None:
    from oomph.config import load

    loaded = load([path])
    builder.begin(Source(path))
    for key in loaded.sources:
        if loaded.said(key):
            builder.setting(key, getattr(loaded.config, key), "given", loaded.sources[key])


def _read_snapshot(builder: Builder, path: str) -> None:
    from oomph.step import snapshot

    recording = snapshot.read(path)
    builder.begin(Source(path))
    builder.run.snapshots.append(recording)


def _override(builder: Builder, overrides: Iterable[Override]) -> list[Problem]:
    """What the user gives goes over whatever the logs say."""
    from oomph.config import load

    try:
        loaded = load(overrides=list(overrides))
    except InputError as error:
        return list(error.problems)
    for key, _, where in overrides:
        key = key.replace("-", "_")
        if loaded.sources[key] == where:
            builder.setting(key, getattr(loaded.config, key), "given", where)
    return []


def read_stream(builder: Builder, stream: BinaryIO, name: str) -> None:
    """Every line of a stream."""
    source = Source(name)
    builder.begin(source)
    for text in pieces(stream):
        source.characters += len(text)
        _read_piece(builder, text)
        source.cut_off = not text.endswith("\n")
        source.lines += text.count("\n")
        builder.line = source.lines
    if source.cut_off:
        source.lines += 1


def _read_piece(builder: Builder, text: str) -> None:
    """The lines of one piece. A handler is asked only where one of its words stands in the piece, then in the line."""
    active = [(handler, here) for handler, words in _HANDLERS if (here := [word for word in words if word in text])]
    if not active and builder.follower is None:
        return
    before = builder.line
    batch: list[str] = []
    for number, line in enumerate(text.split("\n"), before + 1):
        if line[:5] == "iter " and "\r" not in line:
            batch.append(line)
            continue
        builder.line = number
        if batch:
            nanogpt.step_batch(builder, batch, number - len(batch))
            builder.line = number
            batch = []
        if line:
            for part in line.split("\r") if "\r" in line else (line,):
                _read_line(builder, part, active)
    if batch:
        nanogpt.step_batch(builder, batch, before + 1 + text.count("\n") + 1 - len(batch))


def _read_line(builder: Builder, line: str, active: Sequence[tuple[Handler, Sequence[str]]]) -> None:
    if builder.follower is not None and builder.follower(line):
        return
    for handler, words in active:
        for word in words:
            if word in line:
                handler(builder, line)
                break
