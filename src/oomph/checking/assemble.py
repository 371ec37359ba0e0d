"""A job's program, assembled: its model, adapters and data, in the loop of its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from oomph.checking.launch import Job
from oomph.checking.programs import (
    GPTWithLoss,
    HfSteps,
    LoopSteps,
    NanogptSteps,
    OomphSteps,
    PlainSteps,
    Stepwise,
    use_plain_attention,
)
from oomph.config import TrainConfig
from oomph.config.adapters import listed
from oomph.config.programs import TRANSFORMERS
from oomph.step.models.gpt2 import attends_by_hand
from oomph.step.models.lora import ALL_LINEAR
from oomph.step.trace.hugging_face import CausalWithLoss, causal_model_builder
from oomph.training.feed import Batch, Feed
from oomph.training.model import DTYPES, GPT
from oomph.training.ranks.group import Ranks

if TYPE_CHECKING:
    from oomph.checking.sft import SftSteps


def make_program(job: Job) -> Stepwise | SftSteps:
    """The program of the config's trainer, with its model, optimizer and data."""
    torch.manual_seed(job.config.seed)
    device = torch.device(job.device)
    config = replace(job.config, gradient_accumulation_steps=job.micro_steps)
    if job.model or config.trainer in TRANSFORMERS:
        return _transformers_program(job, config, device)
    feed, model = _feed(job, config, device), GPT(config)
    if attends_by_hand(config):
        use_plain_attention(model)
    model.cast()
    model.to(device)
    if config.trainer == "oomph":
        return OomphSteps(config, model, feed)
    return NanogptSteps(config, GPTWithLoss(model, bool(config.return_logits)), feed)


def _transformers_program(job: Job, config: TrainConfig, device: torch.device) -> LoopSteps | SftSteps:
    """A program around a transformers model: the config's, or that of a config.json."""
    model: Any = causal_model_builder(Path(job.model) if job.model else config, bool(config.checkpoint_layers))()
    if job.model:
        model.to(torch.float32 if config.autocast else DTYPES[config.dtype or "float32"])
    model.to(device)
    config = replace(config, vocab_size=model.get_input_embeddings().num_embeddings)
    if config.method != "full":
        model = with_adapters(model, config)
    feed = _feed(job, config, device)
    if config.trainer == "hf":
        return HfSteps(config, model, feed, job.config.gradient_accumulation_steps)
    if config.trainer == "torch":
        return PlainSteps(config, model, feed)
    if config.trainer == "trl":
        from oomph.checking.sft import SftSteps  # needs trl

        return SftSteps(config, model, feed)
    return NanogptSteps(config, CausalWithLoss(model), feed)


def with_adapters(model: nn.Module, config: TrainConfig) -> nn.Module:
    """The model with peft's adapters. With checkpointing, peft makes the model's inputs require a gradient."""
    from peft import LoraConfig, get_peft_model

    targets = config.lora_targets or ALL_LINEAR
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=round(config.lora_alpha),
        lora_dropout=config.lora_dropout,
        target_modules=targets if targets == ALL_LINEAR else [part.strip() for part in targets.split(",")],
        use_dora=config.method == "dora",
        modules_to_save=listed(config.modules_to_save) or None,
    )
    in_float32 = config.adapter_dtype == "float32"
    found: nn.Module = get_peft_model(model, lora, autocast_adapter_dtype=in_float32)
    return found


def _feed(job: Job, config: TrainConfig, device: torch.device) -> Feed:
    return Feed(Path(job.data), config, Ranks(), device) if job.data else cast(Feed, RandomFeed(config, device))


class RandomFeed:
    """Batches of random tokens, one prefetched, when there is no data. Has the part of `Feed` that the programs use."""

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
        """Does nothing: random tokens have no position."""

    def _draw(self, rows: int) -> Tensor:
        return torch.randint(self.vocab_size, (rows, self.block_size)).to(self.device)
