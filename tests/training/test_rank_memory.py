"""The plan of a rank against what the trainer's own steps allocate on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_memory
from training_helpers import write_data

from oomph import config as configs
from oomph.devices import detect
from oomph.predict.memory import find_peak
from oomph.step import build

TWO: dict[str, Any] = {"world_size": 2, "gradient_accumulation_steps": 2}
FOUR: dict[str, Any] = {"world_size": 4, "gradient_accumulation_steps": 8}
FSDP: dict[str, Any] = {"parallel": "fsdp"}
JOBS: dict[str, dict[str, Any]] = {
    "ddp": TWO | {"parallel": "ddp"},
    "ddp of 4, accumulating": FOUR | {"parallel": "ddp"},
    "fsdp": TWO | FSDP,
    "fsdp, checkpointed": TWO | FSDP | {"checkpoint_layers": 4},
    "fsdp, half precision": TWO | FSDP | {"dtype": "bfloat16"},
    "fsdp of 4, accumulating": FOUR | FSDP,
    "fsdp of 4, reduced at last": FOUR | FSDP | {"grad_sync": "last"},
    "fsdp of 4, not resharded": FOUR | FSDP | {"reshard_after_forward": "false"},
}


def planned(keys: dict[str, Any]) -> int:
    """Bytes of a rank's warm step, by the plan."""
    loaded = configs.with_trainer(configs.from_dict(rank_memory.MODEL | keys), "oomph")
    config = configs.settle(loaded, detect("cpu", False)).config
    step = build.build(config, cuda=False, threads=1, evaluates=False)
    return find_peak([step], rounding_bytes=1).allocated_bytes


@pytest.mark.slow
def test_a_rank_allocates_what_is_planned(tmp_path: Path) -> None:
    seen = rank_memory.measure(JOBS, write_data(tmp_path / "tokens"))
    for name, keys in JOBS.items():
        for rank, peaks in enumerate(seen[name]):
            assert planned(keys) == pytest.approx(min(peaks), rel=0.01), (name, rank)
