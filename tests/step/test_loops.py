"""Models with a loop over their tokens: a few are traced and repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf_models import Hf, changes, peak

import oomph
from oomph.config.schema import TrainConfig
from oomph.errors import InputError
from oomph.predict.memory import find_peak
from oomph.step.ops import Step
from oomph.step.trace import template as templates
from oomph.step.trace.user_model import _Tracing, make_template

pytestmark = pytest.mark.filterwarnings("ignore")
STATES = {"state_size": 8, "expand": 2, "intermediate_size": 128, "time_step_rank": 4, "use_mambapy": False}
MAMBA = Hf("mamba", layers=6, more=STATES)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(MAMBA.config.to_json_string(use_diff=False))
    return str(path)


def settled(**keys: Any) -> TrainConfig:
    common = {"dtype": "bfloat16", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "fused", "eval_iters": 2}
    return TrainConfig(**common, compile=False, batch_size=3, **keys)  # type: ignore[arg-type]


def test_a_mamba_is_traced_as_the_profiler_sees_it() -> None:
    model = Hf("mamba", more=STATES, tokens=24)
    seen = peak(changes(model.traced(cuda=False, micro_steps=2)))
    assert seen == pytest.approx(peak(model.profiled(micro_steps=2)), rel=1e-4)


def totals(step: Step) -> tuple[int, int, int]:
    ops = [op for section in step.sections for op in section.ops]
    sums = [sum(op.times * each(op) for op in ops) for each in (lambda op: op.flops, lambda op: op.bytes_moved)]
    return find_peak(step, rounding_bytes=1).allocated_bytes, sums[0], sums[1]


@pytest.mark.slow
def test_a_loop_is_repeated_as_a_whole_trace_has_it(spec: str) -> None:
    config = settled(block_size=40)
    template = make_template(spec, config, cuda=True, cover_more=True)
    assert template.tokens == templates.SHORT
    assert template.gap is not None
    assert template.covers(8, 4096)
    tracing = _Tracing(spec, config, cuda=True)
    tracing.rolls = True  # so that it is patient with the loop
    whole = tracing.template(None, [(3, 40)])
    ours, theirs = (
        totals(templates.step(each.facts, each.lists(3, 40), config, True, first=False)) for each in (template, whole)
    )
    assert ours == theirs


@pytest.mark.slow
def test_a_long_mamba_is_planned(spec: str) -> None:
    plans = [oomph.plan({"compile": False, "block_size": n}, "A100 SXM4 80GB", model=spec) for n in (1024, 2048)]
    assert all("tokens repeated" in plan.source for plan in plans)
    assert plans[1].memory.allocated_mib == pytest.approx(2 * plans[0].memory.allocated_mib, rel=0.05)


@pytest.mark.slow
def test_a_long_loop_is_not_compiled(spec: str) -> None:
    with pytest.raises(InputError, match=r"loop over its tokens, which torch.compile.*compile = False"):
        oomph.plan({"compile": True, "block_size": 1024}, "A100 SXM4 80GB", model=spec)


def test_a_loop_in_a_file_is_repeated_too(tmp_path: Path) -> None:
    path = tmp_path / "scan.py"
    path.write_text(
        """
import torch
from torch import nn

class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.decay = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Parameter(torch.ones(32))

    def forward(self, ids, targets):
        x = self.embed(ids)
        state, states = torch.zeros_like(x[:, 0]), []
        for token in range(x.shape[1]):
            state = torch.tanh(self.decay * state + x[:, token])
            states.append(state)
        logits = self.head(torch.stack(states, 1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
    )
    keys = {"compile": False, "block_size": 2000, "batch_size": 4}
    plan = oomph.plan(keys, "A100 SXM4 80GB", model=f"{path}:Scan")
    assert plan.source == "traced, tokens repeated"
    assert json.loads(json.dumps(plan.to_dict()))["model"]["params"] == 64 * 32 + 32 * 64 + 64 + 32
