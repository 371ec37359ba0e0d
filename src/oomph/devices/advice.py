"""Warnings about a config on a device: one sentence each, for mistakes that cost days."""

from __future__ import annotations

from typing import Protocol

from oomph.devices.device import Device

TENSOR_CORE_STEP = 8  # elements: sixteen bytes of half precision, what tensor-core kernels load at once
TILE = 64  # widths and vocabularies of whole tiles keep products at the full rate
SMALL_VOCABULARY = 1024  # below it the head is too small a share to matter
SMALL_WIDTH = 256  # below it every product is too small to fill a card anyway
FLASH_LARGEST_HEAD = 256


class Run(Protocol):
    """What is read of a training config, its dtype settled."""

    @property
    def n_head(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def compile(self) -> bool: ...
    @property
    def attention(self) -> str: ...
    @property
    def init_from(self) -> str: ...


def warnings(config: Run, device: Device) -> list[str]:
    """What goes slowly or wrong with this config on this device, and what to set instead."""
    if device.kind == "cpu":
        return _cpu(config, device)
    return [*_other_makers(device), *_precision(config, device), *_old_cards(config, device), *_shapes(config)]


def _cpu(config: Run, device: Device) -> list[str]:
    if config.dtype == "bfloat16" and not device.has_bf16:
        return ["This CPU has no bfloat16 instructions, so dtype=bfloat16 is slower than dtype=float32 here."]
    if config.dtype == "float16":
        return ["CPUs compute float16 slowly: dtype=float32 is the quicker one here."]
    return []


def _other_makers(device: Device) -> list[str]:
    if device.kind == "cuda":
        return []
    return [f"The memory predicted is that of CUDA's allocator and kernels: on {device.name} it is unverified."]


def _precision(config: Run, device: Device) -> list[str]:
    if config.dtype == "bfloat16" and not device.has_bf16:
        emulated = device.bf16_emulated_tflops
        if not device.has_tensor_cores:
            slower = "slower than float32"
        elif emulated is None:
            slower = "about 10 times slower than float16"
        else:
            slower = f"at {emulated:g} TFLOPS, where float16 has {device.tflops_fp16:g}"
        return [f"{device.name} has no bfloat16 hardware and PyTorch emulates it {slower}: set dtype=float16."]
    if config.dtype == "float16" and device.has_bf16:
        return [
            "float16 needs a gradient scaler (nanoGPT and oomph have one); dtype=bfloat16 is as fast on "
            f"{device.name} and needs none."
        ]
    return []


def _old_cards(config: Run, device: Device) -> list[str]:
    if device.kind != "cuda":
        return []
    said = []
    if not device.has_tensor_cores:
        said.append(f"{device.name} has no tensor cores: half precision saves memory here, but little time.")
    capability = device.compute_capability
    if capability is None:
        return said
    if config.compile and capability < 7.0:
        said.append(
            f"torch.compile needs compute capability 7.0 and {device.name} has {capability:.1f}: set compile=False."
        )
    if config.attention == "flash" and capability < 8.0:
        said.append(
            f"Flash attention needs compute capability 8.0 and {device.name} has {capability:.1f}: PyTorch takes its "
            "memory-efficient kernel instead (attention=efficient)."
        )
    return said


def _shapes(config: Run) -> list[str]:
    said = []
    head_size, rest = divmod(config.n_embd, config.n_head)
    if rest == 0 and head_size % TENSOR_CORE_STEP:
        said.append(_uneven_heads(config.n_embd, config.n_head, head_size))
    elif rest == 0 and config.n_embd % TILE and config.n_embd >= SMALL_WIDTH:
        said.append(
            f"n_embd={config.n_embd} is no multiple of {TILE}, so matrix products waste part of a tile; near it: "
            f"{_either(*_multiples(config.n_embd, TILE))}, with heads of {TILE}."
        )
    if rest == 0 and head_size > FLASH_LARGEST_HEAD and config.attention == "flash":
        said.append(
            f"Heads of {head_size} are past the {FLASH_LARGEST_HEAD} that flash attention takes: PyTorch falls back "
            "to a slower kernel; use more heads."
        )
    pretrained = config.init_from.startswith("gpt2")  # its vocabulary comes with the weights
    if config.vocab_size % TILE and config.vocab_size >= SMALL_VOCABULARY and not pretrained:
        said.append(
            f"vocab_size={config.vocab_size} is no multiple of {TILE}, which slows the largest product of the step; "
            f"{-(-config.vocab_size // TILE) * TILE} is the next that is, and the extra words cost nothing."
        )
    return said


def _uneven_heads(n_embd: int, n_head: int, head_size: int) -> str:
    padded = -(-head_size // TENSOR_CORE_STEP) * TENSOR_CORE_STEP
    widths = _either(*_multiples(n_embd, TENSOR_CORE_STEP * n_head))
    heads = [count for count in range(1, n_embd // TENSOR_CORE_STEP + 1) if n_embd % (count * TENSOR_CORE_STEP) == 0]
    fitting = [count for count in heads if 32 <= n_embd // count <= 128]
    other = f", or n_head={min(fitting, key=lambda count: abs(count - n_head))}" if fitting else ""
    return (
        f"n_embd={n_embd} with n_head={n_head} gives heads of {head_size}, no multiple of {TENSOR_CORE_STEP}: "
        f"attention pads each to {padded} and its products miss the fast tensor-core path; "
        f"near it: n_embd={widths}{other}."
    )


def _multiples(value: int, step: int) -> tuple[int, int]:
    """The multiples of `step` just below and just above `value`."""
    return value // step * step, -(-value // step) * step


def _either(below: int, above: int) -> str:
    return f"{below} or {above}" if 0 < below != above else str(above)
