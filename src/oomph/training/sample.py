"""`oomph sample`: text from a trained model, one token at a time, with cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oomph.config import TrainConfig
from oomph.config.shape import head_size, key_value_heads
from oomph.data.manifest import MANIFEST, META_PICKLE, find_dataset
from oomph.data.tokenizer import GPT2_VOCAB_SIZE, Gpt2Tokenizer, Tokenizer, tokenizer_of
from oomph.errors import InputError, Problem
from oomph.training import checkpoint, hugging_face, weights
from oomph.training.folder import KEPT_TOKENIZER
from oomph.training.model import GPT, KeyValues

GROUP = 64  # samples generated at a time
GPT2_PADDED_VOCAB_SIZE = 50304  # GPT-2's, rounded up by nanoGPT


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8  # 0: always the most likely token
    top_k: int | None = 200  # only from the k most likely tokens
    top_p: float | None = None  # only from the most likely tokens that together have this probability
    seed: int = 1337


@dataclass(frozen=True)
class OpenedModel:
    """A model and the run it comes from."""

    model: GPT
    config: TrainConfig
    run: Path  # the run's folder
    data_folder: Path | None  # where the training data was


def open_model(path: Path, device: torch.device | str = "cpu") -> OpenedModel:
    """The model in a run's best or last checkpoint, in the given checkpoint, or in a Hugging Face folder."""
    if any((path / name).is_file() for name in (hugging_face.SINGLE, hugging_face.INDEX)):
        config = hugging_face.huggingface_config(path)
        model = GPT(config)
        weights.load_weights(model, weights.read_weights(path), str(path))
        return OpenedModel(model.to(device).eval(), config, path, None)
    if path.is_dir() and not checkpoint.is_folder(path):
        named = [path / checkpoint.BEST] if (path / checkpoint.BEST).exists() else checkpoint.saved(path)[-1:]
        if not named:
            raise InputError(Problem(str(path), "no checkpoint in this folder", allowed="a run's folder"))
        path = named[0]
    content = weights.read_checkpoint(path)
    config = checkpoint.saved_config(content, str(path)).config
    model = GPT(config)
    weights.load_weights(model, content.get("ema") or content["model"], str(path))
    data = (content.get("oomph") or {}).get("data_folder")
    return OpenedModel(model.to(device).eval(), config, checkpoint.run_of(path), Path(data) if data else None)


def tokenizer_of_run(
    run: Path, dataset: str, vocab_size: int, tokenizer_dir: Path | None = None, data_folder: Path | None = None
) -> Tokenizer:
    """The tokenizer kept in a run's folder, else the one of its data.

    If the data is gone too, GPT-2's, as in nanoGPT's sample.py, but only for a model with GPT-2's vocabulary size.
    """
    kept = run / KEPT_TOKENIZER
    if any((kept / name).is_file() for name in (MANIFEST, META_PICKLE)):
        return tokenizer_of(kept, tokenizer_dir, vocab_size)
    try:
        folder = find_dataset(dataset, (Path(), run, run.parent, run.parent.parent))
    except InputError:
        if data_folder is not None and data_folder.is_dir():
            return tokenizer_of(data_folder, tokenizer_dir, vocab_size)
        if not GPT2_VOCAB_SIZE <= vocab_size <= GPT2_PADDED_VOCAB_SIZE:
            raise InputError(
                Problem(
                    str(run),
                    "unknown tokenizer: the run's folder has none, and its data is not here",
                    found=f"dataset {dataset!r}, vocab_size = {vocab_size}",
                    allowed="--dataset FOLDER with the data it was trained on",
                )
            ) from None
        return Gpt2Tokenizer(tokenizer_dir)
    return tokenizer_of(folder, tokenizer_dir, vocab_size)


class Context:
    """The tokens so far.

    Up to the block size, each new token costs one token's work. Beyond it the window slides, and since positions are
    counted from its beginning the whole window is computed again, as nanoGPT does from the start.
    """

    def __init__(self, model: GPT, tokens: Tensor, use_cache: bool = True) -> None:
        self.model, self.tokens, self.use_cache = model, tokens, use_cache
        self.past = self._empty()

    def _empty(self) -> list[KeyValues]:
        config = self.model.config
        shape = self.tokens.size(0), key_value_heads(config), config.block_size, head_size(config)
        return [KeyValues(*shape, like=self.model.lm_head.weight) for _ in range(config.n_layer)]

    def logits(self) -> Tensor:
        """Logits (samples, vocabulary) of the next token."""
        block_size = self.model.config.block_size
        seen = self.past[0].length
        if not self.use_cache or self.tokens.size(1) > block_size:
            self.past, seen = self._empty(), max(0, self.tokens.size(1) - block_size)
        return self.model.next_logits(self.tokens[:, seen:], self.past)

    def append(self, drawn: Tensor) -> None:
        """Add one token to each sample."""
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
    """The same in groups of `GROUP`, so that memory is bounded however many samples there are."""
    randomness = torch.Generator(model.lm_head.weight.device).manual_seed(sampling.seed)
    for first in range(0, samples, GROUP):
        yield _generate_group(model, prompt, count, sampling, min(GROUP, samples - first), stop, use_cache, randomness)


def _generate_group(
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


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """A prompt and its continuation by at most `count` tokens, always with the same random seed."""
    tokens = prompt_tokens(prompt, tokenizer, model.config.vocab_size)
    (drawn,) = generate(model, tokens, count, Sampling(), stop=tokenizer.end_of_text)
    return prompt + tokenizer.decode(drawn)


def prompt_tokens(prompt: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The prompt's tokens, at least one. Raises `InputError` if the model does not have them."""
    tokens = [int(token) for token in tokenizer.encode([prompt])[0]]
    if not tokens:
        if tokenizer.end_of_text is None:
            raise InputError(Problem("--prompt", "empty, and the vocabulary has no end-of-text to begin with"))
        tokens = [tokenizer.end_of_text]
    if max(tokens) >= vocab_size:
        what = f"the tokenizer {tokenizer.name} makes tokens beyond the model's vocabulary"
        found = f"token {max(tokens)}, vocab_size = {vocab_size}"
        raise InputError(Problem("--prompt", what, found=found, allowed="--dataset NAME: the data it was trained on"))
    return tokens


def draw(logits: Tensor, sampling: Sampling, randomness: torch.Generator) -> Tensor:
    """One token per row of logits (samples, vocabulary)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # avoids overflow
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p is not None:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return torch.multinomial(probabilities, 1, generator=randomness).squeeze(1)


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Zero all but the most likely tokens that together reach `share`; the one that crosses it stays."""
    ordered, places = probabilities.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(before >= share, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, places, kept)
