"""Findings about an out-of-memory error: what ran out, why, and which tensor if that is known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from oomph.config import TrainConfig
from oomph.devices import Device, all_devices
from oomph.predict.allocator.blocks import segment_bytes
from oomph.runs.causes import FIRST_TRY, HUGE_MIB, PIECE_MIB, TOOLS, Cause, cause_of, restoring, temporary
from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, known, listed, sentences
from oomph.runs.holding import Holding
from oomph.runs.run import EXABYTE_MIB, Oom, Scalar
from oomph.units import MIB

CARDS_NAMED = 5  # of one memory size
PIDS_NAMED = 3
FRAGMENTED = 0.15  # share of the reserved memory that is unused while an allocation fails
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WHERE = {
    "loading": "while the model was put on the device",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "evaluation": "in an evaluation",
    "unknown": "",
}
_RESTORING = "while a checkpoint was read"
_HUGE = "its shape may be computed wrongly, or grow with the square of a length"
_LESS = "it then asks for less: if the program went on, this was no error"
_WHAT = {
    "card": "The card ran out of memory",
    "npu": "The NPU ran out of memory",
    "tpu": "The TPU ran out of memory",
    "open": "Memory ran out",
    "mps": "The Mac's GPU ran out of the memory that it may use",
    "machine": "The machine ran out of main memory",
}


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The error, its cause, and the cards that have more memory."""
    oom = evidence.oom
    if oom is None:
        if evidence.plan is not None and evidence.plan.memory.fits is False and not evidence.run.steps.count:
            yield from _will_not_fit(evidence)
        return
    held = evidence.holding or Holding()
    yield _failed(evidence, oom, held)
    yield _cause(oom, held)
    yield from _fragmented(oom)
    yield from _larger_cards(evidence)


def _failed(evidence: Evidence, oom: Oom, held: Holding) -> Finding:
    guesses = failed_tensors(oom, evidence.config)
    asked = f": {size(oom.tried_mib)} asked for" if oom.tried_mib is not None else ""
    free = f", {size(oom.free_mib)} free" if oom.free_mib is not None else ""
    what = _WHAT[oom.memory] if oom.library != "the kernel" else "The process was killed because main memory ran out"
    if cause_of(oom, held) == "library":  # the library reports it, but may have hit another error
        what = f"{oom.library} could not get memory on the card"
    elif FIRST_TRY.search(oom.message):  # TensorFlow asks for nearly the whole card, then for less
        what = "TensorFlow could not get the memory of the card at once"
    elif oom.library not in ("torch", "the kernel", "the program"):
        what = f"{what} ({oom.library})"
    title = (
        " ".join(filter(None, (what, _RESTORING if restoring(oom) else _WHERE[oom.phase], _when(evidence, oom))))
        + asked
        + free
    )
    parts = [f"{name} {mib:,.0f} MiB" for name, mib in held.parts()]
    adds_up = held.spilled_mib is None and oom.memory not in ("mps", "tpu")
    text = sentences(
        (
            _tensor(oom, guesses),
            _evaluating(oom),
            f"of the card's {held.total_mib:,.0f} MiB: {listed(parts)}"
            if held.total_mib and parts and adds_up
            else None,
            _predicted(evidence),
            f"the program was at {oom.code}" if oom.code else None,
            _LESS if FIRST_TRY.search(oom.message) else None,
        )
    )
    numbers: dict[str, Scalar] = {
        "tried_mib": oom.tried_mib,
        "free_mib": oom.free_mib,
        "process_mib": held.process_mib,
        "allocated_mib": oom.allocated_mib,
        "others_mib": held.others_mib,
        "phase": oom.phase,
    }
    if guesses:
        numbers |= {"tensor": guesses[0].name, "formula": guesses[0].formula, "tensor_bytes": guesses[0].bytes}
    return Finding("memory.oom", "error", title, text, known(numbers), "read")


def _cause(oom: Oom, held: Holding) -> Finding:
    """The cause, as far as the message shows it."""
    cause = cause_of(oom, held)
    title, more, sure = _words(cause, oom, held)
    numbers: dict[str, Scalar] = {"cause": cause, "others_mib": held.others_mib, "beside_mib": held.beside_mib}
    basis = "follows" if sure else "guess"
    return Finding("memory.cause", "warning", title, sentences(more), known(numbers), basis)  # type: ignore[arg-type]


def _words(cause: Cause, oom: Oom, held: Holding) -> tuple[str, Sequence[str | None], bool]:
    """(title, sentences, whether it follows) of a cause."""
    total = size(held.total_mib) if held.total_mib else "the card"
    tried = size(oom.tried_mib) if oom.tried_mib else "more"
    pids = [f"{pid} with {size(mib)}" for pid, mib in sorted(held.pids.items(), key=lambda e: -e[1])[:PIDS_NAMED]]
    named = f"process {listed(pids)}" if pids else None
    match cause:
        case "request":
            if held.total_mib and (oom.tried_mib or 0.0) <= held.total_mib:
                share = 100 * (oom.tried_mib or 0.0) / held.total_mib
                title = f"The {tried} asked for at once are {share:.0f} % of the card, more than all other tensors"
                return title, (_SCORES,), True
            return f"The {tried} asked for at once are more than the whole card has, {total}", (_SCORES,), True
        case "size":
            return "Such a size was computed wrongly: it is no lack of memory", (_SIZE,), True
        case "others":
            own = f", this run {size(held.process_mib)}" if held.process_mib else ""
            return f"Other processes hold {size(held.others_mib or 0)} of the card's {total}{own}", (named,), True
        case "beside":
            title = f"{size(held.beside_mib or 0)} of the card's {total} are held outside this run's PyTorch"
            tool = TOOLS[oom.backend][0]
            return title, (f"by other processes, or by libraries of this one: {tool} tells them apart",), True
        case "limit":
            return f"PyTorch may use only {size(oom.allowed_mib or 0)} of the card", (_FRACTION,), True
        case "fragments":
            more = "more than" if (oom.unused_mib or 0.0) > (oom.tried_mib or 0.0) + oom.slack_mib else "about"
            title = f"PyTorch holds {size(oom.unused_mib or 0)} that no tensor uses, {more} the {tried} asked for"
            graphs = ", or set aside for CUDA graphs" if oom.private_pools_mib else ""
            return title, (f"it is in pieces that are too small{graphs}",), True
        case "refused" if oom.free_mib is None:
            return f"PyTorch had no tensor on the card yet, and {tried} of its {total} were refused", (_FIRST,), True
        case "refused":
            title = f"The card had {size(oom.free_mib or 0)} free, more than the {tried} asked for"
            return f"{title}: it may be another limit that was reached", (_REFUSED,), False
        case "spilled":
            return f"The tensors take {size(oom.allocated_mib or 0)}, the card has {total}", (_SPILLED,), True
        case "machine" if (oom.tried_mib or 0.0) >= HUGE_MIB:
            return f"One tensor of {tried} was asked for in main memory", (_HUGE,), True
        case "machine" if (oom.tried_mib or 0.0) >= PIECE_MIB:
            return f"{tried} were asked for at once in main memory", (_PIECE,), True
        case "machine":
            return "It is main memory that ran out, not the card's", (_MACHINE,), True
        case "mps":
            outside = f"{size(oom.outside_mib)} are other allocations" if oom.outside_mib else None
            tensors = size(oom.allocated_mib) if oom.allocated_mib else "its tensors"
            title = f"PyTorch holds {tensors} of the {size(oom.allowed_mib or 0)} that it may use"
            return title if oom.allowed_mib else "macOS gives the GPU a part of main memory", (outside, _MPS), True
        case "library" if oom.library == "NCCL":
            return "NCCL found no memory left for its buffers, which are outside PyTorch's", (), True
        case "library":
            return "A library could not get memory on the card, or it may have met an earlier error", (_LIBRARY,), False
    return _filled(cause, oom, held)


def _filled(cause: Cause, oom: Oom, held: Holding) -> tuple[str, Sequence[str | None], bool]:
    """The same if the run's own tensors fill the card."""
    total = size(held.total_mib) if held.total_mib else "the card"
    filled = size(oom.allocated_mib) if oom.allocated_mib else None
    if oom.memory == "tpu" and filled and held.total_mib:
        return f"The program needs {filled}, the TPU has {total}", (), True
    whole = f"The run's own tensors take {filled} of the card's {total}" if filled and held.total_mib else None
    if cause == "loading" and restoring(oom):
        return whole or "The checkpoint does not fit beside what is on the card", (_TWICE,), True
    if cause == "loading":
        return whole or "The model does not fit beside what is on the card", (_LOADING,), True
    if cause == "optimizer" and temporary(oom):
        return whole or "The optimizer's temporary tensors do not fit", (_FOREACH,), True
    if cause == "optimizer":
        return whole or "The optimizer's state does not fit", (_OPTIMIZER,), True
    return whole or "The message does not say who holds the memory", (), True


_SIZE = "a negative or corrupted length, index or shape becomes such a size: check what the failing line is given"
_SCORES = "such a tensor may be attention's scores (they grow with the square of the length) or logits of a long batch"
_FRACTION = "set_per_process_memory_fraction, or a program's own option for it, set that limit"
_REFUSED = "WSL, Windows and containers have limits of their own; or another process freed its memory just then"
_SPILLED = "Windows moves what does not fit to main memory, many times slower, until that is full too"
_MACHINE = "data loading, tokenizing, offloading, or weights that are read whole before they go to the card take it"
_FIRST = "others may hold the card, or its driver may refuse so much at once (Intel's Arc: 4 GiB)"
_PIECE = "such a piece may be a batch, logits, attention's scores, or data or weights that are read whole"
_FOREACH = "its step works on all parameters at once, with temporary tensors as large as they are"
_MPS = "PYTORCH_MPS_HIGH_WATERMARK_RATIO sets that limit"
_LIBRARY = (
    "cuBLAS and cuDNN ask for memory outside PyTorch's; the same message follows an index out of range on the card: "
    "CUDA_LAUNCH_BLOCKING=1 shows which it is"
)
_TWICE = "what is read from a checkpoint takes room beside what it replaces, until that is let go"
_LOADING = "no step had begun: it is the weights, not the batch"
_OPTIMIZER = "Adam's two moments are made in the first step: 8 bytes a parameter in float32"


def _when(evidence: Evidence, oom: Oom) -> str:
    """After which step; "" for an error message without its log."""
    unit = evidence.run.step_unit
    if oom.after_step is not None and (oom.after_step or evidence.run.steps.count):
        return f"after {'log entry' if unit == 'entry' else unit} {oom.after_step:,}"
    printed = evidence.run.printed
    started = oom.after_step == 0 or (printed.params or printed.params_total or printed.tokens_per_step) is not None
    return "before the first step" if started else ""


def size(size_mib: float) -> str:
    """A size in TiB or GiB if at least 1, in MiB if at least a half, else in KiB or bytes."""
    if size_mib >= EXABYTE_MIB:
        return "more than 1 EB"
    if size_mib >= 2**20:
        return f"{size_mib / 2**20:,.2f} TiB"
    if size_mib >= 1024 or size_mib == 0:
        return f"{size_mib / 1024:.2f} GiB" if size_mib else "0 MiB"
    for unit, factor in (("MiB", 1.0), ("KiB", 1024.0)):
        if size_mib * factor >= 0.5:
            return f"{size_mib * factor:,.0f} {unit}"
    return f"{size_mib * MIB:,.0f} bytes"


def _tensor(oom: Oom, guesses: list[TensorGuess]) -> str | None:
    if oom.shape:
        shape = " × ".join(f"{each:,}" for each in oom.shape)
        whole = math.prod(oom.shape) * (oom.number_bytes or 0)
        return f"the tensor is {shape}" + (f", {size(whole / MIB)}" if whole else "")
    if oom.tried_mib is None:
        return None
    if not guesses:
        return None
    first = guesses[0]
    also = f"; {listed(guess.name for guess in guesses[1:3])} would have the same size" if len(guesses) > 1 else ""
    return f"{size(oom.tried_mib)} = {first.formula} bytes: {first.name}{also}"


def _evaluating(oom: Oom) -> str | None:
    if oom.phase != "evaluation":
        return None
    return (
        "an evaluation keeps no activations but makes the same logits, while PyTorch's cache holds blocks of other "
        "sizes from training"
    )


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
    if oom.reserved_mib is None or oom.unused_mib is None or oom.tried_mib is None or oom.memory == "mps":
        return
    if oom.private_pools_mib:  # memory set aside for CUDA graphs counts as unused too
        return
    unused = oom.unused_mib
    if unused < FRAGMENTED * oom.reserved_mib or unused < oom.tried_mib:
        return
    cure = (
        f"max_split_size_mb in {TOOLS[oom.backend][2]} (PyTorch 1.10), or torch 2.1 with expandable_segments:True"
        if oom.old
        else f"{TOOLS[oom.backend][2]}=expandable_segments:True lets it join them, on Linux"
    )
    text = f"PyTorch held {unused:,.0f} MiB that no tensor used, more than the {oom.tried_mib:,.0f} asked for. {cure}."
    title = f"{unused:,.0f} MiB were reserved, but in pieces that are too small"
    yield Finding("memory.fragmented", "info", title, text, {"unused_mib": unused})


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


def failed_tensors(oom: Oom, config: TrainConfig | None) -> list[TensorGuess]:
    """The run's tensors of that size, most likely first. Empty without a config: too many would fit by chance."""
    if oom.tried_mib is None or config is None:
        return []
    return [guess for guess in _large_tensors(config) if _has_size(oom, oom.tried_mib, guess.bytes)]


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
