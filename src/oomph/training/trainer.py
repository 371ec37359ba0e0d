"""One optimizer step and one evaluation, each repeated with smaller micro-batches if memory runs out."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from oomph.config import TrainConfig
from oomph.data.reader import Batches
from oomph.errors import InputError
from oomph.training.errors import LostRankError, OtherRankError, TrainingError, is_out_of_memory
from oomph.training.feed import Batch, Feed, evaluation_reader, read
from oomph.training.model import DTYPES, GPT
from oomph.training.optimizer import AnyOptimizer, clip_and_step, learning_rate, set_learning_rate
from oomph.training.ranks.group import OutOfMemoryElsewhereError
from oomph.training.ranks.sharing import AnySharing

MOST_SKIPPED = 20  # float16 steps in a row: by then the scale has fallen to a millionth, so overflow is not the cause


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
    micro_steps: int  # per rank
    reason: str


class BrokenStepError(TrainingError):
    """A step after which the run cannot go on, and which no checkpoint may hold."""

    event = "out of memory"  # its name in metrics.jsonl

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        super().__init__(f"step {step}: {what}")


class NotFiniteError(BrokenStepError):
    """A loss, gradient or weight is NaN or infinite."""

    event = "not finite"


class Interrupted(Exception):  # noqa: N818 - not an error
    """A stop was requested in the middle of a step or evaluation, which has been undone."""


class Trainer:
    """A model in training. A checkpoint holds its state after a step."""

    def __init__(
        self,
        config: TrainConfig,
        sharing: AnySharing,
        optimizer: AnyOptimizer,
        feed: Feed,
        on_shrink: Callable[[SmallerBatch], None] | None = None,
    ) -> None:
        self.config, self.sharing, self.optimizer, self.feed = config, sharing, optimizer, feed
        self.ranks, self.device = sharing.ranks, feed.device
        self.step = 0
        self._random: dict[str, Tensor] | None = None  # before the step, if another rank may be lost during it
        self.alike = 0  # steps in a row with the same sizes
        self.skipped = 0  # steps in a row that float16's scaler skipped
        self.batch_size = config.batch_size
        self.micro_steps = config.gradient_accumulation_steps // self.ranks.size
        half = config.autocast and config.dtype != "float32"
        self.half = DTYPES[config.dtype or "float32"] if half else None  # FSDP gathers weights in this dtype
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.half is torch.float16)
        if config.compile:
            torch.compiler.reset()  # else the sizes of an earlier run in this process make this one's dynamic
        self._use(sharing.model)
        self.parameters = sharing.parameters
        self.average = [p.detach().clone() for p in self.parameters] if config.ema else []
        self.on_shrink = on_shrink
        self.stop_asked: Callable[[], bool] = lambda: False  # checked between micro-steps
        self.rate_at: Callable[[int], float] = lambda step: learning_rate(step, config)

    def _use(self, model: GPT) -> None:
        """Train this model. A chunked loss is called after the compiled trunk; an unchunked one is compiled with it."""
        self.model = model
        self._loss: Callable[[Tensor, Tensor], Tensor] = model
        if self.config.compile and not self.sharing.in_lockstep:  # FSDP's blocks are compiled one by one
            if self.config.loss_chunk:
                model.trunk = torch.compile(model.trunk)  # type: ignore[method-assign]
            else:
                self._loss = torch.compile(model.forward)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.half is None or self.sharing.in_lockstep:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.half)

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of one batch."""
        with self._autocast():
            return self._loss(x, y)

    def train_step(self) -> StepResult:
        """One optimizer step over the next windows.

        Raises `NotFiniteError` before any weight changes, and `Interrupted` if asked to stop half-way.
        """
        # The first steps may compile, on one rank longer than on another; from then on they keep pace.
        self.ranks.keep_pace(self.alike > 1 or not self.config.compile)
        try:
            return self._train_step()
        except LostRankError:
            if self._random is not None:
                self._undo(self._random)  # no weight has changed yet: the first rank can save the state before the step
            raise
        finally:
            self.ranks.keep_pace(False)

    def _train_step(self) -> StepResult:
        rate = self.rate_at(self.step)
        set_learning_rate(self.optimizer, rate)
        loss = self._retry_smaller("training", self._accumulate)
        gradients = self.sharing.reduced(loss)
        if self.scaler.is_enabled():
            self.scaler.unscale_(cast(torch.optim.Optimizer, self.optimizer))  # it only reads the groups
        norm = self.sharing.norm(gradients)
        loss_value, norm_value = torch.stack([loss, norm.float()]).tolist()  # the step's only wait for the device
        overflowed = self.scaler.is_enabled() and math.isfinite(loss_value) and not math.isfinite(norm_value)
        if not overflowed:
            if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
                bad_loss = not math.isfinite(loss_value)
                what = f"the loss is {loss_value}" if bad_loss else f"the gradient norm is {norm_value}"
                raise NotFiniteError(self.step, f"{what}; stopped before the optimizer step")
            self._optimizer_step(gradients, norm, norm_value)
            self._follow()
        self._count_skipped(overflowed, norm_value)
        if self.scaler.is_enabled():
            self._update_scale(overflowed)
        del gradients
        self.optimizer.zero_grad()
        result = StepResult(self.step, loss_value, norm_value, rate, overflowed)
        self.feed.advance()
        self.alike += 1
        self.step += 1
        return result

    def _update_scale(self, overflowed: bool) -> None:
        """Lower the loss scale after an overflow, raise it after many steps without one.

        The norm says on all ranks whether a step overflowed; a scaler sees only its own rank's parts of the gradients.
        """
        for found in self.scaler._found_inf_per_device(cast(torch.optim.Optimizer, self.optimizer)).values():
            found.fill_(float(overflowed))
        self.scaler.update()

    def _optimizer_step(self, gradients: list[Tensor], norm: Tensor, norm_value: float) -> None:
        """Clip and update. Only the fused AdamW allocates nothing; the others may run out of memory half-way."""
        limit = self.config.grad_clip
        try:
            clip_and_step(self.optimizer, gradients, norm, 0 < limit < norm_value, limit)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            what = "out of memory in the optimizer's step, which leaves the weights half updated"
            raise BrokenStepError(self.step, f"{what}; --optimizer=adamw --optimizer_loop=fused needs none") from None

    def _follow(self) -> None:
        """Move the average towards the new weights; at first quickly, since it began with untrained ones."""
        if self.average:
            decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the averaged weights, if there are any. Swapped, not copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        if self.average:
            self.sharing.swap(self.average)

    def _count_skipped(self, overflowed: bool, norm: float) -> None:
        """Count skipped steps: too large a scale is lowered within a few steps; if no scale helps, the run stops."""
        self.skipped = self.skipped + 1 if overflowed else 0
        if self.skipped >= MOST_SKIPPED:
            what = f"the gradient norm was not finite in {MOST_SKIPPED} steps in a row (now {norm})"
            raise NotFiniteError(self.step, f"{what}, however small the loss scale; none of these steps was taken")

    def _accumulate(self) -> Tensor:
        """Add the gradients of this rank's share of the step to `.grad`; return its share of the mean loss."""
        total = torch.zeros((), device=self.device)
        share = 1 / (self.micro_steps * self.ranks.size)
        for index in range(self.micro_steps):
            batch = self._agreed(lambda index=index: self.feed.batch(index, self.batch_size))  # type: ignore[misc]
            self.sharing.begin(last=index == self.micro_steps - 1)
            loss = self.loss_of(*batch) * share
            del batch
            self.feed.look_ahead(index + 1, self.batch_size)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def evaluate(self, folder: Path, split: str) -> float:
        """The mean loss over a split's evaluation windows, always the same; every rank reads its share."""
        reader = evaluation_reader(folder, split, self.config)
        with self.averaged():
            total = self._retry_smaller("evaluation", lambda: self._evaluate(reader))
        self.ranks.sum([total])
        return total.item() / reader.even

    def _evaluate(self, reader: Batches) -> Tensor:
        """The sum of losses over this rank's windows."""
        windows, size = reader.even, self.ranks.size
        first, last = (windows * rank // size for rank in (self.ranks.rank, self.ranks.rank + 1))
        most = -(-windows // size) if self.sharing.in_lockstep else last - first
        total = torch.zeros((), device=self.device)
        self.model.eval()
        try:
            with torch.no_grad():
                for done in range(0, most, self.batch_size):
                    # If all ranks go in lockstep, one that has read all its windows repeats one, and does not count it.
                    at, rows = first + done, min(self.batch_size, last - first - done)
                    place = (at, rows) if rows > 0 else (max(0, first - 1), 1)
                    batch = self._agreed(lambda place=place: self._window(reader, *place))  # type: ignore[misc]
                    total += self.loss_of(*batch) * max(0, rows)
                    del batch
        finally:
            self.model.train()
            self.sharing.forget()
        return total

    def _window(self, reader: Batches, at: int, rows: int) -> Batch:
        return read(reader, at, rows, self.device, self.config.vocab_size)

    def _agreed(self, read_batch: Callable[[], Batch]) -> Batch:
        """The next batch. Raises `Interrupted` if a stop is requested.

        If a micro-step has collectives, all ranks stop when one of them must.
        """
        if not self.sharing.in_lockstep:
            self._stop_if_asked()
            return read_batch()
        unreadable: InputError | None = None
        batch: Batch | None = None
        try:
            batch = read_batch()
        except InputError as error:
            unreadable = error
        stopping, unread = self.ranks.any([self.stop_asked(), unreadable is not None], self.device)
        if batch is None or unread:
            raise unreadable or OtherRankError("another rank cannot read its data")
        if stopping:
            raise Interrupted
        return batch

    def _stop_if_asked(self) -> None:
        if self.stop_asked():
            raise Interrupted

    def weights_are_finite(self) -> bool:
        """Whether every weight is finite, on all ranks."""
        with torch.no_grad():
            finite = bool(torch.stack([parameter.isfinite().all() for parameter in self.parameters]).all())
        return not self.ranks.any([not finite], self.device)[0]

    def _retry_smaller(self, during: str, work: Callable[[], Tensor]) -> Tensor:
        """Do the work. If memory runs out on any rank, undo it on all, halve the micro-batch and do it again."""
        while True:
            random = random_state(self.device)
            self._random = random if self.ranks.size > 1 else None
            failure: str | None = None
            unreadable: InputError | None = None
            result: Tensor | None = None
            stopped = False
            try:
                result = self.ranks.in_lockstep(work) if self.sharing.in_lockstep else work()
            except Interrupted:
                stopped = True
            except InputError as error:  # from reading the data
                unreadable = error
            except OutOfMemoryElsewhereError:
                failure = "on another rank"
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error).splitlines()[0][:200]
            # Only now are the error and its frames gone, so that their tensors can be freed.
            if failure is not None and self.sharing.in_lockstep:
                self._meet_again()
            flags = [failure is not None, stopped, unreadable is not None]
            failed, stopping, unread = self.ranks.any(flags, self.device, in_step=during == "training")
            if not any((failed, stopping, unread)) and result is not None:
                return result
            self._undo(random)
            if unread:
                raise unreadable or OtherRankError("another rank cannot read its data")
            if stopping:
                raise Interrupted
            self._shrink(during, failure or "on another rank")

    def _meet_again(self) -> None:
        """Make new groups and a new model with the same weights, after memory ran out in the middle of collectives."""
        gc.collect()
        self.ranks.meet_again()
        self.ranks.keep_pace(not self.config.compile)
        self._use(self.sharing.renew())
        self.model.train()

    def _undo(self, random: dict[str, Tensor]) -> None:
        """Restore the state before the work, and free all memory."""
        self.optimizer.zero_grad()
        self.sharing.forget()
        self.feed.forget()
        restore_random_state(random, self.device)
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
        self.alike = 0
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


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the state of torch's random number generators: the host's, and the device's if it is a GPU."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
