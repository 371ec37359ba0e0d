"""Where and how a run will compute: decided before anything is built, each decision with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from oomph import config as configs
from oomph.config import LoadedConfig
from oomph.config.refused import refused
from oomph.devices import Device, calibrated, detect
from oomph.errors import InputError, Problem
from oomph.training.distributed import Ranks


@dataclass(frozen=True)
class Setup:
    """A settled config, the torch device, what is known of the hardware, and the decisions taken."""

    loaded: LoadedConfig
    device: torch.device
    hardware: Device
    backend: str  # torch.distributed's
    reasons: tuple[str, ...]


def prepare(loaded: LoadedConfig, ranks: Ranks, measure: bool = True) -> Setup:
    """Settle everything nobody said for this machine. Raises `InputError` for what this machine cannot do."""
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
        decided["backend"] = own, f"default: what carries a run on {kind}"
    values = {key: value for key, (value, _) in decided.items()}
    sources = loaded.sources | {key: why for key, (_, why) in decided.items()}
    merged = LoadedConfig(
        msgspec.structs.replace(loaded.config, **values),
        sources,
        loaded.notes,
        loaded.files,
    )
    problems = configs.validate(merged.config, sources) + refused(merged, on_cpu) + _no_backend(merged, ranks)
    if problems:
        raise InputError(problems)
    hardware = calibrated(detect(kind, measure))
    settled = configs.settle(merged, hardware)
    device = torch.device(kind if ":" in kind or ranks.size == 1 or on_cpu else f"{kind}:{ranks.local_rank}")
    return Setup(settled, device, hardware, settled.config.backend, _reasons(settled))


def _choose_device(loaded: LoadedConfig) -> tuple[str, str]:
    """The device asked for, refused at once where it is not there; the best there is where nobody asked."""
    asked = loaded.config.device
    kind, _, index = asked.partition(":")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {"cuda": cards > int(index or 0), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not loaded.said("device"):
        if there["cuda"]:
            return "cuda", "default: an NVIDIA GPU is there"
        if there["mps"]:
            return "mps", "default: an Apple GPU is there"
        return "cpu", "default: torch sees no GPU here"
    if there[kind]:
        return asked, loaded.sources["device"]
    found = f"torch {torch.__version__} sees {cards} CUDA device{'' if cards == 1 else 's'}"
    allowed = ", ".join(name for name, present in there.items() if present)
    raise InputError(Problem(loaded.sources["device"], f"device {asked!r} is not there", found=found, allowed=allowed))


def _torch_version() -> str:
    return str(torch.__version__).partition("+")[0].partition("a")[0].partition("rc")[0]


def _no_backend(loaded: LoadedConfig, ranks: Ranks) -> list[Problem]:
    """A backend that somebody named and that cannot carry this run. One process alone needs none."""
    config = loaded.config
    if ranks.size == 1 or not loaded.said("backend"):
        return []
    known = ("gloo", "nccl") if config.device.startswith("cuda") else ("gloo",)
    if config.backend in known:
        return []
    what = f"this backend does not carry a run on {config.device}"
    return [Problem(loaded.sources["backend"], what, found=config.backend, allowed=" or ".join(known))]


def _reasons(loaded: LoadedConfig) -> tuple[str, ...]:
    shown = ("device", "dtype", "compile", "loss_chunk", "optimizer_loop")
    return tuple(
        f"{key} = {getattr(loaded.config, key)}: {loaded.sources[key].removeprefix('default: ')}" for key in shown
    )
