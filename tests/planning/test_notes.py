"""`warnings`: each mistake named with what to set instead, and silence where all is well."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph.config.schema import TrainConfig
from oomph.devices import Device, all_devices, find
from oomph.planning.notes import warnings


def config(**keys: object) -> TrainConfig:
    return TrainConfig(**{"dtype": "bfloat16", **keys})  # type: ignore[arg-type]


def test_gpt2_in_bfloat16_on_a_recent_card_needs_no_warning() -> None:
    assert warnings(config(), find("4070")) == []


def test_bfloat16_without_hardware_is_told_with_the_emulated_rate() -> None:
    [said] = [text for text in warnings(config(), find("T4")) if "bfloat16" in text]
    assert "2.3 TFLOPS" in said and "dtype=float16" in said
    [said] = [text for text in warnings(config(), find("TITAN RTX")) if "bfloat16" in text]
    assert "10 times" in said


def test_float16_is_questioned_only_where_bfloat16_would_do() -> None:
    assert any("scaler" in text for text in warnings(config(dtype="float16"), find("4070")))
    assert not any("scaler" in text for text in warnings(config(dtype="float16"), find("T4")))


def test_heads_of_42_are_told_with_the_nearest_widths_and_heads() -> None:
    [said] = warnings(config(n_embd=504, n_head=12), find("4070"))
    assert all(figure in said for figure in ("42", "480", "576", "n_head=9"))


def test_a_width_of_partial_tiles_is_told_with_its_neighbours() -> None:
    [said] = warnings(config(n_embd=800, n_head=10), find("4070"))
    assert all(figure in said for figure in ("64", "768", "832"))


def test_heads_too_large_for_flash_attention_are_told() -> None:
    [said] = warnings(config(n_embd=1024, n_head=2), find("4070"))
    assert "512" in said


def test_a_vocabulary_of_50257_is_told_50304() -> None:
    [said] = warnings(config(vocab_size=50257), find("4070"))
    assert "50304" in said


@pytest.mark.parametrize("keys", [{"vocab_size": 65}, {"vocab_size": 50257, "init_from": "gpt2"}])
def test_a_vocabulary_that_cannot_matter_or_change_is_left_alone(keys: dict[str, object]) -> None:
    assert warnings(config(**keys), find("4070")) == []


def test_pascal_is_told_of_compile_attention_and_tensor_cores() -> None:
    said = warnings(config(dtype="float16"), find("P100"))
    assert len(said) == 3
    assert any("compile=False" in text for text in said)
    assert any("attention=efficient" in text for text in said)


def test_turing_compiles_but_has_no_flash_attention() -> None:
    [said] = warnings(config(dtype="float16"), find("T4"))
    assert "8.0" in said


@pytest.mark.parametrize("name", ["MI300X", "Apple M1 16GB"])
def test_memory_on_other_makers_devices_is_called_unverified(name: str) -> None:
    assert "unverified" in warnings(config(), find(name))[0]


def test_a_cpu_is_told_only_of_slow_precisions() -> None:
    cpu = Device(name="CPU", kind="cpu", vendor="", arch="", memory_mib=1, usable_mib=1, context_mib=0, has_bf16=False)
    assert "float32" in warnings(config(n_embd=504), cpu)[0]
    assert warnings(config(dtype="float32", n_embd=504), cpu) == []


@given(
    n_head=st.integers(1, 64),
    n_embd=st.integers(1, 5000),
    vocab_size=st.integers(1, 200_000),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    device=st.sampled_from(all_devices()),
)
def test_every_warning_is_a_sentence_and_its_vocabulary_is_aligned(
    n_head: int, n_embd: int, vocab_size: int, dtype: str, device: Device
) -> None:
    for text in warnings(config(n_head=n_head, n_embd=n_embd, vocab_size=vocab_size, dtype=dtype), device):
        assert text[0].isalnum() and text.endswith(".") and "None" not in text


def test_heads_with_a_size_of_their_own_are_judged_by_it() -> None:
    shape = {"model_type": "gemma3_text", "trainer": "hf", "n_embd": 1152, "n_head": 5}
    assert warnings(config(**shape, head_dim=256), find("4070")) == []
    [said] = warnings(config(**shape, head_dim=36), find("4070"))
    assert "head_dim=36" in said


@pytest.mark.parametrize(("version", "said"), [("5.5", 1), ("4.57", 0)])
def test_experts_that_stay_unquantized_are_told(version: str, said: int) -> None:
    keys = {"model_type": "mixtral", "trainer": "hf", "num_experts": 8, "num_experts_per_tok": 2}
    mixture = config(**keys, method="qlora", quantization="nf4", transformers_version=version)
    assert len([each for each in warnings(mixture, find("4070")) if "experts" in each]) == said


def test_an_old_transformers_is_not_said_to_run_as_the_earliest_described() -> None:
    notes = oomph.plan({"trainer": "hf", "n_layer": 1, "transformers_version": "4.40"}, "RTX 4070").notes
    assert [note for note in notes if "4.40" in note and "4.48" in note and "not described" in note]
    later = oomph.plan({"trainer": "hf", "n_layer": 1, "transformers_version": "4.48"}, "RTX 4070").notes
    assert not [note for note in later if "4.48" in note]


@pytest.mark.parametrize(
    ("source", "keys", "idle"),
    [
        ("gpt2", {"num_key_value_heads": "4", "sliding_window": "128", "hidden_act": "relu", "dropout": "0.1"},
         ["sliding_window"]),  # the others oomph train has, which another note says
        ("gpt2", {"trainer": "hf", "dropout": "0.2", "bias": "False"}, ["bias"]),
        ("gpt2", {"trainer": "hf", "return_logits": "True"}, ["return_logits"]),
        ("nanochat-d4", {"autocast": "False", "dropout": "0.1", "tie_weights": "True", "optimizer": "sgd"},
         ["dropout", "tie_weights", "autocast", "optimizer"]),
        ("nanochat-d4", {"window_pattern": "L"}, []),
        ("mistralai/Mixtral-8x7B-v0.1", {"n_layer": "1"}, []),
        ("facebook/opt-125m", {"intermediate_size": "1024", "norm_topk_prob": "False"}, ["norm_topk_prob"]),
        ("gpt2", {}, []),
    ],
)  # fmt: skip
def test_keys_that_neither_program_nor_architecture_looks_at_are_named(
    source: str, keys: dict[str, str], idle: list[str]
) -> None:
    given = {"n_layer": "1", "compile": "False"} | keys if source != "nanochat-d4" else keys
    loaded = oomph.load_config([source], [(key, value, f"--{key}={value}") for key, value in given.items()])
    notes = [note for note in oomph.plan(loaded, "A100 80GB").notes if note.startswith("Given, but changes nothing")]
    assert [note.rpartition(": ")[2].split(", ") for note in notes] == ([idle] if idle else [])
