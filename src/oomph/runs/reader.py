"""Reading a run: any mix of logs, screens, error messages and config files, line by line, in constant memory."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from oomph.errors import InputError, Problem, nearest
from oomph.runs import columns, metrics, nanogpt, oom, settings, smi, step_lines
from oomph.runs.builder import Builder, Columnar
from oomph.runs.lines import pieces
from oomph.runs.model import Run, Source

Override = tuple[str, str, str]  # key, value as written, where: ("batch_size", "8", "--batch_size=8")
Readable = str | os.PathLike[str] | BinaryIO
Handler = Callable[[Builder, str], None]

STDIN = "-"
_CONFIGS = (".py", ".toml")
_SNAPSHOTS = (".pickle", ".pkl")
_IN_FOLDER = ("config.toml", "metrics.jsonl", "train.log", "log.txt")  # what a run's folder may hold
_ANY_NAMES = frozenset(("train", "log", "metrics", "output", "stdout", "nohup"))  # such a log's folder names its run
_PICKLE = b"\x80"


def _gathered(*tables: Mapping[str, tuple[Handler, ...]]) -> dict[bytes, tuple[Handler, ...]]:
    gathered: dict[bytes, tuple[Handler, ...]] = {}
    for table in tables:
        for word, handlers in table.items():
            gathered[word.encode()] = (*gathered.get(word.encode(), ()), *handlers)
    return gathered


# What calls the handlers: whole words of a line's form, and parts of words.
_WORDS = _gathered(nanogpt.WORDS, step_lines.WORDS, smi.WORDS, oom.WORDS)
_PARTS = _gathered(metrics.PARTS, settings.PARTS, smi.PARTS)
_FORMATS = (nanogpt, step_lines, metrics)  # whose steps are read many at a time
_SAME = 4  # lines of one form that make it worth while


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
        except FileNotFoundError:
            problems.append(_absent(Path(str(source))))
        except OSError as error:
            problems.append(Problem(str(source), "cannot be read", error.strerror or type(error).__name__))
    try:
        give(builder, overrides)
    except InputError as error:
        problems.extend(error.problems)
    if problems:
        raise InputError(problems)
    return _finish(builder)


def _absent(path: Path) -> Problem:
    """A file that is not there, and the one beside it that may be meant."""
    try:
        beside = {entry.name: str(path.parent / entry.name) for entry in path.parent.iterdir()}
    except OSError:
        beside = {}
    close = nearest(path.name, list(beside))
    return Problem(
        str(path),
        "cannot be read: no such file",
        allowed="a log, an error message, a config, a snapshot, a run's folder, or - for standard input",
        nearest=beside[close] if close is not None else None,
    )


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
            if path.stem in _ANY_NAMES and path.parent.name:
                return path.parent.name
            return path.stem if path.suffix else path.name or str(path)
    return "standard input"


def _opened_folders(sources: Iterable[Readable]) -> Iterable[Readable]:
    for source in sources:
        if isinstance(source, str | os.PathLike) and Path(source).is_dir():
            inside = [Path(source) / name for name in _IN_FOLDER if (Path(source) / name).is_file()]
            if any(path.name == "metrics.jsonl" for path in inside):  # its log says the same in words
                inside = [path for path in inside if path.name in ("config.toml", "metrics.jsonl")]
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
        read_config(builder, path)
    else:
        with Path(path).open("rb") as stream:
            start = stream.peek(1)[:1]
            if path.endswith(_SNAPSHOTS) or start == _PICKLE:
                _read_snapshot(builder, path)
            else:
                read_stream(builder, stream, path)


def read_config(builder: Builder, path: str) -> None:
    """What a config file beside the log sets."""
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


def give(builder: Builder, overrides: Sequence[Override]) -> None:
    """What the user gives goes over whatever the logs say. Raises `InputError`."""
    from oomph.config import load

    loaded = load(overrides=list(overrides))
    for key, _, where in overrides:
        key = key.replace("-", "_")
        if loaded.sources[key] == where:
            builder.setting(key, getattr(loaded.config, key), "given", where)


def read_stream(builder: Builder, stream: BinaryIO, name: str) -> None:
    """Every line of a stream."""
    source = Source(name)
    builder.begin(source)
    for text in pieces(stream):
        read_piece(builder, text)
    if source.cut_off:
        source.lines += 1


def read_piece(builder: Builder, text: str) -> None:
    """More lines of the source that `builder` is at: whole ones, for what is cut in two is read as two.

    Neighbours of the same form are read together: who reads a line depends on its form alone.
    """
    lines = text.split("\n")
    form_of_all = columns.form(text.encode())
    parts = [part for part in _PARTS if part in form_of_all]
    source, start = builder.source, 0
    for form, same in groupby(form_of_all.split(b"\n")):
        size = len(list(same))
        handlers = _handlers_of(form, parts)
        if form and (handlers or builder.follower is not None):
            _read_lines(builder, lines[start : start + size], source.lines + start + 1, handlers)
        start += size
    source.characters += len(text)
    source.lines += len(lines) - 1
    source.cut_off = lines[-1] != ""
    builder.line = source.lines


def _handlers_of(form: bytes, parts: Sequence[bytes]) -> Sequence[Handler]:
    words = form.split()
    if _WORDS.keys().isdisjoint(words) and not any(part in form for part in parts):
        return ()
    found: dict[Handler, None] = {}
    for word in words:
        found.update(dict.fromkeys(_WORDS.get(word, ())))
    for part in parts:
        if part in form:
            found.update(dict.fromkeys(_PARTS[part]))
    return tuple(found)


def _read_lines(builder: Builder, lines: Sequence[str], number: int, handlers: Sequence[Handler]) -> None:
    """Lines of one form: the first by itself, then the rest at once where they are plain rows of numbers."""
    for index, line in enumerate(lines):
        builder.line = number + index
        if "\r" in line:
            for part in line.split("\r"):
                _read_line(builder, part, handlers)
            continue
        if index == 1 and len(lines) >= _SAME and _read_together(builder, lines[1:]):
            return
        _read_line(builder, line, handlers)


def _read_line(builder: Builder, line: str, handlers: Sequence[Handler]) -> None:
    if builder.follower is not None and builder.follower(line):
        return
    for handler in handlers:
        handler(builder, line)


def _read_together(builder: Builder, lines: Sequence[str]) -> bool:
    """Whether the lines were read as rows of a table."""
    known: list[Columnar] = [(each.step_spans, partial(each.take_steps, builder)) for each in _FORMATS]
    if builder.follower is not None:
        known = [builder.columnar] if builder.columnar is not None else []
    for spans_of, take in known:
        spans = spans_of(lines[0])
        layout = columns.layout(lines[0], spans) if spans is not None else None
        found = columns.read(lines, layout) if layout is not None else None
        if found is not None and all(map(float.is_integer, found.get("step", ()))):
            builder.line += len(lines) - 1
            take(found)
            return True
    return False
