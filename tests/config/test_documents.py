"""TOML and Hugging Face's config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomph.config import LoadedConfig, load
from oomph.errors import InputError


def read(folder: Path, name: str, text: str) -> LoadedConfig:
    (folder / name).write_text(text)
    return load([folder / name])


def refused(folder: Path, name: str, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, name, text)
    return str(caught.value)


def test_toml_is_oomphs_own_format_so_its_trainer_is_oomph(tmp_path: Path) -> None:
    loaded = read(tmp_path, "run.toml", "# a run\nn_layer = 4\nlearning_rate = 1e-3\ncompile = false\n")
    assert (loaded.config.n_layer, loaded.config.compile, loaded.config.trainer) == (4, False, "oomph")
    assert loaded.sources["n_layer"].endswith("run.toml:2")
    assert loaded.sources["trainer"].startswith("default: ")


def test_toml_may_say_another_trainer(tmp_path: Path) -> None:
    assert read(tmp_path, "run.toml", 'trainer = "nanogpt"').config.trainer == "nanogpt"


def test_counts_may_be_written_short(tmp_path: Path) -> None:
    assert read(tmp_path, "run.toml", 'dataset_tokens = "3.68B"').config.dataset_tokens == 3_680_000_000


def test_an_empty_toml_changes_nothing_and_says_so(tmp_path: Path) -> None:
    assert "empty" in read(tmp_path, "run.toml", "\n").notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nn_layer = 3", ["run.toml:1", "table"]),
        ("model.n_layer = 3", ["table"]),
        ("n_layer = [3]", ["list"]),
        ("a = 1\nn_layr = 3", ["run.toml:2", "n_layer?"]),
        ("n_layer = 3\nn_layer = = 4", ["run.toml:2", "not TOML"]),
        ("n_layer = 1979-05-27", ["n_layer", "date"]),
        ("dropout = nan", ["dropout"]),
        ('n_layer = "3"', ["n_layer", "'3'"]),
        ("torch_version = 2.4", ["torch_version"]),
        ("a = " + "[" * 10_000, ["nested too deeply"]),
        (".".join(["a"] * 10_000) + " = 1", ["dots"]),
        ("n_layer = " + "9" * 10_000, ["too many digits"]),
        ("\n".join(f"a{i} = 1" for i in range(1000)), ["980 more unknown keys"]),
    ],
)
def test_toml_that_is_no_config_says_why(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refused(tmp_path, "run.toml", text)
    assert all(word in message for word in words)


def test_a_hugging_face_config_gives_the_shape(tmp_path: Path) -> None:
    content = {
        "model_type": "gpt2",
        "n_layer": 24,
        "n_head": 16,
        "n_embd": 1024,
        "n_positions": 512,
        "vocab_size": 50257,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        "n_inner": None,
        "transformers_version": "4.40.0",
    }
    config = read(tmp_path, "config.json", json.dumps(content)).config
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size) == (24, 16, 1024, 512)
    assert (config.vocab_size, config.bias, config.tie_weights, config.dropout) == (50257, True, False, 0.0)


def test_what_a_hugging_face_config_leaves_out_is_hugging_faces_default(tmp_path: Path) -> None:
    loaded = read(tmp_path, "config.json", '{"architectures": ["GPT2LMHeadModel"], "hidden_size": 384, "n_head": 6}')
    assert (loaded.config.n_embd, loaded.config.n_layer, loaded.config.dropout) == (384, 12, 0.1)
    assert "Hugging Face's default" in loaded.sources["n_layer"]


def test_three_different_dropouts_are_noted(tmp_path: Path) -> None:
    loaded = read(tmp_path, "config.json", '{"model_type": "gpt2", "attn_pdrop": 0.3}')
    assert "attn_pdrop = 0.3" in loaded.notes[0]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"model_type": "bert"}', "gpt2"),
        ('{"model_type": ["gpt2"]}', "gpt2"),
        ('{"model_type": "gpt2", "n_inner": 5}', "n_inner"),
        ('{"model_type": "gpt2", "n_layer": "many"}', "n_layer"),
        ('{"n_layr": 3}', "n_layer?"),
        ("", "not JSON"),
        ("[1]", "a list"),
        ("[" * 100_000, "nested too deeply"),
        ('{"n_layer": ' + "9" * 10_000 + "}", "too many digits"),
        ('{"n_layer": NaN}', "n_layer"),
    ],
)
def test_json_that_is_no_config_says_why(tmp_path: Path, text: str, word: str) -> None:
    assert word in refused(tmp_path, "config.json", text)


def test_a_flat_object_of_keys_is_a_config(tmp_path: Path) -> None:
    assert read(tmp_path, "plain", ' {"n_layer": 3}').config.n_layer == 3
