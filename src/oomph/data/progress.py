"""How far, how fast, how long still: one line that renews itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from oomph.units import MIB, count, duration

TERMINAL_SECONDS, PLAIN_SECONDS = 0.2, 10.0


class Progress:
    """Written to standard error, so that standard output is the result alone."""

    def __init__(
        self, shown: bool, total_bytes: int | None, take: int | None, begun_bytes: int, begun_tokens: int
    ) -> None:
        self._wanted = shown
        self._stream: TextIO = sys.stderr
        self._terminal = self._stream.isatty()
        self._total_bytes, self._take = total_bytes, take
        self._begun_bytes, self._begun_tokens = begun_bytes, begun_tokens
        self._start = self._shown = time.monotonic()

    def update(self, read_bytes: int, tokens: int) -> None:
        """Show where the work is, if it is time to."""
        if not self._wanted:
            return
        now = time.monotonic()
        if now - self._shown < (TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS):
            return
        self._shown = now
        line = self.line(read_bytes, tokens, now - self._start)
        self._stream.write(f"\r\x1b[2K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()

    def line(self, read_bytes: int, tokens: int, seconds: float) -> str:
        """The line itself: what is done, the rate since this call began, and the time left at that rate."""
        rate_bytes = (read_bytes - self._begun_bytes) / max(seconds, 1e-9)
        rate_tokens = (tokens - self._begun_tokens) / max(seconds, 1e-9)
        parts = [f"{read_bytes / MIB:,.0f} MiB read", f"{count(tokens)} tokens"]
        shares = []
        if self._total_bytes:
            shares.append((read_bytes / self._total_bytes, self._total_bytes - read_bytes, rate_bytes))
        if self._take:
            shares.append((tokens / self._take, self._take - tokens, rate_tokens))
        if shares:
            parts.insert(0, f"{min(max(share for share, _, _ in shares), 1):6.1%}")
        parts.append(f"{rate_bytes / MIB:.1f} MiB/s")
        parts.append(f"{count(rate_tokens)} tokens/s")
        left = [remaining / rate for _, remaining, rate in shares if rate > 0]
        if left:
            parts.append(f"{duration(max(min(left), 0))} left")
        return "  ".join(parts)

    def close(self) -> None:
        """Leave the terminal's line clean."""
        if self._terminal and self._wanted:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
