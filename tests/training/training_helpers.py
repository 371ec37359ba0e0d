"""A small run, its data, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oomph.training import checkpoint
from oomph.training.result import Result
from oomph.training.run import Options, train

Train = Callable[..., Result]

VOCAB = 61
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;:!?'\n"[:VOCAB]
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 16,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_iters": 3,
    "lr_decay_iters": 20,
    "max_iters": 6,
    "eval_interval": 1000,
    "eval_iters": 2,
    "device": "cpu",
}


def write_data(folder: Path) -> Path:
    """Tokens that can be learned: each is the last one plus 0, 1 or 2."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = np.random.default_rng(0).integers(0, 3, 5000)
    tokens = (np.cumsum(steps) % VOCAB).astype("<u2")
    tokens[:4000].tofile(folder / "train.bin")
    tokens[4000:].tofile(folder / "val.bin")
    return folder


def trainer_of(data: Path, folder: Path) -> Train:
    """`run(name, max_iters=…, …)` trains the small model into folder/name; `options` go to `Options`."""

    def run(name: str = "run", options: dict[str, Any] | None = None, **keys: Any) -> Result:
        config = SMALL | {"dataset": str(data), "out_dir": str(folder / name)} | keys
        return train(config, Options(**({"quiet": True, "measure": False} | (options or {}))))

    return run


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every logged step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's last checkpoint."""
    found: dict[str, torch.Tensor] = checkpoint.load(checkpoint.saved(folder)[-1])["model"]
    return found
