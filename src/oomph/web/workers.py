"""Processes beside the server: workers that answer questions, and one that measures this CPU. The server's own loop
never computes, and a question that takes too long, or that nobody waits for any more, is ended with its worker."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from oomph.data.workers import exit_with_parent
from oomph.devices.cpu_rates import child_environment
from oomph.web.answers import PARTS, Answer, answer, join_plans

MAX_WAITING = 512  # questions in line; further ones are refused
GRACE_S = 0.3  # for a worker to finish what nobody waits for: enough for a plan, not for a search
MAX_MEMORY_BYTES = 16 * 2**30  # of a worker's address space: an absurd question must not fill the machine
WARM_UP = b'{"gpu": "RTX 4070", "set": {"n_layer": 1}}'  # a small plan loads everything a plan needs


class TooBusyError(Exception):
    """More questions are waiting than can be answered soon."""


class TooLongError(Exception):
    """The answer took longer than its limit."""


class WorkerDiedError(Exception):
    """The process that worked on the answer ended."""


class Worker:
    """One process, replaced when it dies or is killed.

    A pipe of its own, not an executor: an executor waits for ever for the rest of an answer in the middle of which its
    process was killed. Of this pipe nobody else has the far end, so that it breaks when the process ends.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_work, args=(far_end,), daemon=True)
        self._process.start()
        far_end.close()
        self._ready = asyncio.create_task(asyncio.to_thread(self._pipe.recv))

    def submit(self, verb: str, body: bytes, runs_folder: str) -> asyncio.Task[Answer]:
        """The answer to come. It fails with `WorkerDiedError` where the process ends before it."""
        if not self._process.is_alive():
            self._start()
        return asyncio.create_task(self._ask(self._pipe, self._ready, (verb, body, runs_folder)))

    async def _ask(self, pipe: Connection, ready: asyncio.Task[None], question: tuple[str, bytes, str]) -> Answer:
        def ask() -> Answer:
            pipe.send(question)
            answer: Answer = pipe.recv()
            return answer

        try:
            await ready
            return await asyncio.to_thread(ask)
        except (EOFError, OSError):
            raise WorkerDiedError from None

    async def started(self) -> None:
        """Return once the process is ready for its first question, or has failed to start."""
        await asyncio.wait({self._ready})

    def replace(self) -> None:
        """Kill the process and start another."""
        self._process.kill()
        self._start()

    async def close(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        await asyncio.gather(self._ready, return_exceptions=True)
        await asyncio.to_thread(self._process.join)


def _work(pipe: Connection) -> None:
    """Run in each worker: say when it is ready, then answer one question after another until the server is gone."""
    _set_up_worker()
    with contextlib.suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            pipe.send(answer(*pipe.recv()))


def _set_up_worker() -> None:
    """Run in each worker before its first question."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends its workers
    sys.stdout = sys.stderr  # the server's output is its address
    threading.Thread(target=exit_with_parent, daemon=True).start()
    _limit_memory()
    for part in PARTS:
        answer(part, WARM_UP, "")


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MAX_MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))


class WorkerPool:
    """A few workers and the line before them. Heavy questions leave one worker free for quick ones."""

    def __init__(self, size: int, runs_folder: str) -> None:
        self._size, self._runs_folder = size, runs_folder
        self._workers: list[Worker] = []
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._heavy = asyncio.Semaphore(max(1, size - 1))
        self._waiting = 0
        self._releasing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start every worker, so that the first question is as quick as later ones."""
        self._workers = [Worker() for _ in range(self._size)]
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def ask(self, verb: str, body: bytes, seconds: float, heavy: bool) -> Answer:
        """The answer to a question. Raises `TooBusyError`, `TooLongError` or `WorkerDiedError`.

        Cancelled, it leaves the line, or its worker is killed unless it is done within a moment.
        """
        if self._waiting >= MAX_WAITING:
            raise TooBusyError
        self._waiting += 1
        try:
            async with self._heavy if heavy else contextlib.nullcontext():
                return await self._ask_next(verb, body, seconds)
        finally:
            self._waiting -= 1

    async def _ask_next(self, verb: str, body: bytes, seconds: float) -> Answer:
        worker = await self._idle.get()
        answering = worker.submit(verb, body, self._runs_folder)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(answering)
        except TimeoutError:
            raise TooLongError from None
        finally:
            if answering.done():
                self._idle.put_nowait(worker)
            else:
                task = asyncio.create_task(self._release(worker, answering))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def _release(self, worker: Worker, answering: asyncio.Task[Answer]) -> None:
        """Make a worker idle again whose answer nobody waits for: it may finish in a moment, or is replaced.

        Not interrupted and kept: what it caches of earlier plans could be left half made.
        """
        await worker.started()
        await asyncio.wait({answering}, timeout=GRACE_S)
        if not answering.done():
            worker.replace()
        await asyncio.gather(answering, return_exceptions=True)
        self._idle.put_nowait(worker)


async def ask_plan(pool: WorkerPool, body: bytes, seconds: float) -> Answer:
    """The answer to a plan question. Each trainer's plan is a question of its own: two workers share them."""
    asking = [asyncio.create_task(pool.ask(part, body, seconds, False)) for part in PARTS]
    try:
        asked, other = await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
    return join_plans(asked, other)


class CpuMeasurement:
    """This machine's CPU, measured in a process of its own, at most once in a server's life: a machine too busy to be
    measured is not tried again and again."""

    # As `oomph plan` without a card does it: the rates go to the user's cache, where the workers find them.
    COMMAND = "from oomph.devices import detect; detect('cpu')"

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called when new rates may be there."""
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Measure, unless that was done or tried before."""
        if self._task is None:
            self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            self.COMMAND,
            stdin=silent,
            stdout=silent,
            stderr=silent,
            env=child_environment(),
            start_new_session=True,  # it starts one more, which must end with it
        )
        try:
            await process.wait()
            self._on_end()
        finally:
            if process.returncode is None:
                _kill_with_children(process)
                await process.wait()

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _kill_with_children(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()
