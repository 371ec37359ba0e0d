"""Configs of fine-tuning are read as their programs' users write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.config import LoadedConfig, Pasted, load
from oomph.errors import InputError

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
datasets:
  - path: some/data
sequence_len: 2048
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
  - q_proj
  - v_proj
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_bnb_8bit
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
"""
LLAMA_FACTORY = """\
### model
model_name_or_path: Qwen/Qwen3-4B
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
enable_liger_kernel: true
"""


def read(text: str, name: str = "run.yaml", *before: str) -> LoadedConfig:
    return load([*before, Pasted(name, text)])


def test_axolotls_keys_are_ours() -> None:
    config = read(AXOLOTL).config
    assert (config.trainer, config.model_type, config.n_layer, config.n_embd) == ("hf", "llama", 16, 2048)
    assert (config.method, config.lora_rank, config.lora_targets) == ("qlora", 32, "q_proj,v_proj")
    assert (config.batch_size, config.gradient_accumulation_steps, config.block_size) == (2, 4, 2048)
    assert (config.quantization, config.optimizer, config.dtype) == ("nf4", "adamw8bit", "bfloat16")
    assert config.learning_rate == 2e-5  # which YAML takes for text
    assert config.checkpoint_layers == 16


def test_each_key_keeps_its_line() -> None:
    loaded = read(AXOLOTL)
    assert loaded.sources["lora_rank"] == "run.yaml:7"
    assert any("run.yaml:1" in note for note in loaded.notes)  # the model that it is taken for


def test_llama_factory_checkpoints_unless_told_otherwise() -> None:
    loaded = read(LLAMA_FACTORY)
    assert loaded.config.checkpoint_layers == loaded.config.n_layer == 36
    assert (loaded.config.method, loaded.config.lora_targets) == ("lora", "all-linear")
    assert loaded.config.liger_kernel
    assert not any("liger" in note for note in loaded.notes)
    assert read(LLAMA_FACTORY + "disable_gradient_checkpointing: true\n").config.checkpoint_layers == 0


def test_trainers_arguments_as_json() -> None:
    arguments = {
        "model_name_or_path": "Qwen/Qwen3-0.6B", "per_device_train_batch_size": 4, "bf16": True, "max_length": 1024,
        "optim": "adamw_torch_fused", "gradient_checkpointing": False, "max_steps": -1, "use_peft": True, "lora_r": 4,
    }  # fmt: skip
    config = read(json.dumps(arguments), "args.json").config
    assert (config.batch_size, config.block_size, config.optimizer_loop) == (4, 1024, "fused")
    assert (config.method, config.lora_rank, config.checkpoint_layers) == ("lora", 4, 0)
    assert config.max_iters == 1000  # the run's length is in epochs


def test_an_adapters_config_beside_its_model(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 16, "target_modules": ["q_proj"], "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    config = load(["Qwen/Qwen3-0.6B", str(tmp_path / "adapter_config.json")]).config
    assert (config.method, config.lora_rank, config.lora_targets, config.n_layer) == ("dora", 16, "q_proj", 28)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("base_model: some/unknown\nadapter: lora\n", 1),
        ("base_model: Qwen/Qwen3-4B\nadapter: ia3\n", 2),
        ("base_model: Qwen/Qwen3-4B\noptim: came_pytorch\n", 2),
        ("base_model: [1\nb: 2\n", 2),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(text: str, line: int) -> None:
    with pytest.raises(InputError) as caught:
        read(text)
    assert [problem.where for problem in caught.value.problems] == [f"run.yaml:{line}"]


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "foo: 1\n"])
def test_yaml_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        read(text)


def test_code_in_yaml_is_never_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(InputError):
        read(f"base_model: !!python/object/apply:pathlib.Path.touch [{target}]\n")
    assert not target.exists()


def test_all_means_every_block() -> None:
    assert (
        load("Qwen/Qwen3-0.6B", [("checkpoint_layers", "all", "--checkpoint_layers=all")]).config.checkpoint_layers
        == 28
    )


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)
names = st.sampled_from(
    ["base_model", "adapter", "lora_r", "bf16", "optim", "load_in_4bit", "lora_target", "max_steps"]
)


@given(st.dictionaries(names, values))
def test_any_values_are_read_or_refused(content: dict[str, object]) -> None:
    try:
        read(json.dumps(content), "any.json", "Qwen/Qwen3-0.6B")
    except InputError as error:
        assert error.problems


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\n", (True, "off")),
        ("liger_fused_linear_cross_entropy: true\n", (False, "liger")),
        ("cut_cross_entropy: true\n", (False, "cce")),
    ],
)
def test_axolotls_kernels_have_a_key_each(lines: str, expected: tuple[bool, str]) -> None:
    config = read(AXOLOTL + lines).config
    assert (config.liger_kernel, config.fused_loss) == expected


@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY + "quantization_bit: 4\n"], ids=["axolotl", "LLaMA-Factory"])
def test_both_quantize_scales_and_leave_the_rest_in_the_bases_dtype(text: str) -> None:
    config = read(text).config
    assert (config.quantization, config.double_quantization, config.upcast) == ("nf4", True, "off")
