"""Samples' lengths: percentiles, given or counted in a file, and how far a batch is padded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from oomph import config as configs
from oomph.config import TrainConfig
from oomph.config.lengths import count, longest, mean_length, padded_length, points
from oomph.errors import InputError

LENGTHS = [min(4000, int(random.Random(7).lognormvariate(5.5, 0.8)) + 5 * each % 900 + 1) for each in range(5000)]
RUN = {"trainer": "trl", "model_type": "llama", "method": "lora", "batch_size": 4, "block_size": 2048}


def loaded(**keys: Any) -> configs.LoadedConfig:
    return configs.from_dict(RUN | keys)


@pytest.mark.parametrize("text", ["", "p50", "p50:300", "max:0", "p95:900,p50:300,max:2000", "p50:900,max:300", "300"])
def test_percentiles_rise_to_the_longest(text: str) -> None:
    assert points(text) is None


def test_between_percentiles_lengths_are_even() -> None:
    assert points("p0:100, p50:300, max:700") == ((0.0, 100.0), (0.5, 300.0), (1.0, 700.0))
    assert longest("p50:300,max:700") == 700
    even = TrainConfig(block_size=1000, batch_size=3, lengths="p0:200,max:600")
    assert (mean_length(even), padded_length(even)) == (400, 500)  # the longest of n: n / (n + 1) of the way


@pytest.mark.parametrize("cut", [300, 1024, 4000])
@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_a_batch_is_padded_as_far_as_drawn_ones(cut: int, batch: int, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, LENGTHS)))
    text = count(file, "lengths.txt").percentiles
    drawn, chance = [min(each, cut) for each in LENGTHS], random.Random(1)
    config = TrainConfig(block_size=cut, batch_size=batch, lengths=text)
    padded = mean(max(chance.choices(drawn, k=batch)) for _ in range(4000))
    assert mean_length(config) == pytest.approx(mean(drawn), rel=0.01)
    assert padded_length(config) == pytest.approx(padded, rel=0.03)


@pytest.mark.parametrize(
    ("sample", "tokens"),
    [
        (7, 7),
        ([5, 6, 7], 3),
        ({"input_ids": [1, 2, 3, 4]}, 4),
        ({"num_tokens": 9, "text": "x"}, 9),
        ({"text": "x" * 41}, 11),
        ({"instruction": "x" * 20, "input": "", "output": "y" * 20}, 10),
        ({"messages": [{"role": "user", "content": "x" * 12}, {"role": "assistant", "content": "y" * 8}]}, 5),
        ({"conversations": [{"from": "human", "value": "x" * 12}]}, 3),
        ({"prompt": [{"role": "user", "content": "x" * 4}], "completion": "y" * 4}, 2),
    ],
    ids=str,
)
def test_a_sample_is_counted_or_estimated_from_its_text(sample: object, tokens: int, tmp_path: Path) -> None:
    lines, whole = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text(f"{json.dumps(sample)}\n\n")
    whole.write_text(json.dumps([sample]))
    for file in (lines, whole):
        found = count(file, file.name)
        assert (found.samples, longest(found.percentiles)) == (1, tokens)
        assert found.estimated == (isinstance(sample, dict) and not {"input_ids", "num_tokens"} & sample.keys())


@pytest.mark.parametrize("text", ["", "not json", '{"id": 3}', "-4", '"text"'])
def test_a_file_without_samples_is_an_input_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError):
        loaded(lengths=str(tmp_path / "a.jsonl"))


def test_a_file_gives_percentiles_and_the_number_of_samples(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("100\n200\n600\n")
    found = loaded(lengths=str(file))
    assert (found.config.num_samples, found.config.block_size) == (3, 600)
    assert points(found.config.lengths or "")
    assert loaded(lengths=str(file), num_samples=50).config.num_samples == 50
    again = configs.as_loaded(found, {"batch_size": 2})
    assert (again.config.lengths, again.config.block_size) == (found.config.lengths, 600)


def test_rows_are_as_long_as_the_longest_sample_and_no_longer_than_asked() -> None:
    lengths = "p50:300,max:3000"
    assert loaded(lengths=lengths).config.block_size == 2048
    assert loaded(lengths="max:900").config.block_size == 900
    assert loaded(lengths="max:900", packing="packed").config.block_size == 2048
    by_data = {key: value for key, value in RUN.items() if key != "block_size"} | {"lengths": lengths}
    assert configs.from_dict(by_data | {"trainer": "hf"}).config.block_size == 3000
    assert configs.from_dict(by_data).config.block_size == 1024  # SFTConfig's max_length


def test_lengths_have_a_mean_of_their_own_and_the_page_reads_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        loaded(lengths="max:900", mean_length=300)
    (tmp_path / "a.txt").write_text("100\n")
    with pytest.raises(InputError):
        configs.load((), [("lengths", str(tmp_path / "a.txt"), "--lengths")], confined=True)
