"""What the data's folder says of a run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from oomph.config import from_dict, load


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data(folder: Path, size: int = 2000, meta: object = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(bytes(size))
    if meta is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def test_tokens_are_counted_from_the_file_and_words_from_its_meta(here: Path) -> None:
    data(here / "data" / "shakespeare_char", meta={"vocab_size": 65, "itos": {0: "a"}, "stoi": {"a": 0}})
    loaded = from_dict({"dataset": "shakespeare_char"})
    assert (loaded.config.dataset_tokens, loaded.config.vocab_size) == (1000, 65)
    assert loaded.sources["dataset_tokens"] == "data/shakespeare_char/train.bin, at 2 bytes a token"
    assert loaded.sources["vocab_size"] == "data/shakespeare_char/meta.pkl"


def test_a_meta_may_say_four_bytes_a_token(here: Path) -> None:
    data(here / "data" / "big", meta={"vocab_size": 100_000, "dtype": "uint32"})
    assert from_dict({"dataset": "big"}).config.dataset_tokens == 500


def test_a_dataset_may_be_a_path(here: Path) -> None:
    folder = data(here / "elsewhere" / "tokens")
    assert from_dict({"dataset": str(folder)}).config.dataset_tokens == 1000


def test_data_is_found_beside_the_folder_of_the_config(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data(here / "repo" / "data" / "mine")
    (here / "repo" / "config").mkdir()
    file = here / "repo" / "config" / "run.py"
    file.write_text("dataset = 'mine'")
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert load([file]).config.dataset_tokens == 1000


def test_what_was_said_of_the_data_is_kept(here: Path) -> None:
    data(here / "data" / "mine", meta={"vocab_size": 65})
    config = from_dict({"dataset": "mine", "vocab_size": 100, "dataset_tokens": 7}).config
    assert (config.vocab_size, config.dataset_tokens) == (100, 7)


def test_openais_weights_keep_their_vocabulary_whatever_the_meta_says(here: Path) -> None:
    data(here / "data" / "mine", meta={"vocab_size": 65})
    assert from_dict({"dataset": "mine", "init_from": "gpt2"}).config.vocab_size == 50257


def test_a_meta_that_would_run_something_is_noted_and_not_run(here: Path) -> None:
    folder = data(here / "data" / "mine")
    (folder / "meta.pkl").write_bytes(b"cbuiltins\nexec\n(Vopen('canary', 'w')\ntR.")
    loaded = from_dict({"dataset": "mine"})
    assert loaded.config.vocab_size == 50304
    assert "builtins.exec" in loaded.notes[0]
    assert not (here / "canary").exists()


def test_no_data_leaves_the_tokens_unsaid() -> None:
    assert from_dict({"dataset": "nowhere"}).config.dataset_tokens is None


def test_an_empty_file_leaves_the_tokens_unsaid(here: Path) -> None:
    data(here / "data" / "mine", size=0)
    assert from_dict({"dataset": "mine"}).config.dataset_tokens is None


def test_the_vocabulary_of_a_meta_pkl_is_taken_as_it_is_and_that_of_a_manifest_alone_rounded_up(here: Path) -> None:
    folder = data(here / "data" / "mine", meta={"vocab_size": 257})
    (folder / "meta.json").write_text('{"vocab_size": 257, "splits": {"train": {"tokens": 1000}}}')
    assert from_dict({"dataset": "mine"}).config.vocab_size == 257
    (folder / "meta.pkl").unlink()
    assert from_dict({"dataset": "mine"}).config.vocab_size == 320


def test_a_data_set_of_nanogpts_is_known_where_it_is_not_on_the_disk() -> None:
    loaded = from_dict({"dataset": "shakespeare_char"})
    assert (loaded.config.vocab_size, loaded.config.dataset_tokens) == (65, 1_003_854)


def test_a_data_set_that_nobody_named_is_not_assumed() -> None:
    assert from_dict({}).config.dataset_tokens is None


def test_a_vocabulary_that_is_given_is_kept() -> None:
    assert from_dict({"dataset": "shakespeare_char", "vocab_size": 100}).config.vocab_size == 100
