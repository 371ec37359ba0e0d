"""Weights to and from Hugging Face's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open
from training_helpers import Train
from training_helpers import weights as saved_weights

from oomph import config as configs
from oomph.config import TrainConfig
from oomph.errors import InputError
from oomph.training import hugging_face, weights
from oomph.training.model import GPT
from oomph.training.weights import load_weights

CONFIG = TrainConfig(vocab_size=20, n_layer=2, n_head=2, n_embd=8, block_size=10, bias=True)


def model_of(config: TrainConfig = CONFIG) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def test_exported_weights_can_be_imported(tmp_path: Path) -> None:
    model = model_of()
    hugging_face.export_huggingface(model.state_dict(), CONFIG, tmp_path)
    other = GPT(CONFIG)
    load_weights(other, weights.read_weights(tmp_path), "there")
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_matrices_are_transposed_and_the_tied_head_left_out(tmp_path: Path) -> None:
    hugging_face.export_huggingface(model_of().state_dict(), CONFIG, tmp_path)
    tensors = hugging_face.read_safetensors(tmp_path / "model.safetensors")
    assert tensors["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
    assert tensors["transformer.h.1.mlp.c_proj.weight"].shape == (32, 8)
    assert "lm_head.weight" not in tensors
    settings = json.loads((tmp_path / "config.json").read_text())
    assert (settings["n_layer"], settings["n_positions"], settings["activation_function"]) == (2, 10, "gelu")


def test_missing_biases_become_zeros() -> None:
    config = replace(CONFIG, bias=False)
    tensors = hugging_face.to_gpt2(model_of(config).state_dict(), config)
    assert torch.equal(tensors["transformer.h.0.mlp.c_fc.bias"], torch.zeros(32))
    assert torch.equal(tensors["transformer.ln_f.bias"], torch.zeros(8))
    assert not any("wte.bias" in name or "wpe.bias" in name for name in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_files_keep_values_and_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(6).view(2, 3).to(dtype)
    path = tmp_path / "x.safetensors"
    hugging_face.write_safetensors({"a": tensor, "b": tensor[0].clone()}, path)
    found = hugging_face.read_safetensors(path)
    assert torch.equal(found["a"], tensor) and torch.equal(found["b"], tensor[0]) and found["a"].dtype == dtype
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers asks for


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\x10" + b"\0" * 7 + b"{}", b"\xff" * 64])
def test_a_broken_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="safetensors"):
        hugging_face.read_safetensors(tmp_path / "x.safetensors")


def test_fewer_positions_are_the_first_ones() -> None:
    named = model_of().state_dict()
    cropped = weights.crop_positions(dict(named), 4)
    assert torch.equal(cropped["transformer.wpe.weight"], named["transformer.wpe.weight"][:4])


def test_training_starts_from_given_weights(run: Train, tmp_path: Path) -> None:
    first = run("first", max_iters=20, eval_interval=20, options={"export": True})
    assert first.val_loss is not None
    second = run("second", max_iters=1, bias=True, options={"weights": tmp_path / "first" / "huggingface"})
    assert second.loss is not None and abs(second.loss - first.val_loss) < 0.5


@pytest.mark.parametrize(("settings", "told"), [({"activation_function": "gelu"}, False), ({}, True), (None, False)])
def test_weights_trained_with_another_gelu_are_told(
    run: Train, tmp_path: Path, settings: dict[str, str] | None, told: bool
) -> None:
    run("first", max_iters=1, options={"export": True})
    config = tmp_path / "first" / "huggingface" / "config.json"
    config.unlink()
    if settings is not None:
        config.write_text(json.dumps(settings))
    run("second", max_iters=1, bias=True, options={"weights": config.parent})
    assert ("was trained with gelu_new" in (tmp_path / "second" / "log.txt").read_text()) == told


def test_weights_of_another_architecture_are_refused(run: Train, tmp_path: Path) -> None:
    run("first", max_iters=1, options={"export": True})
    (tmp_path / "first" / "huggingface" / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(InputError, match=r"not the architecture.*opt"):
        run("second", max_iters=1, options={"weights": tmp_path / "first" / "huggingface"})


def test_weights_of_another_shape_are_refused_one_by_one(run: Train, tmp_path: Path) -> None:
    hugging_face.export_huggingface(model_of().state_dict(), CONFIG, tmp_path / "other")
    with pytest.raises(InputError, match=r"transformer\.wte\.weight"):
        run("run", options={"weights": tmp_path / "other"})


def refusal(model: GPT, named: dict[str, torch.Tensor]) -> list[str]:
    with pytest.raises(InputError) as error:
        load_weights(model, named, "there")
    return [str(problem) for problem in error.value.problems]


def test_unexpected_biases_are_listed_with_the_key_that_allows_them() -> None:
    named = GPT(CONFIG).state_dict()
    for value in named.values():
        value.fill_(0.5)
    (said,) = refusal(GPT(replace(CONFIG, bias=False)), named)
    assert "transformer.h.0-1.ln_1.bias, transformer.h.0-1.attn.c_attn.bias" in said
    assert said.endswith("transformer.ln_f.bias; try: --bias=True")


def test_biases_of_zeros_and_masks_are_none() -> None:
    config = replace(CONFIG, bias=False)
    named = hugging_face.from_gpt2(hugging_face.to_gpt2(model_of(config).state_dict(), config))
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 10, 10)}  # of a nanoGPT without flash attention
    other = GPT(config)
    load_weights(other, named | mask, "there")
    assert torch.equal(other.state_dict()["transformer.ln_f.weight"], named["transformer.ln_f.weight"])


def test_missing_and_unexpected_layers_are_listed() -> None:
    config = replace(CONFIG, bias=False)
    (fewer,) = refusal(GPT(replace(config, n_layer=1)), model_of(config).state_dict())
    assert "transformer.h.1.ln_1.weight" in fewer and fewer.endswith("--n_layer=2")
    (more,) = refusal(GPT(replace(config, n_layer=4)), model_of(config).state_dict())
    assert "transformer.h.2-3.ln_1.weight" in more and more.endswith("--n_layer=2")


def test_a_head_of_its_own_is_not_lost_in_a_tied_model() -> None:
    untied = model_of(replace(CONFIG, tie_weights=False)).state_dict()
    (said,) = refusal(GPT(CONFIG), untied)
    assert "lm_head.weight" in said and "transformer.wte.weight" in said and said.endswith("--tie_weights=False")


@pytest.mark.parametrize("header", ["[]", '["a"]', "3", '{"a": 3}', '{"a": {"dtype": "F32"}}', "[" * 9000])
def test_a_header_that_is_no_table_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(InputError, match="safetensors"):
        weights.read_weights(path)


def test_a_compiled_models_names_are_plain_and_its_positions_cropped(tmp_path: Path) -> None:
    named = {f"_orig_mod.{name}": value for name, value in model_of().state_dict().items()}
    torch.save({"model": named}, tmp_path / "ckpt.pt")
    cropped = weights.crop_positions(weights.read_weights(tmp_path), 4)
    assert cropped["transformer.wpe.weight"].shape == (4, 8)


FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"bias": True},
    "LlamaForCausalLM": {"use_qk_norm": False, "num_key_value_heads": 1},
    "Qwen3ForCausalLM": {"tie_weights": False, "head_dim": 6},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_from_an_exported_folder(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape: dict[str, Any] = {"vocab_size": 31, "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 10}
    recipe = {"recipe": "modern"} if name != "GPT2LMHeadModel" else {}
    config = configs.from_dict(shape | recipe | FAMILIES[name]).config
    torch.manual_seed(1)
    model = GPT(config).eval()
    for parameter in model.parameters():  # norms and zero projections too
        torch.nn.init.normal_(parameter, std=0.3)
    hugging_face.export_huggingface(model.state_dict(), config, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(31, (2, 10))
    assert type(theirs).__name__ == name
    with torch.no_grad():
        mine = model.lm_head(model.trunk(tokens))
        assert torch.allclose(mine, theirs.eval()(tokens).logits, atol=1e-5)
    again = GPT(hugging_face.huggingface_config(tmp_path))
    load_weights(again, weights.read_weights(tmp_path), "there")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_model_that_transformers_has_not_is_not_exported() -> None:
    config = configs.from_dict({"recipe": "modern", "is_gated_act": False, "hidden_act": "relu2"}).config
    with pytest.raises(InputError, match="relu2"):
        hugging_face.family_of(config)


def test_a_run_begins_with_the_weights_and_shape_that_init_from_names(run: Train, tmp_path: Path) -> None:
    run("first", recipe="modern", n_embd=24, max_iters=3)
    run("second", init_from=str(tmp_path / "first"), max_iters=1, learning_rate=0.0, decay_lr=False)
    first, second = saved_weights(tmp_path / "first"), saved_weights(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["transformer.wte.weight"].shape[1] == 24


def test_init_from_a_hugging_face_folder_plans_its_shape(tmp_path: Path) -> None:
    config = configs.from_dict({"recipe": "modern", "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32}).config
    hugging_face.export_huggingface(GPT(config).state_dict(), config, tmp_path)
    loaded = configs.from_dict({"init_from": str(tmp_path)})
    assert loaded.weights == str(tmp_path)
    assert (loaded.config.n_embd, loaded.config.block_size, loaded.config.trainer) == (16, 32, "oomph")
    assert loaded.config.use_qk_norm and loaded.config.norm_type == "rmsnorm"


@pytest.mark.parametrize("settings", [{"attention_bias": True}, {"rope_scaling": {"rope_type": "llama3"}}])
def test_what_the_model_has_not_is_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = configs.from_dict({"recipe": "modern", "n_layer": 1}).config
    whole = hugging_face.settings_of(config) | {"rope_parameters": None} | settings
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(InputError, match=next(iter(settings)) if "bias" in str(settings) else "llama3"):
        configs.from_dict({"init_from": str(tmp_path)})
