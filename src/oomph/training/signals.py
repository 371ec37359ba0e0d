"""Ctrl-C and SIGTERM ask the run to stop after the step at hand; a second Ctrl-C stops it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopAsked:
    """While entered, notes the signal instead of dying of it."""

    def __init__(self) -> None:
        self.by: str | None = None  # "Ctrl-C" or "SIGTERM"
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopAsked:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
