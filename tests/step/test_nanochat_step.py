"""nanochat's optimizer and loop: what they hold, and when."""

from __future__ import annotations

import pytest
from described_models import nanochat_config

from oomph.predict.memory import find_peak
from oomph.step import loop
from oomph.step.nanochat_optimizer import NanochatOptimizer
from oomph.step.ops import Kind, Phase
from oomph.step.parameters import parameters


def bytes_of(config: object, kind: Kind) -> int:
    step = loop.build(config, evaluates=False)  # type: ignore[arg-type]
    return sum(buffer.bytes for buffer in step.resident if buffer.kind is kind)


@pytest.mark.parametrize(("dtype", "table_bytes"), [("bfloat16", 2), ("float32", 4), ("float16", 4)])
def test_tables_and_their_moments_have_the_activations_dtype_unless_it_is_float16(dtype: str, table_bytes: int) -> None:
    config = nanochat_config(dtype=dtype)
    tables = sum(p.numel for p in parameters(config) if "embeds" in p.name or "wte" in p.name)
    others = sum(p.numel for p in parameters(config)) - tables
    rotary = 2 * 10 * config.block_size * 16 * (4 if dtype == "float32" else 2)
    assert bytes_of(config, Kind.PARAMETERS) == table_bytes * tables + 4 * others + rotary


def test_muon_keeps_a_momentum_and_a_variance_for_the_longer_side() -> None:
    config = nanochat_config()
    optimizer = NanochatOptimizer(config, True, parameters(config))
    held = {storage.buffer.name: storage.bytes for storage in optimizer.create_state()}
    blocks, width = config.n_layer, config.n_embd
    assert held["transformer.h.0.mlp.c_fc.weight.momentum"] == 4 * blocks * 4 * width * width
    assert held["transformer.h.0.mlp.c_fc.weight.second_momentum"] == 4 * blocks * 4 * width


def test_the_optimizer_holds_every_stack_until_it_ends() -> None:
    config = nanochat_config(n_layer=6, batch_size=1, block_size=4)
    step = loop.build(config, evaluates=False)
    matrices = 4 * sum(p.numel for p in parameters(config) if p.block is not None and "embeds" not in p.name)
    peak = find_peak(step, rounding_bytes=1)
    assert [op.phase for op in step.sections[-1].ops][-1] is Phase.OPTIMIZER
    resident = sum(buffer.bytes for buffer in step.resident)
    gradients = sum(4 * p.numel for p in parameters(config))
    assert peak.allocated_bytes >= resident + gradients + 2 * matrices


def test_a_step_ends_with_what_it_began_with() -> None:
    for micro_steps in (1, 2, 4):
        config = nanochat_config(gradient_accumulation_steps=micro_steps, dtype="bfloat16")
        step = loop.build(config, evaluates=False)
        ops = [op for section in step.sections for op in section.ops]
        made = sum(b.bytes for op in ops for b in op.allocates)
        assert made == sum(b.bytes for op in ops for b in op.frees)
