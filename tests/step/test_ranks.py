"""One rank of a shared step is planned as real gloo ranks on this CPU run it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gloo_ranks
import pytest
from described_models import config_of
from hf_models import Hf

from oomph.predict.memory import find_peak
from oomph.step import build, loop
from oomph.step.models import common
from oomph.step.ops import COLLECTIVES, Kernel, Step
from oomph.step.sharding import flat_units
from oomph.step.sharding.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, buckets

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL: dict[str, Any] = {"layers": 4, "width": 128, "heads": 4, "vocab": 1000, "tokens": 32}
LLAMA = Hf("llama", kv_heads=2, ffn=384, tie=False, **SMALL)
GPT2 = Hf("gpt2", ffn=512, **SMALL)
ADAPTERS = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
ADAPTED = Hf("llama", kv_heads=2, ffn=384, tie=False, lora=ADAPTERS, **SMALL)
MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def steps(model: Hf, ranks: int, micro_steps: int = 1, precision: str = "float32", **keys: Any) -> list[Step]:
    """A plain loop's first step and a later one, of one rank."""
    plain = {
        "trainer": "torch",
        "return_logits": True,
        "use_cache": False,
        "optimizer_loop": "forloop",
        "grad_clip": 0.0,
    }
    shared = {"world_size": ranks, "gradient_accumulation_steps": ranks * micro_steps}
    config = config_of(model, precision, **plain, **shared, **keys)
    return [build.build(config, cuda=False, first=first, threads=1, evaluates=False) for first in (True, False)]


CASES: dict[str, tuple[Hf, int, dict[str, Any], dict[str, Any]]] = {
    "ddp llama": (LLAMA, 2, {"parallel": "ddp"}, {}),
    "ddp gpt2 accumulating": (GPT2, 2, {"parallel": "ddp", "micro_steps": 2}, {}),
    "ddp of 4": (LLAMA, 4, {"parallel": "ddp"}, {}),
    "zero1": (LLAMA, 2, {"parallel": "zero1"}, {}),
    "fsdp llama": (LLAMA, 2, {"parallel": "fsdp"}, {}),
    "fsdp gpt2": (GPT2, 2, {"parallel": "fsdp"}, {}),
    "fsdp of 4": (GPT2, 4, {"parallel": "fsdp"}, {}),
    "fsdp not resharded": (LLAMA, 2, {"parallel": "fsdp", "reshard": False}, {"reshard_after_forward": "false"}),
    "fsdp resharded over 2 of 4": (LLAMA, 4, {"parallel": "fsdp", "reshard": 2}, {"reshard_after_forward": "2"}),
    "fsdp reducing each": (GPT2, 2, {"parallel": "fsdp", "micro_steps": 3}, {}),
    "fsdp reducing the last": (
        GPT2, 2, {"parallel": "fsdp", "micro_steps": 2, "each": False}, {"grad_sync": "last"},
    ),
    "fsdp mixed": (
        LLAMA, 2, {"parallel": "fsdp", **MIXED}, {"precision": "autocast", "reduce_dtype": "float32"},
    ),
    "fsdp mixed, reducing the last": (
        LLAMA, 2, {"parallel": "fsdp", **MIXED, "micro_steps": 3, "each": False},
        {"precision": "autocast", "reduce_dtype": "float32", "grad_sync": "last"},
    ),
    "hsdp": (LLAMA, 4, {"parallel": "hsdp", "shard_size": 2}, {"shard_size": 2}),
    "fsdp lora": (ADAPTED, 2, {"parallel": "fsdp"}, {}),
    "fsdp1 llama": (LLAMA, 2, {"parallel": "fsdp1"}, {}),
    "fsdp1 gpt2 of 4": (GPT2, 4, {"parallel": "fsdp1"}, {}),
    "fsdp1 not resharded": (LLAMA, 2, {"parallel": "fsdp1", "reshard": False}, {"reshard_after_forward": "false"}),
    "fsdp1 reducing each": (GPT2, 2, {"parallel": "fsdp1", "micro_steps": 3}, {"grad_sync": "each"}),
    "fsdp1 mixed, reducing the last": (
        LLAMA, 2, {"parallel": "fsdp1", **MIXED, "micro_steps": 2, "each": False},
        {"precision": "autocast", "reduce_dtype": "float32", "grad_sync": "last"},
    ),
    "fsdp1 hybrid": (LLAMA, 4, {"parallel": "fsdp1", "shard_size": 2}, {"shard_size": 2}),
    "fsdp1 lora": (ADAPTED, 2, {"parallel": "fsdp1"}, {}),
    "fsdp1 lora, checkpointed, of 4": (replace(ADAPTED, checkpoint=True), 4, {"parallel": "fsdp1"}, {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_is_planned_as_it_runs(ranks: int) -> None:
    cases = {name: case for name, case in CASES.items() if case[1] == ranks}
    seen = gloo_ranks.run(ranks, {name: {"model": model, **job} for name, (model, _, job, _) in cases.items()})
    planned = {}
    for name, (model, _, job, keys) in cases.items():
        said = {"micro_steps": job.get("micro_steps", 1), "parallel": job["parallel"], **keys}
        planned[name] = find_peak(steps(model, ranks, **said), rounding_bytes=1).allocated_bytes
    assert planned == pytest.approx(seen, rel=1e-3)


@pytest.mark.slow
def test_a_checkpointed_block_whose_hooks_run_again_is_planned_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers before 4.53 does it; the rest of the installed one is newer."""
    monkeypatch.setattr(flat_units, "CHECKPOINTED_INSIDE_SINCE", (99, 0))
    monkeypatch.setattr(common, "NOT_REENTRANT_SINCE", (99, 0))
    monkeypatch.setattr(loop, "micro_step", loop.micro_step.__wrapped__)  # what was described before is another kind
    models = {"full": LLAMA, "lora": ADAPTED}
    jobs = {name: {"model": model, "parallel": "fsdp1", "runs_again": True} for name, model in models.items()}
    seen = gloo_ranks.run(2, jobs)
    for name, model in models.items():
        planned = find_peak(steps(replace(model, checkpoint=True), 2, parallel="fsdp1"), rounding_bytes=1)
        assert planned.allocated_bytes == pytest.approx(seen[name], rel=1e-3), name


@pytest.mark.parametrize("case", CASES)
def test_every_buffer_is_allocated_once_and_freed_once(case: str) -> None:
    model, ranks, job, keys = CASES[case]
    said = {"micro_steps": job.get("micro_steps", 1), "parallel": job["parallel"], **keys}
    for step in steps(model, ranks, **said):
        alive = set(step.resident)
        for op in (op for section in step.sections for op in section.ops):
            assert alive.isdisjoint(op.allocates), op.name
            alive |= set(op.allocates)
            assert alive.issuperset(op.frees), op.name
            alive -= set(op.frees)


@pytest.mark.parametrize("case", CASES)
def test_every_collective_is_waited_for(case: str) -> None:
    model, ranks, job, keys = CASES[case]
    said = {"micro_steps": job.get("micro_steps", 1), "parallel": job["parallel"], **keys}
    ops = [op for section in steps(model, ranks, **said)[1].sections for op in section.ops]
    begun = [op.name for op in ops if op.kernel in COLLECTIVES and op.kernel is not Kernel.ALL_REDUCE]
    waits = [op.name for op in ops if op.kernel is Kernel.WAIT]
    assert sorted(begun) == sorted(name for name in waits if "ddp" not in name and "all_reduce" not in name)
    assert {op.kernel for op in ops} & {Kernel.ALL_REDUCE} == set() or any(
        "ddp" in n or "all_reduce" in n for n in waits
    )


def test_a_rank_of_more_keeps_less() -> None:
    kept = [sum(b.bytes for b in steps(LLAMA, ranks, parallel="fsdp")[1].resident) for ranks in (2, 4, 8)]
    assert kept[0] > kept[1] > kept[2]
    held = [sum(b.bytes for b in steps(LLAMA, ranks, parallel="ddp")[1].resident) for ranks in (2, 4, 8)]
    assert held[0] == held[1] == held[2]


def test_buckets_are_filled_in_the_order_that_gradients_come() -> None:
    sizes = [(str(index), 1 << 19) for index in range(200)]
    found = [sum(size for _, size in bucket) for bucket in buckets(sizes, first=False)]
    assert found == [FIRST_BUCKET_BYTES, BUCKET_BYTES, BUCKET_BYTES, BUCKET_BYTES, 24 << 20]
    assert len(buckets(sizes, first=True)) == 1
