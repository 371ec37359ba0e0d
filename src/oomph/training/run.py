"""`oomph.train`: set up the device, plan, build, train, and compare the result with the plan."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.data.errors import require
from oomph.errors import InputError, Problem
from oomph.planning.plan import Config, Plan, plan
from oomph.training import checkpoint, hugging_face, lora, weights
from oomph.training.errors import DoesNotFitError, OtherRankError, TrainingError, explain, is_out_of_memory
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
from oomph.training.memory import MemoryMeter, drop_pages, return_freed_memory
from oomph.training.model import GPT
from oomph.training.optimizer import make_optimizer
from oomph.training.ranks import jobs
from oomph.training.ranks.group import Ranks, ranks_from_environment
from oomph.training.ranks.sharing import share
from oomph.training.result import Result, lines
from oomph.training.setup import Setup, agreed, set_up
from oomph.training.start import Options, Start, find_start, newest_of
from oomph.training.state import RunProgress, unpack
from oomph.training.trainer import Trainer
from oomph.training.weights import load_weights
from oomph.units import MIB

# What torch loads on first use: modules of `parallel` = "fsdp", and of `compile`.
_LOADED_LATER = {
    "fsdp": ("torch.distributed.fsdp", "torch._dynamo", "oomph.training.ranks.parts"),
    "compile": ("torch._dynamo", "torch._inductor.compile_fx"),
}


def train(config: Config = None, options: Options | None = None, **named: Any) -> Result:
    """Train a config in the folder `out_dir`, and return the result.

    `config` is a preset, a file, a mapping of keys or a `TrainConfig`, as for `oomph.plan`; options are the fields of
    `Options`, by name. Raises `InputError` if the input is wrong and `TrainingError` if the run cannot go on.
    """
    options = options or Options(**named)
    ranks = ranks_from_environment()
    with _told_once(ranks):
        loaded = configs.as_loaded(config)
        options = jobs.taken_up(loaded, options)
        start = find_start(loaded, options)
        setup = set_up(start.loaded, ranks, options.measure and ranks.first)
    ranks.start(setup.backend, setup.device)
    try:
        setup = agreed(setup, ranks)
        with ExitStack() as opened:
            folder = ranks.together(lambda: _hold_folder(setup, start, ranks, options, opened))
            newest = _newest_start(start, loaded, options, ranks)
            if newest is not start:
                start = newest
                measure = options.measure and ranks.first
                setup = agreed(ranks.together(lambda: set_up(newest.loaded, ranks, measure)), ranks)
            return _train(setup, start, folder, ranks, options)
    finally:
        ranks.stop()


@contextmanager
def _told_once(ranks: Ranks) -> Iterator[None]:
    """A context before the ranks meet, in which each finds the same mistakes: a machine's first rank reports them."""
    try:
        yield
    except InputError:
        if ranks.local_rank:
            raise OtherRankError("the first rank of this machine reports it") from None
        raise


def _tf32(setup: Setup) -> bool:
    return setup.device.type == "cuda" and setup.loaded.config.allow_tf32


def _hold_folder(setup: Setup, start: Start, ranks: Ranks, options: Options, opened: ExitStack) -> Path | None:
    """The run's folder, locked until the end, after checking the data. None on all ranks but the first."""
    config = setup.loaded.config
    check_data(start.data(setup.loaded), config)
    if not ranks.first:
        return None
    folder = open_folder(config.out_dir, start.folder, options.overwrite or options.again)
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
            evaluates_only = ranks.gather(_evaluates_only(start, folder, loop.config))[0]
            result = _finish(loop.run(), loop, log, evaluates_only)
            if loop.options.export and result.finished and not evaluates_only:
                ranks.together(lambda: _export(loop, log))
            return result
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
    return_freed_memory()
    _warm_up(setup)
    meter = MemoryMeter(setup.device)
    planned = plan(setup.loaded, meter.with_own_share(setup.hardware))
    _announce(log, setup, planned, start)
    if planned.memory.fits is False and not options.force:
        raise DoesNotFitError("the plan says that this run does not fit; --force tries it anyway")
    trainer = build(setup, data, ranks, start)
    progress = RunProgress()
    if start.content:
        progress = unpack(start.content, trainer, cast(Path, start.checkpoint))
        start.content.clear()
    metrics = None
    if folder is not None:
        trackers = make_trackers(config, folder, start.options.tensorboard, start.options.trackio)
        if start.options.export:
            require("safetensors", "--export")  # not only at the end of the run
            hugging_face.family_of(config)
        if options.overwrite or options.again:
            clear(folder)
        log.open(folder)
        _warn_of_a_small_disk(folder, trainer, start.options.keep, log)
        _sync_files(progress, trainer, start, folder, log)
        if not _evaluates_only(start, folder, config):
            jobs.sign(folder)
            write_plan(folder, planned, start.options.to_repeat())
            keep_tokenizer(data, folder)
        metrics = Metrics(folder, trackers, progress.metrics_bytes, log.line)
        opened.callback(metrics.close)
    return TrainLoop(trainer, setup.loaded, planned, data, folder, progress, log, metrics, meter, start.options)


def _warn_of_a_small_disk(folder: Path, trainer: Trainer, keep: int, log: Log) -> None:
    """Warn if the checkpoints kept, the best one and the next do not all fit."""
    held: list[torch.Tensor] = [*trainer.parameters, *(p for p in trainer.model.parameters() if not p.requires_grad)]
    held += [each for state in trainer.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    ranks = trainer.ranks.size if trainer.sharing.in_lockstep else 1  # each writes as much
    size_mib = ranks * sum(tensor.nbytes for tensor in held) / MIB
    free_mib = shutil.disk_usage(folder).free / MIB
    if free_mib < (keep + 2) * size_mib:
        log.line(
            f"WARNING: {free_mib:,.0f} MiB are free in {folder}, and {keep} checkpoints, the best and the next take "
            f"{keep + 2} × {size_mib:,.0f}: older ones will be given up when the disk is full"
        )


def _sync_files(progress: RunProgress, trainer: Trainer, start: Start, folder: Path, log: Log) -> None:
    """Reconcile what the checkpoint says about metrics.jsonl and best.pt with the files in the folder."""
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
    source = _source_of_weights(setup.loaded.config, start) if start.checkpoint is None else None
    if source is not None and (note := weights.activation_note(source)):
        log.line(note)


def _warm_up(setup: Setup) -> None:
    """Do one step of a tiny model, so that what torch loads on first use does not count as the run's memory."""
    config = setup.loaded.config
    for module in _LOADED_LATER["fsdp"] if config.parallel == "fsdp" else ():
        import_module(module)
    for module in _LOADED_LATER["compile"] if config.compile else ():
        import_module(module)
    if setup.device.type == "cpu":
        shape: dict[str, int | None] = {"vocab_size": 64, "block_size": 64, "n_layer": 1, "n_head": 1, "n_embd": 64}
        shape |= {"checkpoint_layers": 0}
        shape |= {"num_key_value_heads": None, "head_dim": None, "intermediate_size": None}
        tiny = msgspec.structs.replace(config, **shape)
        model = GPT(tiny)
        optimizer = make_optimizer(model, tiny)
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        head_loss(model.trunk(tokens), model.lm_head.weight, tokens, 64).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def build(setup: Setup, data: Path, ranks: Ranks, start: Start) -> Trainer:
    """Model, optimizer and data on the device. The same initial weights on every rank."""
    config = setup.loaded.config
    torch.manual_seed(config.seed)
    feed = Feed(data, config, ranks, setup.device, start.options.order)
    try:
        model = GPT(config)
        if start.checkpoint is None:
            _load_initial_weights(model, config, start)
        elif "model" in start.content:  # else it is sharded, and each rank reads its part
            load_weights(model, start.content["model"], str(start.checkpoint))
            drop_pages(start.content["model"].values())
        torch.manual_seed(config.seed + 1 + ranks.rank)  # dropout differs from rank to rank
        model.cast()
        if config.parallel != "fsdp":  # FSDP moves its parts to the device block by block
            model.to(device=setup.device)
        sharing = share(model, config, ranks, setup.device)
        return Trainer(config, sharing, make_optimizer(model, config, sharing.parameters), feed)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"weights, gradients and optimizer state alone do not fit: {error}") from None


def _source_of_weights(config: TrainConfig, start: Start) -> str | None:
    """The path, or OpenAI's name, of the weights that a new run begins with; None from scratch."""
    if start.options.weights:
        return start.options.weights
    return config.init_from if config.init_from.startswith("gpt2") else None


def _load_initial_weights(model: GPT, config: TrainConfig, start: Start) -> None:
    source = _source_of_weights(config, start)
    if source is not None:
        named = weights.read_weights(Path(source)) if start.options.weights else hugging_face.pretrained(source)
        load_weights(model, weights.crop_positions(named, config.block_size) | lora.adapters_of(model), source)
    elif config.method == "lora":
        what, allowed = "adapters are trained beside weights that are trained already", "--init_from=PATH"
        raise InputError(Problem("method", what, found="init_from = 'scratch'", allowed=allowed))


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
    return result


def _export(loop: TrainLoop, log: Log) -> None:
    """Export the weights for Hugging Face, and for a sharded run also nanoGPT's checkpoint."""
    with loop.trainer.averaged():
        found = lora.merged(loop.trainer.sharing.weights(), lora.scale_of(loop.config))
    folder = loop.folder
    if folder is None:
        return
    try:
        hugging_face.export_huggingface(found, loop.trainer.config, folder / "huggingface")
        log.line(f"weights for Hugging Face: {folder / 'huggingface'}")
        last = checkpoint.saved(folder)[-1]
        if last.is_dir():
            from oomph.training.ranks.parts import load_whole

            checkpoint.save(load_whole(last, optimizer=True), folder / "nanogpt" / checkpoint.NANOGPT)
            log.line(f"checkpoint in nanoGPT's format: {folder / 'nanogpt'}")
    except (InputError, OSError, TrainingError) as error:
        what = f"the run is finished, but its export failed: {error}; --resume --export tries again"
        raise TrainingError(what) from None
