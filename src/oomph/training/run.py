"""`oomph.train`: a plan carried out. The plan first, then the steps, and at the end the one held against the other."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from oomph import config as configs
from oomph.config import TrainConfig
from oomph.errors import InputError
from oomph.planner import Config, Plan, plan
from oomph.training import checkpoint, weights
from oomph.training.distributed import Ranks, ranks_from_environment
from oomph.training.failure import DoesNotFitError, TrainingError, is_out_of_memory
from oomph.training.feed import Feed
from oomph.training.folder import RESULT, clear, open_folder, read_result, write_json, write_plan
from oomph.training.lock import FolderLock
from oomph.training.loop import Loop
from oomph.training.loss import head_loss
from oomph.training.memory import MemoryMeter, return_freed_memory
from oomph.training.metrics import Metrics, make_trackers
from oomph.training.model import GPT
from oomph.training.optimizer import make_optimizer
from oomph.training.options import Options
from oomph.training.progress import Log
from oomph.training.result import Result, lines
from oomph.training.setup import Setup, prepare
from oomph.training.start import Start, find_start
from oomph.training.state import Standing, load_weights, unpack
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
    start = find_start(configs.as_loaded(config), options)
    setup = prepare(start.loaded, ranks, options.measure and ranks.first)
    torch.set_float32_matmul_precision("high" if _tf32(setup) else "highest")
    ranks.start(setup.backend, setup.device)
    try:
        return _train(setup, start, ranks, options)
    except Exception as error:
        if isinstance(error, TrainingError) or not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "an allocation failed"
        raise TrainingError(f"no memory is left: {reason}") from None
    finally:
        ranks.stop()


def _tf32(setup: Setup) -> bool:
    return setup.device.type == "cuda" and setup.loaded.config.allow_tf32


def _train(setup: Setup, start: Start, ranks: Ranks, options: Options) -> Result:
    with ExitStack() as opened:
        log = Log(quiet=options.quiet or not ranks.first, later=ranks.first)
        opened.callback(log.close)
        loop = ranks.together(lambda: _make_ready(setup, start, ranks, options, log, opened))
        loop.standing.best_val_loss = ranks.gather(loop.standing.best_val_loss)[0]  # the first one sees the folder
        try:
            return _finish(loop.run(), loop, log)
        except TrainingError as error:
            log.record(f"ERROR: {error}")
            raise


def _make_ready(setup: Setup, start: Start, ranks: Ranks, options: Options, log: Log, opened: ExitStack) -> Loop:
    """All that a run needs, with everything checked before anything of an older run is touched."""
    config = setup.loaded.config
    data = start.data(setup.loaded)
    planned = plan(setup.loaded, setup.hardware)
    folder = None
    if ranks.first:
        folder = open_folder(config.out_dir, start.folder, options.overwrite)
        opened.callback(FolderLock(folder).release)
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
        _mend(standing, trainer, start, folder)
        trackers = make_trackers(config, folder, start.habits.tensorboard)
        if options.overwrite:
            clear(folder)
        log.open(folder)
        write_plan(folder, planned)
        keep_tokenizer(data, folder)
        metrics = Metrics(folder, trackers, standing.metrics_bytes, log.line)
        opened.callback(metrics.close)
    return Loop(trainer, setup.loaded, planned, data, folder, standing, log, metrics, meter, start.habits)


def _mend(standing: Standing, trainer: Trainer, start: Start, folder: Path) -> None:
    """What the checkpoint says of files beside it, held against those that are there."""
    if start.folder is not None and start.folder.resolve() != folder.resolve():
        standing.metrics_bytes = 0  # another folder's run: this one's metrics begin anew
    best = checkpoint.best_of(folder)
    there = start.checkpoint is not None and best is not None and best[0] <= trainer.step
    standing.best_val_loss = best[1] if there and best is not None else float("inf")


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


def _finish(result: Result, loop: Loop, log: Log) -> Result:
    folder = loop.folder
    if folder is None:
        return result
    before = read_result(folder)
    if loop.done_here == 0 and before is not None and before.finished and before.steps == result.steps:
        log.line(f"nothing was left to do; {folder / RESULT} stands")
        if not loop.config.eval_only:
            result = before
    else:
        try:
            write_json(folder / RESULT, result.to_dict())
        except InputError as error:
            log.line(f"WARNING: {error}")
    for line in lines(result, loop.trainer.device.type == "cpu"):
        log.line(line)
    if loop.habits.export and result.finished:
        try:
            weights.export_huggingface(loop.trainer.model.state_dict(), loop.trainer.config, folder / "huggingface")
        except (InputError, OSError) as error:
            raise TrainingError(
                f"the run is done, but not its export: {error}; --resume --export tries again"
            ) from None
        log.line(f"weights for Hugging Face in {folder / 'huggingface'}")
    return result
