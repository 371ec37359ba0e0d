"""`oomph.train`: set up the device, plan, build, train, and compare the result with the plan."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.data.errors import require
from oomph.devices import Device, calibrated, detect
from oomph.errors import InputError, Problem
from oomph.planning.notes import unrunnable
from oomph.planning.plan import Config, Plan, plan
from oomph.training import checkpoint, weights
from oomph.training.distributed import Ranks, ranks_from_environment
from oomph.training.errors import DoesNotFitError, TrainingError, explain, is_out_of_memory
from oomph.training.feed import Feed, check_data
from oomph.training.folder import (
    RESULT,
    FolderLock,
    clear,
    keep_tokenizer,
    open_folder,
    read_result,
    write_json,
    write_plan,
)
from oomph.training.log import Log, Metrics, make_trackers
from oomph.training.loop import TrainLoop
from oomph.training.loss import head_loss
from oomph.training.memory import MemoryMeter, return_freed_memory
from oomph.training.model import GPT
from oomph.training.optimizer import make_optimizer
from oomph.training.result import Result, lines
from oomph.training.start import Options, Start, find_start, newest_of
from oomph.training.state import RunProgress, unpack
from oomph.training.trainer import DTYPES, Trainer
from oomph.training.weights import load_weights


@dataclass(frozen=True)
class Setup:
    """A settled config, the torch device, the hardware, and the decisions taken."""

    loaded: LoadedConfig
    device: torch.device
    hardware: Device
    backend: str  # torch.distributed's
    reasons: tuple[str, ...]


def set_up(loaded: LoadedConfig, ranks: Ranks, measure: bool = True) -> Setup:
    """Fill in unset keys for this machine. Raises `InputError` for what it cannot do."""
    kind, reason = _choose_device(loaded)
    loaded = configs.with_trainer(loaded, "oomph")
    on_cpu = kind.startswith("cpu")
    decided = {
        "device": (kind, reason),
        "torch_version": (_torch_version(), "default: the torch that runs"),
        "world_size": (ranks.size, f"default: {ranks.size} process{'es' if ranks.size > 1 else ''} started"),
    }
    if not loaded.said("backend"):
        own = "nccl" if kind.startswith("cuda") else "gloo"
        decided["backend"] = own, f"default: the backend for {kind}"
    values = {key: value for key, (value, _) in decided.items()}
    sources = loaded.sources | {key: why for key, (_, why) in decided.items()}
    merged = LoadedConfig(
        msgspec.structs.replace(loaded.config, **values),
        sources,
        loaded.notes,
        loaded.files,
    )
    problems = configs.validate(merged.config, sources) + unrunnable(merged, on_cpu) + _wrong_backend(merged, ranks)
    if problems:
        raise InputError(problems)
    hardware = calibrated(detect(kind, measure))
    settled = configs.settle(merged, hardware)
    device = torch.device(kind if ":" in kind or ranks.size == 1 or on_cpu else f"{kind}:{ranks.local_rank}")
    return Setup(settled, device, hardware, settled.config.backend, _reasons(settled))


def _choose_device(loaded: LoadedConfig) -> tuple[str, str]:
    """The device asked for, or the best there is, and why. Raises `InputError` if it is not there."""
    asked = loaded.config.device
    kind, _, index = asked.partition(":")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {"cuda": cards > int(index or 0), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not loaded.said("device"):
        if there["cuda"]:
            return "cuda", "default: an NVIDIA GPU is available"
        if there["mps"]:
            return "mps", "default: an Apple GPU is available"
        return "cpu", "default: torch sees no GPU here"
    if there[kind]:
        return asked, loaded.sources["device"]
    found = f"torch {torch.__version__} sees {cards} CUDA device{'' if cards == 1 else 's'}"
    allowed = ", ".join(name for name, present in there.items() if present)
    raise InputError(
        Problem(loaded.sources["device"], f"device {asked!r} is not available", found=found, allowed=allowed)
    )


def _torch_version() -> str:
    return str(torch.__version__).partition("+")[0].partition("a")[0].partition("rc")[0]


def _wrong_backend(loaded: LoadedConfig, ranks: Ranks) -> list[Problem]:
    """Refuse a backend that does not work on the device. A single process needs none."""
    config = loaded.config
    if ranks.size == 1 or not loaded.said("backend"):
        return []
    known = ("gloo", "nccl") if config.device.startswith("cuda") else ("gloo",)
    if config.backend in known:
        return []
    what = f"this backend does not work on {config.device}"
    return [Problem(loaded.sources["backend"], what, found=config.backend, allowed=" or ".join(known))]


def _reasons(loaded: LoadedConfig) -> tuple[str, ...]:
    shown = ("device", "dtype", "compile", "loss_chunk", "optimizer_loop")
    return tuple(
        f"{key} = {getattr(loaded.config, key)}: {loaded.sources[key].removeprefix('default: ')}" for key in shown
    )


def train(config: Config = None, options: Options | None = None, **named: Any) -> Result:
    """Train a config in the folder `out_dir`, and return the result.

    `config` is a preset, a file, a mapping of keys or a `TrainConfig`, as for `oomph.plan`; options are the fields of
    `Options`, by name. Raises `InputError` if the input is wrong and `TrainingError` if the run cannot go on.
    """
    options = options or Options(**named)
    ranks = ranks_from_environment()
    loaded = configs.as_loaded(config)
    start = find_start(loaded, options)
    setup = set_up(start.loaded, ranks, options.measure and ranks.first)
    ranks.start(setup.backend, setup.device)
    try:
        with ExitStack() as opened:
            folder = ranks.together(lambda: _hold_folder(setup, start, ranks, options, opened))
            newest = _newest_start(start, loaded, options, ranks)
            if newest is not start:
                start = newest
                setup = ranks.together(lambda: set_up(newest.loaded, ranks, options.measure and ranks.first))
            return _train(setup, start, folder, ranks, options)
    finally:
        ranks.stop()


def _tf32(setup: Setup) -> bool:
    return setup.device.type == "cuda" and setup.loaded.config.allow_tf32


def _hold_folder(setup: Setup, start: Start, ranks: Ranks, options: Options, opened: ExitStack) -> Path | None:
    """The run's folder, locked until the end, after checking the data. None on all ranks but the first."""
    config = setup.loaded.config
    check_data(start.data(setup.loaded), config)
    if not ranks.first:
        return None
    folder = open_folder(config.out_dir, start.folder, options.overwrite)
    opened.callback(FolderLock(folder).release)
    return folder


def _newest_start(start: Start, loaded: LoadedConfig, options: Options, ranks: Ranks) -> Start:
    """The newest start, the same on every rank: a process that held the folder until now may have saved again."""
    newest = ranks.gather(ranks.together(lambda: newest_of(start)))[0]
    if all(loaded_from == newest for loaded_from in ranks.gather(start.checkpoint)):
        return start
    return ranks.together(lambda: find_start(loaded, replace(options, resume=newest)))


def _train(setup: Setup, start: Start, folder: Path | None, ranks: Ranks, options: Options) -> Result:
    torch.set_float32_matmul_precision("high" if _tf32(setup) else "highest")
    with ExitStack() as opened:
        log = Log(quiet=options.quiet or not ranks.first, later=ranks.first)
        opened.callback(log.close)
        try:
            loop = ranks.together(lambda: _make_ready(setup, start, folder, ranks, options, log, opened))
            loop.progress.best_val_loss = ranks.gather(loop.progress.best_val_loss)[
                0
            ]  # only the first rank sees the folder
            return _finish(loop.run(), loop, log, _evaluates_only(start, folder, loop.config))
        except Exception as error:
            said = explain(error)
            log.record(f"ERROR: {said or error}")
            if said is not None:
                raise said from None
            raise


def _evaluates_only(start: Start, folder: Path | None, config: TrainConfig) -> bool:
    """Whether this only evaluates the run in the folder, so that its files must not change."""
    return config.eval_only and start.resumes_in(folder)


def _make_ready(
    setup: Setup, start: Start, folder: Path | None, ranks: Ranks, options: Options, log: Log, opened: ExitStack
) -> TrainLoop:
    """Build everything, and check everything before an older run's files are touched."""
    config = setup.loaded.config
    data = start.data(setup.loaded)
    planned = plan(setup.loaded, setup.hardware)
    _announce(log, setup, planned, start)
    if planned.memory.fits is False and not options.force:
        raise DoesNotFitError("the plan says that this run does not fit; --force tries it anyway")
    return_freed_memory()
    _warm_up(setup)
    meter = MemoryMeter(setup.device)
    trainer = _build(setup, data, ranks, start, options)
    progress = RunProgress()
    if start.content:
        progress = unpack(start.content, trainer, str(start.checkpoint))
        meter.release(start.content)  # a second copy of weights and optimizer state
    metrics = None
    if folder is not None:
        trackers = make_trackers(config, folder, start.options.tensorboard)
        if start.options.export:
            require("safetensors", "--export")  # not only at the end of the run
        if options.overwrite:
            clear(folder)
        log.open(folder)
        _sync_files(progress, trainer, start, folder, log)
        if not _evaluates_only(start, folder, config):
            write_plan(folder, planned, start.options.to_repeat())
            keep_tokenizer(data, folder)
        metrics = Metrics(folder, trackers, progress.metrics_bytes, log.line)
        opened.callback(metrics.close)
    return TrainLoop(trainer, setup.loaded, planned, data, folder, progress, log, metrics, meter, start.options)


def _sync_files(progress: RunProgress, trainer: Trainer, start: Start, folder: Path, log: Log) -> None:
    """Bring what the checkpoint says about metrics.jsonl and best.pt in line with the files in the folder."""
    best = checkpoint.best_of(folder) if start.checkpoint is not None else None
    progress.best_val_loss = best[1] if best is not None and best[0] <= trainer.step else float("inf")
    if not start.resumes_in(folder):
        progress.metrics_bytes = 0  # resumed from another folder: this one's metrics start empty
    elif trainer.config.eval_only:
        progress.metrics_bytes = sys.maxsize  # no step is repeated: keep all lines
    elif progress.is_better(trainer.step) and start.checkpoint is not None:
        # The process that wrote the checkpoint ended before it could write best.pt.
        try:
            checkpoint.mark_best(folder, start.checkpoint)
            progress.best_val_loss = cast(float, progress.val_loss)
        except TrainingError as error:
            log.line(f"WARNING: {error} The older best.pt stays.")


def _announce(log: Log, setup: Setup, planned: Plan, start: Start) -> None:
    from oomph.report.plan import document, summarise
    from oomph.report.terminal import to_text

    log.line(to_text(document([planned], summarise([planned], brief=True))).rstrip("\n"))
    for reason in setup.reasons:
        log.line(reason)
    if start.checkpoint is not None:
        log.line(f"resumed from {start.checkpoint}")
    for change in start.changes:
        log.line(f"changed: {change}")


def _warm_up(setup: Setup) -> None:
    """Do one step of a tiny model, so that what torch loads on first use does not count as the run's memory."""
    if setup.device.type == "cpu":
        shape = {"vocab_size": 64, "block_size": 64, "n_layer": 1, "n_head": 1, "n_embd": 64, "checkpoint_layers": 0}
        config = msgspec.structs.replace(setup.loaded.config, **shape)
        model = GPT(config)
        optimizer = make_optimizer(model, config)
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        head_loss(model.trunk(tokens), model.lm_head.weight, tokens, 64).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _build(setup: Setup, data: Path, ranks: Ranks, start: Start, options: Options) -> Trainer:
    """Model, optimizer and data on the device. The same initial weights on every rank."""
    config = setup.loaded.config
    torch.manual_seed(config.seed)
    feed = Feed(data, config, ranks, setup.device, start.options.order)
    try:
        model = GPT(config)
        if start.checkpoint is None:
            _load_initial_weights(model, config, options)
        torch.manual_seed(config.seed + 1 + ranks.rank)  # dropout differs from rank to rank
        dtype = DTYPES[config.dtype or "float32"] if not config.autocast else torch.float32
        model.to(device=setup.device, dtype=dtype)
        return Trainer(config, model, make_optimizer(model, config), feed, ranks)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"weights, gradients and optimizer state alone do not fit: {error}") from None


def _load_initial_weights(model: GPT, config: TrainConfig, options: Options) -> None:
    if options.weights is not None:
        named, where = weights.read_weights(Path(options.weights)), str(options.weights)
    elif config.init_from.startswith("gpt2"):
        named, where = weights.pretrained(config.init_from), config.init_from
    else:
        return
    load_weights(model, weights.crop_positions(named, config.block_size), where)


def _finish(result: Result, loop: TrainLoop, log: Log, evaluates_only: bool) -> Result:
    folder = loop.folder
    if folder is None:
        return result
    before = read_result(folder)
    unchanged = loop.done_here == 0 and before is not None and before.finished and before.steps == result.steps
    if unchanged and before is not None and not evaluates_only:
        log.line(f"nothing left to do; {folder / RESULT} is unchanged")
        result = before
    elif evaluates_only:
        result = msgspec.structs.replace(result, finished=before is not None and before.finished)
    else:
        try:
            write_json(folder / RESULT, result.to_dict())
        except InputError as error:
            log.line(f"WARNING: {error}")
    for line in lines(result, loop.trainer.device.type == "cpu"):
        log.line(line)
    if loop.options.export and result.finished and not evaluates_only:
        try:
            weights.export_huggingface(loop.trainer.model.state_dict(), loop.trainer.config, folder / "huggingface")
        except (InputError, OSError) as error:
            raise TrainingError(
                f"the run is finished, but its export failed: {error}; --resume --export tries again"
            ) from None
        log.line(f"weights for Hugging Face: {folder / 'huggingface'}")
    return result
