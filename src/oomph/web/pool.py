"""Worker processes: the server's loop never computes, a question that takes too long is ended, and so is its worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec

from oomph.web.worker import LENGTH, Answer

MAX_WAITING = 256  # questions in line; a longer line is turned away
WARM_SECONDS = 30.0
PATIENCE_S = 0.3  # that a worker gets to finish what nobody waits for: a plan does, a search is ended
MAX_ANSWER_BYTES = 2**28


class TooBusyError(Exception):
    """More questions are waiting than can be answered soon."""


class TooLongError(Exception):
    """The answer took longer than its time."""


class Worker:
    """One process, started when first needed and again after it was ended."""

    def __init__(self, runs_folder: str) -> None:
        self._runs_folder = runs_folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            path = os.pathsep.join(entry for entry in sys.path if entry)  # the child finds what this process finds
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "oomph.web.worker",
                self._runs_folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=2**20,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._process

    async def ask(self, verb: str, body: bytes) -> Answer:
        """The answer. Raises `EOFError` where the process died over it."""
        process = await self.start()
        assert process.stdin is not None and process.stdout is not None
        question = msgspec.msgpack.encode((verb, body))
        try:
            process.stdin.write(LENGTH.pack(len(question)) + question)
            await process.stdin.drain()
            (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            if length > MAX_ANSWER_BYTES:
                raise EOFError("an answer of absurd length")
            return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Answer)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the worker process ended") from error

    async def end(self, kill: bool) -> None:
        """Let it go: by closing its input, or at once."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if kill:
                process.kill()
            elif process.stdin is not None:
                process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 2.0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Pool:
    """A few workers, and a line before them. Heavy questions leave one worker free for the quick ones."""

    def __init__(self, size: int, runs_folder: str) -> None:
        self._workers = [Worker(runs_folder) for _ in range(size)]
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._heavy = asyncio.Semaphore(max(1, size - 1))
        self._waiting = 0
        self._starting: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start every worker and let it load what it needs, so that the first question is as quick as the others."""
        self._starting = [asyncio.create_task(self._warm(worker)) for worker in self._workers]

    async def _warm(self, worker: Worker) -> None:
        try:
            with contextlib.suppress(EOFError, TooLongError):
                await self._ask(worker, "warm", b"", WARM_SECONDS)
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.end(kill=True) for worker in self._workers))

    @property
    def is_free(self) -> bool:
        """Whether at least two workers have nothing to do."""
        return self._idle.qsize() >= 2

    async def ask(self, verb: str, body: bytes, seconds: float, heavy: bool) -> Answer:
        """The answer to a question. Raises `TooBusyError`, `TooLongError` or `EOFError`.

        Cancelled, it leaves the line, or its worker is ended: nothing long is computed that nobody waits for.
        """
        if self._waiting >= MAX_WAITING:
            raise TooBusyError
        self._waiting += 1
        try:
            async with self._heavy if heavy else contextlib.nullcontext():
                worker = await self._idle.get()
                try:
                    return await self._ask(worker, verb, body, seconds)
                finally:
                    self._idle.put_nowait(worker)
        finally:
            self._waiting -= 1

    async def _ask(self, worker: Worker, verb: str, body: bytes, seconds: float) -> Answer:
        """Ask; whatever interrupts leaves no half-read answer behind, or the worker is ended and starts anew."""
        asking = asyncio.create_task(worker.ask(verb, body))
        try:
            return await asyncio.wait_for(asyncio.shield(asking), seconds)
        except TimeoutError:
            await _to_its_end(_give_up(worker, asking))
            raise TooLongError from None
        except asyncio.CancelledError:
            await _to_its_end(_call_back(worker, asking))
            raise
        except BaseException:
            await _to_its_end(_give_up(worker, asking))
            raise


async def _to_its_end(cleaning: Coroutine[Any, Any, None]) -> None:
    """Clean up, however often whoever waits is cancelled meanwhile: half cleaned, a worker's pipe would have two
    readers, and one's answer could reach the other."""
    task = asyncio.create_task(cleaning)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


async def _call_back(worker: Worker, asking: asyncio.Task[Answer]) -> None:
    """Wait a moment for the answer; a worker whose answer does not come in time is ended, and starts anew.

    Not stopped half-way and kept: what it remembers of earlier plans could be left half made.
    """
    if not await _is_done(asking, PATIENCE_S):
        await _give_up(worker, asking)
        await worker.start()


async def _is_done(asking: asyncio.Task[Answer], seconds: float) -> bool:
    """Whether an answer comes in that time; what it says no longer matters."""
    await asyncio.wait({asking}, timeout=seconds)
    return asking.done() and not asking.cancelled() and asking.exception() is None


async def _give_up(worker: Worker, asking: asyncio.Task[Answer]) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await worker.end(kill=True)
