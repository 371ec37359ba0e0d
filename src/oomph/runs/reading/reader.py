"""Read a run: any mix of logs, nvidia-smi output, error messages and config files, line by line in constant memory."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from oomph.config import LoadedConfig, Override, is_model
from oomph.errors import InputError, Problem, nearest
from oomph.runs.reading import blocks, oom, rocm, screens, settings, smi_query, steps, tables, tracebacks
from oomph.runs.reading.builder import ANY_DIGIT, FORMS, Builder
from oomph.runs.reading.patterns import read_block
from oomph.runs.run import LoggedRun, LogSource, UnreadableLine

Readable = str | os.PathLike[str] | BinaryIO

STDIN = "-"
_CONFIGS = (".py", ".toml")
_SNAPSHOTS = (".pickle", ".pkl")
_IN_FOLDER = (  # the files of a run's folder
    *("config.toml", "config.json", "metrics.jsonl", "train.log", "log.txt", "trainer_state.json", "trainer_log.jsonl"),
    *("metrics.csv",),
)
_GENERIC_NAMES = frozenset(("train", "log", "metrics", "output", "stdout", "nohup"))  # the folder names such a run
_PICKLE = b"\x80"


def _by_function() -> tuple[tuple[Callable[[Builder, str], object], tuple[str, ...]], ...]:
    """Each reader, with texts of which a line's form must contain at least one."""
    grouped: dict[Callable[[Builder, str], object], list[str]] = {}
    for text, reader in (
        *settings.READERS,
        *blocks.READERS,
        *screens.READERS,
        *rocm.READERS,
        *smi_query.READERS,
        *tracebacks.READERS,
        *oom.READERS,
    ):
        grouped.setdefault(reader, []).append(text.translate(ANY_DIGIT))
    return tuple((reader, tuple(texts)) for reader, texts in grouped.items())


READERS = _by_function()
RANK_LABELS = ("[rank#", "rank#", "[Rank #", "Rank #", "[default#")
_TITLES = re.compile(r"(?i)loss")  # in a column's name: only such lines can begin a table of steps


def read(*sources: Readable, name: str | None = None, overrides: Sequence[Override] = ()) -> LoggedRun:
    """The run that all `sources` together describe.

    A source is a path, "-" for standard input, an open binary file, a run's folder, a config (.py, .toml, a model's
    config.json or name) or a torch memory snapshot (.pickle). `overrides` are the user's own settings. Lines that
    cannot be parsed are counted and sampled in the result. Raises `InputError` if a source cannot be opened or an
    override is wrong.
    """
    builder = Builder(name or _name(sources))
    problems: list[Problem] = []
    for source in _with_folders_opened(sources):
        try:
            _read_source(builder, source)
        except InputError as error:
            problems.extend(error.problems)
        except FileNotFoundError:
            problems.append(_no_such_file(Path(str(source))))
        except OSError as error:
            problems.append(Problem(str(source), "cannot be read", error.strerror or type(error).__name__))
    try:
        override(builder, overrides)
    except InputError as error:
        problems.extend(error.problems)
    if problems:
        raise InputError(problems)
    return _finish(builder)


def read_text(text: str, name: str = "text") -> LoggedRun:
    """The run that a pasted text describes."""
    builder = Builder(name)
    read_stream(builder, io.BytesIO(text.encode("utf-8", "replace")), name)
    return _finish(builder)


# --- lines -----------------------------------------------------------------------------------------


def read_stream(builder: Builder, stream: BinaryIO, name: str) -> None:
    """Read every line of a stream."""
    builder.begin(LogSource(name))
    splitter = LineSplitter()
    while data := stream.read(CHUNK_BYTES):
        for text in splitter.feed(data):
            read_lines(builder, text)
    for text in splitter.finish():
        read_lines(builder, text)
    if builder.source.cut_off:
        builder.source.lines += 1
    if builder.next_lines is not None:
        builder.next_lines("")  # ends whatever spans several lines
    builder.flush()
    tracebacks.cut_traceback(builder)


def read_lines(builder: Builder, text: str) -> None:
    """Read more lines of the current source. `text` must end with a whole line."""
    source = builder.source
    first = source.lines + 1
    place = done = 0
    forms = text.translate(ANY_DIGIT) if builder.block is None else ""
    while place < len(text):
        if (block := builder.block) is not None:
            if builder.shape is not None and builder.shape.text.startswith(RANK_LABELS):
                settings.ranks(builder, builder.shape.text.partition("#")[0], text)
            for line, rest in read_block(builder, text[place:], block):
                builder.cut = not rest.endswith("\n") and not text.endswith("\n") and text.endswith(rest)
                _read_text(builder, rest, first + done + line)
            break
        end = text.find("\n", place) + 1 or len(text)
        if builder.next_lines is None and builder.forms.get(forms[place : end - 1]) == () and text[end - 1] == "\n":
            place, done = end, done + 1
            continue
        builder.cut = end == len(text) and not text.endswith("\n") and done + source.lines > 0
        _read_text(builder, text[place:end], first + done)
        place, done = end, done + 1
    source.characters += len(text)
    source.lines += text.count("\n")
    source.cut_off = not text.endswith("\n")
    builder.line = source.lines


def _read_text(builder: Builder, text: str, first: int) -> None:
    """Read lines one by one."""
    for number, line in enumerate(text.split("\n"), first):
        builder.line = number
        parts = line.split("\r") if "\r" in line else (line,)  # a progress bar prints several "lines" on one
        for place, part in enumerate(parts, 1):
            if part:
                builder.line_end = "\n" if place == len(parts) else "\r"
                _read_line(builder, part)


# What stands before a program's own words: docker compose's container, vLLM's level, time and file.
_PREFIX = re.compile(
    r"^(?:[\w.-]{1,60}[-_]\d{1,4} {2,}\|(?: |$))?(?:(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \S{1,80}:\d+\] ?)?"
)


def _read_line(builder: Builder, printed: str) -> None:
    line = _PREFIX.sub("", printed, count=1)
    if builder.next_lines is not None and builder.next_lines(line):
        return
    if not line:
        return
    form = line.translate(ANY_DIGIT)
    known = builder.forms.get(form)
    if known is not None:
        for reader in known:
            reader(builder, line)
        return
    taken = _step(builder, line)
    readers = tuple(reader for reader, texts in READERS if any(text in form for text in texts))
    for reader in readers:
        reader(builder, line)
    if len(builder.forms) < FORMS:
        builder.forms[form] = (_step, *readers) if taken or steps.may_be_read_later(line) else readers
        if line != printed and not builder.forms[form]:
            builder.forms[printed.translate(ANY_DIGIT)] = ()
    if not taken and builder.run.first_unread is None and line.strip():
        builder.run.first_unread = UnreadableLine(builder.source.name, builder.line, "", line.strip()[:120])


def _step(builder: Builder, line: str) -> bool:
    """Whether the line is a step, or names the columns of a table of steps."""
    return steps.read(builder, line) or (_TITLES.search(line) is not None and tables.header(builder, line))


CHUNK_BYTES = 1 << 17
LONGEST_LINE = 1 << 16  # characters; a longer line is read in pieces of this size
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])")


class LineSplitter:
    """Bytes to clean text in whole lines, in constant memory.

    Handles Windows line ends, colour codes, UTF-16 (which PowerShell's `>` writes), binary junk and endless lines. Each
    text ends with a newline, except the last one and the pieces of an endless line.
    """

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._rest = ""

    def feed(self, data: bytes) -> Iterator[str]:
        """The text completed by these bytes; what follows the last newline is kept for the next call."""
        if self._decoder is None:
            data = data.lstrip(b"\x00")  # a file that was emptied while a program wrote to it begins with zeros
            if not data:
                return
            self._decoder = codecs.getincrementaldecoder(_encoding(data))(errors="replace")
        text = self._rest + self._decoder.decode(data)
        end = text.rfind("\n") + 1
        self._rest = text[end:]
        if end:
            yield _clean(text[:end])
        while len(self._rest) > LONGEST_LINE:
            ends = (self._rest.rfind(end, 0, LONGEST_LINE) + 1 for end in ("\r", "}"))  # of a bar or an object
            cut = next((end for end in ends if end), LONGEST_LINE)
            piece, self._rest = self._rest[:cut], self._rest[cut:]
            yield _clean(piece)

    def finish(self) -> Iterator[str]:
        """The text left over at the end."""
        rest = self._rest + (self._decoder.decode(b"", True) if self._decoder is not None else "")
        self._rest = ""
        if rest:
            yield _clean(rest)


def _encoding(start: bytes) -> str:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if start[:64].count(0) * 3 > len(start[:64]) and b"\x00" in start[1:2]:
        return "utf-16-le"
    return "utf-8-sig"


def _clean(text: str) -> str:
    text = _ESCAPE.sub("", text).replace("\r\n", "\n")
    return text.replace("\x00", "") if "\x00" in text else text


# --- files and settings ----------------------------------------------------------------------------


def _read_source(builder: Builder, source: Readable) -> None:
    if not isinstance(source, str | os.PathLike):
        read_stream(builder, source, str(getattr(source, "name", "stream")))
        return
    path = os.fspath(source)
    if path == STDIN:
        read_stream(builder, sys.stdin.buffer, "standard input")
    elif path.endswith(_CONFIGS) or is_model(path):
        read_config(builder, path)
    else:
        with Path(path).open("rb") as stream:
            if path.endswith(_SNAPSHOTS) or stream.peek(1)[:1] == _PICKLE:
                _read_snapshot(builder, path)
            else:
                read_stream(builder, stream, path)


def read_config(builder: Builder, path: str) -> None:
    """Record the keys that a config file or a model sets, and the program whose format it is."""
    from oomph.config import load

    loaded = load([path])
    builder.begin(LogSource(path))
    for key in told_by(loaded):
        builder.setting(key, getattr(loaded.config, key), "given", loaded.sources[key])


def told_by(loaded: LoadedConfig) -> list[str]:
    """The keys that a config sets, and the program whose format it is."""
    own_program = loaded.config.trainer != "nanogpt"
    return [key for key in loaded.sources if loaded.said(key) or (key == "trainer" and own_program)]


def _read_snapshot(builder: Builder, path: str) -> None:
    from oomph.step.snapshot import read as snapshot

    recording = snapshot.read(path)
    builder.begin(LogSource(path))
    builder.run.snapshots.append(recording)


def override(builder: Builder, overrides: Sequence[Override]) -> None:
    """Let the user's settings replace what the logs say. Raises `InputError`."""
    from oomph.config import load

    # The program and the architecture decide what a key means and whether it is allowed.
    known = [(key, builder.run.settings.get(key)) for key in ("model_type", "trainer")]
    told = [(key, str(setting.value), setting.where) for key, setting in known if setting is not None]
    loaded = load(overrides=[*told, *overrides])
    for key, _, where in overrides:
        key = key.replace("-", "_")
        if loaded.sources[key] == where:
            builder.setting(key, getattr(loaded.config, key), "given", where)


def _finish(builder: Builder) -> LoggedRun:
    run = builder.run
    if builder.pending_val_loss is not None:  # the log ends between an evaluation and its step line
        run.evals.append(step=(run.last_step or 0) + 1, val_loss=builder.pending_val_loss)
        builder.pending_val_loss = None
    run.unreadable.sort(key=lambda entry: (entry.source, entry.line))
    if run.steps.backward:
        times = "once" if run.steps.backward == 1 else f"{run.steps.backward:,} times"
        run.notes.append(f"the step count goes back {times}: the run was restarted, or two runs share the log")
    if run.unreadable_count:
        lines = "1 line looks" if run.unreadable_count == 1 else f"{run.unreadable_count:,} lines look"
        run.notes.append(f"{lines} like a known format but could not be read")
    for failure in run.ooms:
        if failure.total_mib is not None:
            builder.gpu(failure.gpu).torch_total_mib = failure.total_mib
            builder.gpu(failure.gpu).nvidia = failure.backend == "cuda" and failure.memory == "card"
    return run


def _name(sources: Sequence[Readable]) -> str:
    for source in sources:
        if isinstance(source, str | os.PathLike) and os.fspath(source) != STDIN:
            path = Path(source)
            if path.stem in _GENERIC_NAMES and path.parent.name:
                return path.parent.name
            return path.stem if path.suffix else path.name or str(path)
    return "standard input"


def _with_folders_opened(sources: Iterable[Readable]) -> Iterable[Readable]:
    for source in sources:
        if isinstance(source, str | os.PathLike) and Path(source).is_dir():
            inside = [Path(source) / name for name in _IN_FOLDER if (Path(source) / name).is_file()]
            if any(path.name == "metrics.jsonl" for path in inside):  # the log beside it repeats the same figures
                inside = [path for path in inside if path.name in ("config.toml", "metrics.jsonl")]
            if not inside:
                allowed = ", ".join(_IN_FOLDER)
                raise InputError(Problem(str(source), "a folder without a run", allowed=f"a folder with {allowed}"))
            yield from inside
        else:
            yield source


def _no_such_file(path: Path) -> Problem:
    """The problem, with the nearest name in the same folder."""
    try:
        beside = {entry.name: str(path.parent / entry.name) for entry in path.parent.iterdir()}
    except OSError:
        beside = {}
    close = nearest(path.name, list(beside))
    return Problem(
        str(path),
        "cannot be read: no such file",
        allowed="a log, an error message, a config, a model's name, a snapshot, a run's folder or - for stdin",
        nearest=beside[close] if close is not None else None,
    )
