"""One optimizer step and one evaluation, each repeated with smaller micro-batches if memory runs out."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from oomph.config import TrainConfig
from oomph.training.distributed import Ranks
from oomph.training.errors import TrainingError, is_out_of_memory
from oomph.training.feed import Feed, evaluation_reader, read
from oomph.training.loss import head_loss
from oomph.training.model import GPT
from oomph.training.optimizer import AnyOptimizer, clip_and_step, learning_rate, set_learning_rate

MOST_SKIPPED = 20  # float16 steps in a row: by then the scale has fallen to a millionth, so overflow is not the cause
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """The figures of one optimizer step."""

    step: int
    loss: float  # mean over all its tokens
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool = False  # a float16 gradient overflowed, so the scaler lowered its scale


@dataclass(frozen=True)
class SmallerBatch:
    """The reduced micro-batch after memory ran out."""

    step: int
    during: str  # "training" or "evaluation"
    batch_size: int
    micro_steps: int  # of one rank
    reason: str


class NotFiniteError(TrainingError):
    """A loss, gradient or weight is NaN or infinite."""

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        super().__init__(f"step {step}: {what}")


class Interrupted(Exception):  # noqa: N818 - not an error
    """A stop was requested in the middle of a step or evaluation, which has been undone."""


class Trainer:
    """A model in training. A checkpoint holds its state after a step."""

    def __init__(
        self,
        config: TrainConfig,
        model: GPT,
        optimizer: AnyOptimizer,
        feed: Feed,
        ranks: Ranks,
        on_shrink: Callable[[SmallerBatch], None] | None = None,
    ) -> None:
        self.config, self.model, self.optimizer, self.feed, self.ranks = config, model, optimizer, feed, ranks
        self.device = feed.device
        self.step = 0
        self.skipped = 0  # steps in a row that float16's scaler skipped
        self.batch_size = config.batch_size
        self.micro_steps = config.gradient_accumulation_steps // ranks.size
        half = config.autocast and config.dtype != "float32"
        self.half = DTYPES[config.dtype or "float32"] if half else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.half is torch.float16)
        if config.compile:
            torch.compiler.reset()  # else the sizes of an earlier run in this process make this one's dynamic
        # A chunked loss is called after the compiled model; an unchunked one is compiled together with it.
        whole = config.compile and not config.loss_chunk
        self._trunk: Callable[[Tensor], Tensor]
        self._trunk = torch.compile(model.trunk) if config.compile and not whole else model.trunk
        self._loss: Callable[[Tensor, Tensor], Tensor]
        self._loss = torch.compile(self._eager_loss) if whole else self._eager_loss
        self.parameters = list(model.parameters())
        self.on_shrink = on_shrink
        self.stop_asked: Callable[[], bool] = lambda: False  # checked between micro-steps

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half is None else torch.autocast(self.device.type, dtype=self.half)

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of one batch."""
        with self._autocast():
            return self._loss(x, y)

    def _eager_loss(self, x: Tensor, y: Tensor) -> Tensor:
        chunk = self.config.loss_chunk or 0
        return head_loss(self._trunk(x), self.model.lm_head.weight, y, chunk, self.config.compile)

    def train_step(self) -> StepResult:
        """One optimizer step over the next windows.

        Raises `NotFiniteError` before any weight changes, and `Interrupted` if it is to stop half-way.
        """
        rate = learning_rate(self.step, self.config)
        set_learning_rate(self.optimizer, rate)
        loss = self._retry_smaller("training", self._accumulate)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.ranks.sum([*gradients, loss])
        if self.scaler.is_enabled():
            self.scaler.unscale_(cast(torch.optim.Optimizer, self.optimizer))  # it only reads the groups
        norm = get_total_norm(gradients)
        loss_value, norm_value = torch.stack([loss, norm.float()]).tolist()  # the step's only wait for the device
        overflowed = self.scaler.is_enabled() and math.isfinite(loss_value) and not math.isfinite(norm_value)
        if not overflowed:
            if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
                bad_loss = not math.isfinite(loss_value)
                what = f"the loss is {loss_value}" if bad_loss else f"the gradient norm is {norm_value}"
                raise NotFiniteError(self.step, f"{what}; stopped before the optimizer step")
            limit = self.config.grad_clip
            clip_and_step(self.optimizer, gradients, norm, 0 < limit < norm_value, limit)
        self._count_skipped(overflowed, norm_value)
        if self.scaler.is_enabled():
            self.scaler.update()  # lower after an overflow, higher after many steps without one
        del gradients
        self.optimizer.zero_grad()
        result = StepResult(self.step, loss_value, norm_value, rate, overflowed)
        self.feed.advance()
        self.step += 1
        return result

    def _count_skipped(self, overflowed: bool, norm: float) -> None:
        """A too large scale is lowered within a few steps; if no scale helps, the run stops."""
        self.skipped = self.skipped + 1 if overflowed else 0
        if self.skipped >= MOST_SKIPPED:
            what = f"the gradient norm was not finite in {MOST_SKIPPED} steps in a row (now {norm})"
            raise NotFiniteError(self.step, f"{what}, however small the loss scale; none of these steps was taken")

    def _accumulate(self) -> Tensor:
        """Add the gradients of this rank's share of the step to `.grad`; return its share of the mean loss."""
        total = torch.zeros((), device=self.device)
        share = 1 / (self.micro_steps * self.ranks.size)
        for index in range(self.micro_steps):
            self._stop_if_asked()
            loss = self.loss_of(*self.feed.batch(index, self.batch_size)) * share
            self.feed.look_ahead(index + 1, self.batch_size)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def evaluate(self, folder: Path, split: str) -> float:
        """The mean loss over a split's evaluation windows, always the same; every rank reads its share."""
        total = self._retry_smaller("evaluation", lambda: self._evaluate(folder, split))
        self.ranks.sum([total])
        return total.item() / (self.config.eval_iters * self.config.batch_size)

    def _evaluate(self, folder: Path, split: str) -> Tensor:
        """The sum of losses over this rank's windows. Without collectives: memory may run out on one rank only."""
        reader = evaluation_reader(folder, split, self.config)
        windows = self.config.eval_iters * self.config.batch_size
        first, last = (windows * rank // self.ranks.size for rank in (self.ranks.rank, self.ranks.rank + 1))
        total = torch.zeros((), device=self.device)
        self.model.eval()
        try:
            with torch.no_grad():
                for at in range(first, last, self.batch_size):
                    self._stop_if_asked()
                    rows = min(self.batch_size, last - at)
                    total += self.loss_of(*read(reader, at, rows, self.device)) * rows
        finally:
            self.model.train()
        return total

    def _stop_if_asked(self) -> None:
        if self.stop_asked():
            raise Interrupted

    def weights_are_finite(self) -> bool:
        """Whether every weight is finite."""
        with torch.no_grad():
            return bool(torch.stack([parameter.isfinite().all() for parameter in self.parameters]).all())

    def _retry_smaller(self, during: str, work: Callable[[], Tensor]) -> Tensor:
        """Do the work. If memory runs out on any rank, undo it on all, halve the micro-batch and do it again."""
        while True:
            random = random_state(self.device)
            failure: str | None = None
            result: Tensor | None = None
            stopped = False
            try:
                result = work()
            except Interrupted:
                stopped = True
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error).splitlines()[0][:200]
            # Only now are the error and its frames gone, so that their tensors can be freed.
            failed, stopping = self.ranks.any([failure is not None, stopped], self.device)
            if not failed and not stopping and result is not None:
                return result
            self._undo(random)
            if stopping:
                raise Interrupted
            self._shrink(during, failure or "on another rank")

    def _undo(self, random: dict[str, Tensor]) -> None:
        """Restore the state before the work, and free all memory."""
        self.optimizer.zero_grad()
        self.feed.forget()
        restore_random_state(random)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _shrink(self, during: str, reason: str) -> None:
        if self.batch_size == 1:
            raise TrainingError(
                f"step {self.step}: out of memory in {during} with a single sequence: {reason}. "
                f"Try a smaller block_size, checkpoint_layers={self.config.n_layer} or a smaller model."
            )
        by = next(n for n in range(2, self.batch_size + 1) if self.batch_size % n == 0)
        self.batch_size //= by
        self.micro_steps *= by
        if self.on_shrink is not None:
            self.on_shrink(SmallerBatch(self.step, during, self.batch_size, self.micro_steps, reason))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's random number generators."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device | None = None) -> None:
    """Restore the state of torch's random number generators."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu(), device or torch.device("cuda"))
