"""The unfinished set: growing token files, and a journal of how much of them is valid.

Everything stays in OUT/.unfinished until the set is complete. The journal is written only after the bytes it vouches
for are on disk; when work resumes, anything beyond them is cut off and made again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from oomph.data.errors import DataError, cannot_write, is_full
from oomph.data.manifest import MANIFEST, SET_FILES, SPLITS, Counts, Split, check_parts
from oomph.data.pieces import SourcePosition
from oomph.errors import InputError, Problem
from oomph.files import sync_folder, write_whole

WORK, JOURNAL, LOCK = ".unfinished", "journal.json", "lock"


class Journal(msgspec.Struct):
    """How far the work is."""

    recipe: dict[str, Any]
    source: int = 0  # index of the current source
    at: SourcePosition = msgspec.field(default_factory=dict)  # position in it
    splits: dict[str, Split] = msgspec.field(default_factory=lambda: {name: Split(f"{name}.bin") for name in SPLITS})
    counts: Counts = msgspec.field(default_factory=Counts)
    repaired: bool = False  # the current document is already counted as repaired
    standard_input: dict[str, int | str] | None = None

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())


def decode_journal(content: bytes) -> Journal:
    """The journal. Raises ValueError if it is not a valid one."""
    try:
        journal = msgspec.json.decode(content, type=Journal)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    check_parts(journal.recipe, journal.splits)
    return journal


class WorkFolder:
    """The folder of one unfinished set, locked by one process at a time."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out / WORK
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("wb")
        except OSError as error:
            if is_full(error):
                raise cannot_write(str(out), error) from None
            raise InputError(Problem(f"--out {out}", "cannot be written", found=error.strerror)) from None
        _take_lock(self._lock, out)

    def read_journal(self) -> Journal | None:
        """The journal that an earlier run left, or None."""
        path = self.path / JOURNAL
        if not path.exists():
            return None
        try:
            return decode_journal(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                Problem(str(path), "cannot be read", found=str(error), allowed="--overwrite to start over")
            ) from None

    def write_journal(self, journal: Journal) -> None:
        """Write the journal, all or nothing."""
        self.write(JOURNAL, msgspec.json.encode(journal))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file of the unfinished set, all or nothing."""
        try:
            write_whole(self.path / name, content)
        except InputError as error:  # the folder exists, so the disk is full or gone
            raise DataError(f"{error}. Finished work is kept: fix that and run it again.") from None

    def clear(self) -> None:
        """Delete everything but the lock."""
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink()

    def publish(self, names: Sequence[str]) -> None:
        """Move the complete files to their final names, the manifest last. Can be resumed if killed at any point."""
        try:
            (self.out / MANIFEST).unlink(missing_ok=True)  # of a set that is being replaced
            for name in SET_FILES:
                if name not in names:
                    (self.out / name).unlink(missing_ok=True)  # likewise
                elif (self.path / name).exists():
                    (self.path / name).replace(self.out / name)
            (self.path / MANIFEST).replace(self.out / MANIFEST)
            sync_folder(self.out)
        except OSError as error:
            raise cannot_write(str(self.out), error) from None
        self.abandon()

    def abandon(self) -> None:
        """Delete the folder, then release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        self._lock.close()


class TokenFiles:
    """The two growing token files, their checksums, and the journal.

    Journal and checksums change together, in one assignment after the bytes are written, so an interruption at any
    moment leaves a valid journal.
    """

    def __init__(self, folder: WorkFolder, journal: Journal, token_bytes: int) -> None:
        self.folder = folder
        self.token_bytes = token_bytes
        self.note: str | None = None
        self._files: dict[str, IO[bytes]] = {}
        try:
            digests = {name: self._open(name, journal.splits[name]) for name in SPLITS}
            if None in digests.values():
                self.note = "the unfinished files do not match their journal: starting over"
                journal = Journal(journal.recipe)
                digests = {name: self._open(name, journal.splits[name]) for name in SPLITS}
        except OSError as error:
            raise cannot_write(str(folder.path), error) from None
        self._state = journal, digests

    @property
    def journal(self) -> Journal:
        return self._state[0]

    def _open(self, name: str, split: Split) -> Any:
        """Open a file and cut it to the journal's length. Returns its SHA-256 so far, None if it does not match."""
        if name in self._files:
            self._files[name].close()
        path = self.folder.path / split.file
        file = self._files[name] = path.open("r+b" if path.exists() else "w+b", buffering=0)
        digest = hashlib.sha256()
        left = split.tokens * self.token_bytes
        while left > 0:
            data = file.read(min(left, 2**20))
            if not data:
                return None
            digest.update(data)
            left -= len(data)
        file.truncate(split.tokens * self.token_bytes)
        file.seek(0, os.SEEK_END)
        return digest if not split.tokens or digest.hexdigest() == split.sha256 else None

    def append(self, data: dict[str, memoryview], journal: Journal) -> None:
        """Append tokens to the splits and adopt the journal that includes them."""
        digests = {}
        for name in SPLITS:
            digests[name] = self._state[1][name].copy()
            digests[name].update(data[name])
            view = data[name]
            try:
                while view:
                    view = view[self._files[name].write(view) :]
            except OSError as error:
                self._cut_back()  # which frees space for the journal
                raise cannot_write(str(self.folder.path / f"{name}.bin"), error) from None
        self._state = journal, digests

    def _cut_back(self) -> None:
        with suppress(OSError):
            for name, split in self.journal.splits.items():
                self._files[name].truncate(split.tokens * self.token_bytes)

    def save(self) -> None:
        """Flush to disk: the bytes first, then the journal that vouches for them."""
        journal, digests = self._state
        try:
            for name in SPLITS:
                os.fsync(self._files[name].fileno())
                journal.splits[name].sha256 = digests[name].hexdigest()
        except OSError as error:
            raise cannot_write(str(self.folder.path), error) from None
        self.folder.write_journal(journal)

    def save_quietly(self) -> None:
        """Save after a failure if possible, without hiding the first error."""
        with suppress(DataError):
            self.save()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _take_lock(file: IO[bytes], out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two runs at once go undetected
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InputError(
            Problem(
                f"--out {out}", "another oomph data is writing here", allowed="another --out, or wait until it ends"
            )
        ) from None
