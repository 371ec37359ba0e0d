"""Blocks of text to tokens, on all cores, in order.

Processes and not threads: on two cores tiktoken did 2.0 times one core's work in processes and 1.6 times in threads.
A worker reads from its own pipe and writes to it, touches no file, and leaves when the pipe ends, so that one whose
parent was killed does no harm.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from oomph.data.encoders import Encoder
from oomph.data.failure import DataError
from oomph.data.pieces import Block, Broken, Part, Piece, cut
from oomph.errors import InputError, Problem

IN_HAND = 2  # blocks a worker has at once: one in work, one waiting
AHEAD = 4  # blocks a worker, that may be begun before the oldest is written
MAX_AHEAD_BYTES = 2**27  # of text, whatever their number: a single line may have 64 MiB


@dataclass(frozen=True)
class Job:
    """What a worker must know."""

    encoder: Encoder
    dtype: str
    val_fraction: float
    skip_broken: bool


class Run(NamedTuple):
    """What one piece of text became."""

    is_val: bool = False
    tokens: int = 0
    text_bytes: int = 0
    begins: bool = False  # a document begins with it
    repaired: bool = False
    empty: bool = False  # a document without text
    broken: bool = False  # no document at all


@dataclass
class Encoded:
    """A block's tokens, each split's together, and the pieces they came from."""

    train: bytes = b""
    val: bytes = b""
    runs: list[Run] = field(default_factory=list)  # in the order of the text
    problem: Problem | None = None  # the work must stop here


def encode_block(parts: Iterable[Part], job: Job) -> Encoded:
    """All documents of a block. Stops at the first that is broken, unless those are skipped."""
    import numpy as np

    result = Encoded()
    found: list[Piece | Run] = []
    for part in parts:
        for piece in part.pieces(job.val_fraction):
            if isinstance(piece, Broken):
                if not job.skip_broken:
                    return Encoded(problem=piece.problem)
                found.append(Run(broken=True))
            elif not piece.text and piece.begins and piece.ends:
                found.append(Run(empty=True))
            else:
                found += cut(piece)
    try:
        encoded = iter(job.encoder.encode([piece.text for piece in found if isinstance(piece, Piece)]))
    except InputError as error:
        return Encoded(problem=error.problems[0])
    end = np.array([job.encoder.end_of_text or 0], dtype=job.dtype)
    ids: dict[bool, list[Any]] = {False: [], True: []}
    for each in found:
        if isinstance(each, Run):
            result.runs.append(each)
            continue
        side, tokens = ids[each.is_val], next(encoded)
        side.append(tokens.astype(job.dtype, copy=False))
        ending = each.end_of_text and job.encoder.end_of_text is not None
        if ending:
            side.append(end)
        text_bytes = len(each.text) if each.text.isascii() else len(each.text.encode())
        result.runs.append(Run(each.is_val, len(tokens) + ending, text_bytes, each.begins, each.repaired))
    result.train, result.val = (np.concatenate(side).tobytes() if side else b"" for side in (ids[False], ids[True]))
    return result


def encode_all(blocks: Iterator[tuple[Block, Any]], job: Job, workers: int) -> Iterator[tuple[Encoded, Any]]:
    """Each block's tokens with what came beside it, in the order of the blocks, whatever the number of workers."""
    if workers == 1:
        for block, beside in blocks:
            yield encode_block(block.parts, job), beside
        return
    pool = _Pool(job, workers)
    try:
        yield from pool.run(blocks)
    finally:
        pool.close()


class _Pool:
    def __init__(self, job: Job, workers: int) -> None:
        context: Any = multiprocessing.get_context(_start_method())
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A forked child inherits every end opened so far: it must close them, or no pipe would ever end.
            inherited = [*self._pipes, ours] if context.get_start_method() == "fork" else []
            process = context.Process(target=_work, args=(theirs, inherited, job), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._in_hand = dict.fromkeys(self._pipes, 0)

    def run(self, blocks: Iterator[tuple[Block, Any]]) -> Iterator[tuple[Encoded, Any]]:
        waiting: deque[tuple[int, int, Any]] = deque()  # (number, size, beside) of the blocks begun, oldest first
        done: dict[int, Encoded] = {}
        number, ahead_bytes, more = 0, 0, True
        while True:
            while more and len(waiting) < AHEAD * len(self._pipes) and ahead_bytes < MAX_AHEAD_BYTES:
                pipe = min(self._pipes, key=self._in_hand.__getitem__)
                if self._in_hand[pipe] >= IN_HAND:
                    break
                following = next(blocks, None)
                if following is None:
                    more = False
                    break
                block, beside = following
                self._send(pipe, (number, block.parts))
                waiting.append((number, block.size_bytes, beside))
                ahead_bytes += block.size_bytes
                number += 1
            if not waiting:
                return
            if waiting[0][0] in done:
                oldest, size, beside = waiting.popleft()
                ahead_bytes -= size
                yield done.pop(oldest), beside
            else:
                self._receive(done)

    def _send(self, pipe: Connection, task: object) -> None:
        try:
            pipe.send(task)
        except OSError:
            raise self._died(pipe) from None
        self._in_hand[pipe] += 1

    def _receive(self, done: dict[int, Encoded]) -> None:
        for pipe in wait(self._pipes):
            assert isinstance(pipe, Connection)
            try:
                number, encoded = pipe.recv()
            except (EOFError, OSError):
                raise self._died(pipe) from None
            self._in_hand[pipe] -= 1
            if isinstance(encoded, BaseException):
                raise encoded
            done[number] = encoded

    def _died(self, pipe: Connection) -> DataError:
        process = self._processes[self._pipes.index(pipe)]
        process.join(timeout=5)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return DataError(
            f"a worker process died ({how}; SIGKILL is most often the system, short of memory). "
            "What was finished before is kept: call again, with fewer --workers if memory is short."
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


def _work(pipe: Connection, inherited: list[Connection], job: Job) -> None:
    """A worker's life. Ctrl-C reaches it too; only the parent answers that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for connection in inherited:
        connection.close()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from queue import SimpleQueue
    from threading import Thread

    tasks: SimpleQueue[Any] = SimpleQueue()

    def receive() -> None:
        """Take the next task off the pipe while one is in work, so that neither side ever waits for the other."""
        try:
            while True:
                tasks.put(pipe.recv())
        except (EOFError, OSError):
            tasks.put(None)

    Thread(target=receive, daemon=True).start()
    while (task := tasks.get()) is not None:
        number, parts = task
        try:
            result: Encoded | BaseException = encode_block(parts, job)
        except Exception as error:
            result = error
        try:
            pipe.send((number, result))
        except OSError:
            return


def _start_method() -> str:
    """Forking shares the tokenizer's tables at once, but is safe only while this process has a single thread."""
    if sys.platform != "linux":
        return "spawn"
    return "fork" if len(os.listdir("/proc/self/task")) == 1 else "spawn"  # noqa: PTH208
