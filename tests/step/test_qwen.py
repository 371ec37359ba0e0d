"""Qwen's first models: the description is the trace of a model with the same operations, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from described_models import config_of, described, first_difference
from qwen_model import Qwen

from oomph import load_config
from oomph.config import from_dict
from oomph.errors import InputError
from oomph.step.parameters import parameters

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = ["c_attn", "c_proj", "w1", "w2"]
OLD = {"transformers_version": "4.36"}  # whose checkpointing is reentrant


def difference(model: Qwen, cuda: bool, precision: str, **keys: Any) -> str:
    """Where the description of two micro-steps parts from the trace."""
    ours = described(config_of(model, precision, **OLD, **keys), cuda=cuda, micro_steps=2)
    return first_difference(ours, model.traced(cuda=cuda, precision=precision, micro_steps=2))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_description_with_flash_attn_is_the_trace(batch: int, precision: str, checkpoint: bool) -> None:
    assert not difference(Qwen("qwen", batch=batch, checkpoint=checkpoint), True, precision)


@pytest.mark.parametrize(("cuda", "precision"), [(False, "float32"), (True, "float32")])
def test_the_description_without_flash_attn_is_the_trace(cuda: bool, precision: str) -> None:
    model = Qwen("qwen")
    model.flash = False
    assert not difference(model, cuda, precision)


@pytest.mark.parametrize("whole", [[], ["wte", "lm_head"]])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_adapters_and_modules_trained_whole_are_the_trace(checkpoint: bool, half: bool, whole: list[str]) -> None:
    lora = {"r": 4, "target_modules": TARGETS, "lora_dropout": 0.1, "modules_to_save": whole or None}
    model = Qwen("qwen", checkpoint=checkpoint, lora=lora, half_adapters=half)
    assert not difference(model, True, "loaded", modules_to_save=",".join(whole) or None)


@pytest.mark.parametrize(("name", "billions"), [("1_8B", 1.8368), ("7B", 7.7213), ("14B", 14.1673), ("72B", 72.2885)])
def test_models_have_their_published_number_of_parameters(name: str, billions: float) -> None:
    found = load_config([f"Qwen/Qwen-{name}"]).config
    assert sum(each.numel for each in parameters(found)) == pytest.approx(billions * 1e9, rel=1e-4)


@pytest.mark.parametrize(("key", "value"), [("compile", True), ("fused_loss", "liger"), ("tie_weights", True)])
def test_what_is_not_described_is_refused(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        from_dict({"model_type": "qwen", "trainer": "hf", "compile": False, "tie_weights": False, key: value})
