"""The lengths of a data set's samples: percentiles, given or counted in a file, and what they mean for a batch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from oomph.config.layer import SourcedValue
from oomph.config.schema import TrainConfig
from oomph.errors import InputError, Problem

# English and code take about four bytes a token (OpenAI, "What are tokens and how to count them?").
BYTES_PER_TOKEN = 4
# Kept of a file, closer where it is decided how far a batch is padded.
PERCENTILES = (*range(0, 85, 5), *range(85, 100), 99.5, 99.9, 100)
LENGTH_FROM_DATA = ("hf", "torch", "torchtune", "litgpt")  # programs without a maximum length of their own
MOST_POINTS = 64
MOST_TOKENS = 10**8
FORM = "a file of samples (.jsonl, .json) or of lengths (.txt), or percentiles such as p50:300,p95:1200,max:2048"
COUNTS = ("length", "num_tokens", "n_tokens", "token_count")  # fields with a number of tokens
TOKENS = ("input_ids", "tokens", "token_ids")  # fields with the tokens themselves
# Fields with text: of plain text, of instructions (Alpaca's), of prompts and completions, and of a turn in a chat.
TEXTS = (
    "text", "instruction", "input", "output", "system", "prompt", "completion", "response", "question", "answer",
    "content", "value",
)  # fmt: skip
CHATS = ("messages", "conversations", "conversation", "dialog", "prompt", "completion")  # fields with a list of turns
_POINT = re.compile(r"\s*(?:p(\d{1,2}(?:\.\d{1,3})?|100)|max)\s*:\s*(\d{1,9})\s*")

Points = tuple[tuple[float, float], ...]  # (share of the samples, tokens that they have at most), rising


class Counted(NamedTuple):
    """What a file of samples says."""

    samples: int
    percentiles: str
    estimated: bool  # from the text's bytes


def points(text: str) -> Points | None:
    """Percentiles as written, from the shortest to the longest; None if they are not written so, or do not rise."""
    parts = text.split(",")
    found = [_POINT.fullmatch(part) for part in parts[:MOST_POINTS]]
    if len(parts) > MOST_POINTS or not all(found):
        return None
    given = [(float(each[1] or 100) / 100, float(each[2])) for each in found if each]
    if given[0][0] > 0:
        given.insert(0, (0.0, 1.0))  # the shortest is not told: any length up to the first that is
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(given))
    possible = given[0][1] >= 1 and given[-1][1] <= MOST_TOKENS
    return tuple(given) if rising and possible and given[-1][0] == 1.0 else None


def apply_lengths(values: dict[str, SourcedValue], *, confined: bool = False) -> tuple[list[str], list[Problem]]:
    """Replace a file in `lengths` by its percentiles, and bound rows that are not packed by the longest sample; returns
    notes and problems. `confined`: no file is read."""
    said, notes = values["lengths"], list[str]()
    if not isinstance(text := said.value, str):
        return notes, []
    if values["mean_length"].firm:
        return notes, [Problem(said.where, "lengths have a mean of their own", allowed="no mean_length")]
    if points(text) is None:
        if confined or not _is_file(text):
            return notes, [Problem(said.where, "neither a file nor percentiles", text[:60], FORM)]
        try:
            found = count(Path(text), text)
        except InputError as error:
            return notes, list(error.problems)
        if found.estimated:
            how = f"estimated from {BYTES_PER_TOKEN} bytes a token; lengths or input_ids would be exact"
            notes.append(f"{text}: samples' lengths are {how}")
        text = found.percentiles
        values["lengths"] = said._replace(value=text)
        if not values["num_samples"].firm:
            values["num_samples"] = SourcedValue(found.samples, said.where)
    block = values["block_size"]
    by_data = not block.firm and values["trainer"].value in LENGTH_FROM_DATA
    shorter = isinstance(block.value, int) and longest(text) < block.value
    if values["packing"].value != "packed" and (by_data or shorter):
        values["block_size"] = SourcedValue(longest(text), f"{said.where}: the longest sample", block.firm)
    return notes, []


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def longest(text: str) -> int:
    """Tokens of the longest sample."""
    return round((points(text) or ((1.0, 1.0),))[-1][1])


def mean_length(config: TrainConfig) -> int:
    """Tokens of a sample in the mean, each cut to block_size."""
    known = points(config.lengths) if config.lengths else None
    if known is None:
        return min(config.mean_length or config.block_size, config.block_size)
    return max(1, round(_longest_of(known, 1, config.block_size)))


def padded_length(config: TrainConfig) -> int:
    """Tokens of a row in the mean: of the longest sample of a micro-batch, to which the others are padded; without
    padding, or where the lengths are not known, of a mean sample."""
    known = points(config.lengths) if config.lengths and config.packing == "off" else None
    if known is None:
        return mean_length(config)
    return max(1, round(_longest_of(known, config.batch_size, config.block_size)))


def _longest_of(known: Points, samples: int, most: int) -> float:
    """The expected length of the longest of several samples drawn at random, each cut to `most` tokens.

    With u the share of samples that are not longer, the longest of n has the distribution u^n; between two known
    points the length is a straight line in u.
    """
    expected, n = min(known[-1][1], most), samples
    for (low, short), (high, long) in pairwise(known):
        if short >= most or long == short:
            continue
        if long > most:  # only as far as the line is below the cut
            high, long = low + (high - low) * (most - short) / (long - short), most
        slope = (long - short) / (high - low)
        expected -= slope * (high ** (n + 1) - low ** (n + 1)) / (n + 1)
    return expected


def count(path: Path, label: str) -> Counted:
    """The lengths of a file's samples. Raises `InputError` if it has none."""
    lengths: list[int] = []
    estimated = False
    try:
        for sample in _samples(path):
            size, exact = _length(sample)
            if size < 1:
                continue
            lengths.append(min(size, MOST_TOKENS))
            estimated = estimated or not exact
    except (OSError, ValueError, msgspec.DecodeError) as error:
        where = f"{label}, sample {len(lengths) + 1}"
        raise InputError(Problem(where, "samples cannot be read", f"{error}"[:120], FORM)) from None
    if not lengths:
        what = f"no sample in it has {', '.join((*COUNTS, *TOKENS))} or text"
        raise InputError(Problem(label, what, allowed=f"text under {', '.join((*TEXTS, *CHATS))}"))
    lengths.sort()
    ranks = [math.ceil(each / 100 * (len(lengths) - 1)) for each in PERCENTILES]
    named = [f"p{each}" if each < 100 else "max" for each in PERCENTILES]
    percentiles = ",".join(f"{name}:{lengths[rank]}" for name, rank in zip(named, ranks, strict=True))
    return Counted(len(lengths), percentiles, estimated)


def _samples(path: Path) -> Iterator[object]:
    """The samples of a file: objects of JSON, one a line or in an array, or whole numbers, one a line."""
    if path.suffix.lower() == ".json":
        content = msgspec.json.decode(path.read_bytes())
        yield from content if isinstance(content, list) else [content]
        return
    with path.open("rb") as lines:
        yield from (msgspec.json.decode(line) for line in lines if not line.isspace())


def _length(sample: object) -> tuple[int, bool]:
    """Tokens of a sample, and whether they are counted; 0 if it has none."""
    if isinstance(sample, bool) or not isinstance(sample, int | list | dict):
        return 0, True
    if isinstance(sample, int):
        return sample, True
    if isinstance(sample, list):
        is_tokens = bool(sample) and isinstance(sample[0], int)
        return (len(sample), True) if is_tokens else (_estimate(_bytes({"messages": sample})), False)
    for name in COUNTS:
        if isinstance(found := sample.get(name), int):
            return found, True
    for name in TOKENS:
        if isinstance(found := sample.get(name), list):
            return len(found), True
    return _estimate(_bytes(sample)), False


def _estimate(size: int) -> int:
    return math.ceil(size / BYTES_PER_TOKEN)


def _bytes(sample: dict[str, object]) -> int:
    """Bytes of a sample's text in UTF-8."""
    texts = (sample.get(name) for name in TEXTS)
    turns: Iterable[object] = (turn for name in CHATS if isinstance(chat := sample.get(name), list) for turn in chat)
    own = sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
    return own + sum(_bytes(turn) for turn in turns if isinstance(turn, dict))
