"""A connection that must ask: one whose request does not come whole in time is closed, so that idlers keep no place."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # that a request's head may take; uvicorn's own limits begin after the first answer


class PromptProtocol(H11Protocol):
    """uvicorn's, with a limit on the time that a head takes."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    @property
    def _has_asked(self) -> bool:
        """Whether a request has come whole and its answer is still to be given."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        if self._has_asked:
            self._rest()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEADER_SECONDS, self._close)

    def _rest(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _close(self) -> None:
        self._waiting = None
        if not self._has_asked and not self.transport.is_closing():
            self.transport.close()
