"""DeepSpeed's JSON files are read as transformers' Trainer reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oomph.config import LoadedConfig, load
from oomph.errors import InputError

ZERO3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True},
    "train_micro_batch_size_per_gpu": "auto",
}


def loaded(folder: Path, content: dict[str, Any], **keys: str) -> LoadedConfig:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(content, indent=2))
    return load(["Qwen/Qwen3-0.6B", str(file)], [(key, value, f"--{key}={value}") for key, value in keys.items()])


def test_the_stage_and_the_precision_are_read(tmp_path: Path) -> None:
    config = loaded(tmp_path, ZERO3).config
    assert (config.deepspeed, config.dtype, config.overlap_comm, config.trainer) == ("zero3", "bfloat16", True, "hf")


def test_an_auto_bucket_is_the_square_of_the_models_width(tmp_path: Path) -> None:
    config = loaded(tmp_path, ZERO3).config
    assert config.reduce_bucket_size == config.n_embd**2


def test_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 2e8}
    content = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5}
    config = loaded(tmp_path, content, dtype="bfloat16").config
    assert (config.deepspeed, config.reduce_bucket_size, config.overlap_comm) == ("zero2", 200_000_000, False)
    assert (config.batch_size, config.grad_clip) == (3, 0.5)


@pytest.mark.parametrize(
    ("zero", "line"),
    [
        ({"stage": 0}, "stage"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "offload_optimizer"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "offload_param"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param"),
    ],
)
def test_what_is_not_planned_is_refused_with_its_line(tmp_path: Path, zero: dict[str, Any], line: str) -> None:
    content = {"zero_optimization": zero}
    number = next(at for at, text in enumerate(json.dumps(content, indent=2).split("\n"), 1) if f'"{line}"' in text)
    with pytest.raises(InputError) as raised:
        loaded(tmp_path, content)
    assert any(problem.where.endswith(f"ds_config.json:{number}") for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("stage", "names", "kept"),
    [(1, ["offload_optimizer"], "optimizer"), (3, ["offload_optimizer", "offload_param"], "all"), (2, [], "off")],
)
def test_what_is_kept_on_the_host_is_read(tmp_path: Path, stage: int, names: list[str], kept: str) -> None:
    zero = {"stage": stage, **{name: {"device": "cpu"} for name in names}}
    config = loaded(tmp_path, {"zero_optimization": zero}, dtype="bfloat16").config
    assert (config.deepspeed, config.cpu_offload) == (f"zero{stage}", kept)


def test_auto_numbers_of_stage_3_are_those_of_transformers(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    config = loaded(
        tmp_path, {"zero_optimization": zero | {"stage3_max_live_parameters": 1e8}}, dtype="bfloat16"
    ).config
    assert config.stage3_prefetch_bucket_size == int(0.9 * config.n_embd**2)
    assert config.stage3_param_persistence_threshold == 10 * config.n_embd
    assert (config.stage3_max_live_parameters, config.stage3_max_reuse_distance) == (10**8, 10**9)
