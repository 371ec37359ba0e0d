"""Operations on other buffers, and the micro-steps of an eager step that are repeated by it."""

from __future__ import annotations

from typing import Any

from oomph.config.schema import TrainConfig
from oomph.step import loop
from oomph.step.ops import Buffer, Kind, Op, Phase, Step, copied, exchanged

KEYS: dict[str, Any] = {
    "dtype": "float16",
    "return_logits": True,
    "loss_chunk": 0,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "vocab_size": 512,
    "block_size": 64,
    "batch_size": 4,
}


def buffers(*names: str) -> list[Buffer]:
    return [Buffer(name, 8, Kind.INPUTS) for name in names]


def test_a_buffer_is_exchanged_wherever_it_stands_and_the_rest_stays() -> None:
    old, other = buffers("old", "other")
    ops = [Op("make", Phase.FORWARD, (old, other)), Op("use", Phase.FORWARD), Op("drop", Phase.FORWARD, (), (old,))]
    new = copied(old)
    made = exchanged(ops, {old: new})
    assert [op.allocates for op in made] == [(new, other), (), ()]
    assert [op.frees for op in made] == [(), (), (new,)]
    assert made[1] is ops[1]


def test_what_becomes_nothing_is_neither_allocated_nor_freed() -> None:
    old, other = buffers("old", "other")
    (op,) = exchanged([Op("both", Phase.FORWARD, (old,), (old, other))], {old: None})
    assert (op.allocates, op.frees) == ((), (other,))


def play(step: Step) -> set[Buffer]:
    """What is alive after a step; every buffer is allocated when it is not there, and freed when it is."""
    alive = set(step.resident)
    for section in step.sections:
        for op in section.ops:
            assert alive.isdisjoint(op.allocates)
            alive |= set(op.allocates)
            assert alive.issuperset(op.frees)
            alive -= set(op.frees)
    return alive


def test_every_micro_step_takes_over_what_the_one_before_left() -> None:
    for first in (True, False):
        for count in (1, 2, 3, 9):
            step = loop.build(TrainConfig(**KEYS, gradient_accumulation_steps=count), first=first)
            names = sorted(buffer.name for buffer in play(step) if buffer.kind in (Kind.INPUTS, Kind.LOGITS))
            assert names == ["batch.x", "batch.y", "lm_head", "loss.scaled"]


def test_a_runs_first_micro_step_makes_the_gradient_scaler_and_lets_nothing_old_go() -> None:
    config = TrainConfig(**KEYS, gradient_accumulation_steps=2)
    first, later = (loop.build(config, first=first) for first in (True, False))
    made = [buffer.name for section in first.sections for op in section.ops for buffer in op.allocates]
    assert made.count("scaler.scale") == 1
    assert "scaler.scale" in [buffer.name for buffer in later.resident]
    beginnings = [next(s for s in step.sections if s.name == "micro-step 1") for step in (first, later)]
    freed = [[b.name for op in section.ops for b in op.frees].count("loss.scaled") for section in beginnings]
    assert freed == [0, 1]
