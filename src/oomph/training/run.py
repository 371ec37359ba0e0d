"""`oomph.train`: a plan carried out. The plan first, then the steps, and at the end the one held against the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.data.manifest import find_dataset
from oomph.errors import InputError, Problem
from oomph.planner import Plan, plan
from oomph.training import checkpoint, weights
from oomph.training.distributed import Ranks, ranks_from_environment
from oomph.training.failure import DoesNotFitError, TrainingError, is_out_of_memory
from oomph.training.feed import Feed
from oomph.training.folder import find_run, open_folder, write_json, write_plan
from oomph.training.loop import Loop
from oomph.training.loss import head_loss
from oomph.training.memory import MemoryMeter, return_freed_memory
from oomph.training.metrics import Metrics, make_trackers
from oomph.training.model import GPT
from oomph.training.optimizer import make_optimizer
from oomph.training.progress import Log
from oomph.training.result import Result, lines
from oomph.training.setup import Setup, prepare
from oomph.training.state import Standing, load_weights, resumed_config, unpack
from oomph.training.trainer import DTYPES, Trainer

Config = LoadedConfig | TrainConfig | Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Options:
    """What is asked of a run beyond its config."""

    resume: bool | str | os.PathLike[str] = False  # True: the run in out_dir; or a run's folder or checkpoint
    force: bool = False  # train though the plan says that it does not fit
    overwrite: bool = False  # begin anew in a folder that holds a run
    keep: int = 2  # checkpoints kept, the newest ones; the best is kept beside them
    save_minutes: float = 15.0  # a checkpoint at least this often
    order: str = "random"  # of the data: "random" windows as nanoGPT draws them, or shuffled "epochs"
    weights: str | os.PathLike[str] | None = None  # first weights: a checkpoint, or Hugging Face's safetensors
    tensorboard: bool = False
    export: bool = False  # at the end, the weights as Hugging Face has them
    quiet: bool = False
    measure: bool = True  # the CPU's rates, for the plan's hours


def train(config: Config = None, options: Options | None = None, **named: Any) -> Result:
    """Train what `config` says, and return what became of it.

    `config` is a preset, a file, a mapping of keys or a `TrainConfig`, as `oomph.plan` takes them; options are the
    fields of `Options`, by name. Everything lands in the folder `out_dir`. Raises `InputError` where the input is
    wrong and `TrainingError` where the run cannot go on.
    """
    options = options or Options(**named)
    check_options(options)
    ranks = ranks_from_environment()
    loaded = configs.as_loaded(config)
    start = _Start.find(loaded, options)
    setup = prepare(start.loaded, ranks, options.measure and ranks.first)
    torch.set_float32_matmul_precision("high" if _tf32(setup) else "highest")
    ranks.start("nccl" if setup.device.type == "cuda" else "gloo", setup.device)
    try:
        return _train(setup, start, ranks, options)
    finally:
        ranks.stop()


@dataclass(frozen=True)
class _Start:
    """Where a run begins: from nothing, or from a checkpoint."""

    loaded: LoadedConfig
    checkpoint: Path | None = None
    content: dict[str, Any] | None = None
    changes: tuple[str, ...] = ()

    @staticmethod
    def find(loaded: LoadedConfig, options: Options) -> _Start:
        resume = options.resume or loaded.config.init_from == "resume"
        if not resume:
            return _Start(loaded)
        path = find_run(Path(loaded.config.out_dir if resume is True else resume))
        content = checkpoint.load(path)
        merged, changes = resumed_config(path, content, loaded)
        return _Start(merged, path, content, tuple(changes))


def _tf32(setup: Setup) -> bool:
    return setup.device.type == "cuda" and setup.loaded.config.allow_tf32


def _train(setup: Setup, start: _Start, ranks: Ranks, options: Options) -> Result:
    config = setup.loaded.config
    data = find_dataset(config.dataset, _roots(setup.loaded))
    planned = plan(setup.loaded, setup.hardware)
    folder = open_folder(config, start.checkpoint is not None, options.overwrite) if ranks.first else None
    log = Log(folder, quiet=options.quiet or not ranks.first)
    try:
        _announce(log, setup, planned, start, options.quiet or not ranks.first)
        if planned.memory.fits is False and not options.force:
            raise DoesNotFitError("the plan says that this run does not fit; --force tries it all the same")
        if folder is not None:
            write_plan(folder, planned)
        return_freed_memory()
        _warm_up(setup)
        meter = MemoryMeter(setup.device)
        trainer = _build(setup, data, ranks, options)
        standing = Standing()
        if start.content is not None:
            standing = unpack(start.content, trainer, str(start.checkpoint))
        if folder is not None and start.checkpoint is not None and folder not in start.checkpoint.parents:
            standing.metrics_bytes = 0  # another folder's run: this one's metrics begin anew
        metrics = None
        if folder is not None:
            trackers = make_trackers(config, folder, options.tensorboard)
            metrics = Metrics(folder, trackers, standing.metrics_bytes)
        loop = Loop(trainer, setup.loaded, planned, data, folder, standing, log, metrics, meter, options)
        try:
            return _finish(loop.run(), loop, folder, log, options)
        finally:
            if metrics is not None:
                metrics.close()
    finally:
        log.close()


def _roots(loaded: LoadedConfig) -> list[Path]:
    """Where data/NAME is looked for: here, and beside the config files and their folders, as `oomph plan` looks."""
    folders = [Path(file).parent for file in loaded.files]
    return [Path(), *folders, *(folder.parent for folder in folders)]


def _announce(log: Log, setup: Setup, planned: Plan, start: _Start, quiet: bool) -> None:
    if not quiet:
        from oomph.report.summary import summarise
        from oomph.report.terminal import to_text

        print(to_text(summarise([planned])), end="")
    for reason in setup.reasons:
        log.line(reason)
    if start.checkpoint is not None:
        log.line(f"resumed from {start.checkpoint}")
    for change in start.changes:
        log.line(f"changed: {change}")


def _warm_up(setup: Setup) -> None:
    """One step of a tiny model, so that what torch loads on first use is not taken for the run's memory."""
    if setup.device.type == "cpu":
        shape = {"vocab_size": 64, "block_size": 64, "n_layer": 1, "n_head": 1, "n_embd": 64, "checkpoint_layers": 0}
        config = msgspec.structs.replace(setup.loaded.config, **shape)
        model = GPT(config)
        optimizer = make_optimizer(model, config)
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        head_loss(model.trunk(tokens), model.lm_head.weight, tokens, 64).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _build(setup: Setup, data: Path, ranks: Ranks, options: Options) -> Trainer:
    """Model, optimizer and data on the device. The same first weights on every rank."""
    config = setup.loaded.config
    torch.manual_seed(config.seed)
    feed = Feed(data, config, ranks, setup.device, options.order)
    try:
        model = GPT(config)
        _first_weights(model, config, options)
        torch.manual_seed(config.seed + 1 + ranks.rank)  # dropout differs from rank to rank
        dtype = DTYPES[config.dtype or "float32"] if not config.autocast else torch.float32
        model.to(device=setup.device, dtype=dtype)
        return Trainer(config, model, make_optimizer(model, config), feed, ranks)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"weights, gradients and optimizer state alone do not fit: {error}") from None


def _first_weights(model: GPT, config: TrainConfig, options: Options) -> None:
    if options.weights is not None:
        named, where = weights.read_weights(Path(options.weights)), str(options.weights)
    elif config.init_from.startswith("gpt2"):
        named, where = weights.pretrained(config.init_from), config.init_from
    else:
        return
    load_weights(model, weights.crop_positions(named, config.block_size), where)


def _finish(result: Result, loop: Loop, folder: Path | None, log: Log, options: Options) -> Result:
    if folder is not None:
        write_json(folder / "result.json", result.to_dict())
        for line in lines(result):
            log.line(line)
        if options.export:
            weights.export_huggingface(loop.trainer.model.state_dict(), loop.trainer.config, folder / "huggingface")
            log.line(f"weights for Hugging Face in {folder / 'huggingface'}")
    return result


def check_options(options: Options) -> None:
    """Refuse what makes no sense before any work."""
    problems = []
    if options.keep < 1:
        problems.append(Problem("--keep", "too few", found=str(options.keep), allowed="at least 1"))
    if options.resume and options.overwrite:
        problems.append(Problem("--overwrite", "cannot go with --resume", allowed="one of the two"))
    if problems:
        raise InputError(problems)
