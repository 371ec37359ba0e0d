"""What an explanation says of an out-of-memory error: which tensor, where, and why there was no room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oomph.devices import Device, all_devices
from oomph.runs.allocation import Guess, name_allocation
from oomph.runs.case import Case
from oomph.runs.findings import Finding, Number, known, listed, sentences
from oomph.runs.model import Oom

NAMED = 5  # cards of one memory size
FRAGMENTED = 0.15  # of what is reserved, unused while an allocation fails
_WHERE = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "evaluation": "in an evaluation",
    "unknown": "",
}


def findings(case: Case) -> Iterator[Finding]:
    """The error that tells most, and what could be had on the card."""
    oom = case.oom
    if oom is None:
        if case.plan is not None and case.plan.memory.fits is False and not case.run.steps.count:
            yield from _will_not_fit(case)
        return
    yield _failed(case, oom)
    yield from _fragmented(oom)
    yield from _larger_cards(case)


def _failed(case: Case, oom: Oom) -> Finding:
    guesses = name_allocation(oom, case.config)
    where = _WHERE[oom.phase]
    when = _when(case, oom)
    asked = f": {_size(oom.tried_mib)} asked for" if oom.tried_mib is not None else ""
    free = f", {_size(oom.free_mib)} free" if oom.free_mib is not None else ""
    title = " ".join(filter(None, ("The card ran out of memory", where, when))) + asked + free
    text = sentences((_named(oom, guesses), _evaluating(oom), _held(case, oom), _predicted(case), _code(oom)))
    numbers: dict[str, Number] = {
        "tried_mib": oom.tried_mib,
        "free_mib": oom.free_mib,
        "process_mib": oom.process_mib,
        "allocated_mib": oom.allocated_mib,
        "phase": oom.phase,
    }
    if guesses:
        numbers |= {"tensor": guesses[0].name, "formula": guesses[0].formula, "tensor_bytes": guesses[0].bytes}
    return Finding("memory.oom", "error", title, text, known(numbers))


def _when(case: Case, oom: Oom) -> str:
    """After which step; nothing where the error stands alone, without the log that it ended."""
    if oom.after_step is not None and (oom.after_step or case.run.steps.count):
        return f"after step {oom.after_step:,}"
    printed = case.run.printed
    begun = oom.after_step == 0 or (printed.params or printed.params_total or printed.tokens_per_step) is not None
    return "before the first step" if begun else ""


def _size(size_mib: float | None) -> str:
    size = size_mib or 0.0
    return f"{size / 1024:.2f} GiB" if size >= 1024 else f"{size:,.0f} MiB"


def _named(oom: Oom, guesses: list[Guess]) -> str | None:
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
        "an evaluation keeps no activations, but it makes the same logits, while the cache that training left holds "
        "blocks of other sizes"
    )


def _held(case: Case, oom: Oom) -> str | None:
    if oom.allocated_mib is None:
        return None
    parts = [f"{oom.allocated_mib:,.0f} MiB in tensors"]
    if oom.reserved_mib is not None:
        parts.append(f"{oom.reserved_mib - oom.allocated_mib:,.0f} cached by PyTorch")
    if oom.process_mib is not None and oom.reserved_mib is not None:
        parts.append(f"{max(0.0, oom.process_mib - oom.reserved_mib):,.0f} of CUDA context and libraries")
    whole = f" of {oom.total_mib:,.0f} MiB" if oom.total_mib is not None else ""
    others = f"; other programs had {case.others_mib:,.0f}" if case.others_mib else ""
    return f"at that moment the process had {listed(parts)}{whole}{others}"


def _predicted(case: Case) -> str | None:
    if case.plan is None or case.plan.memory.headroom_mib is None:
        return None
    memory = case.plan.memory
    lacking = (case.others_mib or 0.0) - (memory.headroom_mib or 0.0)
    if lacking > 0:
        return (
            f"the whole run is predicted to need {memory.total_mib:,.0f} MiB, {lacking:,.0f} more than there are "
            f"({memory.capacity_mib:,.0f} for a process, less what others hold)"
        )
    return (
        f"the run is predicted to need {memory.total_mib:,.0f} MiB, which would fit: either it is not quite the run "
        "that the log tells, or something else held memory at that moment"
    )


def _code(oom: Oom) -> str | None:
    return f"the program was at {oom.code}" if oom.code else None


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
    title = f"{unused:,.0f} MiB were reserved but in pieces too small"
    yield Finding("memory.fragmented", "warning", title, text, {"unused_mib": unused})


def _will_not_fit(case: Case) -> Iterator[Finding]:
    assert case.plan is not None
    memory = case.plan.memory
    title = f"It will not fit: {memory.total_mib:,.0f} MiB are needed, {-(memory.headroom_mib or 0.0):,.0f} too many"
    yield Finding("memory.fits", "error", title, f"The card gives a process {memory.capacity_mib:,.0f} MiB.", {})
    yield from _larger_cards(case)


def _larger_cards(case: Case) -> Iterator[Finding]:
    """Which cards have more, by the catalogue: facts that are often told wrongly."""
    device, plan = case.device, case.plan
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
            f"as much memory have, among others, {_names(alike)}" if alike else None,
            f"enough for this run as it is, on one card: {'; '.join(sizes[:5])}" if sizes else None,
        )
    )
    title = f"A {device.name} has {here} GB; which cards have more"
    yield Finding("card.larger", "info", title, text, {"memory_mib": device.memory_mib})


def _names(cards: Sequence[Device]) -> str:
    """The cards that most people have first."""
    ranked = sorted(cards, key=lambda card: not card.name.startswith("GeForce"))
    return ", ".join(card.name.removeprefix("GeForce ") for card in ranked[:NAMED])
