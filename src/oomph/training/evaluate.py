"""`oomph evaluate`: how good a trained model is, in figures that are comparable between models.

The loss in nats a token depends on the tokenizer; bits per byte of text do not. Multiple choice, as in HellaSwag,
asks which of several endings the model finds most likely after a beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from oomph.data.reader import EVEN, Batches
from oomph.data.tokenizer import Tokenizer
from oomph.errors import InputError, Problem
from oomph.training.feed import read
from oomph.training.loss import head_loss
from oomph.training.model import GPT

ROWS = 8  # windows at a time
_CHUNK = 512  # rows of logits at a time


class Evaluation(msgspec.Struct, frozen=True):
    """The loss of a model on a split."""

    split: str
    tokens: int  # predicted tokens
    loss: float  # nats a token
    text_bytes: int | None  # of those tokens, as UTF-8; None without a tokenizer

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs per byte of text: comparable between tokenizers."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else None

    @property
    def perplexity(self) -> float:
        """The exponential of the loss: how many equally likely tokens it chooses between."""
        return math.exp(self.loss)


@torch.no_grad()
def evaluate_split(model: GPT, folder: Path, split: str, tokens: int | None, tokenizer: Tokenizer | None) -> Evaluation:
    """The mean loss over `tokens` tokens in windows spread evenly over the split, as in training; None: all of it."""
    size, device = model.config.block_size, model.lm_head.weight.device
    windows = 2**62 if tokens is None else max(1, tokens // size)
    reader = Batches(folder, split, batch_size=1, block_size=size, order=EVEN, even=windows)
    total, text_bytes = 0.0, 0
    for first in range(0, reader.even, ROWS):
        rows = min(ROWS, reader.even - first)
        x, y = read(reader, first, rows, device, model.config.vocab_size)
        total += rows * head_loss(model.trunk(x), model.lm_head.weight, y, _CHUNK).item()
        if tokenizer is not None:
            text_bytes += sum(_text_bytes(row, tokenizer) for row in y.tolist())
    counted = None if tokenizer is None else text_bytes
    return Evaluation(split, reader.even * size, total / reader.even, counted)


def _text_bytes(tokens: list[int], tokenizer: Tokenizer) -> int:
    """Bytes of text, without end-of-text tokens. Off by a few if a window's border cuts a character."""
    return len(tokenizer.decode([token for token in tokens if token != tokenizer.end_of_text]).encode())


class Question(msgspec.Struct, frozen=True):
    """One line of a multiple choice, with HellaSwag's names."""

    ctx: str
    endings: list[str]
    label: int


class Choices(msgspec.Struct, frozen=True):
    """How often the right ending was the most likely."""

    questions: int
    accuracy: float  # by the probability of the whole ending
    accuracy_per_token: float  # by the mean over its tokens, so that short endings have no advantage
    chance: float  # accuracy of guessing


def read_questions(path: Path) -> list[Question]:
    """The questions in a JSON Lines file. Raises `InputError` naming the first lines that are wrong."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(Problem(str(path), "cannot be read", found=error.strerror)) from None
    questions, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = msgspec.json.decode(line, type=Question, strict=False)  # HellaSwag's labels may be text
            if len(question.endings) < 2 or not 0 <= question.label < len(question.endings):
                raise ValueError(f"label {question.label} of {len(question.endings)} endings")
            questions.append(question)
        except (msgspec.MsgspecError, ValueError) as error:
            allowed = '{"ctx": "…", "endings": ["…", "…"], "label": 0}'
            problems.append(Problem(f"{path}:{number}", "not a question", str(error)[:120], allowed))
    if not questions and not problems:
        problems.append(Problem(str(path), "no questions in it"))
    if problems:
        raise InputError(problems[:5])
    return questions


def answer(model: GPT, questions: list[Question], tokenizer: Tokenizer) -> Choices:
    """Answer every question."""
    right = right_per_token = 0
    chance = 0.0
    for question in questions:
        scores = [list(_score(model, question.ctx, ending, tokenizer)) for ending in question.endings]
        sums = [sum(each) for each in scores]
        means = [total / max(1, len(each)) for total, each in zip(sums, scores, strict=True)]
        right += sums.index(max(sums)) == question.label
        right_per_token += means.index(max(means)) == question.label
        chance += 1 / len(question.endings)
    count = len(questions)
    return Choices(count, right / count, right_per_token / count, chance / count)


@torch.no_grad()
def _score(model: GPT, beginning: str, ending: str, tokenizer: Tokenizer) -> Iterator[float]:
    """The log-probability of each token of the ending, after as much of the beginning as fits the block."""
    before, after = ([int(token) for token in ids] for ids in tokenizer.encode([beginning, " " + ending.lstrip()]))
    if not before:
        before = [tokenizer.end_of_text or 0]
    after = after[: model.config.block_size]  # only the first tokens of a longer ending
    ids = (before + after)[-model.config.block_size - 1 :]
    tokens = torch.tensor([ids], device=model.lm_head.weight.device)
    hidden: Tensor = model.trunk(tokens[:, :-1])[0, -len(after) :]
    logits = F.log_softmax(model.lm_head(hidden).float(), -1)
    yield from logits.gather(1, tokens[0, -len(after) :, None])[:, 0].tolist()
