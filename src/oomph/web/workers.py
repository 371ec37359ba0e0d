"""Processes beside the server: workers that answer questions, and one that measures this CPU. The server's event loop
never computes. A question that takes too long, or whose client has disconnected, is stopped by killing its worker."""

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
from typing import Literal

from oomph.data.workers import exit_with_parent
from oomph.devices.cpu_rates import child_environment
from oomph.web.answers import PARTS, Answer, answer, join_plans

MAX_WAITING = 512  # questions in the queue; more are refused
GRACE_S = 0.3  # for a worker to finish after its client has disconnected: enough for a plan, not for a search
MAX_MEMORY_BYTES = 16 * 2**30  # address space of a worker, so that an absurd question cannot fill the machine
WARM_UP = b'{"gpu": "RTX 4070", "set": {"n_layer": 1}}'  # a small plan, which imports all that plans need

# Roles of workers. Plans are quick and always have workers of their own. A search may be cancelled, which kills its
# worker. The reader of runs keeps what it has read, and runs at lower priority.
Role = Literal["planner", "searcher", "reader"]
NICENESS: dict[Role, int] = {"planner": 0, "searcher": 0, "reader": 10}


class TooBusyError(Exception):
    """More questions are waiting than can be answered soon."""


class TooLongError(Exception):
    """The answer took longer than its limit."""


class WorkerDiedError(Exception):
    """The worker process ended before it answered."""


class Worker:
    """One process, replaced when it dies or is killed.

    Each has its own pipe, which breaks when the process ends. Not `ProcessPoolExecutor`: its workers share one pipe,
    and killing one in the middle of an answer would leave the executor waiting forever.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_work, args=(far_end, self._role), daemon=True)
        self._process.start()
        far_end.close()
        self._ready = asyncio.create_task(asyncio.to_thread(self._pipe.recv))

    def submit(self, verb: str, body: bytes, runs_folder: str) -> asyncio.Task[Answer]:
        """A future of the answer. It fails with `WorkerDiedError` if the process ends first."""
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
        """Wait until the process is ready for its first question, or has failed to start."""
        await asyncio.wait({self._ready})

    def replace(self) -> None:
        """Kill the process and start another."""
        self._process.kill()
        self._start()

    async def close(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        await asyncio.gather(self._ready, return_exceptions=True)
        await asyncio.to_thread(self._process.join)


def _work(pipe: Connection, role: Role) -> None:
    """The worker's main function: report ready, then answer questions until the server is gone."""
    _set_up_worker(role)
    with contextlib.suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            pipe.send(answer(*pipe.recv()))


def _set_up_worker(role: Role) -> None:
    """Set up the worker process before its first question."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then ends its workers
    sys.stdout = sys.stderr  # the server prints only its address to stdout
    threading.Thread(target=exit_with_parent, daemon=True).start()
    _limit_memory()
    if hasattr(os, "nice"):
        os.nice(NICENESS[role])
    if role == "planner":
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
    """The workers of one role, and the queue before them."""

    def __init__(self, size: int, runs_folder: str, role: Role = "planner") -> None:
        self._size, self._runs_folder, self._role = size, runs_folder, role
        self._workers: list[Worker] = []
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._waiting = 0
        self._releasing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start every worker now, so that the first question does not have to wait for it."""
        self._workers = [Worker(self._role) for _ in range(self._size)]
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def ask(self, verb: str, body: bytes, seconds: float) -> Answer:
        """The answer to a question. Raises `TooBusyError`, `TooLongError` or `WorkerDiedError`.

        If cancelled, it leaves the queue, or its worker is killed unless it finishes within `GRACE_S`.
        """
        if self._waiting >= MAX_WAITING:
            raise TooBusyError
        self._waiting += 1
        if not self._workers:
            await self.start()
        try:
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
        """Make a worker idle again after its client has disconnected: it finishes within `GRACE_S`, or is replaced.

        It is not interrupted and kept, because that could leave its caches half written.
        """
        await worker.started()
        await asyncio.wait({answering}, timeout=GRACE_S)
        if not answering.done():
            worker.replace()
        await asyncio.gather(answering, return_exceptions=True)
        self._idle.put_nowait(worker)


async def ask_plan(pool: WorkerPool, body: bytes, seconds: float) -> Answer:
    """The answer to a plan question. The two trainers' plans are computed by two workers at the same time."""
    asking = [asyncio.create_task(pool.ask(part, body, seconds)) for part in PARTS]
    try:
        asked, other = await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
    return join_plans(asked, other)


class CpuMeasurement:
    """Measures this CPU in a separate process, at most once per server: a machine too busy to be measured is not tried
    again."""

    # Like `oomph plan` without a card: the rates go to the user's cache, where workers find them.
    COMMAND = "from oomph.devices import detect; detect('cpu')"

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called when there may be new rates."""
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start measuring, unless that was done or tried before."""
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
            start_new_session=True,  # it starts another process, which must be killed with it
        )
        try:
            await process.wait()
            self._on_end()
        finally:
            if process.returncode is None:
                _kill_with_children(process)
                await process.wait()

    async def close(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _kill_with_children(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()
