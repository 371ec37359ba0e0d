"""`oomph.train`: a plan carried out. The plan first, then the steps, and at the end the one held against the other."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.errors import InputError
from oomph.planner import Config, Plan, plan
from oomph.training import checkpoint, weights
from oomph.training.distributed import Ranks, ranks_from_environment
from oomph.training.failure import DoesNotFitError, TrainingError, in_words, is_out_of_memory
from oomph.training.feed import Feed, check_data
from oomph.training.folder import RESULT, clear, open_folder, read_result, write_json, write_plan
from oomph.training.lock import FolderLock
from oomph.training.loop import Loop
from oomph.training.loss import head_loss
from oomph.training.memory import MemoryMeter, return_freed_memory
from oomph.training.metrics import Metrics, make_trackers
from oomph.training.model import GPT
from oomph.training.named import load_weights
from oomph.training.optimizer import make_optimizer
from oomph.training.options import Options
from oomph.training.progress import Log
from oomph.training.result import Result, lines
from oomph.training.setup import Setup, prepare
from oomph.training.start import Start, find_start, newest_of
from oomph.training.state import Standing, unpack
from oomph.training.text import keep_tokenizer
from oomph.training.trainer import DTYPES, Trainer


def train(config: Config = None, options: Options | None = None, **named: Any) -> Result:
    """Train what `config` says, and return what became of it.

    `config` is a preset, a file, a mapping of keys or a `TrainConfig`, as `oomph.plan` takes them; options are the
    fields of `Options`, by name. Everything lands in the folder `out_dir`. Raises `InputError` where the input is
    wrong and `TrainingError` where the run cannot go on.
    """
    options = options or Options(**named)
    ranks = ranks_from_environment()
    loaded = configs.as_loaded(config)
    start = find_start(loaded, options)
    setup = prepare(start.loaded, ranks, options.measure and ranks.first)
    ranks.start(setup.backend, setup.device)
    try:
        with ExitStack() as opened:
            folder = ranks.together(lambda: _hold_folder(setup, start, ranks, options, opened))
            newest = _newest_start(start, loaded, options, ranks)
            if newest is not start:
                start = newest
                setup = ranks.together(lambda: prepare(newest.loaded, ranks, options.measure and ranks.first))
            return _train(setup, start, folder, ranks, options)
    finally:
        ranks.stop()


def _tf32(setup: Setup) -> bool:
    return setup.device.type == "cuda" and setup.loaded.config.allow_tf32


def _hold_folder(setup: Setup, start: Start, ranks: Ranks, options: Options, opened: ExitStack) -> Path | None:
    """The run's folder, locked until the end, once it is known that there is something to train on."""
    config = setup.loaded.config
    check_data(start.data(setup.loaded), config)
    if not ranks.first:
        return None
    folder = open_folder(config.out_dir, start.folder, options.overwrite)
    opened.callback(FolderLock(folder).release)
    return folder


def _newest_start(start: Start, loaded: LoadedConfig, options: Options, ranks: Ranks) -> Start:
    """The same on every rank, and the newest: whoever held the folder until now may have saved once more."""
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
            loop.standing.best_val_loss = ranks.gather(loop.standing.best_val_loss)[0]  # the first one sees the folder
            return _finish(loop.run(), loop, log, _looks_only(start, folder, loop.config))
        except Exception as error:
            said = in_words(error)
            log.record(f"ERROR: {said or error}")
            if said is not None:
                raise said from None
            raise


def _looks_only(start: Start, folder: Path | None, config: TrainConfig) -> bool:
    """Whether this only evaluates a run that the folder holds: then none of its files says anything new."""
    return config.eval_only and start.goes_on_in(folder)


def _make_ready(
    setup: Setup, start: Start, folder: Path | None, ranks: Ranks, options: Options, log: Log, opened: ExitStack
) -> Loop:
    """All that a run needs, with everything checked before anything of an older run is touched."""
    config = setup.loaded.config
    data = start.data(setup.loaded)
    planned = plan(setup.loaded, setup.hardware)
    _announce(log, setup, planned, start)
    if planned.memory.fits is False and not options.force:
        raise DoesNotFitError("the plan says that this run does not fit; --force tries it all the same")
    return_freed_memory()
    _warm_up(setup)
    meter = MemoryMeter(setup.device)
    trainer = _build(setup, data, ranks, start, options)
    standing = Standing()
    if start.content:
        standing = unpack(start.content, trainer, str(start.checkpoint))
        meter.let_go(start.content)  # a second copy of weights and state, which the run would carry to its end
    metrics = None
    if folder is not None:
        trackers = make_trackers(config, folder, start.habits.tensorboard)
        if options.overwrite:
            clear(folder)
        log.open(folder)
        _mend(standing, trainer, start, folder, log)
        if not _looks_only(start, folder, config):
            write_plan(folder, planned, start.habits.for_a_repetition())
            keep_tokenizer(data, folder)
        metrics = Metrics(folder, trackers, standing.metrics_bytes, log.line)
        opened.callback(metrics.close)
    return Loop(trainer, setup.loaded, planned, data, folder, standing, log, metrics, meter, start.habits)


def _mend(standing: Standing, trainer: Trainer, start: Start, folder: Path, log: Log) -> None:
    """What the checkpoint says of files beside it, held against those that are there."""
    best = checkpoint.best_of(folder) if start.checkpoint is not None else None
    standing.best_val_loss = best[1] if best is not None and best[0] <= trainer.step else float("inf")
    if not start.goes_on_in(folder):
        standing.metrics_bytes = 0  # another folder's run: this one's metrics begin anew
    elif trainer.config.eval_only:
        standing.metrics_bytes = sys.maxsize  # no step is done again: all lines hold
    elif standing.is_better(trainer.step) and start.checkpoint is not None:
        # The process that wrote it ended before it could say that this is the best.
        try:
            checkpoint.mark_best(folder, start.checkpoint)
            standing.best_val_loss = cast(float, standing.val_loss)
        except TrainingError as error:
            log.line(f"WARNING: {error} The best so far stays.")


def _announce(log: Log, setup: Setup, planned: Plan, start: Start) -> None:
    from oomph.report.summary import summarise
    from oomph.report.terminal import to_text

    log.line(to_text(summarise([planned])).rstrip("\n"))
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


def _build(setup: Setup, data: Path, ranks: Ranks, start: Start, options: Options) -> Trainer:
    """Model, optimizer and data on the device. The same first weights on every rank."""
    config = setup.loaded.config
    torch.manual_seed(config.seed)
    feed = Feed(data, config, ranks, setup.device, start.habits.order)
    try:
        model = GPT(config)
        if start.checkpoint is None:
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


def _finish(result: Result, loop: Loop, log: Log, looks_only: bool) -> Result:
    folder = loop.folder
    if folder is None:
        return result
    before = read_result(folder)
    unchanged = loop.done_here == 0 and before is not None and before.finished and before.steps == result.steps
    if unchanged and before is not None and not looks_only:
        log.line(f"nothing was left to do; {folder / RESULT} stands")
        result = before
    elif looks_only:
        result = msgspec.structs.replace(result, finished=before is not None and before.finished)
    else:
        try:
            write_json(folder / RESULT, result.to_dict())
        except InputError as error:
            log.line(f"WARNING: {error}")
    for line in lines(result, loop.trainer.device.type == "cpu"):
        log.line(line)
    if loop.habits.export and result.finished and not looks_only:
        try:
            weights.export_huggingface(loop.trainer.model.state_dict(), loop.trainer.config, folder / "huggingface")
        except (InputError, OSError) as error:
            raise TrainingError(
                f"the run is done, but not its export: {error}; --resume --export tries again"
            ) from None
        log.line(f"weights for Hugging Face in {folder / 'huggingface'}")
    return result
