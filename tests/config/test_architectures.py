"""Which program and model a name, a config.json and a trainer ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomph.config.load import Pasted, as_loaded, from_dict, load
from oomph.config.programs import MODEL_TYPES
from oomph.config.reading import hugging_face
from oomph.config.schema import TrainConfig
from oomph.config.settle import settle
from oomph.devices import find
from oomph.errors import InputError
from oomph.planning.plan import plan
from oomph.step.parameters import parameters

CLASSES = [name for name in MODEL_TYPES if name not in ("nanochat", "qwen")]  # of transformers
HF = ("trainer", "hf", "--trainer=hf")


def settled(*sources: str | Pasted, trainer: str | None = None) -> TrainConfig:
    overrides = [("trainer", trainer, f"--trainer={trainer}")] if trainer else []
    return settle(load(sources, overrides), find("A100 80GB")).config


def test_a_gpt2_config_json_is_nanogpts_unless_the_trainer_is_transformers() -> None:
    file = Pasted("config.json", '{"model_type": "gpt2", "n_layer": 2, "resid_pdrop": 0.2}')
    ours, theirs = settled(file), settled(file, trainer="hf")
    assert (ours.trainer, ours.hidden_act) == ("nanogpt", "gelu")
    assert (theirs.trainer, theirs.hidden_act, theirs.dropout) == ("hf", "gelu_new", 0.2)
    shapes = [{p.name: p.shape for p in parameters(config)} for config in (ours, theirs)]
    assert [each["transformer.h.0.attn.c_attn.weight"] for each in shapes] == [(2304, 768), (768, 2304)]


def test_a_gpt2_preset_under_transformers_is_openais_model() -> None:
    config = settled("gpt2", trainer="hf")
    assert (config.vocab_size, config.dropout, config.bias, config.max_position_embeddings) == (50257, 0.1, True, 1024)
    assert sum(p.numel for p in parameters(config)) == 124_439_808


def test_a_shorter_sequence_leaves_transformers_table_of_positions() -> None:
    loaded = load(["gpt2"], [HF, ("block_size", "256", "--block_size=256")])
    config = settle(loaded, find("A100 80GB")).config
    assert {p.name: p.shape for p in parameters(config)}["transformer.wpe.weight"] == (1024, 768)


# As the models' own cards and transformers' `num_parameters()` have them.
COUNTS = {
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_model_by_name_has_its_own_number_of_parameters(name: str) -> None:
    config = settled(name)
    assert config.trainer == "hf"
    assert sum(p.numel for p in parameters(config)) == COUNTS[name]


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("mixtral", "output_router_logits", True),
        ("mixtral", "router_jitter_noise", 0.1),
        ("opt", "layer_norm_elementwise_affine", False),
        ("opt", "layerdrop", 0.1),
    ],
)
def test_a_switch_that_is_not_described_is_a_problem(family: str, key: str, value: object) -> None:
    layer = hugging_face.read({"model_type": family, key: value}, "config.json")
    assert [problem.what.partition(":")[0] for problem in layer.problems] == [key]


@pytest.mark.parametrize(
    ("trainer", "architecture"),
    [("nanogpt", "gpt_neox"), ("oomph", "mixtral"), ("hf", "nanochat"), ("nanochat", "opt")],
)
def test_a_trainer_that_does_not_have_the_architecture_is_a_problem(trainer: str, architecture: str) -> None:
    with pytest.raises(InputError) as caught:
        from_dict({"trainer": trainer, "model_type": architecture})
    assert any(f"model_type = {architecture!r}" in problem.found for problem in caught.value.problems if problem.found)


def test_more_tokens_than_positions_are_a_problem() -> None:
    with pytest.raises(InputError) as caught:
        plan(load(["facebook/opt-125m"], [("block_size", "4096", "--block_size=4096")]), "A100 80GB")
    assert "--block_size=4096" in {problem.where for problem in caught.value.problems}


# What base_train prints for these depths.
DEPTHS = {12: (768, 6, 8, 2520), 20: (1280, 10, 16, 4980), 26: (1664, 13, 16, 10510)}


@pytest.mark.parametrize("depth", DEPTHS)
def test_nanochats_depth_decides_width_batch_and_length(depth: int) -> None:
    config = settled(f"nanochat-d{depth}")
    found = (config.n_embd, config.n_head, config.gradient_accumulation_steps, config.max_iters)
    assert (config.trainer, config.model_type, found) == ("nanochat", "nanochat", DEPTHS[depth])


def test_nanochat_keeps_the_tokens_of_a_step_when_the_batch_shrinks() -> None:
    loaded = load(["nanochat-d12"], [("batch_size", "4", "--batch_size=4")])
    assert loaded.config.gradient_accumulation_steps == 64


def test_nanochat_without_a_depth_is_its_default() -> None:
    assert settled(trainer="nanochat").n_layer == 20


def test_nanochat_takes_flash_attention_3_where_there_is_one() -> None:
    kernels = {name: settle(load(["nanochat-d12"]), find(name)).config.attention for name in ("A100 80GB", "RTX 5090")}
    assert kernels == {"A100 80GB": "flash3", "RTX 5090": "flash"}


@pytest.mark.parametrize("family", CLASSES)
def test_a_config_that_gives_the_architecture_alone_is_its_class_default(family: str) -> None:
    """By a config.json, and by keys."""
    transformers = pytest.importorskip("transformers")
    own = transformers.CONFIG_MAPPING[family]()
    heads = own.num_attention_heads
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // heads
    by_name = ("intermediate_size", "ffn_dim", "n_inner")
    inner = next((value for name in by_name if (value := getattr(own, name, None))), 4 * own.hidden_size)
    expected = {
        "n_layer": own.num_hidden_layers,
        "n_head": heads,
        "n_embd": own.hidden_size,
        "vocab_size": own.vocab_size,
        "tie_weights": own.tie_word_embeddings,
        "num_key_value_heads": getattr(own, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": inner,
        "sliding_window": getattr(own, "sliding_window", None),
        "attention_dropout": getattr(own, "attention_dropout", getattr(own, "attn_pdrop", None)),
    }
    activation = next(
        getattr(own, name) for name in ("hidden_activation", "hidden_act", "activation_function") if hasattr(own, name)
    )
    expected["hidden_act"] = {"gelu_pytorch_tanh": "gelu"}.get(activation, activation)
    by_file = settled(Pasted("config.json", f'{{"model_type": "{family}"}}'), trainer="hf")
    by_keys = settle(from_dict({"trainer": "hf", "model_type": family}), find("A100 80GB")).config
    for config in (by_file, by_keys):
        assert {key: getattr(config, key) for key in expected} == expected


def test_what_a_config_json_sets_to_null_is_not_its_class_default() -> None:
    file = Pasted("config.json", '{"model_type": "mistral", "sliding_window": null}')
    assert settled(file).sliding_window is None


def test_toml_unsets_a_key_with_none() -> None:
    file = Pasted("run.toml", 'trainer = "hf"\nmodel_type = "mistral"\nsliding_window = "None"')
    assert settled(file).sliding_window is None


@pytest.mark.parametrize(
    ("more", "window", "pattern"),
    [
        ('"sliding_window": 64', None, None),
        ('"sliding_window": 64, "use_sliding_window": true, "max_window_layers": 4', None, None),
        ('"sliding_window": 64, "use_sliding_window": true, "max_window_layers": 0', 64, None),
        (
            f'"use_sliding_window": true, "layer_types": {json.dumps(["sliding_attention", "full_attention"] * 2)}',
            4096,
            2,
        ),
    ],
)
def test_qwens_window_is_switched_on_and_starts_at_a_block(more: str, window: int | None, pattern: int | None) -> None:
    config = settled(Pasted("config.json", f'{{"model_type": "qwen2", "num_hidden_layers": 4, {more}}}'))
    assert (config.sliding_window, config.sliding_window_pattern) == (window, pattern)


@pytest.mark.parametrize(
    "more",
    [
        {"max_window_layers": 2},
        {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "sliding_attention", "other", None]},
        {"layer_types": "full"},
    ],
)
def test_windows_that_are_not_described_are_a_problem(more: dict[str, object]) -> None:
    content = {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, **more}
    assert len(hugging_face.read(content, "config.json").problems) == 1


def test_parts_of_a_model_beside_its_language_model_are_named() -> None:
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 2}
    content = {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 8}}
    layer = hugging_face.read(content, "config.json")
    assert layer.values["n_layer"].value == 2
    assert [note for note in layer.notes if "vision_config" in note and "text_config" not in note]


def test_a_config_json_without_model_type_is_told_what_it_lacks() -> None:
    text = '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}'
    for content, near in ((text, "llama"), ('{"hidden_size": 64}', None)):
        with pytest.raises(InputError) as caught:
            load([Pasted("config.json", content)])
        (problem,) = caught.value.problems
        assert "model_type" in problem.what
        assert problem.nearest == near


def test_a_settled_config_is_planned_as_it_is() -> None:
    keys = {"trainer": "hf", "model_type": "mistral", "n_layer": 12, "sliding_window": None, "batch_size": 12}
    once = settle(from_dict(keys), find("4070")).config
    assert (once.n_layer, once.sliding_window, once.batch_size) == (12, None, 12)
    assert settle(as_loaded(once), find("4070")).config == once


@pytest.mark.parametrize("trainer", ["hf", "torch"])
def test_on_several_devices_transformers_programs_take_one_micro_step_each(trainer: str) -> None:
    keys = {"trainer": trainer, "world_size": 3}
    assert from_dict(keys).config.gradient_accumulation_steps == 3
    assert from_dict(keys | {"gradient_accumulation_steps": 6}).config.gradient_accumulation_steps == 6
    with pytest.raises(InputError):
        from_dict(keys | {"gradient_accumulation_steps": 4})


def test_a_models_folder_is_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 3}')
    assert load(tmp_path).config.n_layer == 3


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("EleutherAI/pythia-70m", "head_dim", "40"),
        ("facebook/opt-125m", "sliding_window", "64"),
        ("Qwen/Qwen3-0.6B", "attn_logit_softcapping", "30"),
        ("Qwen/Qwen3-0.6B", "loss_chunk", "128"),
        ("nanochat-d4", "loss_chunk", "128"),
    ],
)
def test_a_key_that_a_program_does_not_have_is_refused(model: str, key: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        load([model], [(key, value, f"--{key}={value}")])
    assert [problem.where for problem in caught.value.problems] == [f"--{key}={value}"]


def test_a_files_keys_that_its_class_ignores_are_not_read() -> None:
    content = {"model_type": "llama", "sliding_window": 64, "attn_logit_softcapping": 30.0, "num_experts": 8}
    read = hugging_face.read(content, "config.json")
    assert not read.problems and not {"sliding_window", "attn_logit_softcapping", "num_experts"} & read.values.keys()
