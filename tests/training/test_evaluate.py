"""How good a model is: the loss over fixed windows, bits per byte, and a multiple choice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import Train

from oomph.cli.main import main
from oomph.config import TrainConfig
from oomph.data.tokenizer import ByteTokenizer
from oomph.errors import InputError
from oomph.training import hugging_face
from oomph.training.evaluate import Question, answer, evaluate_split, read_questions
from oomph.training.loss import plain_loss
from oomph.training.model import GPT
from oomph.training.sample import open_model


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(TrainConfig(vocab_size=257, n_layer=2, n_head=2, n_embd=16, block_size=16, dropout=0.0)).eval()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """161 bytes of text, an end of text among them: ten windows of 16."""
    tokens = np.frombuffer(b"the same words again and again. " * 6, np.uint8)[:161].astype("<u2")
    tokens[100] = 256
    tokens.tofile(tmp_path / "val.bin")
    tokens.tofile(tmp_path / "train.bin")
    return tmp_path


def test_a_whole_split_has_the_mean_loss_of_all_its_windows(model: GPT, text: Path) -> None:
    found = evaluate_split(model, text, "val", None, ByteTokenizer())
    tokens = torch.from_numpy(np.fromfile(text / "val.bin", "<u2").astype("int64"))
    x, y = tokens[:-1].view(10, 16), tokens[1:].view(10, 16)
    with torch.no_grad():
        expected = plain_loss(model.trunk(x).flatten(0, 1), model.lm_head.weight, y.flatten()).item()
    assert found.loss == pytest.approx(expected, abs=1e-5)
    assert (found.tokens, found.text_bytes) == (160, 159)  # the end of text is no byte
    assert found.bits_per_byte == pytest.approx(found.loss * 160 / math.log(2) / 159)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_fewer_tokens_are_spread_over_the_split(model: GPT, text: Path) -> None:
    assert evaluate_split(model, text, "val", 40, None).tokens == 32
    assert evaluate_split(model, text, "val", 40, None).bits_per_byte is None


def favour(model: GPT, byte: str) -> None:
    """Make one byte the likeliest everywhere."""
    with torch.no_grad():
        model.transformer["ln_f"].weight.fill_(0.0)
        model.transformer["ln_f"].bias = torch.nn.Parameter(torch.ones(16))
        model.lm_head.weight.fill_(0.0)
        model.lm_head.weight[ord(byte)] = 1.0


def test_the_likeliest_ending_is_chosen(model: GPT) -> None:
    favour(model, "b")
    questions = [Question("x", ["aaa", "bbb", "ccc"], 1), Question("x" * 99, ["bbb", "aaa"], 1)]
    found = answer(model, questions, ByteTokenizer())
    assert (found.questions, found.accuracy, found.accuracy_per_token) == (2, 0.5, 0.5)
    assert found.chance == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_a_long_ending_is_not_punished_by_the_mean(model: GPT) -> None:
    favour(model, "b")
    found = answer(model, [Question("x", ["b", "bbbbbb"], 1)], ByteTokenizer())
    assert (found.accuracy, found.accuracy_per_token) == (0.0, 1.0)


@pytest.mark.parametrize(
    "line",
    ["{}", '{"ctx": "a", "endings": ["b"], "label": 0}', '{"ctx": "a", "endings": ["b", "c"], "label": 2}', "x", ""],
)
def test_a_wrong_line_of_questions_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"q\.jsonl"):
        read_questions(path)


def test_the_command_tells_loss_and_answers(
    run: Train, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("run", max_iters=2, eval_tokens=10**6)
    assert main(["evaluate", str(tmp_path / "run"), str(data), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["loss"] == pytest.approx(result.val_loss, abs=1e-5) and found["bits_per_byte"] is None
    assert main(["evaluate", str(tmp_path / "run")]) == 0  # the data it was trained on
    assert "val loss" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "run"), str(tmp_path / "none")]) == 2


def test_a_hugging_face_folder_opens_with_the_same_losses(run: Train, tmp_path: Path, data: Path) -> None:
    run("run", max_iters=3, bias=False, options={"export": True})
    ours, theirs = (open_model(tmp_path / "run" / name).model for name in ("", "huggingface"))
    first, second = (evaluate_split(each, data, "val", None, None).loss for each in (ours, theirs))
    assert first == pytest.approx(second, abs=1e-6)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"n_layer": "x"}'])
def test_a_hugging_face_folder_without_a_shape_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json: cannot be read.*n_positions"):
        hugging_face.huggingface_config(tmp_path)


@pytest.mark.usefixtures("letters")
def test_text_is_written_at_each_evaluation_and_changes_no_number(run: Train, tmp_path: Path) -> None:
    silent = run("silent", eval_interval=3, dropout=0.2)
    spoken = run("spoken", eval_interval=3, dropout=0.2, sample_tokens=20)
    assert silent.val_loss == spoken.val_loss and silent.loss == spoken.loss
    texts = {path.name: path.read_text() for path in (tmp_path / "spoken" / "samples").iterdir()}
    assert set(texts) == {"step-0.txt", "step-3.txt", "step-6.txt"} and all(1 < len(t) <= 21 for t in texts.values())


def test_a_sample_that_cannot_be_written_does_not_stop_the_run(run: Train, tmp_path: Path) -> None:
    assert run("run", max_iters=2, sample_tokens=5, vocab_size=64).finished  # no tokenizer beside the data
    assert "WARNING: no sample was written" in (tmp_path / "run" / "log.txt").read_text()
