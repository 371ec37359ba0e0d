"""Writing files in full or not at all, and where this user's caches are."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from oomph.errors import InputError, Problem


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, then rename over it: all or nothing. Raises `InputError`."""
    import tempfile  # takes 20 ms, and few commands write

    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(
            Problem(str(path), "cannot be written", found=error.strerror, allowed="a path in a folder that exists")
        ) from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be written", found=error.strerror)) from None
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where oomph keeps what it can compute again for this user."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "oomph"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "oomph" / "Cache"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "oomph"


def sync_folder(path: Path) -> None:
    """Make renames in the folder survive a power cut. Does nothing on systems that cannot sync a folder."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
