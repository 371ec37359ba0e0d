"""Text from a trained model: one token at a time, with the keys and values of the earlier ones kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oomph.config import TrainConfig
from oomph.errors import InputError, Problem
from oomph.training import checkpoint
from oomph.training.cache import KeyValues
from oomph.training.model import GPT
from oomph.training.named import load_weights
from oomph.training.state import saved_config

GROUP = 64  # samples generated at once


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8  # 0: always the likeliest
    top_k: int | None = 200  # of the k likeliest only
    top_p: float | None = None  # of the likeliest that together have this probability
    seed: int = 1337


@dataclass(frozen=True)
class Opened:
    """A model, and where it comes from."""

    model: GPT
    config: TrainConfig
    run: Path  # its run's folder
    data_folder: Path | None  # where its data was


def open_model(path: Path, device: torch.device | str = "cpu") -> Opened:
    """The model in a run's best or last checkpoint, or in the checkpoint named; nanoGPT's too."""
    if path.is_dir():
        named = [path / checkpoint.BEST] if (path / checkpoint.BEST).is_file() else checkpoint.saved(path)[-1:]
        if not named:
            raise InputError(Problem(str(path), "no checkpoint in this folder", allowed="a run's folder"))
        path = named[0]
    content = checkpoint.load(path)
    config = saved_config(content, str(path)).config
    model = GPT(config)
    load_weights(model, content["model"], str(path))
    data = (content.get("oomph") or {}).get("data_folder")
    return Opened(model.to(device).eval(), config, checkpoint.run_of(path), Path(data) if data else None)


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[GPT, TrainConfig]:
    """The model of a run or a checkpoint, and its config."""
    opened = open_model(path, device)
    return opened.model, opened.config


class Context:
    """The tokens so far. Up to the block size each new one costs one token's work; beyond it the window slides, and
    since positions are learned all of it is computed anew, as nanoGPT does from the start."""

    def __init__(self, model: GPT, tokens: Tensor, use_cache: bool = True) -> None:
        self.model, self.tokens, self.use_cache = model, tokens, use_cache
        self.past = self._empty()

    def _empty(self) -> list[KeyValues]:
        config = self.model.config
        shape = self.tokens.size(0), config.n_head, config.block_size, config.n_embd // config.n_head
        return [KeyValues(*shape, like=self.model.lm_head.weight) for _ in range(config.n_layer)]

    def logits(self) -> Tensor:
        """Logits (samples, vocabulary) of the token that comes next."""
        block_size = self.model.config.block_size
        seen = self.past[0].length
        if not self.use_cache or self.tokens.size(1) > block_size:
            self.past, seen = self._empty(), max(0, self.tokens.size(1) - block_size)
        return self.model.next_logits(self.tokens[:, seen:], self.past)

    def append(self, drawn: Tensor) -> None:
        """Take in one token a sample."""
        self.tokens = torch.cat([self.tokens, drawn.unsqueeze(1)], dim=1)


def generate(
    model: GPT,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    samples: int = 1,
    stop: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """`samples` continuations of up to `count` tokens each, without the prompt; each ends before the token `stop`."""
    return [
        sample
        for group in generate_groups(model, prompt, count, sampling, samples, stop, use_cache)
        for sample in group
    ]


def generate_groups(
    model: GPT,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    samples: int = 1,
    stop: int | None = None,
    use_cache: bool = True,
) -> Iterator[list[list[int]]]:
    """The same, some at a time: however many there are to be, memory holds one group."""
    randomness = torch.Generator(model.lm_head.weight.device).manual_seed(sampling.seed)
    for first in range(0, samples, GROUP):
        yield _together(model, prompt, count, sampling, min(GROUP, samples - first), stop, use_cache, randomness)


def _together(
    model: GPT,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    samples: int,
    stop: int | None,
    use_cache: bool,
    randomness: torch.Generator,
) -> list[list[int]]:
    device = model.lm_head.weight.device
    context = Context(model, torch.tensor([prompt] * samples, device=device), use_cache)
    made: list[list[int]] = [[] for _ in range(samples)]
    done = [False] * samples
    for _ in range(count):
        drawn = draw(context.logits(), sampling, randomness)
        for row, token in enumerate(drawn.tolist()):
            done[row] = done[row] or token == stop
            if not done[row]:
                made[row].append(token)
        if all(done):
            break
        context.append(drawn)
    return made


def draw(logits: Tensor, sampling: Sampling, randomness: torch.Generator) -> Tensor:
    """One token a row of logits (samples, vocabulary)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # so that no exponent overflows
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p is not None:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=randomness).squeeze(1)


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Only the likeliest tokens that together reach the share; the one that crosses it stays."""
    ordered, places = probabilities.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(before >= share, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, places, kept)
