"""Python's cycle collector, kept out of plans and traces. Needs no torch: importing that is quicker without it, too."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cycle collector, which would traverse all that is imported, planned and traced again and again.

    It also makes frees deterministic: an object is freed with its last reference.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
