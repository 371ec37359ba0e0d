"""Findings about an out-of-memory error: which tensor, where, and why there was no room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device, all_devices
from oomph.predict.allocator.blocks import segment_bytes
from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, known, listed, sentences
from oomph.runs.model_shape import VOCABULARIES
from oomph.runs.run import Oom, Scalar
from oomph.units import MIB

CARDS_NAMED = 5  # of one memory size
FRAGMENTED = 0.15  # share of the reserved memory that is unused while an allocation fails
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WHERE = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "evaluation": "in an evaluation",
    "unknown": "",
}


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The error, and the cards that have more memory."""
    oom = evidence.oom
    if oom is None:
        if evidence.plan is not None and evidence.plan.memory.fits is False and not evidence.run.steps.count:
            yield from _will_not_fit(evidence)
        return
    yield _failed(evidence, oom)
    yield from _fragmented(oom)
    yield from _larger_cards(evidence)


def _failed(evidence: Evidence, oom: Oom) -> Finding:
    guesses = failed_tensors(oom, evidence.config)
    asked = f": {_size(oom.tried_mib)} asked for" if oom.tried_mib is not None else ""
    free = f", {_size(oom.free_mib)} free" if oom.free_mib is not None else ""
    title = (
        " ".join(filter(None, ("The card ran out of memory", _WHERE[oom.phase], _when(evidence, oom)))) + asked + free
    )
    text = sentences(
        (
            _tensor(oom, guesses),
            _evaluating(oom),
            _held(evidence, oom),
            _predicted(evidence),
            f"the program was at {oom.code}" if oom.code else None,
        )
    )
    numbers: dict[str, Scalar] = {
        "tried_mib": oom.tried_mib,
        "free_mib": oom.free_mib,
        "process_mib": oom.process_mib,
        "allocated_mib": oom.allocated_mib,
        "phase": oom.phase,
    }
    if guesses:
        numbers |= {"tensor": guesses[0].name, "formula": guesses[0].formula, "tensor_bytes": guesses[0].bytes}
    return Finding("memory.oom", "error", title, text, known(numbers))


def _when(evidence: Evidence, oom: Oom) -> str:
    """After which step; "" for an error message without its log."""
    if oom.after_step is not None and (oom.after_step or evidence.run.steps.count):
        return f"after step {oom.after_step:,}"
    printed = evidence.run.printed
    started = oom.after_step == 0 or (printed.params or printed.params_total or printed.tokens_per_step) is not None
    return "before the first step" if started else ""


def _size(size_mib: float) -> str:
    return f"{size_mib / 1024:.2f} GiB" if size_mib >= 1024 else f"{size_mib:,.0f} MiB"


def _tensor(oom: Oom, guesses: list[TensorGuess]) -> str | None:
    if oom.tried_mib is None:
        return "the message does not say how much was asked for"
    if not guesses:
        return None
    first = guesses[0]
    also = f"; {listed(guess.name for guess in guesses[1:3])} would have the same size" if len(guesses) > 1 else ""
    return f"{_size(oom.tried_mib)} = {first.formula} bytes: {first.name}{also}"


def _evaluating(oom: Oom) -> str | None:
    if oom.phase != "evaluation":
        return None
    return (
        "an evaluation keeps no activations but makes the same logits, while PyTorch's cache holds blocks of other "
        "sizes from training"
    )


def _held(evidence: Evidence, oom: Oom) -> str | None:
    if oom.allocated_mib is None:
        return None
    parts = [f"{oom.allocated_mib:,.0f} MiB in tensors"]
    if oom.reserved_mib is not None:
        parts.append(f"{oom.reserved_mib - oom.allocated_mib:,.0f} cached by PyTorch")
    if oom.process_mib is not None and oom.reserved_mib is not None:
        parts.append(f"{max(0.0, oom.process_mib - oom.reserved_mib):,.0f} of CUDA context and libraries")
    whole = f", of {oom.total_mib:,.0f} MiB on the card" if oom.total_mib is not None else ""
    others = f"; other programs had {evidence.others_mib:,.0f}" if evidence.others_mib else ""
    return f"the process had {listed(parts)}{whole}{others}"


def _predicted(evidence: Evidence) -> str | None:
    if evidence.plan is None or evidence.plan.memory.headroom_mib is None:
        return None
    memory = evidence.plan.memory
    lacking = (evidence.others_mib or 0.0) - (memory.headroom_mib or 0.0)
    if lacking > 0:
        return (
            f"the run is predicted to need {memory.total_mib:,.0f} MiB, {lacking:,.0f} more than there is "
            f"({memory.capacity_mib:,.0f} for a process, minus what others hold)"
        )
    return (
        f"the run is predicted to need {memory.total_mib:,.0f} MiB, which would fit: either its settings differ from "
        "those in the log, or something else held memory at that moment"
    )


def _fragmented(oom: Oom) -> Iterator[Finding]:
    if oom.reserved_mib is None or oom.allocated_mib is None or oom.tried_mib is None:
        return
    unused = oom.reserved_mib - oom.allocated_mib
    if unused < FRAGMENTED * oom.reserved_mib or unused < oom.tried_mib:
        return
    text = (
        f"PyTorch held {unused:,.0f} MiB that no tensor used, more than the {oom.tried_mib:,.0f} asked for, but in "
        "pieces. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets it join them."
    )
    title = f"{unused:,.0f} MiB were reserved, but in pieces that are too small"
    yield Finding("memory.fragmented", "warning", title, text, {"unused_mib": unused})


def _will_not_fit(evidence: Evidence) -> Iterator[Finding]:
    assert evidence.plan is not None
    memory = evidence.plan.memory
    title = f"Will not fit: needs {memory.total_mib:,.0f} MiB, {-(memory.headroom_mib or 0.0):,.0f} too many"
    yield Finding("memory.fits", "error", title, f"A process can use {memory.capacity_mib:,.0f} MiB of the card.")
    yield from _larger_cards(evidence)


def _larger_cards(evidence: Evidence) -> Iterator[Finding]:
    """Cards with more memory, from the catalogue."""
    device, plan = evidence.device, evidence.plan
    if device is None or device.kind != "cuda" or plan is None:
        return
    groups: dict[int, list[Device]] = {}
    for other in all_devices():
        if other.kind == "cuda" and "Laptop" not in other.name and "RTX" in other.name:
            groups.setdefault(round(other.memory_mib / 1024), []).append(other)
    here = round(device.memory_mib / 1024)
    alike = [other for other in groups.pop(here, []) if other.name != device.name]
    enough = {size: [d for d in group if d.usable_mib >= plan.memory.total_mib] for size, group in groups.items()}
    sizes = [f"{size} GB: {_names(enough[size])}" for size in sorted(enough) if enough[size]]
    text = sentences(
        (
            f"the same amount: {_names(alike)}" if alike else None,
            f"enough for this run as it is, on one card: {'; '.join(sizes[:5])}" if sizes else None,
        )
    )
    title = f"A {device.name} has {here} GB; cards with more"
    yield Finding("card.larger", "info", title, text, {"memory_mib": device.memory_mib})


def _names(cards: Sequence[Device]) -> str:
    """Consumer cards first."""
    ranked = sorted(cards, key=lambda card: not card.name.startswith("GeForce"))
    return ", ".join(card.name.removeprefix("GeForce ") for card in ranked[:CARDS_NAMED])


# --- which tensor was it? --------------------------------------------------------------------------


class TensorGuess(msgspec.Struct, frozen=True):
    """A tensor with the size of the failed allocation."""

    name: str  # "the logits in float32"
    formula: str  # "8 × 1024 × 50304 × 4"
    bytes: int


def failed_tensors(oom: Oom, config: TrainConfig | None = None) -> list[TensorGuess]:
    """The tensors it may have been, most likely first; empty if none fits or the message gives no size."""
    if oom.tried_mib is None:
        return []
    sizes = _large_tensors(config) if config is not None else _gpt2_logits(oom.tried_mib)
    return [guess for guess in sizes if _has_size(oom, oom.tried_mib, guess.bytes)]


def _has_size(oom: Oom, tried_mib: float, size_bytes: int) -> bool:
    slack = oom.tried_slack_mib * 1.000001 + 1e-9
    return any(abs(size / MIB - tried_mib) <= slack for size in (segment_bytes(size_bytes), size_bytes))


def _large_tensors(config: TrainConfig) -> Iterator[TensorGuess]:
    """The large tensors of a training or evaluation step, largest kinds first."""
    batch, length, width, vocabulary = config.batch_size, config.block_size, config.n_embd, config.vocab_size
    hidden = config.intermediate_size or 4 * width
    half_name = config.dtype or "half precision"
    half = NUMBER_BYTES[config.dtype or "bfloat16"]
    weight = 4 if config.autocast else half
    yield _guess("the logits, or their gradient, in float32", batch, length, vocabulary, 4)
    if half != 4:
        yield _guess(f"the logits in {half_name}", batch, length, vocabulary, half)
    if config.attention == "math":
        yield _guess("attention scores of one layer in float32", batch, config.n_head, length, length, 4)
        yield _guess(f"attention scores of one layer in {half_name}", batch, config.n_head, length, length, half)
    for name, size in (
        ("an MLP's hidden layer", hidden),
        ("queries, keys and values of a layer", 3 * width)
        if config.model_type == "gpt2"
        else ("a layer's queries", config.n_head * (config.head_dim or width // config.n_head)),
        ("a layer's output", width),
    ):
        yield _guess(f"{name} in {half_name}", batch, length, size, half)
        if half != 4:
            yield _guess(f"{name} in float32", batch, length, size, 4)
    yield _guess("the token embedding, its gradient or an Adam moment", vocabulary, width, weight)
    yield _guess("an MLP's weights, their gradient or an Adam moment", hidden, width, weight)


def _guess(name: str, *factors: int) -> TensorGuess:
    return TensorGuess(name, " × ".join(map(str, factors)), math.prod(factors))


def _gpt2_logits(tried_mib: float) -> Iterator[TensorGuess]:
    """Without a config: logits over GPT-2's vocabulary for whole multiples of 1024 tokens."""
    for vocabulary in (50304, 50257):
        for size, name in ((4, "float32"), (2, "half precision")):
            middle = round(tried_mib * MIB / (vocabulary * size) / 1024)
            for blocks in range(max(1, middle - 1), middle + 2):
                what = f"logits of {VOCABULARIES[vocabulary]} in {name}"
                yield TensorGuess(what, f"{blocks * 1024} × {vocabulary} × {size}", blocks * 1024 * vocabulary * size)
