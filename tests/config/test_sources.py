"""Sources laid over one another, and what each value says of where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomph.config import GPT2_SHAPES, TrainConfig, as_loaded, from_dict, load, with_trainer
from oomph.errors import InputError


def override(text: str) -> tuple[str, str, str]:
    key, _, value = text.removeprefix("--").partition("=")
    return key, value, text


def problems(*sources: object, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(InputError) as caught:
        load([str(source) for source in sources], [override(text) for text in overrides])
    return [str(problem) for problem in caught.value.problems]


def test_nothing_at_all_is_nanogpts_defaults() -> None:
    loaded = load()
    assert loaded.config == TrainConfig()
    assert set(loaded.sources) == set(TrainConfig.__struct_fields__)
    assert set(loaded.sources.values()) == {"default"}


@pytest.mark.parametrize("name", GPT2_SHAPES)
def test_a_preset_sets_the_architecture_and_its_shape_alone(name: str) -> None:
    loaded = load([name])
    said = {key for key in loaded.sources if loaded.said(key)}
    assert said == {"model_type", "n_layer", "n_head", "n_embd"}
    assert {key: getattr(loaded.config, key) for key in said} == {"model_type": "gpt2", **GPT2_SHAPES[name]}
    assert loaded.sources["n_layer"] == f"preset {name}"


def test_later_sources_win_and_overrides_win_last(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.toml"
    first.write_text("batch_size = 1\nblock_size = 64\nn_layer = 3")
    second.write_text("batch_size = 2\nblock_size = 128\n")
    loaded = load(["gpt2-xl", first, second], [override("--batch_size=3")])
    assert (loaded.config.batch_size, loaded.config.block_size, loaded.config.n_layer) == (3, 128, 3)
    assert loaded.sources["batch_size"] == "--batch_size=3"
    assert loaded.sources["block_size"] == f"{second}:2"
    assert loaded.sources["n_head"] == "preset gpt2-xl"
    assert loaded.files == [str(first), str(second)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("--compile=True", True),
        ("--compile=false", False),
        ("--compile=0", False),
        ("--learning_rate=1e-3", 1e-3),
        ("--learning_rate=3", 3.0),
        ("--dataset_tokens=3.68B", 3_680_000_000),
        ("--max_iters=10M", 10_000_000),
        ("--vocab_size=5k", 5000),
        ("--gradient_accumulation_steps=5*8", 40),
        ("--gradient-accumulation-steps=40", 40),
        ("--max_iters=1e4", 10_000),
        ("--max_iters=600_000", 600_000),
        ("--out_dir=out", "out"),
        ("--out_dir='a b'", "a b"),
        ("--dataset=5", "5"),
        ("--torch_version=2.10", "2.10"),
        ("--dtype=None", None),
        ("--out_dir=a=b", "a=b"),
    ],
)
def test_an_override_means_what_people_mean(text: str, value: object) -> None:
    key = override(text)[0].replace("-", "_")
    assert getattr(load([], [override(text)]).config, key) == value


@pytest.mark.parametrize(
    "text",
    [
        "--compile=yes",
        "--n_layer=12.5",
        "--n_layer=True",
        "--n_layer=",
        "--n_layer=twelve",
        "--n_layer=-1",
        "--max_iters=1.5555k",
        "--n_layer=9**9**9",
        "--learning_rate=5m",
        "--dropout=1",
        "--beta1=nan",
        "--learning_rate=1e999",
        "--dtype=fp8",
        "--n_layer=__import__('os').getpid()",
        "--out_dir=a\nb",
    ],
)
def test_an_override_that_means_nothing_is_a_problem(text: str) -> None:
    (problem,) = problems(overrides=(text,))
    assert problem.startswith(text.split("\n")[0])
    assert "; try: " in problem


def test_an_unknown_override_names_the_nearest_key() -> None:
    (problem,) = problems(overrides=("--batch_sise=3",))
    assert "did you mean batch_size?" in problem


def test_init_from_sets_shape_bias_and_vocabulary_and_says_so() -> None:
    loaded = load([], [override("--init_from=gpt2-large"), override("--n_layer=6"), override("--block_size=256")])
    assert (loaded.config.n_layer, loaded.config.bias, loaded.config.vocab_size) == (36, True, 50257)
    assert loaded.config.block_size == 256
    assert loaded.sources["n_layer"] == "init_from = 'gpt2-large'"
    assert [note for note in loaded.notes if "n_layer = 6" in note]


def test_init_from_has_no_longer_blocks_than_it_was_trained_with() -> None:
    (problem,) = problems(overrides=("--init_from=gpt2", "--block_size=2048"))
    assert "1024" in problem


def test_resuming_says_that_the_checkpoint_has_the_shape() -> None:
    assert "ckpt.pt" in load([], [override("--init_from=resume")]).notes[0]


def test_problems_of_all_sources_come_together(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text("batch_sise = 3\nn_embd = 770")
    found = problems(file, tmp_path / "missing.py", overrides=("--compile=yes", "--nonsense=3"))
    assert len(found) == 5


def test_a_missing_file_names_the_nearest_file_or_preset(tmp_path: Path) -> None:
    (tmp_path / "train_gpt2.py").write_text("")
    assert "train_gpt2.py?" in problems(tmp_path / "train_gtp2.py")[0]
    assert "gpt2-xl?" in problems("gpt2xl")[0]


def test_a_folder_names_the_config_inside_it(tmp_path: Path) -> None:
    (tmp_path / "ckpt.pt").write_bytes(b"")
    (problem,) = problems(tmp_path)
    assert "folder" in problem
    assert "ckpt.pt?" in problem


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (bytes(range(256)), "binary"),
        (b"n_layer = 3\0", "binary"),
        (b"n_layer = 3\nout_dir = '\xe9'", "UTF-8"),
        ("n_layer = 3".encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04 and no archive", "archive"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "torch 1.6"),
        (b'\x10\x01\0\0\0\0\0\0{"__metadata__": {}}', "safetensors"),
    ],
)
def test_a_file_that_is_no_config_is_named_for_what_it_is(tmp_path: Path, content: bytes, word: str) -> None:
    file = tmp_path / "run.py"
    file.write_bytes(content)
    (problem,) = problems(file)
    assert word in problem


@pytest.mark.parametrize("name", ["/dev/null", "a\0b", "x" * 5000, "", "run.yaml/x"])
def test_a_name_that_is_no_file_is_a_problem(name: str) -> None:
    assert len(problems(name)) == 1


def test_an_ini_file_is_refused_with_what_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "run.ini"
    file.write_text("n_layer: 3")
    assert ".toml" in problems(file)[0]


def test_yaml_may_have_our_own_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("n_layer: 3")
    assert load([file]).config.n_layer == 3


def test_the_python_api_takes_whatever_it_is_handed(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text("n_layer = 3")
    assert as_loaded(None).config == TrainConfig()
    assert as_loaded("gpt2-xl").config.n_layer == 48
    assert as_loaded(file).config.n_layer == 3
    assert as_loaded({"n_layer": 3}).sources["n_layer"] == "given"
    assert as_loaded(TrainConfig(n_layer=3)).sources["n_layer"] == "given"
    loaded = load()
    assert as_loaded(loaded) is loaded


def test_a_train_config_is_checked_like_any_other() -> None:
    with pytest.raises(InputError):
        as_loaded(TrainConfig(n_embd=770))


def test_a_mapping_says_where_it_came_from_and_what_it_does_not_know() -> None:
    assert from_dict({"n_layer": 3}, where="the form").sources["n_layer"] == "the form"
    with pytest.raises(InputError, match="n_layer"):
        from_dict({"n_layers": 3})


def test_another_trainer_keeps_what_was_said_and_forgets_what_was_decided() -> None:
    loaded = from_dict({"dtype": "float16"})
    other = with_trainer(loaded, "oomph")
    assert (other.config.trainer, other.config.dtype, other.config.loss_chunk) == ("oomph", "float16", None)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen/Qwen3-0.7B", "Qwen/Qwen3-1.7B"),
        ("llama-3.2-2b", "meta-llama/Llama-3.2-3B"),
        ("gpt2-mdium", "gpt2-medium"),
        ("gpt-2", "gpt2"),
        ("nothing-like-it", None),
    ],
)
def test_an_unknown_model_is_told_the_nearest_name(name: str, near: str | None) -> None:
    with pytest.raises(InputError) as caught:
        load([name])
    assert [problem.nearest for problem in caught.value.problems] == [near]


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 32}


def written(tmp_path: Path, name: str, content: dict[str, object]) -> str:
    (tmp_path / name).write_text(json.dumps(content))
    return str(tmp_path / name)


def test_problems_of_a_models_config_call_keys_what_it_calls_them(tmp_path: Path) -> None:
    wrong = {"hidden_size": 65, "num_hidden_layers": 0, "head_dim": None}
    file = written(tmp_path, "config.json", LLAMA | wrong)
    with pytest.raises(InputError) as refused:
        load([file], [("n_head", "3", "--n_head=3")])
    assert [problem.what for problem in refused.value.problems] == [
        "num_hidden_layers is not valid",
        "hidden_size is not a multiple of n_head",
    ]


def test_a_second_model_keeps_nothing_of_the_first(tmp_path: Path) -> None:
    first = written(tmp_path, "llama.json", LLAMA)
    second = written(tmp_path, "gpt2.json", {"model_type": "gpt2", "n_embd": 128, "n_head": 4})
    assert load([first, second]).config == load([second], [("trainer", "hf", "--trainer=hf")]).config
    assert load([second, first]).config == load([first]).config
    assert load([first, "gpt2"], [("trainer", "nanogpt", "-")]).config == load(["gpt2"]).config
    run = tmp_path / "run.py"
    run.write_text("block_size = 512\n")
    assert load([second, run, first]).config.block_size == 512


@pytest.mark.parametrize("source", ["gpt2", "openai-community/gpt2"])
def test_gpt2_is_not_planned_as_nanochats_model(source: str) -> None:
    with pytest.raises(InputError, match="nanochat trains nanochat only; found model_type = 'gpt2'"):
        load([source], [("trainer", "nanochat", "--trainer=nanochat")])


@pytest.mark.parametrize("trainer", ["nanochat", "torchtitan"])
def test_a_nanogpt_config_is_not_planned_as_another_programs_model(trainer: str, tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text("n_layer = 4\nn_head = 4\nn_embd = 128\n")
    with pytest.raises(InputError, match=r"only; found model_type = 'gpt2' \(.*small.py is nanoGPT's\)"):
        load([file], [("trainer", trainer, f"--trainer={trainer}")])


@pytest.mark.parametrize("text", ["trainer = 'nanochat'\nn_layer = 4\n", "learning_rate = 1e-3\n"])
def test_a_py_file_that_names_its_program_or_no_model_is_nanochats_too(text: str, tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(text)
    assert load([file], [("trainer", "nanochat", "--trainer=nanochat")]).config.model_type == "nanochat"


@pytest.mark.parametrize("trainer", ["hf", "torch"])
def test_transformers_checkpoints_all_blocks_or_none(trainer: str) -> None:
    keys = {"trainer": trainer, "n_layer": 6}
    assert [from_dict(keys | {"checkpoint_layers": each}).config.checkpoint_layers for each in (0, 6)] == [0, 6]
    with pytest.raises(InputError, match="0 or all, which is 6"):
        from_dict(keys | {"checkpoint_layers": 3})
