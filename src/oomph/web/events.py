"""A run while it goes: what its metrics.jsonl grows by, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from oomph.web.runs import (
    METRICS,
    PLAN,
    RESULT,
    Clock,
    Figures,
    flops_per_token,
    open_file,
    read_json,
    read_lines,
    state,
    steps_done,
)

LOOK_S = 0.5  # between looks at the file
HEARTBEAT_S = 10.0
PIECE_BYTES = 256 * 2**10  # of the file, to one event
EVENTS_A_LOOK = 8
RETRY_MS = 2000
MAX_STREAMS = 64


class Tail:
    """A growing metrics.jsonl from some byte on."""

    def __init__(self, folder: Path, offset: int) -> None:
        self.folder, self.offset = folder, offset
        self.flops_per_token = flops_per_token(read_json(folder / PLAN))
        self.clock = Clock()
        self._caught_up = offset == 0
        self._last_state: tuple[str, Any] | None = None

    def more(self) -> list[bytes]:
        """The events since the last look."""
        events: list[bytes] = []
        if (restarted := self._size() < self.offset) or not self._caught_up:
            self._catch_up(restarted)
        if restarted:
            return [self._event("reset", {})]
        while len(events) < EVENTS_A_LOOK and (lines := self._lines()):
            found = read_lines(lines, self.clock, self.flops_per_token)
            events.append(self._event("metrics", found.columns()))
        result = read_json(self.folder / RESULT)
        now = (state(self.folder, result), result)
        if now != self._last_state:
            self._last_state = now
            steps = steps_done(self.folder, result, Figures())
            events.append(self._event("state", {"state": now[0], "result": result, "steps": steps}))
        return events

    def _catch_up(self, restarted: bool) -> None:
        """Bring the clock to where the reader is: the hours of a later line need those of all before it."""
        wanted = 0 if restarted else self.offset
        self.offset, self.clock, self._caught_up = 0, Clock(), True
        while self.offset < wanted and (lines := self._lines(wanted)):
            read_lines(lines, self.clock, None)
        self.offset = wanted

    def _size(self) -> int:
        try:
            return (self.folder / METRICS).stat().st_size
        except OSError:
            return 0

    def _lines(self, end: int | None = None) -> list[bytes]:
        """Some more whole lines, and past them."""
        try:
            with open_file(self.folder / METRICS) as stream:
                stream.seek(self.offset)
                data = stream.read(PIECE_BYTES if end is None else min(PIECE_BYTES, end - self.offset))
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == PIECE_BYTES:  # a line longer than any of ours: passed over
            whole = len(data)
        self.offset += whole
        return data[:whole].splitlines()

    def _event(self, kind: str, value: Any) -> bytes:
        data = msgspec.json.encode(value).decode()
        return f"id: {self.offset}\nevent: {kind}\ndata: {data}\n\n".encode()


async def stream(folder: Path, offset: int, closing: asyncio.Event) -> AsyncIterator[bytes]:
    """Events until the reader leaves or the server closes. A thread reads: the loop never waits for a disk."""
    tail = Tail(folder, offset)
    quiet_s = 0.0
    yield f"retry: {RETRY_MS}\n\n".encode()
    while not closing.is_set():
        events = await asyncio.to_thread(tail.more)
        for event in events:
            yield event
        quiet_s = 0.0 if events else quiet_s + LOOK_S
        if quiet_s >= HEARTBEAT_S:
            quiet_s = 0.0
            yield b": still here\n\n"
        try:
            await asyncio.wait_for(closing.wait(), LOOK_S)
        except TimeoutError:
            continue
