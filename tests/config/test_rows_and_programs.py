"""Configs of fine-tuning: samples in a row, attention, dtypes that weights are loaded in, and other programs' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oomph.config import load
from oomph.config.schema import TrainConfig
from oomph.errors import InputError
from oomph.planning.plan import plan

AXOLOTL = {"base_model": "NousResearch/Meta-Llama-3.1-8B", "sequence_len": 4096, "micro_batch_size": 2, "bf16": "auto"}
FACTORY = {"model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "finetuning_type": "lora", "stage": "sft", "bf16": True}
TRL = {"model_name_or_path": "Qwen/Qwen3-8B", "max_length": 2048, "dataset_text_field": "text"}
UNSLOTH = {"model_name": "unsloth/Qwen3-8B-unsloth-bnb-4bit", "max_seq_length": 4096, "load_in_4bit": True, "r": 32}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """A function that loads a mapping as a JSON file: the config."""

    def found(content: dict[str, object]) -> TrainConfig:
        file = tmp_path / "run.json"
        file.write_text(json.dumps(content))
        return load([str(file)]).config

    return found


@pytest.mark.parametrize(
    ("content", "packing", "attention"),
    [
        (AXOLOTL | {"sample_packing": True, "flash_attention": True}, "packed", "flash2"),
        (AXOLOTL | {"attn_implementation": "eager"}, "off", "eager"),
        (AXOLOTL | {"sdp_attention": True}, "off", "flash"),
        (FACTORY | {"neat_packing": True, "packing": True, "flash_attn": "fa2"}, "packed", "flash2"),
        (FACTORY | {"packing": True}, "off", "flash"),
        (FACTORY | {"flash_attn": "auto"}, "off", "flash"),
        (TRL | {"packing": True, "attn_implementation": "flash_attention_2"}, "packed", "flash2"),
        (TRL | {"packing": True, "packing_strategy": "wrapped"}, "off", "flash"),
        (TRL | {"padding_free": True}, "padding_free", "flash"),
    ],
)
def test_rows_and_attention_are_read(read: Any, content: dict[str, object], packing: str, attention: str) -> None:
    found = read(content)
    assert (found.packing, found.attention) == (packing, attention)


def test_a_whole_model_of_axolotls_is_bfloat16_throughout(read: Any) -> None:
    assert read(AXOLOTL).autocast is False
    assert read(AXOLOTL | {"torch_dtype": "float32"}).autocast is True


def test_llama_factory_keeps_float32_weights_of_a_whole_model(read: Any) -> None:
    assert read(FACTORY | {"finetuning_type": "full"}).autocast is True


def test_a_base_is_loaded_in_the_dtype_that_is_told(read: Any) -> None:
    assert read(TRL | {"use_peft": True, "torch_dtype": "bfloat16", "bf16": True}).base_dtype == "bfloat16"


def test_trls_arguments_for_the_model_are_read(read: Any) -> None:
    inside = {"torch_dtype": "bfloat16", "attn_implementation": "flash_attention_2"}
    found = read(TRL | {"use_peft": True, "bf16": True, "model_init_kwargs": inside})
    assert (found.base_dtype, found.attention) == ("bfloat16", "flash2")


def test_a_base_of_4_bits_is_told_by_its_name(read: Any) -> None:
    found = read({"base_model_name_or_path": "unsloth/Meta-Llama-3.1-8B-bnb-4bit", "peft_type": "LORA", "r": 16})
    assert (found.quantization, found.double_quantization, found.n_layer) == ("nf4", True, 32)


def test_axolotls_plugin_switches_cut_cross_entropy_on(read: Any) -> None:
    plugin = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}
    assert read(AXOLOTL | plugin).fused_loss == "cce"
    assert read(AXOLOTL | plugin | {"cut_cross_entropy": False}).fused_loss is None


def test_unsloths_arguments_are_read(read: Any) -> None:
    found = read(UNSLOTH | {"use_gradient_checkpointing": "unsloth", "lora_alpha": 32, "max_steps": 60})
    assert (found.trainer, found.method, found.lora_rank) == ("unsloth", "qlora", 32)
    assert (found.n_layer, found.checkpoint_layers, found.block_size, found.max_iters) == (36, 36, 4096, 60)


def test_unsloths_base_of_16_bits_and_its_targets_are_read(read: Any) -> None:
    more = {"load_in_4bit": False, "target_modules": ["q_proj", "v_proj"], "use_gradient_checkpointing": False}
    found = read(UNSLOTH | more)
    assert (found.method, found.lora_targets, found.checkpoint_layers) == ("lora", "q_proj,v_proj", 0)


def test_unsloths_full_fine_tuning_is_refused(read: Any) -> None:
    with pytest.raises(InputError, match="Unsloth"):
        read(UNSLOTH | {"full_finetuning": True, "use_gradient_checkpointing": "unsloth"})


def test_llama_factorys_unsloth_has_its_own_trainer(read: Any) -> None:
    found = read(FACTORY | {"use_unsloth": True})
    assert (found.trainer, found.method, found.packing) == ("unsloth", "lora", "off")


@pytest.mark.parametrize("stage", [{"stage": "dpo"}, {"stage": "rm"}, {"stage": "ppo"}])
def test_what_is_not_supervised_is_refused(read: Any, stage: dict[str, str]) -> None:
    with pytest.raises(InputError, match="not described"):
        read(FACTORY | stage)


def test_axolotls_preference_learning_is_refused(read: Any) -> None:
    with pytest.raises(InputError, match="not described"):
        read(AXOLOTL | {"rl": "dpo"})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("NeMo AutoModel", {"model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}}),
        ("DeepSpeed", {"train_micro_batch_size_per_gpu": 1}),
        ("accelerate", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}),
        ("verl", {"actor_rollout_ref": {}}),
        ("torchtitan", {"model": {"flavor": "8B"}, "training": {}}),
        ("MaxText", {"base_emb_dim": 4096}),
    ],
)
def test_files_of_other_programs_are_named(read: Any, name: str, content: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"a config of {name}"):
        read(content)


@pytest.mark.parametrize(
    ("keys", "parallel"),
    [
        ({"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_state_dict_type": "FULL_STATE_DICT"}}, "fsdp1"),
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "fsdp"),
        ({}, None),
    ],
)
def test_fsdp_is_read(read: Any, keys: dict[str, object], parallel: str | None) -> None:
    assert read(AXOLOTL | keys).parallel == parallel


def test_accumulation_in_their_files_is_each_devices(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(AXOLOTL | {"gradient_accumulation_steps": 4, "adapter": "lora"}))
    assert load([str(file)], [("world_size", "2", "--world_size=2")]).config.gradient_accumulation_steps == 8
    found = plan(str(file), "4xRTX 4090").config
    assert (found.world_size, found.gradient_accumulation_steps) == (4, 16)
