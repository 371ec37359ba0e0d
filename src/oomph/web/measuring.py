"""This machine's CPU, measured once while the page is in use: in a process of its own, so that nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable

from oomph.devices.rates import child_environment

# As `oomph plan` without a card does it: the rates end up in the user's cache, where the workers find them.
MEASURE = "from oomph.devices import detect; detect('cpu')"


class Measuring:
    """At most one measurement in a server's life: a machine too busy to be measured is not asked again and again."""

    def __init__(self, then: Callable[[], None]) -> None:
        """`then` hears when rates may be there that were not."""
        self._then = then
        self._task: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self) -> None:
        """Measure, unless that was done or tried before."""
        if self._task is None:
            self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            MEASURE,
            stdin=silent,
            stdout=silent,
            stderr=silent,
            env=child_environment(),
            start_new_session=True,  # it starts one more, which must end with it
        )
        try:
            await process.wait()
            self._then()
        finally:
            if process.returncode is None:
                _end(process)
                await process.wait()

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
