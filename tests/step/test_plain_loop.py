"""A plain PyTorch loop around a transformers model: planned as it really runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from described_models import config_of
from hf_models import Hf

from oomph.checking.child import peak_allocated_bytes
from oomph.config.schema import TrainConfig
from oomph.predict.memory import find_peak
from oomph.step import build, loop
from oomph.step.ops import Kind, Step

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("gpt2", "gpt_neox", "opt", "llama", "qwen3")


def plain(model: Hf, **keys: Any) -> TrainConfig:
    """The config of a plain loop around that model."""
    kept = {"use_cache": bool(model.more.get("use_cache")), "optimizer_loop": "forloop", "grad_clip": 0.0}
    return config_of(model, "float32", trainer="torch", return_logits=True, **{**kept, **keys})


def run(model: Hf, zero_grad: str, steps: int, padded: bool = False, optimizer_class: Any = None) -> None:
    """The loop itself, on the CPU; `padded` with a mask that leaves out a token of each sequence."""
    torch.manual_seed(0)
    built = model.build()
    optimizer = (optimizer_class or torch.optim.AdamW)(built.parameters(), lr=1e-3, foreach=False)
    for _ in range(steps):
        batch = model.inputs()
        if padded:
            mask = torch.ones_like(batch["input_ids"])
            mask[:, 0] = 0
            batch["attention_mask"] = mask
        outputs = built(**batch)
        loss = outputs.loss
        if zero_grad == "before_backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero_grad == "after_step":
            optimizer.zero_grad()


def peak_bytes(steps: list[Step]) -> int:
    return find_peak(steps, rounding_bytes=1).allocated_bytes


@pytest.mark.parametrize("zero_grad", ["after_step", "before_backward"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_loop_is_planned_as_it_runs(family: str, cached: bool, zero_grad: str) -> None:
    model = Hf(family, layers=3, kv_heads=4, width=96, ffn=256, vocab=1000, tokens=48, more={"use_cache": cached})
    config = plain(model, zero_grad=zero_grad)
    steps = [build.build(config, cuda=False, first=first, threads=torch.get_num_threads()) for first in (True, False)]
    seen = peak_allocated_bytes(lambda: run(model, zero_grad, steps=3))
    assert peak_bytes(steps) == pytest.approx(seen, rel=2e-3)


@pytest.mark.parametrize("zero_grad", ["after_step", "before_backward"])
@pytest.mark.parametrize(("name", "used"), [("sgd", torch.optim.SGD), ("adafactor", torch.optim.Adafactor)])
def test_an_optimizer_with_its_own_defaults_is_planned_as_it_runs(name: str, used: Any, zero_grad: str) -> None:
    model = Hf("llama", layers=3, kv_heads=4, width=96, ffn=256, vocab=1000, tokens=48, more={"use_cache": False})
    config = plain(model, zero_grad=zero_grad, optimizer=name)
    steps = [build.build(config, cuda=False, first=first, threads=torch.get_num_threads()) for first in (True, False)]
    seen = peak_allocated_bytes(lambda: run(model, zero_grad, steps=3, optimizer_class=used))
    assert peak_bytes(steps) == pytest.approx(seen, rel=2e-3)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt", "llama"])
def test_padded_batches_cost_a_mask(family: str, kv_heads: int) -> None:
    heads = kv_heads if family == "llama" else 4
    model = Hf(family, layers=3, kv_heads=heads, width=64, ffn=128, vocab=100, tokens=160, batch=3)
    steps = [
        build.build(plain(model, padding=True), cuda=False, first=first, threads=torch.get_num_threads())
        for first in (True, False)
    ]
    seen = peak_allocated_bytes(lambda: run(model, "after_step", steps=3, padded=True))
    assert peak_bytes(steps) == pytest.approx(seen, rel=5e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_loop_is_the_one_interpreted_block_by_block(family: str) -> None:
    config = plain(Hf(family, layers=7, kv_heads=4, more={"use_cache": True}))
    sampled = loop.micro_step(config, True, 1)
    whole = loop.with_previous_cache(loop._interpreted(config, True, 1, range(config.n_layer)))
    for ours, theirs in ((sampled.before, whole.before), (sampled.after, whole.after)):
        assert sorted(b.bytes for b in ours) == sorted(b.bytes for b in theirs)
    assert len(sampled.after) == 4 + 2 * config.n_layer  # the batch, logits, loss; keys and values of each block
    made = {buffer for op in sampled.ops for buffer in op.allocates}
    assert made.issuperset(sampled.after)
    several = [plain(Hf(family, layers=n, kv_heads=4), use_cache=True, gradient_accumulation_steps=3) for n in (3, 7)]
    assert all(peak_bytes([build.build(each, first=False)]) for each in several)
    assert [sum(b.bytes for b in op.frees) for op in sampled.ops] == [
        sum(b.bytes for b in op.frees) for op in whole.ops
    ]


def test_outputs_are_held_until_the_next_are_there() -> None:
    """The Trainer lets them go before backward; a plain loop's variable does not."""
    model = Hf("gpt2", layers=2, vocab=4000, more={"use_cache": False})
    logits_bytes = 4 * model.batch * model.tokens * model.vocab
    config = plain(model)
    later = build.build(config, first=False)
    assert sum(b.bytes for b in later.resident if b.kind is Kind.LOGITS) >= logits_bytes
    trainers = build.build(config_of(model, "float32", return_logits=False), first=False)
    assert peak_bytes([later]) - peak_bytes([trainers]) == pytest.approx(logits_bytes, rel=1e-3)


def test_gradients_let_go_late_lie_under_the_forward() -> None:
    model = Hf("opt", layers=3)
    early, late = (build.build(plain(model, zero_grad=when), first=False) for when in ("after_step", "before_backward"))
    weights = sum(b.bytes for b in early.resident if b.kind is Kind.PARAMETERS)
    held = [sum(b.bytes for b in step.resident if b.kind is Kind.GRADIENTS) for step in (early, late)]
    assert held == [0, weights]


# Peaks in bytes of three turns of the loop, by torch's profiler on the CPU (torch 2.13, one thread, 2026-11-17), with
# that release of transformers: family, heads of keys, whether keys and values are kept.
MEASURED = {
    ("4.48.1", "gpt2", 4, True): 22870388, ("4.48.1", "gpt2", 4, False): 20216180,
    ("4.48.1", "llama", 4, True): 23947008, ("4.48.1", "llama", 2, False): 21735168,
    ("4.48.1", "qwen2", 2, True): 22629168,
    ("4.50.0", "gpt2", 4, True): 21744740, ("4.50.0", "gpt2", 4, False): 20237896,
    ("4.50.0", "opt", 4, True): 15043864, ("4.50.0", "gpt_neox", 4, True): 19214080,
    ("4.50.0", "gpt_neox", 4, False): 17264868, ("4.50.0", "llama", 4, True): 23083988,
    ("4.50.0", "llama", 2, True): 22199252, ("4.50.0", "qwen2", 2, False): 21766148,
    ("4.55.0", "gpt2", 4, True): 21744740, ("4.55.0", "opt", 4, True): 16371000,
    ("4.55.0", "gpt_neox", 4, True): 19214080, ("4.55.0", "llama", 2, True): 21756884,
}  # fmt: skip


@pytest.mark.parametrize(("case", "seen"), MEASURED.items(), ids=str)
def test_older_releases_of_transformers_are_planned_as_they_ran(case: tuple[str, str, int, bool], seen: int) -> None:
    version, family, kv_heads, cached = case
    shape = {"layers": 4, "width": 96, "ffn": 256, "vocab": 1000, "tokens": 96, "batch": 3}
    model = Hf(family, kv_heads=kv_heads, more={"use_cache": cached}, **shape)  # type: ignore[arg-type]
    config = plain(model, transformers_version=version)
    steps = [build.build(config, cuda=False, first=first, threads=1) for first in (True, False)]
    assert peak_bytes(steps) == pytest.approx(seen, rel=1e-4)
