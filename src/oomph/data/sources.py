"""The sources that the user names, in a fixed order: files, folders, globs, `-`, `hf:NAME`, `builtin:python`."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from oomph.data.errors import printable
from oomph.data.formats import HubSource, JsonSource, ParquetSource, TextSource
from oomph.data.pieces import Chunk, Identity, SourcePosition
from oomph.data.streams import FileStream, StandardInput, identity
from oomph.errors import InputError, Problem, nearest

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
FORMATS = (TEXT, JSONL)
SUFFIXES = {".txt": TEXT, ".text": TEXT, ".md": TEXT, ".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
COMPRESSED = (".gz", ".zst")
BUILTINS = {"builtin:python": "the Python standard library's own source text, about 12 MB"}
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes inside a UTF-8 sequence
SOURCE_NAMES = "a file, a folder, a glob, - for standard input, hf:NAME[:CONFIG[:SPLIT]], builtin:python"


class DocumentSource(Protocol):
    """Documents in a fixed order, from any position."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Identity:
        """The properties that must not change between two runs on one set."""
        ...

    @property
    def size_bytes(self) -> int | None: ...

    def chunks(self, at: SourcePosition, val_fraction: float) -> Iterator[Chunk]: ...


@dataclass(frozen=True)
class ReadOptions:
    """How documents are found in the sources."""

    text_key: str = "text"  # the key or column of the text: JSON lines, parquet, hub datasets
    separator: str | None = None  # between documents of plain text; None: each file is one document
    format: str = TEXT  # of standard input, and of files whose name does not imply one


@dataclass
class FoundSources:
    """The sources, and the files left out."""

    sources: list[DocumentSource] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)  # files that do not look like UTF-8 text, and why


def resolve(names: Sequence[str], reading: ReadOptions) -> FoundSources:
    """Every source, in the order named, sorted inside folders and globs. Raises all problems at once."""
    found = FoundSources()
    problems: list[Problem] = []
    seen: set[Path] = set()
    if not names:
        problems.append(Problem("SOURCE", "none given", allowed=SOURCE_NAMES))
    if list(names).count("-") > 1:
        problems.append(Problem("-", "standard input can be read only once", found="- twice"))
    for name in names:
        if name in ("", "hf:"):
            problems.append(Problem(f"SOURCE {name!r}", "is empty", allowed=SOURCE_NAMES))
        elif name == "-":
            found.sources.append(_standard_input(reading))
        elif name.startswith("hf:"):
            found.sources.append(_hub(name, reading))
        elif name.startswith("builtin:"):
            if name not in BUILTINS:
                close = nearest(name, list(BUILTINS))
                problems.append(Problem(name, "no such built-in text", allowed=", ".join(BUILTINS), nearest=close))
                continue
            found.sources += [_text_file(path, str(path), ReadOptions()) for path in standard_library()]
        else:
            try:
                paths = _paths(name, found, problems)
            except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte in it, an unknown ~user
                reason = getattr(error, "strerror", None) or str(error)
                problems.append(Problem(printable(name)[:200], "not a usable path", found=reason))
                continue
            for path in paths:
                _add_file(path, reading, found, problems, seen)
    if problems:
        raise InputError(problems)
    return found


def single_text(sources: Sequence[DocumentSource]) -> TextSource | None:
    """The source, if there is only one and it is a plain text file, like nanoGPT's Shakespeare; else None."""
    first = sources[0] if len(sources) == 1 else None
    return first if isinstance(first, TextSource) and first.name != "-" and first.separator is None else None


def split_by_tail(text: TextSource, val_fraction: float) -> list[DocumentSource]:
    """One text as two sources: its end, counted in characters as in nanoGPT, is the validation split."""
    from dataclasses import replace

    offset = _byte_offset(text, int(_count_characters(text) * (1 - val_fraction)))
    first = replace(text, end=offset, is_val=False)
    return [first, replace(text, start=offset, is_val=True, size_bytes=0)]  # its bytes are already counted


def standard_library() -> list[Path]:
    """The standard library's Python files in a fixed order, without its tests, which not every machine has."""
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path for path in root.rglob("*.py") if unwanted.isdisjoint(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _paths(name: str, found: FoundSources, problems: list[Problem]) -> list[Path]:
    """The files that a path or a glob matches."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path, found, problems)
    if path.exists() or path.is_symlink():
        return [path]
    if glob.has_magic(name):
        matches = sorted(Path(match) for match in glob.iglob(str(path), recursive=True))  # noqa: PTH207
        files = [match for match in matches if match.is_file()]
        if not files:
            problems.append(Problem(printable(name), "matches no file"))
        return files
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside)
    problems.append(
        Problem(
            printable(name),
            "no such file",
            allowed=SOURCE_NAMES,
            nearest=printable(path.with_name(close)) if close else None,
        )
    )
    return []


def _in_folder(folder: Path, found: FoundSources, problems: list[Problem]) -> list[Path]:
    """Files of known formats in sorted order, without hidden ones."""
    files: list[Path] = []

    def unreadable(error: OSError) -> None:
        problems.append(Problem(printable(error.filename), "cannot be read", found=error.strerror))

    for root, folders, names in os.walk(folder, onerror=unreadable, followlinks=False):
        folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                continue
            path = Path(root, name)
            if format_of(path) is None:
                found.ignored.append(printable(path))
            else:
                files.append(path)
    if not files:
        problems.append(
            Problem(printable(folder), "no text in this folder", allowed=f"files ending in {', '.join(SUFFIXES)}")
        )
    return files


def format_of(path: Path) -> str | None:
    """The format that a file's name implies; None if unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _add_file(path: Path, reading: ReadOptions, found: FoundSources, problems: list[Problem], seen: set[Path]) -> None:
    try:
        real = path.resolve()
        if real in seen:
            return
        seen.add(real)
        if (
            not path.is_file() and not path.is_dir() and path.exists()
        ):  # opening a pipe would block until it has a writer
            problems.append(Problem(printable(path), "not a file", allowed="- to read a pipe as standard input"))
            return
        with path.open("rb"):
            state: Identity = {**identity(path)}
    except OSError as error:
        problems.append(Problem(printable(path), "cannot be read", found=error.strerror))
        return
    name = printable(path)
    if doubt := _doubt(path, reading):
        found.doubtful.append(f"{name} {doubt}")
    kind = format_of(path) or reading.format
    if kind == PARQUET:
        found.sources.append(ParquetSource(name, state, path.stat().st_size, path, reading.text_key))
    elif kind == JSONL:
        size = path.stat().st_size
        found.sources.append(JsonSource(name, state, size, partial(FileStream, path), reading.text_key))
    else:
        found.sources.append(_text_file(path, name, reading))


def _doubt(path: Path, reading: ReadOptions) -> str | None:
    """Why the first bytes of a file do not look like UTF-8 text; None if they do."""
    if path.suffix.lower() in (*COMPRESSED, ".parquet") or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            head = file.read(2**12)
    except OSError:  # reported when it is read
        return None
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "looks like UTF-16 but is read as UTF-8: convert it first, for example with iconv -f UTF-16 -t UTF-8"
    if b"\0" in head and "\0" not in (reading.separator or ""):
        return "contains zero bytes: is it text?"
    return None


def _text_file(path: Path, name: str, reading: ReadOptions) -> TextSource:
    separator = reading.separator.encode() if reading.separator else None
    state: Identity = {**identity(path)}
    return TextSource(name, state, path.stat().st_size, partial(FileStream, path), separator)


def _standard_input(reading: ReadOptions) -> DocumentSource:
    if reading.format == JSONL:
        return JsonSource("-", {}, None, StandardInput, reading.text_key)
    return TextSource("-", {}, None, StandardInput, reading.separator.encode() if reading.separator else None)


def _hub(name: str, reading: ReadOptions) -> HubSource:
    repository, _, rest = name.removeprefix("hf:").partition(":")
    config, _, split = rest.partition(":")
    return HubSource(name, repository, config or None, split or "train", reading.text_key)


def _characters(data: bytes) -> int:
    """How many UTF-8 characters begin in this data."""
    return len(data.translate(None, _CONTINUATION))


def _count_characters(text: TextSource) -> int:
    with closing(text.opener({})) as stream:
        return sum(_characters(data) for data in iter(lambda: stream.read(2**20), b""))


def _byte_offset(text: TextSource, characters: int) -> int:
    """The byte offset of the character after the first `characters`."""
    offset = 0
    with closing(text.opener({})) as stream:
        while data := stream.read(2**20):
            here = _characters(data)
            if here > characters:
                low, high = 0, len(data)  # bisect for the longest prefix with at most `characters`
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if _characters(data[:middle]) <= characters else (low, middle - 1)
                return offset + low
            characters -= here
            offset += len(data)
    return offset
