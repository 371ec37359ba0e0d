"""The programs that a check runs: nanoGPT's training step as published, and oomph's own."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.checking.by_hand import attend_by_hand
from oomph.checking.wire import Job, Stepped
from oomph.config import TrainConfig
from oomph.devices.busy import waited_s, waits_s
from oomph.step.gpt_eager_run import attends_by_hand
from oomph.training.distributed import Ranks
from oomph.training.feed import Batch, Feed
from oomph.training.model import GPT
from oomph.training.optimizer import groups, make_optimizer
from oomph.training.trainer import DTYPES, Shrunk, Trainer


class OutOfRoomError(Exception):
    """Memory ran out in a step of a program that would have gone on with a smaller micro-batch."""


class Program(Protocol):
    """Something that does one optimizer step at a time, and tells when each part of it was over."""

    def do_step(self) -> Stepped: ...


def make_program(job: Job) -> Program:
    """The program of the config's trainer, with model, optimizer and data in place."""
    torch.manual_seed(job.config.seed)
    device = torch.device(job.device)
    config = replace(job.config, gradient_accumulation_steps=job.micro_steps)
    feed = Feed(Path(job.data), config, Ranks(), device) if job.data else cast(Feed, RandomFeed(config, device))
    model = GPT(config)
    if attends_by_hand(config):
        attend_by_hand(model)
    model.to(device=device, dtype=torch.float32 if config.autocast else DTYPES[config.dtype or "float32"])
    return OomphSteps(config, model, feed) if config.trainer == "oomph" else NanogptSteps(config, model, feed)


class RandomFeed:
    """Batches of random tokens, one fetched ahead, for a set that is not there. What of a `Feed` the programs use."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.device, self.vocab_size, self.block_size = device, config.vocab_size, config.block_size
        self._ahead: Batch | None = None

    def batch(self, _index: int, rows: int) -> Batch:
        ahead, self._ahead = self._ahead, None
        return ahead or (self._draw(rows), self._draw(rows))

    def look_ahead(self, index: int, rows: int) -> None:
        self._ahead = self.batch(index, rows)

    def forget(self) -> None:
        self._ahead = None

    def advance(self) -> None:
        """Random tokens have no position."""

    def _draw(self, rows: int) -> Tensor:
        return torch.randint(self.vocab_size, (rows, self.block_size)).to(self.device)


class Clock:
    """Moments of a step. On a GPU the host runs ahead, so only the end waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[float] = []
        self.waits: dict[str, float] = {}

    def start(self) -> None:
        self.waits = waits_s()
        self.marks = [time.perf_counter()]

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def stepped(self, step: int, loss: float) -> Stepped:
        """The step's three parts: marks are its start, the end of each micro-step, and the end of the last again."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start, first, last = self.marks[0], self.marks[1], self.marks[-1]
        end_s = time.perf_counter() - last
        return Stepped(step, first - start, last - first, end_s, loss, waited_s(self.waits))


class WithLoss(nn.Module):
    """nanoGPT's forward: head and loss inside the model, and the logits handed back with the loss."""

    def __init__(self, model: GPT, return_logits: bool) -> None:
        super().__init__()
        self.model, self.return_logits = model, return_logits

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor]:
        logits: Tensor = self.model.lm_head(self.model.trunk(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)
        return (logits if self.return_logits else None), loss


class NanogptSteps:
    """nanoGPT's loop: the caller keeps each micro-step's logits until the next one's are there."""

    def __init__(self, config: TrainConfig, model: GPT, feed: Feed) -> None:
        self.config, self.feed, self.clock = config, feed, Clock(feed.device)
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            groups(self.parameters, config),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            fused=config.optimizer_loop == "fused",
            foreach=config.optimizer_loop == "foreach",
        )
        half = config.autocast and config.dtype != "float32" and feed.device.type == "cuda"
        self.half = DTYPES[config.dtype or "float32"] if half else None
        self.scaler = torch.amp.GradScaler(feed.device.type, enabled=self.half is torch.float16)
        with_loss = WithLoss(model, bool(config.return_logits))
        self.model: Any = torch.compile(with_loss) if config.compile else with_loss
        self.batch = feed.batch(0, config.batch_size)
        self.fetched = self.done = 0
        self.kept: Tensor | None = None

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half is None else torch.autocast(self.feed.device.type, dtype=self.half)

    def do_step(self) -> Stepped:
        """One optimizer step."""
        micro_steps = self.config.gradient_accumulation_steps
        self.clock.start()
        for _ in range(micro_steps):
            with self._autocast():
                self.kept, loss = self.model(*self.batch)
                loss = loss / micro_steps
            self.fetched += 1
            self.batch = self.feed.batch(self.fetched, self.config.batch_size)
            self.scaler.scale(loss).backward()
            self.clock.mark()
        if self.config.grad_clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return self.clock.stepped(self.done - 1, loss.item() * micro_steps)


class OomphSteps(Trainer):
    """`oomph train`'s own trainer, with a look at the clock where a micro-step begins."""

    def __init__(self, config: TrainConfig, model: GPT, feed: Feed) -> None:
        super().__init__(config, model, make_optimizer(model, config), feed, Ranks(), _no_room)
        self.clock = Clock(feed.device)

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        self.clock.mark()
        return super().loss_of(x, y)

    def _accumulate(self) -> Tensor:
        total = super()._accumulate()
        self.clock.mark()
        return total

    def do_step(self) -> Stepped:
        """One optimizer step. The first micro-step's beginning is no end of another."""
        self.clock.start()
        loss = self.train_step().loss
        del self.clock.marks[1]
        return self.clock.stepped(self.step - 1, loss)


def _no_room(shrunk: Shrunk) -> None:
    raise OutOfRoomError(shrunk.reason)
