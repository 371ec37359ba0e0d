"""Writing files so that nothing half-written ever stands under a final name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from oomph.errors import InputError, Problem


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, then rename over it: all or nothing."""
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
