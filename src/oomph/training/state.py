"""All that a run is between two steps, as a checkpoint holds it, and back again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from oomph import config as configs
from oomph.config import KEYS, LoadedConfig, TrainConfig
from oomph.errors import InputError, Problem
from oomph.training.trainer import Trainer, random_state, restore_random_state

VERSION = 1
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "tie_weights")  # the weights fix them
_PREFIX = "_orig_mod."  # torch.compile's, which nanoGPT's checkpoints may carry


@dataclass
class Standing:
    """How far the run has come, beyond what the trainer holds."""

    best_val_loss: float = float("inf")
    evaluated_at: int = -1  # the step of the last evaluation
    metrics_bytes: int = 0
    seconds: float = 0.0  # of training, over all processes that worked on it


def pack(trainer: Trainer, loaded: LoadedConfig, standing: Standing) -> dict[str, Any]:
    """The content of a checkpoint: nanoGPT's entries, and ours under `oomph`. A collective: every rank calls it."""
    config = trainer.config
    randoms = trainer.ranks.gather(random_state(trainer.device))
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "model_args": {key: getattr(config, key) for key in (*SHAPE[:-1], "dropout")},
        "iter_num": trainer.step,
        "best_val_loss": standing.best_val_loss,
        "config": {key: value for key, value in msgspec.to_builtins(config).items() if value is not None},
        "oomph": {
            "version": VERSION,
            "decided": [key for key in KEYS if not loaded.said(key)],  # on another machine these are decided anew
            "batch_size": trainer.batch_size,
            "micro_steps": trainer.micro_steps * trainer.ranks.size,
            "scaler": trainer.scaler.state_dict(),
            "data": trainer.feed.state(),
            "random": randoms,
            "standing": {name: getattr(standing, name) for name in standing.__dataclass_fields__},
        },
    }


def unpack(content: dict[str, Any], trainer: Trainer, where: str) -> Standing:
    """Put the trainer where the checkpoint was taken. nanoGPT's says no data position: the steps done tell it."""
    load_weights(trainer.model, content["model"], where)
    if "optimizer" in content:
        _load_optimizer(trainer, content["optimizer"], where)
    trainer.step = int(content.get("iter_num", 0))
    ours = content.get("oomph")
    if ours is None:
        trainer.feed.position = trainer.step * trainer.feed.windows
        return Standing(best_val_loss=float(content.get("best_val_loss", float("inf"))))
    trainer.scaler.load_state_dict(ours["scaler"] if trainer.scaler.is_enabled() else {})
    trainer.feed.load_state(ours["data"])
    config, ranks = trainer.config, trainer.ranks
    if config.batch_size == content["config"]["batch_size"] and ours["micro_steps"] % ranks.size == 0:
        trainer.batch_size, trainer.micro_steps = ours["batch_size"], ours["micro_steps"] // ranks.size
    if ranks.rank < len(ours["random"]):
        restore_random_state(ours["random"][ranks.rank], trainer.device)
    return Standing(**ours["standing"])


def load_weights(model: torch.nn.Module, weights: dict[str, Any], where: str) -> None:
    """Weights by name; every difference in names and shapes is said."""
    named = {name.removeprefix(_PREFIX): value for name, value in weights.items()}
    wanted = model.state_dict()
    problems = [Problem(where, f"no weights for {name}") for name in wanted if name not in named]
    problems += [
        Problem(where, f"weights of another shape for {name}", str(tuple(value.shape)), str(tuple(wanted[name].shape)))
        for name, value in named.items()
        if name in wanted and value.shape != wanted[name].shape
    ]
    if problems:
        raise InputError(problems[:10])
    model.load_state_dict({name: named[name] for name in wanted})


def _load_optimizer(trainer: Trainer, state: dict[str, Any], where: str) -> None:
    try:
        trainer.optimizer.load_state_dict(state)
    except (ValueError, KeyError) as error:
        what = f"its optimizer's state is not that of {trainer.config.optimizer}"
        raise InputError(Problem(where, what, found=str(error)[:120])) from None


def saved_config(content: dict[str, Any], where: str) -> LoadedConfig:
    """The config in a checkpoint of ours or nanoGPT's: its keys, and over them the shape that its weights have."""
    found = {**content.get("config", {}), **content.get("model_args", {})}
    return configs.from_dict({key: found[key] for key in KEYS if found.get(key) is not None}, where)


def resumed_config(checkpoint: Path, content: dict[str, Any], now: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """The config that a run goes on with: the checkpoint's, and over it what the user says now; what changed, in words.

    Refuses a changed shape: the weights have the old one.
    """
    before = saved_config(content, str(checkpoint))
    decided = set(content.get("oomph", {}).get("decided", ()))
    defaults = TrainConfig()
    values, sources = {}, {}
    changes: list[str] = []
    problems: list[Problem] = []
    for key in KEYS:
        old, new = getattr(before.config, key), getattr(now.config, key)
        if now.said(key) and key != "init_from":
            values[key], sources[key] = new, now.sources[key]
            if new != old and key not in decided:
                changes.append(f"{key}: {old} in the checkpoint, now {new} ({now.sources[key]})")
            if new != old and key in SHAPE:
                what = f"{key} cannot change: the checkpoint's weights have {key} = {old}"
                problems.append(Problem(now.sources[key], what, found=str(new), allowed=str(old)))
        elif key in decided:
            values[key], sources[key] = getattr(defaults, key) if key not in SHAPE else old, "default"
        else:
            values[key], sources[key] = old, before.sources[key]
    if problems:
        raise InputError(problems)
    values["init_from"] = "resume"
    return LoadedConfig(TrainConfig(**values), sources, now.notes, now.files), changes
