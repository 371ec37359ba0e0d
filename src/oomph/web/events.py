"""Live runs: new lines of their metrics.jsonl files as server-sent events, all runs in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from oomph.web.metrics import METRICS, Clock, Figures, open_file, position, read_lines, whole_lines
from oomph.web.runs import flops_per_token, read_json
from oomph.web.standing import PLAN, RESULT, Standing, standing, steps_done

LOOK_S = 0.5  # between two looks at the files
HEARTBEAT_S = 10.0
PIECE_BYTES = 256 * 2**10  # the most of a file in one event
EVENTS_A_LOOK = 8
RETRY_MS = 2000
MAX_STREAMS = 64
MAX_RUNS = 64  # in one stream


class Tail:
    """A growing metrics.jsonl, read from some byte on."""

    def __init__(self, folder: Path, offset: int, clock: Clock | None = None) -> None:
        """`offset` is the byte to begin at, `clock` the training hours up to there."""
        self.folder, self.offset = folder, offset
        self.flops_per_token = flops_per_token(read_json(folder / PLAN))
        self.clock = clock or Clock()
        self._last = Figures()  # the lines read last
        self._told: tuple[Standing, Any] | None = None

    def more(self) -> list[tuple[str, Any]]:
        """Events since the last look, as names and data."""
        events: list[tuple[str, Any]] = []
        if self._size() < self.offset:  # the file was started over
            self.offset, self.clock = 0, Clock()
            return [("reset", {})]
        while len(events) < EVENTS_A_LOOK and (text := self._lines()):
            self._last = read_lines(text, self.clock, self.flops_per_token)
            events.append(("metrics", self._last.columns()))
        result = read_json(self.folder / RESULT)
        now = standing(self.folder, result, self._last)
        if (now, result) != self._told:
            self._told = now, result
            steps = steps_done(self.folder, result, Figures())
            told = {"state": now.state, "reason": now.reason, "result": result, "steps": steps}
            events.append(("state", told))
        return events

    def _size(self) -> int:
        try:
            return (self.folder / METRICS).stat().st_size
        except OSError:
            return 0

    @property
    def position(self) -> str:
        """The position from which another stream can continue."""
        return position(self.offset, self.clock)

    def _lines(self) -> bytes:
        """The next whole lines; moves past them."""
        try:
            with open_file(self.folder / METRICS) as stream:
                stream.seek(self.offset)
                text, size = whole_lines(stream, PIECE_BYTES)
        except OSError:
            return b""
        self.offset += size
        return text


class Streams:
    """Counts open streams. A place is reserved before the response starts and released when it ends."""

    def __init__(self) -> None:
        self.open = 0

    def reserve(self) -> bool:
        """Take a place; False if none is left."""
        if self.open >= MAX_STREAMS:
            return False
        self.open += 1
        return True

    def release(self) -> None:
        self.open -= 1


class EventStream(StreamingResponse):
    """A response that lasts until its reader disconnects. A place in `Streams` must have been reserved."""

    def __init__(self, tails: Sequence[Tail], closing: asyncio.Event, streams: Streams) -> None:
        super().__init__(stream(tails, closing), media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.release()


async def stream(tails: Sequence[Tail], closing: asyncio.Event) -> AsyncIterator[bytes]:
    """Events until the reader disconnects or the server closes. Files are read in a thread, so the loop never blocks.

    An event's id is the position in each run's file, so that a client that reconnects misses nothing.
    """
    quiet_s = 0.0
    yield f"retry: {RETRY_MS}\n\n".encode()
    while not closing.is_set():
        quiet_s += LOOK_S
        for at, tail in enumerate(tails):
            for kind, data in await asyncio.to_thread(tail.more):
                quiet_s = 0.0
                positions = ",".join(each.position for each in tails)
                text = msgspec.json.encode({"run": at, "data": data}).decode()
                yield f"id: {positions}\nevent: {kind}\ndata: {text}\n\n".encode()
        if quiet_s >= HEARTBEAT_S:
            quiet_s = 0.0
            yield b": still here\n\n"
        try:
            await asyncio.wait_for(closing.wait(), LOOK_S)
        except TimeoutError:
            continue
