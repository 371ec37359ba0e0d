"""Compiled steps from an architecture's description against inductor's own plan of transformers' class."""

from __future__ import annotations

import random
from statistics import median

import pytest
import torch
from described_models import config_of
from hf_models import Hf
from msgspec.structs import replace
from torch import Tensor, nn

from oomph.config.schema import TrainConfig
from oomph.predict.memory import find_peak
from oomph.step.compile.loop import Loop
from oomph.step.compile.programs import programs
from oomph.step.loop import model_buffers
from oomph.step.ops import Step
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import parameters
from oomph.step.trace.compiled import compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor warns of what this machine lacks

WORST = 0.025  # seen: 2.0 and 2.2 %, in pure bfloat16 with checkpointed blocks; why is not known
PRECISIONS = {
    "autocast": {"dtype": "bfloat16", "autocast": True},
    "float32": {"dtype": "float32", "autocast": True},
    "bfloat16": {"dtype": "bfloat16", "autocast": False},
}


class LossAlone(nn.Module):
    """A transformers model whose forward returns its loss."""

    def __init__(self, model: Hf) -> None:
        super().__init__()
        self.model = model.build()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def planned(model: Hf, precision: str) -> Step:
    """Inductor's plan of a later step of two micro-steps."""
    inputs = model.inputs()
    batch = [inputs["input_ids"], inputs["labels"]]
    return compiled(lambda: LossAlone(model), batch, accumulation=2, evaluation=False, **PRECISIONS[precision])  # type: ignore[arg-type]


def described(config: TrainConfig) -> Step:
    """The same from the description."""
    loop = Loop(programs(config, True, 1, False), 2, 0)
    return loop.step(Optimizer(config, True, parameters(config)), model_buffers(config, True), first=False)


def drawn(family: str, seed: int) -> tuple[Hf, str]:
    """A random small model of a family, and its precision."""
    choose = random.Random(f"{family} {seed}")
    groups = choose.choice([1, 2])
    heads = groups * choose.choice([1, 2, 3])
    size = choose.choice([16, 32, 64])
    model = Hf(
        family,
        layers=choose.randint(1, 4),
        width=heads * size,
        heads=heads,
        kv_heads=heads // groups,
        ffn=heads * size * choose.choice([2, 3, 4]),
        vocab=choose.choice([200, 1000, 3001]),
        batch=choose.choice([2, 3, 4, 8]),
        tokens=choose.choice([64, 128, 256]),
        tie=choose.random() < 0.5,
        checkpoint=choose.random() < 0.25,
    )
    return model, choose.choice(sorted(PRECISIONS))


def error_of(family: str, seed: int) -> float:
    """How far the described peak is from inductor's, as a share of it."""
    model, precision = drawn(family, seed)
    config = replace(config_of(model, precision), compile=True)
    sizes = [find_peak(step).allocated_bytes for step in (described(config), planned(model, precision))]
    return sizes[0] / sizes[1] - 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("start", range(0, 20, 5))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_models_are_as_inductor_plans_them(family: str, start: int) -> None:
    errors = {seed: error_of(family, seed) for seed in range(start, start + 5)}
    assert max(map(abs, errors.values())) <= WORST, errors
    assert median(map(abs, errors.values())) <= 0.005, errors


FAMILIES = ["mistral", "qwen2", "olmo2", "phi3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "opt"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_described_family_is_as_inductor_plans_it(family: str) -> None:
    errors = {seed: error_of(family, seed) for seed in range(2)}
    assert max(map(abs, errors.values())) <= WORST, errors


def test_a_compiled_llama_is_as_inductor_plans_it() -> None:
    torch.manual_seed(0)
    assert abs(error_of("llama", 100)) <= 0.01


@pytest.mark.parametrize("family", ["llama", "qwen3", *FAMILIES])
def test_every_buffer_of_a_compiled_step_is_allocated_once_and_freed_once(family: str) -> None:
    model, precision = drawn(family, seed=7)
    step = described(replace(config_of(model, precision), compile=True))
    alive = dict.fromkeys(step.resident)
    for op in (op for section in step.sections for op in section.ops):
        assert alive.keys().isdisjoint(op.allocates), op.name
        alive |= dict.fromkeys(op.allocates)
        assert alive.keys() >= set(op.frees), op.name
        alive = {buffer: None for buffer in alive if buffer not in op.frees}
