"""The last step of a config: what nobody said is decided from the trainer and the device, with its reason."""

from __future__ import annotations

from typing import Protocol

import msgspec

from oomph.config.load import LoadedConfig
from oomph.config.schema import COMPILED_LOSS_CHUNK, DEFAULT_LOSS_CHUNK, TrainConfig

Decision = tuple[str | int | bool, str]  # a value and its reason


class SettlingDevice(Protocol):
    """What a decision needs to know of a device."""

    @property
    def kind(self) -> str: ...  # cuda, rocm, cpu or mps
    @property
    def name(self) -> str: ...
    @property
    def has_bf16(self) -> bool: ...
    @property
    def capability(self) -> tuple[int, int] | None: ...  # CUDA's, where it has one


# Keys of ours that nanoGPT as published cannot follow, and what it does instead.
NANOGPT_HAS = {"checkpoint_layers": 0, "loss_chunk": 0, "optimizer": "adamw"}
CPU_LOSS_CHUNK = 512  # tokens; measured: below, the products get slow; above, only the memory grows
FLASH_CAPABILITY = (8, 0)  # PyTorch's flash kernel needs Ampere; before that SDPA takes the memory-efficient one
FLASH_HEAD_SIZE = 256  # and heads of at most this size


def settle(loaded: LoadedConfig, device: SettlingDevice, own_model: bool = False) -> LoadedConfig:
    """The same config with no None left but `dataset_tokens`. What was said is kept, or its loss is noted.

    `own_model`: the user's own stands in for nanoGPT's, and with it any optimizer.
    """
    config = loaded.config
    decisions: dict[str, Decision] = {}
    notes = list(loaded.notes)
    if config.trainer == "nanogpt":
        config, left_out = _as_published(config, loaded, own_model)
        notes += left_out
    if config.attention == "flash" and (reason := _no_flash(config, device)):
        decisions["attention"] = ("efficient", reason)
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
        dtype = decisions["dtype"][0] if "dtype" in decisions else config.dtype
        decisions["loss_chunk"] = _loss_chunk(msgspec.structs.replace(config, dtype=dtype), device)
    if config.trainer == "oomph" and config.compile and device.kind == "cpu" and not loaded.said("compile"):
        decisions["compile"] = (False, "torch.compile does not pay on a CPU")
    if config.optimizer_loop is None:
        decisions["optimizer_loop"] = _optimizer_loop(config, device)
    settled = msgspec.structs.replace(config, **{key: value for key, (value, _) in decisions.items()})
    sources = loaded.sources | {key: f"default: {reason}" for key, (_, reason) in decisions.items()}
    return LoadedConfig(settled, sources, notes, loaded.files)


def _as_published(config: TrainConfig, loaded: LoadedConfig, own_model: bool) -> tuple[TrainConfig, list[str]]:
    """nanoGPT's own behaviour where a key asks for something that only oomph train does."""
    asked = {key: value for key, value in NANOGPT_HAS.items() if getattr(config, key) not in (value, None)}
    if own_model:
        asked.pop("optimizer", None)
        return msgspec.structs.replace(config, **asked), []
    notes = [
        f"{loaded.sources[key]}: nanoGPT as published has no {key}, so its figures are without it; oomph train has"
        for key in asked
    ]
    return msgspec.structs.replace(config, **asked), notes


def _no_flash(config: TrainConfig, device: SettlingDevice) -> str | None:
    """Why PyTorch will not take its flash kernel, or None where it will."""
    if device.kind == "cuda" and device.capability is not None and device.capability < FLASH_CAPABILITY:
        return f"{device.name} is too old for the flash kernel, and PyTorch takes its memory-efficient one"
    if device.kind == "cuda" and config.n_embd // config.n_head > FLASH_HEAD_SIZE:
        return f"heads wider than {FLASH_HEAD_SIZE} are too wide for the flash kernel"
    return None


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


def _loss_chunk(config: TrainConfig, device: SettlingDevice) -> Decision:
    if config.trainer == "nanogpt":
        return 0, "nanoGPT computes all logits at once"
    if config.return_logits:
        return 0, "return_logits needs all of them at once"
    if device.kind == "cpu":
        return CPU_LOSS_CHUNK, f"chunks of {CPU_LOSS_CHUNK} tokens are quickest on a CPU"
    return usual_loss_chunk(config), f"oomph computes the loss in chunks of {usual_loss_chunk(config)} tokens"


def usual_loss_chunk(config: TrainConfig) -> int:
    """Tokens a chunk on a GPU, of a config whose precision is decided.

    Under autocast every chunk ends with a sum over the head's float32 gradient: fewer, larger ones are quicker. Where
    they are compiled they can be larger, since a logit then takes 2 bytes instead of 6.
    """
    larger = config.compile and config.autocast and config.dtype != "float32"
    return COMPILED_LOSS_CHUNK if larger else DEFAULT_LOSS_CHUNK


def _optimizer_loop(config: TrainConfig, device: SettlingDevice) -> Decision:
    if config.trainer == "oomph":
        return "fused", "oomph fuses the optimizer on every device"
    if _no_autocast(device):
        return "forloop", "nanoGPT fuses AdamW on CUDA alone, and torch loops over tensors elsewhere"
    return "fused", "nanoGPT fuses AdamW on CUDA"
