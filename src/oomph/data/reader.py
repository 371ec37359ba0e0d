"""Token files to batches: windows are read as they are needed, in an order that is computed, not stored.

The windows of a run form one endless numbered sequence, the same for any batch size and number of ranks. A step takes
the next `batch_size × world_size` of them, rank by rank. So the state is one number, resuming is exact, no two ranks
read the same window, and a run that halves its batch continues with the very next window. The file is not mapped: the
kernel would count every page that was ever read as this process's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import finalize

from oomph.data.manifest import Manifest, find_dataset, read_manifest
from oomph.errors import InputError, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

RANDOM, EPOCHS, EVEN = "random", "epochs", "even"
ORDERS = (RANDOM, EPOCHS, EVEN)
SAMPLED_PAGES, SAMPLED_BYTES = 64, 4096  # hashed to distinguish files of the same size
AT_ONCE = 4096  # windows whose starts are computed together
ROUNDS = 4  # of the shuffle: Luby and Rackoff proved that four suffice for a pseudo-random permutation

ReaderState = dict[str, int | str]


class Batches:
    """Endless batches of one split: `next()` returns x and y, int64 (batch, block) each, y one token later than x.

    order "random": windows begin anywhere, drawn uniformly with replacement, as in nanoGPT.
    order "epochs": windows do not overlap; each is read once an epoch, in an order reshuffled for each epoch, and the
    first begins at a different one of the first `block_size` tokens, so that borders between windows move too.
    order "even": windows are spread evenly over the file, `even` of them, then the same again: for evaluations.
    """

    def __init__(
        self,
        dataset: str | Path,
        split: str = "train",
        *,
        batch_size: int,
        block_size: int,
        order: str = RANDOM,
        seed: int = 1337,
        rank: int = 0,
        world_size: int = 1,
        state: ReaderState | None = None,
        even: int = 1,
    ) -> None:
        self.batch_size, self.block_size = batch_size, block_size
        self.order, self.seed = order, seed
        self.rank, self.world_size = rank, world_size
        self._check()
        folder = find_dataset(str(dataset))
        self.path = folder / f"{split}.bin"
        self.manifest = read_manifest(folder)
        self._file, self._dtype, self.tokens = _open(self.path, self.manifest, block_size)
        self.even = min(even, max(1, (self.tokens - 1) // block_size))  # at most all non-overlapping windows
        self.position = 0  # windows read, over all ranks
        self._known: tuple[int, Any] = (
            0,
            (),
        )  # (first window, starts from it on), computed many at a time
        finalize(self, self._file.close)
        if state is not None:
            self.load_state(state)

    def _check(self) -> None:
        problems = []
        if self.order not in ORDERS:
            problems.append(Problem("order", "no such order", found=self.order, allowed=" or ".join(ORDERS)))
        for name in ("batch_size", "block_size", "world_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                problems.append(Problem(name, "not a size", found=str(value), allowed="a whole number of at least 1"))
        ranks = self.world_size if isinstance(self.world_size, int) and self.world_size > 0 else 1
        if not (isinstance(self.rank, int) and 0 <= self.rank < ranks):
            problems.append(Problem("rank", "out of range", found=str(self.rank), allowed=f"0 to {ranks - 1}"))
        if problems:
            raise InputError(problems)

    @property
    def epoch_windows(self) -> int:
        """Windows per epoch: how many fit in the file without overlap, wherever the first begins."""
        return max(1, (self.tokens - self.block_size) // self.block_size)

    def state(self) -> ReaderState:
        """What is needed to resume exactly here, as plain values for a checkpoint."""
        return {
            "order": self.order,
            "seed": self.seed,
            "position": self.position,
            "block_size": self.block_size,
            "tokens": self.tokens,
            "sha256": self._checksum(),
            "sample": self._sample,
        }

    def load_state(self, state: ReaderState) -> None:
        """Resume from a state. Batch size and number of ranks may differ; the data may not."""
        mine = self.state()
        problems = [
            Problem("the reader's state", f"{key} differs", found=str(state.get(key)), allowed=str(mine[key]))
            for key in mine
            if key != "position" and state.get(key, "") != mine[key] and (key != "sample" or key in state)
        ]
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            problems.append(Problem("the reader's state", "no position", found=str(position), allowed="0 or more"))
        if problems:
            raise InputError(problems)
        assert isinstance(position, int)
        self.position = position

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return self

    def __next__(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = self._read(self.starts())  # (B, T + 1)
        self.position += self.batch_size * self.world_size
        return rows[:, :-1].astype("int64"), rows[:, 1:].astype("int64")

    def _read(self, starts: NDArray[np.int64]) -> NDArray[Any]:
        """The windows that begin at these tokens."""
        import numpy as np

        rows = np.empty((len(starts), self.block_size + 1), self._dtype)
        try:
            for row, start in zip(rows, starts.tolist(), strict=True):
                self._file.seek(start * self._dtype.itemsize)
                if self._file.readinto(row) != row.nbytes:
                    raise InputError(Problem(str(self.path), "truncated while it was read", allowed="the whole file"))
        except OSError as error:
            raise InputError(Problem(str(self.path), "cannot be read", found=error.strerror)) from None
        return rows

    def starts(self) -> NDArray[np.int64]:
        """Where the windows of this rank's next batch begin."""
        first = self.position + self.rank * self.batch_size
        known_from, known = self._known
        if not known_from <= first <= first + self.batch_size <= known_from + len(known):
            known_from, known = first, self._starts_of(first, max(AT_ONCE, self.batch_size))
            self._known = known_from, known
        starts: NDArray[np.int64] = known[first - known_from : first - known_from + self.batch_size]
        return starts

    def _starts_of(self, first: int, count: int) -> NDArray[np.int64]:
        """Start offsets of `count` windows from number `first`."""
        import numpy as np

        numbers = np.arange(first, first + count, dtype=np.uint64)
        if self.order == RANDOM:
            drawn = _mixed(numbers, np.uint64(_key(self.seed, 0)))
            return (drawn % np.uint64(self.tokens - self.block_size)).astype(np.int64)
        if self.order == EVEN:
            return (
                (numbers % np.uint64(self.even)).astype(np.int64)
                * (self.tokens - 1 - self.block_size)
                // max(1, self.even - 1)
            )
        size = np.uint64(self.epoch_windows)
        spare = np.uint64(min(self.block_size, self.tokens - int(size) * self.block_size))
        shifts = _mixed(numbers // size, np.uint64(_key(self.seed, -1))) % spare
        return (_shuffled(numbers, int(size), self.seed) * np.uint64(self.block_size) + shifts).astype(np.int64)

    def _checksum(self) -> str:
        return self.manifest.splits[self.path.stem].sha256 if self.manifest else ""

    @cached_property
    def _sample(self) -> str:
        """A hash of a few pages all over the file, so that other data of the same size is noticed."""
        from hashlib import blake2b

        size = self.tokens * self._dtype.itemsize
        found = blake2b(digest_size=16)
        for page in range(SAMPLED_PAGES):
            self._file.seek(max(0, size - SAMPLED_BYTES) * page // (SAMPLED_PAGES - 1))
            found.update(self._file.read(SAMPLED_BYTES))
        return found.hexdigest()


def _open(path: Path, manifest: Manifest | None, block_size: int) -> tuple[Any, Any, int]:
    """The file, the type of its tokens and their number."""
    import numpy as np

    dtype = np.dtype(manifest.dtype if manifest else "uint16").newbyteorder("<")
    try:
        size = path.stat().st_size
        if size % dtype.itemsize or (manifest and size != manifest.splits[path.stem].tokens * dtype.itemsize):
            raise InputError(Problem(str(path), "truncated, or not a token file", found=f"{size} bytes"))
        if size // dtype.itemsize <= block_size:
            raise InputError(
                Problem(
                    str(path),
                    f"too few tokens for windows of {block_size}",
                    found=f"{size // dtype.itemsize:,} tokens",
                    allowed=f"at least {block_size + 1:,}, or a smaller block_size",
                )
            )
        return path.open("rb", buffering=0), dtype, size // dtype.itemsize
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None


def _key(seed: int, number: int) -> int:
    """A 64-bit key from a seed of any size and a number."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")


def _mixed(numbers: NDArray[np.uint64], key: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each number: SplitMix64 (Steele, Lea, Flood 2014), whose n-th output needs no earlier ones."""
    import numpy as np

    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _shuffled(numbers: NDArray[np.uint64], size: int, seed: int) -> NDArray[np.uint64]:
    """Map numbers 0, 1, 2, … to indices below `size`: each index once per `size` numbers, reshuffled each time.

    A Feistel network permutes the next power of four; results that are too large are permuted again until they fit.
    It needs no table, so it costs the same for a thousand windows as for a trillion.
    """
    import numpy as np

    epochs, places = np.divmod(numbers, np.uint64(size))
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = {
        int(epoch): [_key(seed, int(epoch) * ROUNDS + turn + 1) for turn in range(ROUNDS)]
        for epoch in {*epochs.tolist()}
    }
    table = np.array([keys[epoch] for epoch in epochs.tolist()], dtype=np.uint64).T  # (round, number)
    result = _feistel(places, half, table)
    while (outside := result >= np.uint64(size)).any():
        result[outside] = _feistel(result[outside], half, table[:, outside])
    return result


def _feistel(numbers: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass. Each round mixes the right half into the left and swaps them, which is invertible: no collisions."""
    import numpy as np

    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) & mask)
    return (left << half) | right


DEPTH = 4  # batches ready at once
_POLL_SECONDS = 0.05


class Prefetcher:
    """Batches as tensors on a device, made in a background thread and pinned for CUDA.

    `next()` returns x and y. `state()` counts the batches returned, not those waiting.
    """

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

    def state(self) -> ReaderState:
        """The reader's state after the last batch returned."""
        return dict(self._state)

    def close(self) -> None:
        """Stop the thread. Waiting batches are dropped; the state does not count them."""
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
        except BaseException as error:  # raised by the next `next()`
            self._put(error)

    def _next(self) -> tuple[Tensor, Tensor, ReaderState]:
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
