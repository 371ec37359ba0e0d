"""Generating text: the same with and without the cache, from the same seed, cut where it should be."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_helpers import LETTERS, VOCAB, Train, write_data

from oomph import config as configs
from oomph.cli import sample as command
from oomph.config import TrainConfig
from oomph.data.tokenizer import tokenizer_of
from oomph.training import checkpoint
from oomph.training.model import GPT
from oomph.training.sample import Sampling, draw, generate, open_model
from refusals import refused


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(TrainConfig(vocab_size=20, n_layer=2, n_head=2, n_embd=16, block_size=10)).eval()


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, None), Sampling(0.7, 5), Sampling(1.0, None, 0.8)])
@pytest.mark.parametrize("recipe", ["nanogpt", "modern"])
def test_the_cache_changes_nothing_even_beyond_the_block(recipe: str, sampling: Sampling) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 20, "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 10, "num_key_value_heads": 1}
    model = GPT(configs.from_dict(shape | {"recipe": recipe, "trainer": "oomph", "zero_init": False}).config).eval()
    cached = generate(model, [1, 2, 3], 15, sampling, samples=3)
    assert cached == generate(model, [1, 2, 3], 15, sampling, samples=3, use_cache=False)


def test_a_seed_repeats_and_another_differs(model: GPT) -> None:
    first = generate(model, [1], 8, Sampling(seed=1))
    assert first == generate(model, [1], 8, Sampling(seed=1))
    assert first != generate(model, [1], 8, Sampling(seed=2))


def test_each_sample_ends_before_the_stop_token(model: GPT) -> None:
    free = generate(model, [1], 8, Sampling(1.0, None), samples=4)
    stop = free[0][3]
    stopped = generate(model, [1], 8, Sampling(1.0, None), samples=4, stop=stop)
    for with_stop, without in zip(stopped, free, strict=True):
        assert with_stop == (without[: without.index(stop)] if stop in without else without)


@settings(max_examples=50, deadline=None)
@given(k=st.integers(1, 30), p=st.floats(0.05, 1.0), seed=st.integers(0, 1000))
def test_only_the_likeliest_are_drawn(k: int, p: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, 20)
    order = logits[0].argsort(descending=True).tolist()
    randomness = torch.Generator().manual_seed(seed)
    assert draw(logits, Sampling(1.0, k), randomness).item() in order[:k]
    shares = logits[0].softmax(-1)[order].cumsum(0)
    needed = int((shares < p - 1e-6).sum()) + 1
    assert draw(logits, Sampling(1.0, None, p), randomness).item() in order[:needed]


def test_no_temperature_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert draw(logits, Sampling(0), torch.Generator()).item() == 1


@pytest.mark.usefixtures("letters")
def test_the_command_writes_text_in_the_datas_letters(
    run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("run", eval_interval=3)
    argv = [str(tmp_path / "run"), "--prompt", "abc", "--tokens", "12", "--samples", "2", "--json"]
    assert command.run(argv) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["tokens"] == [12, 12] and out["tokenizer"] == "chars"
    assert all(len(text) == 12 and set(text) <= set(LETTERS) for text in out["samples"])


@pytest.mark.usefixtures("letters")
def test_a_saved_sample_lands_in_the_runs_folder(
    run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("run", eval_interval=3)
    assert command.run([str(tmp_path / "run"), "--prompt", "abc", "--tokens", "5", "--seed", "7", "--save"]) == 0
    assert (tmp_path / "run" / "samples" / "seed_7.txt").read_text() == capsys.readouterr().out


def test_a_nanogpt_checkpoint_can_be_sampled(run: Train, tmp_path: Path) -> None:
    run("run")
    content = checkpoint.load(checkpoint.saved(tmp_path / "run")[-1])
    del content["oomph"]
    (tmp_path / "theirs").mkdir()
    torch.save(content, tmp_path / "theirs" / "ckpt.pt")
    theirs = open_model(tmp_path / "theirs").model
    ours = open_model(tmp_path / "run").model
    assert generate(theirs, [1], 5, Sampling()) == generate(ours, [1], 5, Sampling())


def test_an_unknown_character_in_the_prompt_is_named(letters: Path) -> None:
    with refused("meta.pkl", found="'ß'"):
        tokenizer_of(letters, None, VOCAB).encode(["Straße"])


def test_characters_survive_encoding_and_decoding(letters: Path) -> None:
    tokenizer = tokenizer_of(letters, None, VOCAB)
    assert tokenizer.decode(tokenizer.encode(["Hello, world!"])[0].tolist()) == "Hello, world!"


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with refused(str(tmp_path)):
        open_model(tmp_path)


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("data_is_gone", [False, True])
def test_a_run_can_be_sampled_from_any_folder(
    run: Train,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data_is_gone: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    run("run", dataset=data.name)
    if data_is_gone:
        data.rename(tmp_path / "gone")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in (tmp_path / "run", checkpoint.saved(tmp_path / "run")[-1]):
        assert command.run([str(path), "--prompt", "abc", "--tokens", "5", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokenizer"] == "chars"


@pytest.mark.usefixtures("letters")
def test_an_unknown_tokenizer_is_not_guessed(run: Train, data: Path, tmp_path: Path) -> None:
    run("run")
    (tmp_path / "alone").mkdir()
    checkpoint.saved(tmp_path / "run")[-1].rename(tmp_path / "alone" / "best.pt")
    data.rename(tmp_path / "gone")
    with refused(str(tmp_path / "alone"), allowed="--dataset"):
        command.run([str(tmp_path / "alone")])
    with refused("dataset 'nowhere'"):
        command.run([str(tmp_path / "alone"), "--dataset", "nowhere"])


def test_data_that_names_no_tokenizer_is_gpt2s_only_with_its_vocabulary(run: Train, tmp_path: Path) -> None:
    run("run")
    with refused(str(tmp_path), found="vocab_size = 61"):
        command.run([str(tmp_path / "run")])


@pytest.mark.usefixtures("letters")
def test_a_prompt_beyond_the_models_vocabulary_is_refused(run: Train, tmp_path: Path) -> None:
    run("run")
    other = write_data(tmp_path / "other")
    more = LETTERS + "ß"
    tables = {"stoi": {c: i for i, c in enumerate(more)}, "itos": dict(enumerate(more)), "vocab_size": VOCAB + 1}
    (other / "meta.pkl").write_bytes(pickle.dumps(tables))
    with refused("--prompt", found="token 61, vocab_size = 61"):
        command.run([str(tmp_path / "run"), "--dataset", str(other), "--prompt", "aß"])


@pytest.mark.usefixtures("letters")
def test_a_sample_of_a_checkpoint_lands_in_its_runs_folder(run: Train, tmp_path: Path) -> None:
    run("run")
    path = checkpoint.saved(tmp_path / "run")[-1]
    assert command.run([str(path), "--prompt", "abc", "--tokens", "5", "--seed", "7", "--save", "--json"]) == 0
    assert (tmp_path / "run" / "samples" / "seed_7.txt").is_file()


@pytest.mark.parametrize(
    "argv",
    [
        ["--device", "tpu"],
        ["--device", "meta"],
        ["--device", "cuda:99"],
        ["--seed", str(2**70)],
        ["--temperature", "1e-40"],
        ["--tokens", "1.5"],
        ["--tokens", "0"],
        ["--top_k", "0.5"],
        ["--samples", "1e3"],
        ["--prompt", "a\udcff"],
    ],
    ids=str,
)
@pytest.mark.usefixtures("letters")
def test_what_cannot_be_sampled_with_is_refused(
    run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    from oomph.cli.main import main

    if argv[0] == "--device":  # looked at once the input is known to be sound
        run("run", max_iters=1)
    assert main(["sample", str(tmp_path / "run"), "--prompt", "abc", *argv]) == 2
    assert argv[0] in capsys.readouterr().err


def test_many_samples_are_made_in_groups(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    from oomph.training import sample

    likeliest = generate(model, [1], 5, Sampling(0), 1)
    monkeypatch.setattr(sample, "GROUP", 4)
    sizes = [len(group) for group in sample.generate_groups(model, [1], 5, Sampling(0), 10)]
    assert sizes == [4, 4, 2] and generate(model, [1], 5, Sampling(0), 10) == likeliest * 10
    drawn = generate(model, [1], 5, Sampling(1.0), 8)
    assert drawn[:4] != drawn[4:]  # random numbers go on from group to group


@pytest.mark.usefixtures("letters")
def test_too_little_memory_for_the_samples_is_reported(
    run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from oomph.cli.main import main
    from oomph.training import sample

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    run("run", max_iters=1)
    monkeypatch.setattr(sample, "KeyValues", full)
    assert main(["sample", str(tmp_path / "run"), "--prompt", "abc"]) == 3
    assert "fewer --samples" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e6])
def test_any_temperature_draws_a_token(temperature: float) -> None:
    logits = torch.tensor([[0.0, 300.0, -300.0]])
    assert draw(logits, Sampling(temperature, None), torch.Generator()).item() in (0, 1, 2)
