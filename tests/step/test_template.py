"""A traced model as a template: the same lists as a trace of the whole model at the size asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hf_models import Hf

import oomph
from oomph.config.load import load
from oomph.config.schema import TrainConfig
from oomph.predict.memory import find_peak
from oomph.step.ops import Step
from oomph.step.trace import cache as cache_module
from oomph.step.trace import template as templates
from oomph.step.trace.template import Template
from oomph.step.trace.user_model import _Tracing, make_template

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks
SETTLED: dict[str, Any] = {
    "dtype": "bfloat16", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "fused", "attention": "flash",
    "gradient_accumulation_steps": 3, "eval_iters": 2,
}  # fmt: skip


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "oomph" / "templates"


def config_file(tmp_path: Path, family: str, layers: int, **more: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(Hf(family, layers=layers, more=more).config.to_json_string(use_diff=False))
    return str(path)


def settled(**keys: Any) -> TrainConfig:
    return TrainConfig(**{**SETTLED, **keys})


def canonical(step: Step, freed: bool = True) -> list[Any]:
    """A step as names and numbers, to be compared; `freed`: with the names of what is freed, not its size alone."""
    found: list[Any] = [sorted((b.name, b.bytes, b.kind) for b in step.resident)]
    for section in step.sections:
        found.append((section.name, section.times))
        for op in section.ops:
            made = [(b.name, b.bytes, b.kind) for b in op.allocates]
            gone = sorted((b.name if freed else "", b.bytes) for b in op.frees)
            found.append((op.name, op.phase, op.kernel, op.shape, op.dtype, op.flops, op.bytes_moved, made, gone))
    return found


def both(template: Template, spec: str, config: TrainConfig) -> list[Step]:
    """A later step from a template, and from a trace of the whole model."""
    asked = (config.batch_size, config.block_size)
    whole = _Tracing(spec, config, cuda=True).template(None, [asked])
    return [templates.step(each.facts, each.lists(*asked), config, True, first=False) for each in (template, whole)]


@pytest.mark.parametrize(
    "family", ["llama", "opt", *map(slow, ("qwen3", "mixtral", "gpt2", "gpt_neox", "deepseek_v3", "gemma2"))]
)
def test_an_eager_template_is_the_trace_at_any_size(tmp_path: Path, family: str) -> None:
    spec = config_file(tmp_path, family, 10 if family == "gemma2" else 6, num_local_experts=4)
    config = settled(compile=False, batch_size=4, block_size=640)
    template = make_template(spec, config, cuda=True, cover_more=True)
    assert template.gap is not None
    assert len(template.tokens) == 3
    other = msgspec.structs.replace(config, batch_size=7, block_size=512)
    assert template.covers(7, 512)
    ours, theirs = map(canonical, both(template, spec, other))
    assert ours == theirs


@pytest.mark.parametrize(("batch", "tokens", "lengths"), [(1, 256, 3), (3, 100, 1), (1, 33, 1)])
def test_one_sequence_and_ragged_lengths_have_templates_of_their_own(
    tmp_path: Path, batch: int, tokens: int, lengths: int
) -> None:
    spec = config_file(tmp_path, "llama", 5)
    config = settled(compile=False, batch_size=batch, block_size=tokens)
    template = make_template(spec, config, cuda=True, cover_more=True)
    assert len(template.tokens) == lengths
    assert template.covers(batch, tokens)
    assert not template.covers(5 - batch, tokens + 1)
    ours, theirs = map(canonical, both(template, spec, config))
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("llama", 14)])
def test_a_compiled_template_is_the_compiled_trace(tmp_path: Path, family: str, layers: int) -> None:
    spec = config_file(tmp_path, family, layers)
    config = settled(compile=True, batch_size=4, block_size=256)
    template = make_template(spec, config, cuda=True, cover_more=True)
    assert template.gap is not None
    steps = both(template, spec, config)
    ours, theirs = (canonical(Step(step.resident, step.sections[:4]), freed=False) for step in steps)
    assert ours == theirs
    ours, theirs = ([op.times * op.flops for op in step.sections[5].ops] for step in steps)
    assert sum(ours) == sum(theirs)  # of an evaluation, whose blocks inductor fuses with one another


@pytest.mark.slow
def test_a_search_of_compiled_batches_traces_one_for_all_of_two_sequences_and_more(tmp_path: Path) -> None:
    spec = config_file(tmp_path, "llama", 2)
    config = settled(compile=True, batch_size=4, block_size=256)
    template = make_template(spec, config, cuda=True, cover_more=True, search=True)
    assert [template.covers(batch, 256) for batch in (1, 2, 4, 64)] == [False, True, True, True]
    ours, theirs = (find_peak(step).allocated_bytes for step in both(template, spec, config))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_a_kept_template_answers_without_torch(tmp_path: Path, cache: Path) -> None:
    spec = config_file(tmp_path, "llama", 6)
    keys = {"batch_size": 4, "block_size": 256, "compile": False}
    plan = oomph.plan(keys, "RTX 4090", model=spec)
    assert [path.is_file() for path in cache.iterdir()] == [True]
    asked = f"oomph.plan({keys | {'batch_size': 8}!r}, 'RTX 4090', model={spec!r})"
    code = f"import sys, oomph; plan = {asked}; assert 'torch' not in sys.modules; print(plan.memory.allocated_mib)"
    more = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert more > plan.memory.allocated_mib


def test_a_template_that_cannot_be_read_is_made_again(tmp_path: Path, cache: Path) -> None:
    spec = config_file(tmp_path, "llama", 2)
    keys = {"batch_size": 2, "block_size": 128, "compile": False}
    plan = oomph.plan(keys, "RTX 4090", model=spec)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:1000])
    assert oomph.plan(keys, "RTX 4090", model=spec).memory.allocated_mib == plan.memory.allocated_mib
    assert cache_module.load(kept.name) is not None


def test_no_more_templates_are_kept_than_a_number(cache: Path, tmp_path: Path) -> None:
    spec = config_file(tmp_path, "llama", 1)
    made = make_template(spec, settled(compile=False, batch_size=2, block_size=7), cuda=True, cover_more=False)
    for number in range(cache_module.KEPT + 3):
        cache_module.save(f"{number:03}", made)
    assert len(list(cache.iterdir())) == cache_module.KEPT


def test_the_weights_are_float32_whatever_the_config_was_saved_in(tmp_path: Path) -> None:
    path = Path(config_file(tmp_path, "llama", 2))
    keys = {"batch_size": 2, "block_size": 128, "compile": False}
    plain = oomph.plan(keys, "RTX 4090", model=str(path)).memory.allocated_mib
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    assert oomph.plan(keys, "RTX 4090", model=str(path)).memory.allocated_mib == plain


@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_checkpointing_is_applied_to_a_hugging_face_model(tmp_path: Path, compiled: bool) -> None:
    spec = config_file(tmp_path, "llama", 2)
    keys = {"batch_size": 8, "block_size": 256, "compile": compiled, "trainer": "oomph"}
    plans = [oomph.plan(keys | {"checkpoint_layers": n}, "RTX 4090", model=spec) for n in (0, 2)]
    assert plans[1].memory.allocated_mib < plans[0].memory.allocated_mib
    assert plans[1].compute.flops_per_step > plans[0].compute.flops_per_step


@pytest.mark.parametrize("compiled", [False, slow(True)])
@pytest.mark.parametrize("trainer", ["hf", "torch"])
def test_a_traced_model_is_trained_as_the_described_one(tmp_path: Path, trainer: str, compiled: bool) -> None:
    spec = config_file(tmp_path, "llama", 2)
    keys = {"trainer": trainer, "compile": compiled, "batch_size": 8, "block_size": 256, "use_cache": False}
    traced = oomph.plan(keys, "RTX 4090", model=spec).memory.allocated_mib
    described = oomph.plan(load(spec, [(key, str(value), key) for key, value in keys.items()]), "RTX 4090").memory
    assert traced == pytest.approx(described.allocated_mib, rel=0.005)
