"""The programs that a check runs: nanoGPT's training step as published, oomph's own, and transformers' loops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomph.checking.launch import StepDone
from oomph.config import TrainConfig
from oomph.devices.cpu_rates import processor_s, waited_s, waits_s
from oomph.step.tensor.layout import HALVES
from oomph.step.trace.hugging_face import CausalWithLoss
from oomph.training.feed import Batch, Feed
from oomph.training.model import DTYPES, GPT
from oomph.training.optimizer import make_optimizer, torch_optimizer
from oomph.training.ranks.group import Ranks
from oomph.training.ranks.sharing import Whole
from oomph.training.trainer import SmallerBatch, Trainer


class PlainAttention(nn.Module):
    """nanoGPT's attention without scaled_dot_product_attention: every score in memory, and its own mask."""

    triangle: Tensor

    def __init__(self, c_attn: nn.Linear, c_proj: nn.Linear, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads, self.dropout = c_attn, c_proj, heads, dropout
        self.register_buffer("triangle", torch.ones(tokens, tokens).tril().view(1, 1, tokens, tokens))

    def forward(self, x: Tensor, _rotary: None = None, _past: None = None) -> Tensor:
        rows, tokens, width = x.shape
        query, key, value = self.c_attn(x).split(width, dim=2)
        key = key.view(rows, tokens, self.heads, -1).transpose(1, 2)  # (rows, heads, tokens, head size), all three
        query = query.view(rows, tokens, self.heads, -1).transpose(1, 2)
        value = value.view(rows, tokens, self.heads, -1).transpose(1, 2)
        weights = (query @ key.transpose(-2, -1)) * (1.0 / math.sqrt(key.size(-1)))
        weights = weights.masked_fill(self.triangle[:, :, :tokens, :tokens] == 0, -math.inf)
        weights = F.softmax(weights, dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        mixed = (weights @ value).transpose(1, 2).contiguous().view(rows, tokens, width)
        return F.dropout(self.c_proj(mixed), self.dropout, self.training)


def use_plain_attention(model: GPT) -> None:
    """Replace every block's attention, keeping its weights."""
    config = model.config
    for block in model.blocks():
        attention: Any = block.attn
        block.attn = PlainAttention(
            attention.c_attn, attention.c_proj, config.n_head, config.block_size, config.dropout
        )


class OutOfMemoryInStepError(Exception):
    """Memory ran out in a step that `oomph train` would repeat with a smaller micro-batch."""


class Stepwise:
    """A program that does one step at a time."""

    def do_step(self) -> StepDone:
        """One optimizer step."""
        raise NotImplementedError

    def run(self, count: int, done: Callable[[StepDone], None]) -> None:
        """Do `count` optimizer steps, each reported when it is done."""
        for _ in range(count):
            done(self.do_step())


class StepTimer:
    """The times of a step. On a GPU the host runs ahead, so only the end waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[float] = []
        self.waits: dict[str, float] = {}
        self.processor_s = 0.0

    def start(self) -> None:
        self.waits = waits_s()
        self.processor_s = processor_s()
        self.marks = [time.perf_counter()]

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def stepped(self, step: int, loss: float) -> StepDone:
        """The step's three parts. The marks are its start and the end of each micro-step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start, first, last = self.marks[0], self.marks[1], self.marks[-1]
        end_s = time.perf_counter() - last
        had_s = processor_s() - self.processor_s
        return StepDone(step, first - start, last - first, end_s, loss, waited_s(self.waits), had_s)


class LoopSteps(Stepwise):
    """A loop around a model with torch's own optimizer. Programs differ in their micro-steps."""

    def __init__(self, config: TrainConfig, model: nn.Module, feed: Feed) -> None:
        self.config, self.feed, self.timer = config, feed, StepTimer(feed.device)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer: Any = torch_optimizer(model, config)  # a pair, if it is Muon
        self.scaler = torch.amp.GradScaler(feed.device.type, enabled=half(config) is torch.float16)
        self.model: Any = torch.compile(model) if config.compile else model
        self.fetched = self.done = 0

    def fetch(self) -> Batch:
        """The next batch."""
        self.fetched += 1
        return self.feed.batch(self.fetched - 1, self.config.batch_size)

    def micro_steps(self) -> Tensor:
        """Every forward and backward of a step, with a mark of the timer after each; returns the loss."""
        raise NotImplementedError

    def do_step(self) -> StepDone:
        """One optimizer step."""
        self.timer.start()
        with attention(self.config):
            loss = self.micro_steps()
        if self.config.grad_clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.config.zero_grad == "after_step":
            self.optimizer.zero_grad()
        self.done += 1
        return self.timer.stepped(self.done - 1, loss.item())


def half(config: TrainConfig) -> torch.dtype | None:
    """The dtype of autocast; None if it is off."""
    return DTYPES[config.dtype] if config.autocast and config.dtype in HALVES else None


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast that a config asks for."""
    return nullcontext() if half(config) is None else torch.autocast(device.type, dtype=half(config))


def attention(config: TrainConfig) -> AbstractContextManager[Any]:
    """Restricts scaled_dot_product_attention to the config's kernel; flash is its default, so it is not restricted."""
    kernels = {"efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "math": [SDPBackend.MATH]}
    found: list[SDPBackend] | None = kernels.get(config.attention)
    return nullcontext() if found is None else sdpa_kernel(found)


class GPTWithLoss(nn.Module):
    """nanoGPT's forward: head and loss inside the model, and the logits returned with the loss."""

    def __init__(self, model: GPT, return_logits: bool) -> None:
        super().__init__()
        self.model, self.return_logits = model, return_logits

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor]:
        logits: Tensor = self.model.lm_head(self.model.trunk(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)
        return (logits if self.return_logits else None), loss


class NanogptSteps(LoopSteps):
    """nanoGPT's loop: the caller keeps each micro-step's logits until the next ones exist."""

    def __init__(self, config: TrainConfig, model: GPTWithLoss | CausalWithLoss, feed: Feed) -> None:
        super().__init__(config, model, feed)
        self.batch = self.fetch()
        self.kept: Tensor | None = None

    def micro_steps(self) -> Tensor:
        count, loss = self.config.gradient_accumulation_steps, torch.zeros(())
        for _ in range(count):
            with autocast(self.config, self.feed.device):
                self.kept, loss = self.model(*self.batch)
                loss = loss / count
            self.batch = self.fetch()
            self.scaler.scale(loss).backward()
            self.timer.mark()
        return loss * count


class TrainerModel(nn.Module):
    """A transformers model as accelerate prepares it: under autocast, and then with float32 logits."""

    def __init__(self, config: TrainConfig, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.config, self.model, self.device = config, model, device

    def forward(self, **batch: Any) -> tuple[Tensor, Tensor]:
        with autocast(self.config, self.device):
            outputs = self.model(**batch)
        return outputs.logits if half(self.config) is None else outputs.logits.float(), outputs.loss


def trainers_adafactor(torchs: Any, config: TrainConfig) -> Any:
    """transformers' own Adafactor, with the Trainer's arguments and the same groups as torch's."""
    from transformers.optimization import Adafactor

    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in torchs.param_groups]
    return Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)  # type: ignore[no-untyped-call]


class HfSteps(LoopSteps):
    """The loop of transformers' Trainer: a step's batches are fetched at once, outputs freed before backward.

    It is reimplemented, because the Trainer itself needs accelerate and a dataset, and takes as much memory: on a CPU
    one batch more, which its loader has prefetched (5.22, eager and compiled, float32 and bfloat16).
    """

    def __init__(self, config: TrainConfig, model: nn.Module, feed: Feed, batches: int) -> None:
        """`batches`: the number in a step, though on a CPU not all of them may be run."""
        super().__init__(config, TrainerModel(config, model, feed.device), feed)
        if config.optimizer == "adafactor":
            self.optimizer = trainers_adafactor(self.optimizer, config)
        self.batches = batches
        self.takes_items = any(each.kind is each.VAR_KEYWORD for each in signature(model.forward).parameters.values())

    def micro_steps(self) -> Tensor:
        batches = [hf_batch(self.config, *self.fetch()) for _ in range(self.batches)]
        count = self.config.gradient_accumulation_steps
        items = torch.stack([batch["labels"][:, 1:].ne(-100).sum() for batch in batches[:count]]).sum()
        losses = [self.micro_step(batch, items) for batch in batches[:count]]
        return torch.stack(losses).sum()

    def micro_step(self, batch: dict[str, Any], items: Tensor) -> Tensor:
        """training_step: the model divides its loss by the tokens in all batches, or the loop by the number of them."""
        loss: Tensor = self.model(**batch, **({"num_items_in_batch": items} if self.takes_items else {}))[1]
        if not self.takes_items:
            loss = loss / self.config.gradient_accumulation_steps
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.timer.mark()
        return loss.detach()


class PlainSteps(LoopSteps):
    """The plainest loop around a transformers model: its outputs are held until the next ones exist."""

    def __init__(self, config: TrainConfig, model: nn.Module, feed: Feed) -> None:
        super().__init__(config, model, feed)
        self.outputs: Any = None
        self.batch: dict[str, Any] = {}

    def micro_steps(self) -> Tensor:
        for index in range(self.config.gradient_accumulation_steps):
            self.batch = hf_batch(self.config, *self.fetch())
            with autocast(self.config, self.feed.device):
                self.outputs = self.model(**self.batch)
            if index == 0:
                self.optimizer.zero_grad()
            self.scaler.scale(self.outputs.loss).backward()
            self.timer.mark()
        loss: Tensor = self.outputs.loss
        return loss.detach()


def hf_batch(config: TrainConfig, tokens: Tensor, _targets: Tensor) -> dict[str, Any]:
    """A batch for transformers, which shifts the labels itself; padding is one token per sequence."""
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone(), "use_cache": config.use_cache}
    if config.padding:
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][:, 0] = 0
    return batch


class OomphSteps(Trainer, Stepwise):
    """`oomph train`'s trainer, with the time taken at the start of each micro-step."""

    def __init__(self, config: TrainConfig, model: GPT, feed: Feed) -> None:
        super().__init__(config, Whole(model, Ranks()), make_optimizer(model, config), feed, _raise_out_of_memory)
        self.timer = StepTimer(feed.device)

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        self.timer.mark()
        return super().loss_of(x, y)

    def _accumulate(self) -> Tensor:
        total = super()._accumulate()
        self.timer.mark()
        return total

    def do_step(self) -> StepDone:
        """One optimizer step. The mark at the first micro-step's start is dropped."""
        self.timer.start()
        loss = self.train_step().loss
        del self.timer.marks[1]
        return self.timer.stepped(self.step - 1, loss)


def _raise_out_of_memory(shrunk: SmallerBatch) -> None:
    raise OutOfMemoryInStepError(shrunk.reason)
