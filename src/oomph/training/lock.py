"""One trainer to a folder: a lock that the kernel lets go with the process, however it ends."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from oomph.errors import InputError, Problem

FILE = ".lock"


class FolderLock:
    """Held from its making until `release`. Raises `InputError` where another process holds it.

    On systems and file systems without such locks it does nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._handle: int | None = None
        if find_spec("fcntl") is None:
            return
        fcntl = import_module("fcntl")
        while self._handle is None:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise InputError(Problem(str(folder), "cannot be written", found=error.strerror)) from None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found = os.read(handle, 32).decode(errors="replace").strip()
                os.close(handle)
                raise InputError(
                    Problem(
                        f"out_dir {str(folder)!r}",
                        "another oomph train is writing here",
                        found=f"process {found}" if found else None,
                        allowed="--out_dir=ANOTHER, or wait for its end",
                    )
                ) from None
            except OSError:  # a file system without locks
                os.close(handle)
                return
            if self._is_ours(handle):
                self._handle = handle
            else:
                os.close(handle)  # its last holder removed the file between our opening and locking it
        with suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.write(self._handle, str(os.getpid()).encode())

    def _is_ours(self, handle: int) -> bool:
        try:
            return self.path.stat().st_ino == os.fstat(handle).st_ino
        except OSError:
            return False

    def release(self) -> None:
        """Let others in."""
        if self._handle is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None
