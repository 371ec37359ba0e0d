"""How a run scales: the same work for each card, on one card and on more, up to the number requested."""

from __future__ import annotations

import msgspec

from oomph.config import LoadedConfig
from oomph.planning.plan import Plan, plan


class ScalePoint(msgspec.Struct, frozen=True):
    """A run on a number of cards."""

    cards: int
    total_mib: float  # per card
    fits: bool | None
    tokens_per_s: float  # of all cards
    efficiency: float  # tokens a second per card, over the first point's
    communication_ms: float
    exposed_ms: float
    binds: bool  # collectives take longer than the arithmetic that could hide them


def scaling(asked: Plan) -> tuple[ScalePoint, ...]:
    """The run on 1, 2, 4, … cards and on those requested, each with the same work; empty for one, or without a time.

    Every card keeps its micro-batch and its number of micro-steps, so that a step has more tokens on more cards.
    """
    config = asked.config
    if config.world_size == 1 or asked.time is None or asked.time.basis == "given" or asked.traced:
        return ()
    near = config.world_size // config.nodes
    counts = [2**power for power in range(20) if 2**power < config.world_size]
    points: list[ScalePoint] = []
    for cards in [count for count in counts if count <= near or count % near == 0]:
        found = plan(_on(asked, cards), asked.device)
        points += _point(found, points)
    return (*points, *_point(asked, points))


def _on(asked: Plan, cards: int) -> LoadedConfig:
    config = asked.config
    near = config.world_size // config.nodes
    each = config.gradient_accumulation_steps // config.world_size
    changes = {
        "world_size": cards, "gradient_accumulation_steps": cards * each, "nodes": max(1, cards // near),
        "parallel": "none" if cards == 1 else config.parallel, "shard_size": min(cards, config.shard_size or cards),
    }  # fmt: skip
    if config.parallel != "hsdp":
        del changes["shard_size"]
    return msgspec.structs.replace(asked.loaded, config=msgspec.structs.replace(config, **changes))


def _point(found: Plan, before: list[ScalePoint]) -> list[ScalePoint]:
    time, cards = found.time, found.config.world_size
    if time is None:
        return []
    alone = before[0].tokens_per_s / before[0].cards if before else time.tokens_per_s / cards
    return [
        ScalePoint(
            cards=cards,
            total_mib=found.memory.total_mib,
            fits=found.memory.fits,
            tokens_per_s=time.tokens_per_s,
            efficiency=time.tokens_per_s / (cards * alone),
            communication_ms=time.communication_ms,
            exposed_ms=time.exposed_ms,
            binds=time.communication_ms > time.step_ms - time.exposed_ms,
        )
    ]
