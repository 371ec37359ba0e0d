"""Ctrl-C, SIGTERM and a closed terminal ask the run to stop where it stands; a second Ctrl-C stops it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
if hasattr(signal, "SIGHUP"):  # Windows has none
    _NAMES[signal.SIGHUP] = "SIGHUP"


class StopAsked:
    """While entered, notes the signal instead of dying of it."""

    def __init__(self) -> None:
        self.by: str | None = None  # "Ctrl-C", "SIGTERM" or "SIGHUP"
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        """Whether somebody wants the run to stop."""
        return self.by is not None

    def __enter__(self) -> StopAsked:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number, name in _NAMES.items():
                if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup's wish is kept
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
        self.by = self.by or _NAMES[signal.Signals(number)]
