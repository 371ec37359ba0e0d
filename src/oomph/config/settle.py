"""The last step of a config: what nobody said is decided from the trainer and the device, with its reason."""

from __future__ import annotations

from typing import Protocol

import msgspec

from oomph.config.load import LoadedConfig
from oomph.config.schema import DEFAULT_LOSS_CHUNK, TrainConfig

Decision = tuple[str | int | bool, str]  # a value and its reason


class SettlingDevice(Protocol):
    """What a decision needs to know of a device."""

    @property
    def kind(self) -> str: ...  # cuda, rocm, cpu or mps
    @property
    def name(self) -> str: ...
    @property
    def has_bf16(self) -> bool: ...


def settle(loaded: LoadedConfig, device: SettlingDevice) -> LoadedConfig:
    """The same config with no None left but `dataset_tokens`. What was said is kept, or its loss is noted."""
    config = loaded.config
    decisions: dict[str, Decision] = {}
    notes = list(loaded.notes)
    if config.dtype is None:
        decisions["dtype"] = _dtype(config, device)
    elif config.trainer == "nanogpt" and config.dtype != "float32" and _no_autocast(device):
        decisions["dtype"] = ("float32", f"nanoGPT does not autocast on {device.name}")
        notes.append(
            f"{loaded.sources['dtype']}: dtype = {config.dtype!r} has no effect: nanoGPT switches autocast off where "
            f"the device is not CUDA, so it computes in float32"
        )
    if config.return_logits is None:
        decisions["return_logits"] = _return_logits(config)
    if config.loss_chunk is None:
        decisions["loss_chunk"] = _loss_chunk(config)
    if config.optimizer_loop is None:
        decisions["optimizer_loop"] = _optimizer_loop(config, device)
    settled = msgspec.structs.replace(config, **{key: value for key, (value, _) in decisions.items()})
    sources = loaded.sources | {key: f"default: {reason}" for key, (_, reason) in decisions.items()}
    return LoadedConfig(settled, sources, notes, loaded.files)


def _no_autocast(device: SettlingDevice) -> bool:
    """nanoGPT calls every device whose name lacks "cuda" a CPU, and gives a CPU no autocast. ROCm's name is cuda."""
    return device.kind not in ("cuda", "rocm")


def _dtype(config: TrainConfig, device: SettlingDevice) -> Decision:
    if _no_autocast(device):
        if config.trainer == "nanogpt":
            return "float32", f"nanoGPT does not autocast on {device.name}"
        return "float32", f"half precision is seldom faster on {device.name}"
    if device.has_bf16:
        return "bfloat16", f"{device.name} has bfloat16"
    return "float16", f"{device.name} has no bfloat16"


def _return_logits(config: TrainConfig) -> Decision:
    if config.loss_chunk:
        return False, "a loss in chunks never holds all logits"
    if config.trainer == "nanogpt":
        return True, "nanoGPT's training step returns its logits"
    return False, "oomph's training step returns only the loss"


def _loss_chunk(config: TrainConfig) -> Decision:
    if config.trainer == "nanogpt":
        return 0, "nanoGPT computes all logits at once"
    if config.return_logits:
        return 0, "return_logits needs all of them at once"
    return DEFAULT_LOSS_CHUNK, f"oomph computes the loss in chunks of {DEFAULT_LOSS_CHUNK} tokens"


def _optimizer_loop(config: TrainConfig, device: SettlingDevice) -> Decision:
    if config.trainer == "oomph":
        return "fused", "oomph fuses the optimizer on every device"
    if _no_autocast(device):
        return "forloop", "nanoGPT fuses AdamW on CUDA alone, and torch loops over tensors elsewhere"
    return "fused", "nanoGPT fuses AdamW on CUDA"
