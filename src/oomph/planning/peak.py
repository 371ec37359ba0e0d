"""What the peak memory consists of, in sentences, and what would remove the largest part."""

from __future__ import annotations

from oomph.planning.plan import Plan
from oomph.step.models import unsloth
from oomph.step.ops import Kernel, Kind, Phase
from oomph.units import counted, mib

LOGITS_SHARE = 0.5  # a buffer of at least this share of the half-precision logits counts as one of their size


def peak_sentences(about: Plan, lean: Plan | None = None) -> list[str]:
    """What holds the peak memory and how much of it, the largest share first.

    With `lean`, the same run from `without_returned_logits`, also what not returning the logits would save.
    """
    memory = about.memory
    shares = {part.name: part.mib for part in memory.breakdown}
    found = [f"peak in {memory.peak_at}: {memory.allocated_mib:,.0f} MiB allocated"]
    facts = [
        (shares.get(Kind.LOGITS.value, 0.0), _logits(about)),
        (shares.get(Kind.ACTIVATIONS.value, 0.0), _layers(about)),
    ]
    found += [sentence for _, sentence in sorted(facts, key=lambda fact: -fact[0]) if sentence]
    found.append(_weights(about, shares))
    found += _without_logits(about, lean) if lean is not None else []
    return found


def _share(about: Plan, size_mib: float) -> str:
    return f"{size_mib:,.0f} MiB, {100 * size_mib / about.memory.allocated_mib:.0f} %"


def _logits(about: Plan) -> str | None:
    """The buffers of tokens × vocabulary: how many, their names and their size; None if there are none."""
    config = about.config
    one_bytes = config.batch_size * config.block_size * config.vocab_size * (4 if config.dtype == "float32" else 2)
    large = [b for b in about.memory.peak.live if b.kind is Kind.LOGITS and b.bytes >= LOGITS_SHARE * one_bytes]
    if not large or about.traced:
        return None
    held = mib(sum(buffer.bytes for buffer in large))
    names = ", ".join(dict.fromkeys(buffer.name for buffer in large))
    tokens = f"{config.batch_size} × {counted(config.block_size, 'token')} × a vocabulary of {config.vocab_size:,}"
    count = "one buffer" if len(large) == 1 else f"{len(large)} buffers"
    return f"{count} of the logits' size ({tokens}): {names}; {_share(about, held)}"


def _layers(about: Plan) -> str:
    held = mib(sum(b.bytes for b in about.memory.peak.live if b.kind in (Kind.ACTIVATIONS, Kind.ATTENTION)))
    if about.traced:
        return f"what the forward keeps for the backward holds {_share(about, held)}"
    if about.config.trainer == "unsloth" and unsloth.is_offloaded(about.config):
        return f"activations hold {_share(about, held)}; the inputs of blocks are on the host"
    layers = about.config.n_layer
    scores = "; the T × T scores of attention are never stored" if _is_fused(about) else ""
    keep = "the layer keeps" if layers == 1 else f"the {layers} layers keep"
    return f"{keep} {_share(about, held)}, {held / layers:,.0f} MiB each{scores}"


def _is_fused(about: Plan) -> bool:
    """Whether one kernel computes each block's attention; not if PyTorch falls back to plain products."""
    forward = [op for op in about.steps[-1].sections[0].ops if op.phase in (Phase.FORWARD, Phase.EVAL)]
    return sum(op.kernel is Kernel.ATTENTION for op in forward) >= about.config.n_layer


def _weights(about: Plan, shares: dict[str, float]) -> str:
    kinds = {
        Kind.PARAMETERS: "weights", Kind.HALF_WEIGHTS: "their half copies", Kind.GATHERED: "gathered ones",
        Kind.GRADIENTS: "gradients", Kind.OPTIMIZER: "optimizer state",
    }  # fmt: skip
    there = {name: shares[kind.value] for kind, name in kinds.items() if shares.get(kind.value)}
    *first, last = there or {"weights": 0.0}
    named = f"{', '.join(first)} and {last}" if first else last
    return f"{named} hold {_share(about, sum(there.values()))}"


def _without_logits(about: Plan, other: Plan) -> list[str]:
    """What a training step that returns only the loss would need."""
    saved = about.memory.total_mib - other.memory.total_mib
    if saved < 1:
        return []
    capacity = about.memory.capacity_mib
    would = capacity is not None and not about.memory.fits and other.memory.total_mib <= capacity
    fits = ", and the run would fit" if would else ""
    return [
        f"a training step that returns only the loss would need {other.memory.total_mib:,.0f} MiB, "
        f"{saved:,.0f} less, with the same mathematics{fits}"
    ]
