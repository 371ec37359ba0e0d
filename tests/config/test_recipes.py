"""torchtune's and litgpt's own config files, read as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.config import LoadedConfig, load
from oomph.errors import InputError

TORCHTUNE = """
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 2048
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
seed: null
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: False
"""
FULL = TORCHTUNE.replace("lora_llama3_1_8b", "llama3_1_8b").replace("accumulation_steps: 8", "accumulation_steps: 1")
FULL = FULL.replace("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit") + "optimizer_in_bwd: True\n"
LITGPT = """
checkpoint_dir: checkpoints/meta-llama/Llama-2-7b-hf
out_dir: out/finetune/qlora-llama2-7b
precision: bf16-true
quantize: bnb.nf4
devices: 1
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_query: true
lora_key: false
lora_value: true
lora_projection: false
lora_mlp: false
lora_head: false
data:
  class_path: litgpt.data.Alpaca2k
train:
  save_interval: 200
  global_batch_size: 8
  micro_batch_size: 2
  lr_warmup_steps: 10
  epochs: 4
  max_steps:
  max_seq_length: 512
eval:
  interval: 100
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
    weight_decay: 0.0
"""


def read(tmp_path: Path, text: str) -> LoadedConfig:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load([file])


def problem(tmp_path: Path, text: str) -> str:
    with pytest.raises(InputError) as found:
        read(tmp_path, text)
    return str(found.value)


def test_torchtunes_lora_config(tmp_path: Path) -> None:
    config = read(tmp_path, TORCHTUNE).config
    assert (config.trainer, config.method, config.model_type, config.n_layer) == ("torchtune", "lora", "llama", 32)
    assert config.lora_targets == "q_proj,v_proj,output_proj,w1,w2,w3"
    assert (config.batch_size, config.gradient_accumulation_steps, config.block_size) == (2, 8, 2048)
    assert (config.dtype, config.autocast, config.checkpoint_layers) == ("bfloat16", False, 32)
    assert (config.optimizer_loop, config.learning_rate, config.max_position_embeddings) == ("fused", 3e-4, 131072)


@pytest.mark.parametrize(
    ("old", "new", "method"),
    [("lora_llama3_1_8b", "qlora_llama3_1_8b", "qlora"), ("lora_rank: 8", "lora_rank: 8\n  use_dora: True", "dora")],
)
def test_torchtunes_other_adapters(tmp_path: Path, old: str, new: str, method: str) -> None:
    assert read(tmp_path, TORCHTUNE.replace(old, new, 1)).config.method == method


def test_torchtunes_full_config_steps_in_backward(tmp_path: Path) -> None:
    config = read(tmp_path, FULL).config
    assert (config.method, config.optimizer, config.zero_grad) == ("full", "paged_adamw8bit", "in_backward")


def test_without_a_length_one_is_assumed_and_told(tmp_path: Path) -> None:
    loaded = read(tmp_path, TORCHTUNE.replace("max_seq_len: 2048", "max_seq_len: null"))
    assert loaded.config.block_size == 1024
    assert any("max_seq_len" in note for note in loaded.notes)


@pytest.mark.parametrize(("old", "new"), [("packed: False", "packed: True"), ("offloading: False", "offloading: True")])
def test_what_is_not_counted_is_told(tmp_path: Path, old: str, new: str) -> None:
    assert any("not in the figures" in note for note in read(tmp_path, TORCHTUNE.replace(old, new)).notes)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lora_llama3_1_8b", "lora_llama3_1_8c", "did you mean"),
        ("torch.optim.AdamW", "torch.optim.LBFGS", "an optimizer that is not described"),
        ("CEWithChunkedOutputLoss", "SFTLoss", "a loss that is not described"),
        ("compile: False", "compile: True", "compiled models are not described"),
        ("dtype: bf16", "dtype: fp16", "bfloat16 or float32"),
    ],
)
def test_what_torchtune_cannot_be_planned_with_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in problem(tmp_path, TORCHTUNE.replace(old, new, 1))


def test_litgpts_qlora_config(tmp_path: Path) -> None:
    config = read(tmp_path, LITGPT).config
    assert (config.trainer, config.method, config.quantization) == ("litgpt", "qlora", "nf4")
    assert (config.double_quantization, config.lora_targets, config.lora_rank) == (False, "query,value", 32)
    assert (config.batch_size, config.gradient_accumulation_steps, config.block_size) == (2, 4, 512)
    assert (config.dtype, config.autocast, config.learning_rate) == ("bfloat16", False, 2e-4)


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [("bf16-mixed", "bfloat16", True), ("16-true", "float16", False), ("32-true", "float32", False)],
)
def test_litgpts_precisions(tmp_path: Path, precision: str, dtype: str, autocast: bool) -> None:
    text = LITGPT.replace("bf16-true", precision).replace("quantize: bnb.nf4", "quantize:")
    config = read(tmp_path, text).config
    assert (config.dtype, config.autocast, config.method) == (dtype, autocast, "lora")


def test_litgpts_double_quantization(tmp_path: Path) -> None:
    assert read(tmp_path, LITGPT.replace("bnb.nf4", "bnb.nf4-dq")).config.double_quantization is True


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("Llama-2-7b-hf", "Llama-2-7c-hf", "did you mean"), ("devices: 1", "devices: 4", "planned on one device")],
)
def test_what_litgpt_cannot_be_planned_with_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in problem(tmp_path, LITGPT.replace(old, new))


@pytest.mark.parametrize(("name", "method"), [("llama3_1_8b", "full"), ("qlora_llama3_1_8b", "qlora")])
def test_torchtunes_names_are_presets(name: str, method: str) -> None:
    config = load([name]).config
    assert (config.trainer, config.method, config.n_embd, config.max_position_embeddings) == (
        "torchtune", method, 4096, 131072,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "blocks", "said"),
    [("torchtune", "3", "all blocks or none"), ("litgpt", "all", "on several devices alone")],
)
def test_checkpointing_that_a_program_has_not_is_refused(trainer: str, blocks: str, said: str) -> None:
    keys = [("trainer", trainer, "--trainer"), ("checkpoint_layers", blocks, "--checkpoint_layers")]
    with pytest.raises(InputError, match=said):
        load(["Llama-3.2-1B"], keys)


@pytest.mark.parametrize(("text", "epochs"), [(LITGPT, 4), (TORCHTUNE + "epochs: 2\n", 2)], ids=["litgpt", "torchtune"])
def test_a_files_epochs_are_its_own(tmp_path: Path, text: str, epochs: int) -> None:
    assert read(tmp_path, text).config.num_train_epochs == epochs
