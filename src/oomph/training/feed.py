"""Which windows of the data a step reads: one numbered sequence for the whole run, for any batch size and ranks.

A step takes the next `windows` of the sequence; each rank takes a contiguous share of them and cuts it into
micro-batches. So a step that is repeated with smaller micro-batches, or on another number of ranks, reads the same
data, and the state is a single position.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from oomph.config import TrainConfig
from oomph.config.schema import eval_tokens
from oomph.data.reader import EVEN, Batches, ReaderState
from oomph.errors import InputError, Problem
from oomph.training.ranks.group import Ranks

Batch = tuple[Tensor, Tensor]
_LOOKED_AT = 2**20  # tokens checked against the vocabulary in each of a few places


class Feed:
    """Training batches on the device, the next one prefetched."""

    def __init__(
        self, folder: Path, config: TrainConfig, ranks: Ranks, device: torch.device, order: str = "random"
    ) -> None:
        self.reader = Batches(
            folder, "train", batch_size=1, block_size=config.block_size, order=order, seed=config.seed
        )
        check_vocabulary(self.reader, config.vocab_size)
        self.vocab_size = config.vocab_size
        self.windows = config.batch_size * config.gradient_accumulation_steps  # per step, over all ranks
        self.share = self.windows // ranks.size
        self.position = 0  # windows that finished steps have read
        self.ranks, self.device = ranks, device
        self._ahead: tuple[int, int, Batch] | None = None

    def batch(self, index: int, rows: int) -> Batch:
        """Micro-batch `index` of this rank's share of the step, `rows` windows."""
        first = self._first(index, rows)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (first, rows):
            return ahead[2]
        return read(self.reader, first, rows, self.device, self.vocab_size)

    def look_ahead(self, index: int, rows: int) -> None:
        """Prefetch that micro-batch, or the next step's first, while the device computes."""
        first = self._first(index, rows)
        with suppress(InputError):  # raised when that batch is needed, after this step is done
            self._ahead = first, rows, read(self.reader, first, rows, self.device, self.vocab_size)

    def forget(self) -> None:
        """Drop the prefetched batch."""
        self._ahead = None

    def _first(self, index: int, rows: int) -> int:
        steps, rest = divmod(index * rows, self.share)
        return self.position + steps * self.windows + self.ranks.rank * self.share + rest

    def advance(self) -> None:
        """Move on to the next step's windows."""
        self.position += self.windows

    def state(self) -> ReaderState:
        """What a checkpoint needs to resume here."""
        self.reader.position = self.position
        return self.reader.state()

    def load_state(self, state: ReaderState, where: str) -> None:
        """Resume from a state. `where` is its checkpoint, for error messages."""
        mine = self.reader.state()
        if any(state.get(key, mine[key]) != mine[key] for key in ("tokens", "sha256", "sample")):
            what = f"it was trained on different data than {self.reader.path}"
            found = f"{mine['tokens']} tokens here, {state['tokens']} there"
            if state["tokens"] == mine["tokens"]:
                found = "as many tokens, but different ones"
            raise InputError(Problem(where, what, found, "the same data, or --weights instead of --resume"))
        self.reader.load_state(state)
        self.position = self.reader.position
        self.forget()


def read(reader: Batches, first: int, rows: int, device: torch.device, vocab_size: int) -> Batch:
    """`rows` windows from number `first`, as tensors on the device; copied asynchronously to CUDA.

    Raises `InputError` for a token beyond the vocabulary, which on a device would end in an assertion.
    """
    reader.position, reader.batch_size = first, rows
    x, y = (torch.from_numpy(side) for side in next(reader))
    if (highest := max(int(x.max()), int(y[:, -1].max()))) >= vocab_size:
        raise InputError(_beyond(reader, highest, vocab_size))
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


def evaluation_reader(folder: Path, split: str, config: TrainConfig) -> Batches:
    """A reader of the windows of an evaluation, spread evenly over the split.

    They depend only on the data, `eval_tokens` and `block_size`, so losses differ only by the weights, whatever the
    batch and the seed.
    """
    windows = max(1, eval_tokens(config) // config.block_size)
    return Batches(folder, split, batch_size=1, block_size=config.block_size, order=EVEN, even=windows)


def check_data(folder: Path, config: TrainConfig) -> None:
    """Check, before anything is written, that both splits can be read and their tokens are in the vocabulary."""
    problems: list[Problem] = []
    for split in ("train", "val"):
        try:
            check_vocabulary(evaluation_reader(folder, split, config), config.vocab_size)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)


def check_vocabulary(reader: Batches, vocab_size: int) -> None:
    """Refuse tokens beyond the vocabulary: a GPU would only report "device-side assert"."""
    if reader.manifest is not None:
        highest = reader.manifest.vocab_size - 1
    else:
        import numpy as np

        tokens = np.memmap(reader.path, dtype="<u2", mode="r")  # without a manifest it is a nanoGPT file
        places = {0, len(tokens) // 2, max(0, len(tokens) - _LOOKED_AT)}
        highest = max(int(tokens[place : place + _LOOKED_AT].max()) for place in places)
    if highest >= vocab_size:
        raise InputError(_beyond(reader, highest, vocab_size))


def _beyond(reader: Batches, highest: int, vocab_size: int) -> Problem:
    return Problem(
        str(reader.path),
        "contains tokens beyond the vocabulary",
        found=f"token {highest}, vocab_size = {vocab_size}",
        allowed=f"--vocab_size={-(-(highest + 1) // 64) * 64} or more",
    )
