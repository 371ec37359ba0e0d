"""Python's cycle collector, kept out of plans and traces. Needs no torch: importing that is quicker without it, too."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which would go over all that is imported, planned and traced again and again.

    It also makes frees certain: what goes, goes when its last name does.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
