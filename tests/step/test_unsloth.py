"""Unsloth's models and adapters, described, are traces of modules that run its operations, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from described_models import described, first_difference, settled, traced
from unsloth_model import Unsloth

from oomph.config.load import from_dict, load
from oomph.config.programs import UNSLOTH_FAMILIES
from oomph.config.schema import TrainConfig
from oomph.errors import InputError
from oomph.planning.plan import plan
from oomph.step import build, loop
from oomph.step.models.unsloth import host_bytes, pinned_bytes
from oomph.step.ops import Kind

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def config(family: str = "llama", **keys: Any) -> TrainConfig:
    """A small settled config."""
    small = {
        "trainer": "unsloth", "model_type": family, "n_layer": 3, "n_head": 4, "num_key_value_heads": 2, "n_embd": 64,
        "intermediate_size": 96, "vocab_size": 120, "block_size": 40, "batch_size": 2, "dtype": "bfloat16",
        "lora_rank": 4, "method": "lora", "tie_weights": False, "loss_chunk": 80,
    }  # fmt: skip
    return settled(from_dict({**small, **keys}))


def difference(found: TrainConfig) -> str:
    """Where two micro-steps part from the trace."""
    theirs = traced(lambda: Unsloth(found), found, micro_steps=2)
    return first_difference(described(found, micro_steps=2), theirs)


MIB = 2**20


@pytest.mark.parametrize("blocks", [0, 3])
@pytest.mark.parametrize("packing", ["off", "padding_free"])
@pytest.mark.parametrize("family", UNSLOTH_FAMILIES)
def test_a_model_is_its_trace(family: str, packing: str, blocks: int) -> None:
    assert not difference(config(family, packing=packing, checkpoint_layers=blocks))


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "qlora"},
        {"attention": "flash2"},
        {"modules_to_save": "embed_tokens,lm_head", "packing": "off"},
        {"modules_to_save": "lm_head"},
        {"lora_targets": "q_proj,v_proj"},
        {"lora_targets": "q_proj,k_proj,v_proj,gate_proj,up_proj,down_proj"},
        {"lora_dropout": 0.1, "checkpoint_layers": 0},
        {"adapter_dtype": "bfloat16"},
        {"num_key_value_heads": 4},
        {"batch_size": 4, "block_size": 600, "n_embd": 512, "loss_chunk": 2400},  # inputs of blocks are offloaded
    ],
    ids=lambda keys: "-".join(f"{key}={value}" for key, value in keys.items()),
)
def test_other_settings_are_their_traces(keys: dict[str, Any]) -> None:
    assert not difference(config(**keys))


def test_a_deep_model_is_its_blocks_repeated() -> None:
    found = config(n_layer=7, batch_size=4, block_size=600, n_embd=512)
    whole, sampled = loop._interpreted(found, True, 1, range(7)), loop.micro_step(found, True, 1)
    assert [op.name for op in sampled.ops] == [op.name for op in whole.ops]
    assert sampled.grads.keys() == whole.grads.keys()


def test_logits_of_one_chunk_exist_at_a_time() -> None:
    step = build.build(config(block_size=600, loss_chunk=200), cuda=True)
    made = [each.bytes for s in step.sections for op in s.ops for each in op.allocates if "chunk_logits" in each.name]
    assert set(made) == {2 * 150 * 120}  # 1,200 tokens in 8 chunks, a multiple of 4, of at most 200


def test_inputs_of_blocks_are_on_the_host() -> None:
    keys = {"model_type": "llama", "n_layer": 8, "n_head": 8, "n_embd": 1024, "vocab_size": 32000}
    keys |= {"intermediate_size": 2816, "batch_size": 2, "block_size": 4096, "tie_weights": False}
    found = plan(from_dict({"trainer": "unsloth", **keys}), "RTX 4090")
    own = 2 * 2 * 4096 * 1024
    assert found.loading is not None and found.loading.host_mib * MIB >= 8 * own
    kept = [each for each in found.steps[1].resident if each.name.startswith("GPU_BUFFERS")]
    assert [each.bytes for each in kept] == [own, own]
    assert pinned_bytes(found.config) == (200 - 8) * 256 * 1024 + 8 * own


def test_what_modules_trained_whole_were_copied_from_is_on_the_host() -> None:
    found = build.build(config(modules_to_save="embed_tokens,lm_head"), cuda=True)
    tables = [each.name for each in found.resident if each.kind is Kind.PARAMETERS and each.bytes == 2 * 120 * 64]
    assert tables == ["model.embed_tokens.modules_to_save.weight", "lm_head.modules_to_save.weight"]
    assert host_bytes(config(modules_to_save="lm_head")) - host_bytes(config()) == 2 * 120 * 64


def test_a_small_card_has_smaller_chunks() -> None:
    keys = {"trainer": "unsloth", "batch_size": 2, "block_size": 4096}
    small, large = (plan("Qwen/Qwen3-8B", card, **keys).config.loss_chunk or 0 for card in ("RTX 3060", "A100 80GB"))
    assert small < large == int(4 * 2**30 / (4 * 151936))


def test_defaults_are_unsloths() -> None:
    found = load(["Qwen/Qwen3-8B"], [("trainer", "unsloth", "--trainer=unsloth")]).config
    assert (found.method, found.lora_rank, found.optimizer, found.packing) == ("qlora", 16, "adamw8bit", "padding_free")
    assert found.checkpoint_layers == found.n_layer and found.batch_size == 4


@pytest.mark.parametrize("keys", [{"method": "full"}, {"model_type": "gemma2"}, {"quantization": "int8"}])
def test_what_is_not_described_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        from_dict({"trainer": "unsloth", "model_type": "llama", **keys})


def test_a_quantized_weight_has_one_copy_that_all_layers_share() -> None:
    found = build.build(config(method="qlora"), cuda=True)
    sizes = {each.name: each.bytes for each in found.resident if each.kind is Kind.HALF_WEIGHTS}
    assert sizes["WEIGHT_BUFFER"] == 2 * 96 * 64 and sizes["ABSMAX_BUFFER"] == 4 * 96
