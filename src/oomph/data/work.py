"""The unfinished set: token files that grow, and a journal that says how far they are true.

Everything lies in OUT/.unfinished until it is complete. The journal is written after the bytes it speaks of are on the
disk; whatever lies beyond them when a run is taken up again is cut off, and made anew.
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

from oomph.data.failure import DataError, cannot_write, is_full
from oomph.data.manifest import MANIFEST, SET_FILES, SPLITS, Counts, Split, check_parts
from oomph.data.pieces import State
from oomph.errors import InputError, Problem
from oomph.files import write_whole

WORK, JOURNAL, LOCK = ".unfinished", "journal.json", "lock"


class Journal(msgspec.Struct):
    """How far the work has come."""

    recipe: dict[str, Any]
    source: int = 0  # the source in work
    at: State = msgspec.field(default_factory=dict)  # and the place in it
    splits: dict[str, Split] = msgspec.field(default_factory=lambda: {name: Split(f"{name}.bin") for name in SPLITS})
    counts: Counts = msgspec.field(default_factory=Counts)
    repaired: bool = False  # the document in work is counted as repaired
    standard_input: dict[str, int | str] | None = None

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())


def decode_journal(content: bytes) -> Journal:
    """A journal as it was written; ValueError where it is none."""
    try:
        journal = msgspec.json.decode(content, type=Journal)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    check_parts(journal.recipe, journal.splits)
    return journal


class WorkFolder:
    """The folder of one unfinished set, held by one process at a time."""

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
        """The journal an earlier call left, or None."""
        path = self.path / JOURNAL
        if not path.exists():
            return None
        try:
            return decode_journal(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                Problem(str(path), "cannot be read", found=str(error), allowed="--overwrite to begin anew")
            ) from None

    def write_journal(self, journal: Journal) -> None:
        """The journal, whole or not at all."""
        self.write(JOURNAL, msgspec.json.encode(journal))

    def write(self, name: str, content: bytes) -> None:
        """A small file of the unfinished set, whole or not at all."""
        try:
            write_whole(self.path / name, content)
        except InputError as error:  # the folder could be made: the disk is full, or gone
            raise DataError(f"{error}. What was finished before is kept: mend that and call again.") from None

    def clear(self) -> None:
        """Forget all that was begun; the lock stays."""
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink()

    def publish(self, names: Sequence[str]) -> None:
        """Move what is complete to its final names, the manifest last. A killed call goes on from anywhere."""
        try:
            (self.out / MANIFEST).unlink(missing_ok=True)  # of a set that is being replaced
            for name in SET_FILES:
                if name not in names:
                    (self.out / name).unlink(missing_ok=True)  # likewise
                elif (self.path / name).exists():
                    (self.path / name).replace(self.out / name)
            (self.path / MANIFEST).replace(self.out / MANIFEST)
            _sync_folder(self.out)
        except OSError as error:
            raise cannot_write(str(self.out), error) from None
        self.abandon()

    def abandon(self) -> None:
        """Remove the folder, and only then let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        self._lock.close()


class TokenFiles:
    """The two growing token files, their checksums, and the journal.

    Journal and checksums change together, in one assignment after the bytes are written: an interruption at any moment
    leaves a journal that is true.
    """

    def __init__(self, folder: WorkFolder, journal: Journal, token_bytes: int) -> None:
        self.folder = folder
        self.token_bytes = token_bytes
        self.note: str | None = None
        self._files: dict[str, IO[bytes]] = {}
        try:
            digests = {name: self._take_up(name, journal.splits[name]) for name in SPLITS}
            if None in digests.values():
                self.note = "the unfinished files are not what the journal says: beginning anew"
                journal = Journal(journal.recipe)
                digests = {name: self._take_up(name, journal.splits[name]) for name in SPLITS}
        except OSError as error:
            raise cannot_write(str(folder.path), error) from None
        self._state = journal, digests

    @property
    def journal(self) -> Journal:
        return self._state[0]

    def _take_up(self, name: str, split: Split) -> Any:
        """Open a file at the length the journal knows; its checksum, or None where its bytes are not those."""
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
        """Tokens at the ends of the splits, and the journal as it is with them."""
        digests = {}
        for name in SPLITS:
            digests[name] = self._state[1][name].copy()
            digests[name].update(data[name])
            view = data[name]
            try:
                while view:
                    view = view[self._files[name].write(view) :]
            except OSError as error:
                self._cut_back()  # which makes room for the journal that vouches for the rest
                raise cannot_write(str(self.folder.path / f"{name}.bin"), error) from None
        self._state = journal, digests

    def _cut_back(self) -> None:
        with suppress(OSError):
            for name, split in self.journal.splits.items():
                self._files[name].truncate(split.tokens * self.token_bytes)

    def save(self) -> None:
        """Make all of it last: the bytes first, then the journal that vouches for them."""
        journal, digests = self._state
        try:
            for name in SPLITS:
                os.fsync(self._files[name].fileno())
                journal.splits[name].sha256 = digests[name].hexdigest()
        except OSError as error:
            raise cannot_write(str(self.folder.path), error) from None
        self.folder.write_journal(journal)

    def save_quietly(self) -> None:
        """Save on the way out of a failure, if that can be: what went wrong first is what the user must read."""
        with suppress(DataError):
            self.save()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _take_lock(file: IO[bytes], out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two calls at once are not noticed
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InputError(
            Problem(f"--out {out}", "another oomph data is at work on it", allowed="to wait for it, or another --out")
        ) from None


def _sync_folder(path: Path) -> None:
    """Make renames last; not every system lets a folder be opened."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
