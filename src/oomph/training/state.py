"""The state of a run between two steps: packed into a checkpoint, unpacked from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from oomph import config as configs
from oomph.config import KEYS, LoadedConfig
from oomph.errors import InputError, Problem
from oomph.training.checkpoint import VERSION
from oomph.training.optimizer import load_optimizer, saved_state
from oomph.training.trainer import Trainer, random_state, restore_random_state
from oomph.training.weights import load_weights

SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "tie_weights")  # fixed by the weights
_INVALID = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError)  # what invalid content raises


@dataclass
class RunProgress:
    """How far the run is, beyond what the trainer holds."""

    best_val_loss: float = float("inf")  # that of best.pt
    evaluated_at: int = -1  # the step of the last evaluation
    metrics_bytes: int = 0  # length of metrics.jsonl
    seconds: float = 0.0  # of training, over all processes that worked on the run
    loss: float | None = None  # of the last step
    val_loss: float | None = None  # of the last evaluation

    def is_better(self, step: int) -> bool:
        """Whether this step's weights were evaluated and are better than those in best.pt."""
        evaluated = step > 0 and self.evaluated_at == step and self.val_loss is not None
        return evaluated and cast(float, self.val_loss) < self.best_val_loss


def pack(
    trainer: Trainer, loaded: LoadedConfig, progress: RunProgress, options: Mapping[str, Any], data: Path
) -> dict[str, Any]:
    """The content of a checkpoint: nanoGPT's entries, and ours under `oomph`. Every rank must call it."""
    config = trainer.config
    randoms = trainer.ranks.gather(random_state(trainer.device))
    return {
        "model": trainer.model.state_dict(),
        "optimizer": saved_state(trainer.optimizer),
        "model_args": {key: getattr(config, key) for key in (*SHAPE[:-1], "dropout")},
        "iter_num": trainer.step,
        "best_val_loss": progress.best_val_loss,
        "config": {key: value for key, value in msgspec.to_builtins(config).items() if value is not None},
        "oomph": {
            "version": VERSION,
            "decided": [key for key in KEYS if not loaded.said(key)],  # decided again on another machine
            "batch_size": trainer.batch_size,
            "micro_steps": trainer.micro_steps * trainer.ranks.size,
            "scaler": trainer.scaler.state_dict(),
            "data": trainer.feed.state(),
            "data_folder": str(data.resolve()),  # for a run resumed from another folder
            "random": randoms,
            "standing": {name: getattr(progress, name) for name in progress.__dataclass_fields__},
            "options": dict(options),
        },
    }


def unpack(content: dict[str, Any], trainer: Trainer, where: str) -> RunProgress:
    """Restore the trainer. nanoGPT's checkpoints have no data position: it follows from the steps done."""
    load_weights(trainer.model, content["model"], where)
    if content.get("optimizer"):
        _load_optimizer(trainer, content["optimizer"], where)
    trainer.step = int(content.get("iter_num") or 0)
    ours = content.get("oomph")
    if ours is None:
        trainer.feed.position = trainer.step * trainer.feed.windows
        best = content.get("best_val_loss")
        return RunProgress(best_val_loss=float("inf") if best is None else float(best))
    trainer.feed.load_state(ours["data"], where)
    try:
        if trainer.scaler.is_enabled() and ours["scaler"]:  # a run that was not float16 before starts with a new one
            trainer.scaler.load_state_dict(ours["scaler"])
        if trainer.ranks.rank < len(ours["random"]):
            restore_random_state(ours["random"][trainer.ranks.rank], trainer.device)
    except _INVALID as error:
        raise InputError(Problem(where, "its entry oomph is invalid", found=str(error)[:120])) from None
    _restore_batch(trainer, content["config"], ours)
    known = {name: value for name, value in ours["standing"].items() if name in RunProgress.__dataclass_fields__}
    return RunProgress(**known)


def _restore_batch(trainer: Trainer, before: dict[str, Any], ours: dict[str, Any]) -> None:
    """Keep a micro-batch that was reduced when memory ran out, unless the user sets another one."""
    config, size = trainer.config, trainer.ranks.size
    keys = ("batch_size", "gradient_accumulation_steps")
    unchanged = all(before.get(key) == getattr(config, key) for key in keys)
    same_tokens = ours["batch_size"] * ours["micro_steps"] == trainer.feed.windows
    if unchanged and same_tokens and ours["micro_steps"] % size == 0:
        trainer.batch_size, trainer.micro_steps = ours["batch_size"], ours["micro_steps"] // size


def _load_optimizer(trainer: Trainer, state: dict[str, Any], where: str) -> None:
    try:
        load_optimizer(trainer.optimizer, state)
    except _INVALID as error:
        what = f"its optimizer state is not that of {trainer.config.optimizer} for this model"
        raise InputError(Problem(where, what, found=f"{type(error).__name__}: {error}"[:120])) from None


def saved_config(content: dict[str, Any], where: str) -> LoadedConfig:
    """The config in a checkpoint, oomph's or nanoGPT's, with the shape that its weights have."""
    found = {**(content.get("config") or {}), **(content.get("model_args") or {})}
    return configs.from_dict({key: found[key] for key in KEYS if found.get(key) is not None}, where)
