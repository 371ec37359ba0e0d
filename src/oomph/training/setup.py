"""The device of a run and its settled config: unset keys filled in for this machine, what it cannot run refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import torch

from oomph import config as configs
from oomph.config import LoadedConfig
from oomph.config.schema import eval_tokens
from oomph.config.sharing import SHARDED_OPTIMIZERS, trains_parts
from oomph.devices import Device, calibrated, detect
from oomph.errors import InputError, Problem
from oomph.planning.notes import unrunnable
from oomph.planning.plan import plan
from oomph.training.ranks.group import Ranks
from oomph.training.start import KEPT


@dataclass(frozen=True)
class Setup:
    """A settled config, the torch device, the hardware, and the decisions taken."""

    loaded: LoadedConfig
    device: torch.device
    hardware: Device
    backend: str  # torch.distributed's
    reasons: tuple[str, ...]


def set_up(loaded: LoadedConfig, ranks: Ranks, measure: bool = True) -> Setup:
    """Fill in unset keys for this machine. Raises `InputError` for settings that it cannot run."""
    kind, reason = _choose_device(loaded)
    loaded = configs.with_trainer(loaded, "oomph")
    on_cpu = kind.startswith("cpu")
    decided = {
        "device": (kind, reason),
        "torch_version": (_torch_version(), "default: the torch that runs"),
        "world_size": (ranks.size, f"default: {ranks.size} process{'es' if ranks.size > 1 else ''} started"),
    }
    if loaded.config.eval_tokens is None:
        # Once decided it stays with the run, so that losses stay comparable whatever micro-batch it is resumed with.
        decided["eval_tokens"] = eval_tokens(loaded.config), "default: eval_iters × batch_size × block_size"
    if not loaded.said("backend"):
        own = "nccl" if kind.startswith("cuda") else "gloo"
        decided["backend"] = own, f"default: the backend for {kind}"
    lone = ranks.size == 1 and (ranks.launched or loaded.sources.get("parallel", "").endswith(KEPT))
    if lone or loaded.config.parallel in (None, "auto"):
        decided["parallel"] = None, "default"  # one process shares nothing; for several `_shared` decides
    values = {key: value for key, (value, _) in decided.items()}
    sources = loaded.sources | {key: why for key, (_, why) in decided.items()}
    merged = LoadedConfig(
        msgspec.structs.replace(loaded.config, **values),
        sources,
        loaded.notes,
        loaded.files,
    )
    problems = configs.validate(merged.config, sources) + unrunnable(merged, on_cpu) + _wrong_backend(merged, ranks)
    problems += _wrong_sharing(merged, ranks)
    if problems:
        raise InputError(problems)
    hardware = calibrated(detect(kind, measure))
    settled = configs.settle(_shared(merged, hardware), hardware)
    device = torch.device(kind if ":" in kind or ranks.size == 1 or on_cpu else f"{kind}:{ranks.local_rank}")
    return Setup(settled, device, hardware, settled.config.backend, _reasons(settled))


def agreed(setup: Setup, ranks: Ranks) -> Setup:
    """The same sharing on every rank: if one device has too little free memory for a whole model, all shard it."""
    mine = setup.loaded.config.parallel
    chosen = next((each for each in ranks.gather(mine) if each == "fsdp"), mine)
    if chosen != mine:
        config = msgspec.structs.replace(setup.loaded.config, parallel=chosen)
        sources = setup.loaded.sources | {"parallel": "default: the plan says that a whole model does not fit a device"}
        loaded = msgspec.structs.replace(setup.loaded, config=config, sources=sources)
        setup = replace(setup, loaded=loaded, reasons=_reasons(loaded))
    if chosen == "fsdp" and ranks.control is None:
        ranks.gather_weights()
    return setup


def _choose_device(loaded: LoadedConfig) -> tuple[str, str]:
    """The requested device, or the best available, and why. Raises `InputError` if it is not available."""
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


def _wrong_sharing(loaded: LoadedConfig, ranks: Ranks) -> list[Problem]:
    """Refuse a way to share the work that oomph train does not have, or that conflicts with other settings."""
    config, where = loaded.config, loaded.sources.get("parallel", "parallel")
    if config.parallel in (None, "none", "ddp") and not (config.parallel == "none" and ranks.size > 1):
        return []
    found = f"parallel = {config.parallel!r}"
    if config.parallel not in ("none", "fsdp"):
        return [Problem(where, "oomph train shares the work by DDP or FSDP2", found, "ddp, fsdp, or auto")]
    if config.parallel == "none":
        return [Problem(where, f"{ranks.size} processes were started", found, "ddp, fsdp, or auto")]
    if ranks.size == 1:
        again = "torchrun --nproc_per_node=2 -m oomph train …, with as many processes as there are devices"
        return [Problem(where, "FSDP2 needs several processes", f"{found}, and one process", again)]
    problems = []
    if config.optimizer not in SHARDED_OPTIMIZERS:
        what = "needs whole matrices or blocks of numbers: it cannot update a part of a parameter"
        allowed = f"{' or '.join(SHARDED_OPTIMIZERS)}, or parallel = 'ddp'"
        problems.append(Problem(loaded.sources.get("optimizer", "optimizer"), what, config.optimizer, allowed))
    told = (config.reshard_after_forward or "").lower()
    if told.isdigit() and (int(told) < 2 or ranks.size % int(told)):
        what, allowed = "cannot reshard over so many ranks", f"true, false, or a divisor of {ranks.size} above 1"
        problems.append(Problem(loaded.sources["reshard_after_forward"], what, told, allowed))
    if config.cpu_offload != "off":
        what = "oomph train keeps all parts on the device"
        problems.append(Problem(loaded.sources["cpu_offload"], what, config.cpu_offload, "off"))
    if config.device.startswith("mps"):
        problems.append(Problem(loaded.sources["device"], "FSDP2 does not run on Apple GPUs", config.device, "cpu"))
    return problems


def _shared(loaded: LoadedConfig, hardware: Device) -> LoadedConfig:
    """The config with `parallel` filled in: DDP if the plan says that it fits, else FSDP2 if that does."""
    config = loaded.config
    if config.parallel is not None or config.world_size == 1 or not trains_parts(config):
        return loaded

    def fits(parallel: str) -> bool:
        tried = msgspec.structs.replace(config, parallel=parallel)
        return plan(msgspec.structs.replace(loaded, config=tried), hardware).memory.fits is not False

    chosen, why = "ddp", "the plan says that a whole model fits each device"
    if not fits("ddp"):
        chosen, why = "fsdp", "the plan says that a whole model does not fit a device, and a part does"
        if not fits("fsdp"):
            chosen, why = "ddp", "the plan says that neither a whole model nor a part fits a device"
    sources = loaded.sources | {"parallel": f"default: {why}"}
    return msgspec.structs.replace(loaded, config=msgspec.structs.replace(config, parallel=chosen), sources=sources)


def _reasons(loaded: LoadedConfig) -> tuple[str, ...]:
    shared = ("parallel",) if loaded.config.world_size > 1 else ()
    adapters = ("lora_targets", "base_dtype") if loaded.config.method == "lora" else ()
    shown = ("device", *shared, "dtype", *adapters, "compile", "loss_chunk", "optimizer_loop")
    return tuple(
        f"{key} = {getattr(loaded.config, key)}: {loaded.sources[key].removeprefix('default: ')}" for key in shown
    )
