"""transformers' eager attention and flash-attn's in its models, held against traces; and documents in a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from described_models import config_of, described, first_difference
from hf_models import Hf
from torch import nn
from transformers import masking_utils
from unsloth_model import Flash

from oomph.config import from_dict
from oomph.errors import InputError
from oomph.planning.plan import Plan, plan
from oomph.step.ops import Kernel

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "phi3"])
def test_eager_attention_is_its_trace(family: str, precision: str, checkpoint: bool) -> None:
    model = Hf(family, kv_heads=2, checkpoint=checkpoint, attention="eager")
    ours = described(config_of(model, precision, attention="eager"), micro_steps=2)
    assert not first_difference(ours, model.traced(precision=precision, micro_steps=2))


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash-attn that makes and keeps the same tensors as its own, which needs a GPU."""

    def dense(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return Flash.apply(q, k, v, None)

    functions = (dense, None, None, None, None), (lambda **_: {}, None)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: functions)


class Flashed(Hf):
    """A model that is told of flash-attn once it is there: before, transformers looks for the package."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        made = super().build(dtype)
        for module in made.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = "flash_attention_2"
        return made


def looks(position_ids: torch.Tensor, batch_size: int) -> bool:
    """_is_packed_sequence, without asking what it found."""
    if batch_size == 1:
        increasing = torch.arange(position_ids.shape[1], device=position_ids.device) + position_ids.min()
        (increasing - position_ids).abs().sum().bool()
    return False


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_flash_attention_is_its_trace(family: str, precision: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_is_packed_sequence", looks)
    model = Flashed(family, kv_heads=2, batch=batch)
    ours = described(config_of(model, precision, attention="flash2"), micro_steps=2)
    assert not first_difference(ours, model.traced(precision=precision, micro_steps=2))


class Packed(Hf):
    """A model that is given positions."""

    def inputs(self) -> dict[str, torch.Tensor]:
        return super().inputs() | {"position_ids": torch.ones(1, self.tokens, dtype=torch.long)}


def in_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """find_packed_sequence_indices, without asking what it found."""
    first_dummy_value = position_ids[:, :1] - 1
    position_diff = torch.diff(position_ids, prepend=first_dummy_value, dim=-1)
    packed_sequence_mask = (position_diff != 1).cumsum(-1)
    (packed_sequence_mask[:, -1] == 0).all()
    return packed_sequence_mask


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_mask_of_documents_is_its_trace(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", in_documents)
    model = Packed(family, kv_heads=2, batch=1, attention="eager" if attention == "eager" else "sdpa")
    ours = described(config_of(model, "bfloat16", attention=attention, packing="packed"), micro_steps=2)
    assert not first_difference(ours, model.traced(precision="bfloat16", micro_steps=2))


def found(packing: str, attention: str = "flash2", **keys: Any) -> Plan:
    """A plan of a small model, on a card."""
    shape = {"model_type": "llama", "n_layer": 4, "n_head": 8, "n_embd": 512, "vocab_size": 1000, "trainer": "hf"}
    run = {"batch_size": 4, "block_size": 2048, "packing": packing, "attention": attention, "dtype": "bfloat16"}
    return plan(from_dict(shape | run | keys), "RTX 4090")


def attention_flops(of: Plan) -> int:
    ops = [op for section in of.steps[1].sections for op in section.ops]
    return sum(op.flops for op in ops if op.kernel is Kernel.ATTENTION)


def test_documents_in_a_row_see_their_own_alone() -> None:
    assert attention_flops(found("padding_free")) == attention_flops(found("off"))
    packed = found("packed", mean_length=256)
    assert attention_flops(packed) * 8 == pytest.approx(attention_flops(found("packed")), rel=0.01)
    assert packed.memory.allocated_mib == pytest.approx(found("off").memory.allocated_mib, rel=0.02)


def test_a_mask_of_documents_is_stored_without_flash_attn() -> None:
    tokens = 4 * 2048
    more = found("padding_free", "flash").memory.allocated_mib - found("padding_free").memory.allocated_mib
    assert more * 2**20 > tokens * tokens * 3  # a byte for each pair, and two in the kernel's own dtype


def test_packed_rows_are_fewer_than_samples() -> None:
    keys = {"num_samples": 1000, "num_train_epochs": 1.0, "mean_length": 512}
    assert found("off", **keys).config.max_iters == 250
    packed = found("packed", **keys)
    assert packed.config.max_iters == 63  # 250 rows of 2,048 tokens, 4 a step
    assert packed.data.tokens_per_step == 4 * 2048


def test_the_mean_batch_without_padding_takes_less_time() -> None:
    whole, mean = found("padding_free"), found("padding_free", mean_length=512)
    assert whole.time is not None and mean.time is not None and mean.time.step_ms < whole.time.step_ms / 2
    assert whole.memory.allocated_mib == mean.memory.allocated_mib


@pytest.mark.parametrize("keys", [{"trainer": "nanogpt"}, {"trainer": "hf", "model_type": "gpt2"}])
def test_other_models_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        from_dict({"packing": "packed", **keys})
