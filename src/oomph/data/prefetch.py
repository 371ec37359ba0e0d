"""Batches as tensors, made in the background and pinned for CUDA, so that no step waits for its data."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

from oomph.data.reader import Batches, State

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 4  # batches ready at once
_POLL_SECONDS = 0.05


class Prefetcher:
    """`next()` gives x and y on the device. `state()` is that of the batches given out, not of those waiting."""

    def __init__(self, batches: Batches, device: str = "cpu", depth: int = DEPTH) -> None:
        self._batches = batches
        self._device = device
        self._pin = device.startswith("cuda")
        self._state = batches.state()
        self._queue: Queue[Any] = Queue(maxsize=depth)
        self._stop = Event()
        self._thread = Thread(target=self._work, name="oomph-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        x, y, self._state = item
        if self._device == "cpu":
            return x, y
        return x.to(self._device, non_blocking=self._pin), y.to(self._device, non_blocking=self._pin)

    def state(self) -> State:
        """The reader's state after the last batch given out."""
        return dict(self._state)

    def close(self) -> None:
        """Stop the background work. Batches that wait are dropped; the state does not count them."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except Empty:
                self._thread.join(_POLL_SECONDS)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._put(self._next())
        except BaseException as error:  # it is raised where the batch is asked for
            self._put(error)

    def _next(self) -> tuple[Tensor, Tensor, State]:
        import torch

        x, y = (torch.from_numpy(side) for side in next(self._batches))
        if self._pin:
            x, y = x.pin_memory(), y.pin_memory()
        return x, y, self._batches.state()

    def _put(self, item: object) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return
            except Full:
                continue
