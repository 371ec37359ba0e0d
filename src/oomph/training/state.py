"""The state of a run between two steps: packed into a checkpoint, unpacked from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from torch import Tensor

from oomph.config import KEYS, LoadedConfig
from oomph.errors import InputError, Problem
from oomph.training.entries import VERSION
from oomph.training.memory import drop_pages
from oomph.training.optimizer import load_optimizer, saved_state
from oomph.training.trainer import Trainer, random_state, restore_random_state
from oomph.training.weights import plain_names

_MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")  # nanoGPT's GPTConfig
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
    alarms: dict[str, list[float]] = field(default_factory=dict)  # the usual loss and gradient norm

    def is_better(self, step: int) -> bool:
        """Whether this step's weights were evaluated and are better than those in best.pt."""
        evaluated = step > 0 and self.evaluated_at == step and self.val_loss is not None
        return evaluated and cast(float, self.val_loss) < self.best_val_loss


def pack(
    trainer: Trainer,
    loaded: LoadedConfig,
    progress: RunProgress,
    options: Mapping[str, Any],
    data: Path,
    alone: bool = False,
) -> dict[str, Any]:
    """The content of a checkpoint: nanoGPT's entries, and ours under `oomph`. Every rank must call it.

    Without sharded tensors, which `parts` writes. `alone`: the other ranks are gone, and only this rank's
    random numbers are known.
    """
    config = trainer.config
    mine = random_state(trainer.device)
    randoms = [mine] if alone else trainer.ranks.gather(mine)
    return {
        **_tensors_of(trainer),
        "model_args": {key: getattr(config, key) for key in _MODEL_ARGS},
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
            **({"numbers": _numbers(trainer)} if trainer.sharing.in_lockstep else {}),
        },
    }


def _tensors_of(trainer: Trainer) -> dict[str, Any]:
    if trainer.sharing.in_lockstep:
        return {"optimizer": {"param_groups": saved_state(trainer.optimizer)["param_groups"]}}
    everything = {"model": trainer.model.state_dict(), "optimizer": saved_state(trainer.optimizer)}
    return everything | ({"ema": _average(trainer)} if trainer.average else {})


def _numbers(trainer: Trainer) -> dict[str, int]:
    """The index of each parameter in the optimizer's state, by name."""
    parameters = [id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]]
    numbers = {each: number for number, each in enumerate(parameters)}
    names = zip(trainer.sharing.names, trainer.parameters, strict=True)
    return {name: numbers[id(parameter)] for name, parameter in names}


def unpack(content: dict[str, Any], trainer: Trainer, path: Path) -> RunProgress:
    """Restore the trainer. Its weights are loaded already, except for sharded ones.

    nanoGPT's checkpoints have no data position: it follows from the steps done.
    """
    where = str(path)
    if "sharded" in content:
        _restore_parts(content, trainer, path)
    else:
        _load_average(trainer, content.get("ema"), where)
        if content.get("optimizer"):
            _load_optimizer(trainer, content["optimizer"], where)
            drop_pages(_tensors(content["optimizer"]))
    trainer.step = int(content.get("iter_num") or 0)
    ours = content.get("oomph")
    if ours is None:
        trainer.feed.position = trainer.step * trainer.feed.windows
        best = content.get("best_val_loss")
        return RunProgress(best_val_loss=float("inf") if best is None else float(best))
    trainer.feed.load_state(ours["data"], where)
    try:
        if trainer.scaler.is_enabled() and ours["scaler"]:  # a run that was not float16 before starts with a new scaler
            trainer.scaler.load_state_dict(ours["scaler"])
        if trainer.ranks.rank < len(ours["random"]):
            restore_random_state(ours["random"][trainer.ranks.rank], trainer.device)
    except _INVALID as error:
        raise InputError(Problem(where, "its entry oomph is invalid", found=str(error)[:120])) from None
    _restore_batch(trainer, content["config"], ours)
    known = {name: value for name, value in ours["standing"].items() if name in RunProgress.__dataclass_fields__}
    return RunProgress(**known)


def _average(trainer: Trainer) -> dict[str, Tensor]:
    """The averaged weights by name, and frozen ones; the head beside the embedding it is tied to, as in `model`."""
    averaged = {id(mine): each for mine, each in zip(trainer.parameters, trainer.average, strict=True)}
    everything = trainer.model.named_parameters(remove_duplicate=False)
    return {name: averaged.get(id(parameter), parameter.detach()) for name, parameter in everything}


def _restore_parts(content: dict[str, Any], trainer: Trainer, path: Path) -> None:
    """Read this rank's parts of a checkpoint's folder."""
    from oomph.training.ranks import parts

    parts.verify(path, content, trainer.ranks.rank, trainer.ranks.size)
    begins = trainer.average and not content["config"].get("ema")
    average, trainer.average = trainer.average, [] if begins else trainer.average
    parts.restore(path, parts.tensors_of(trainer))
    trainer.average = average
    if begins:
        _load_average(trainer, None, str(path))


def _load_average(trainer: Trainer, saved: dict[str, Tensor] | None, where: str) -> None:
    """Load the saved average; if the run had none so far, it starts as the weights."""
    if not trainer.average:
        return
    if saved is None:
        for mine, parameter in zip(trainer.average, trainer.parameters, strict=True):
            mine.copy_(parameter.detach())
        return
    named = plain_names(saved)
    for name, mine in zip(trainer.sharing.names, trainer.average, strict=True):
        if name not in named or (part := trainer.sharing.part_of(named[name])).shape != mine.shape:
            raise InputError(Problem(where, f"its average has no {name} of the model's shape"))
        mine.copy_(part)
    drop_pages(saved.values())


def _restore_batch(trainer: Trainer, before: dict[str, Any], ours: dict[str, Any]) -> None:
    """Keep a micro-batch that was reduced when memory ran out, unless the user sets another one."""
    config, size = trainer.config, trainer.ranks.size
    keys = ("batch_size", "gradient_accumulation_steps")
    unchanged = all(before.get(key) == getattr(config, key) for key in keys)
    same_tokens = ours["batch_size"] * ours["micro_steps"] == trainer.feed.windows
    if unchanged and same_tokens and ours["micro_steps"] % size == 0:
        trainer.batch_size, trainer.micro_steps = ours["batch_size"], ours["micro_steps"] // size


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


def _load_optimizer(trainer: Trainer, state: dict[str, Any], where: str) -> None:
    try:
        load_optimizer(trainer.optimizer, _cut(state, trainer))
    except _INVALID as error:
        what = f"its optimizer state is not that of {trainer.config.optimizer} for this model"
        raise InputError(Problem(where, what, found=f"{type(error).__name__}: {error}"[:120])) from None


def _cut(value: Any, trainer: Trainer) -> Any:
    """A state with this rank's parts of its tensors; step counts are not sharded."""
    if isinstance(value, Tensor):
        return trainer.sharing.part_of(value) if value.dim() else value
    if isinstance(value, dict):
        return {name: _cut(inner, trainer) for name, inner in value.items()}
    return [_cut(inner, trainer) for inner in value] if isinstance(value, list) else value
