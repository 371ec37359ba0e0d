"""What fills the peak, in plain sentences, and what would take the largest part away."""

from __future__ import annotations

import msgspec

from oomph.planner import Plan, plan
from oomph.step.ops import Kind
from oomph.units import mib

LOGITS_SHARE = 0.5  # a buffer of at least half the half-precision logits counts as one of the vocabulary's size


def sentences(about: Plan, simulate: bool = True) -> list[str]:
    """Who holds the peak, in which share, and what would remove it; the largest share first.

    Without `simulate`, what needs another simulation to be told is left out.
    """
    memory = about.memory
    shares = {part.name: part.mib for part in memory.breakdown}
    found = [f"fullest in {memory.peak_at}: {memory.allocated_mib:,.0f} MiB allocated"]
    facts = [
        (shares.get(Kind.LOGITS.value, 0.0), _logits(about)),
        (shares.get(Kind.ACTIVATIONS.value, 0.0), _layers(about)),
    ]
    found += [sentence for _, sentence in sorted(facts, key=lambda fact: -fact[0]) if sentence]
    found.append(_weights(about, shares))
    found += _without_logits(about) if simulate else []
    return found


def _share(about: Plan, size_mib: float) -> str:
    return f"{size_mib:,.0f} MiB, {100 * size_mib / about.memory.allocated_mib:.0f} %"


def _logits(about: Plan) -> str | None:
    """The buffers of tokens × vocabulary: how many, how large, and what for."""
    config = about.config
    one_bytes = config.batch_size * config.block_size * config.vocab_size * (4 if config.dtype == "float32" else 2)
    large = [b for b in about.memory.peak.live if b.kind is Kind.LOGITS and b.bytes >= LOGITS_SHARE * one_bytes]
    if not large or about.traced:
        return None
    held = mib(sum(buffer.bytes for buffer in large))
    names = ", ".join(dict.fromkeys(buffer.name for buffer in large))
    tokens = f"{config.batch_size} × {config.block_size} tokens × {config.vocab_size} words"
    count = "one buffer" if len(large) == 1 else f"{len(large)} buffers"
    return f"{count} of the logits' size ({tokens}): {names}; {_share(about, held)}"


def _layers(about: Plan) -> str:
    held = mib(sum(b.bytes for b in about.memory.peak.live if b.kind in (Kind.ACTIVATIONS, Kind.ATTENTION)))
    if about.traced:
        return f"what the forward keeps for the backward holds {_share(about, held)}"
    layers = about.config.n_layer
    scores = "" if about.config.attention == "math" else "; the T × T scores of attention are never stored"
    return f"the {layers} layers keep {_share(about, held)}, {held / layers:,.0f} MiB each{scores}"


def _weights(about: Plan, shares: dict[str, float]) -> str:
    kinds = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.HALF_WEIGHTS)
    held = sum(shares.get(kind.value, 0.0) for kind in kinds)
    return f"weights, their half copies, gradients and optimizer state hold {_share(about, held)}"


def _without_logits(about: Plan) -> list[str]:
    """What not returning the logits would change, by the same simulation."""
    config = about.config
    if not config.return_logits or about.traced:
        return []
    changed = msgspec.structs.replace(about.loaded, config=msgspec.structs.replace(config, return_logits=False))
    other = plan(changed, about.device)
    saved = about.memory.total_mib - other.memory.total_mib
    if saved < 1:
        return []
    capacity = about.memory.capacity_mib
    would = capacity is not None and not about.memory.fits and other.memory.total_mib <= capacity
    fits = ", and the run would fit" if would else ""
    return [
        f"a training step that returns the loss alone would need {other.memory.total_mib:,.0f} MiB, "
        f"{saved:,.0f} less, with the same mathematics{fits}"
    ]
