"""`Device`: what is known about a GPU or CPU, and the rules for figures that nobody has published."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from oomph.devices.cpu_rates import CpuRates

DeviceKind = Literal["cuda", "rocm", "mps", "cpu"]


class Rate(NamedTuple):
    """Multiply-adds per clock and multiprocessor, with fp32 accumulation; 0 if there is no such unit."""

    half: int  # fp16, and bf16 from compute capability 8.0
    tf32: int
    fp32: int


# NVIDIA's published rates. GeForce cards run half precision with fp32 accumulation at half the
# rate of the professional cards of the same chip, which most published tables miss.
RATES: dict[str, Rate] = {
    "pascal_gp102": Rate(0, 0, 128),
    "pascal_gp100": Rate(0, 0, 64),
    "volta": Rate(512, 0, 64),
    "turing_gtx": Rate(0, 0, 64),
    "turing_geforce": Rate(256, 0, 64),
    "turing_full": Rate(512, 0, 64),
    "ga100": Rate(1024, 512, 64),
    "ga10x_geforce": Rate(256, 128, 128),
    "ga10x_pro": Rate(512, 256, 128),
    "ada_geforce": Rate(256, 128, 128),
    "ada_pro": Rate(512, 256, 128),
    "hopper": Rate(2048, 1024, 128),
    "bw_geforce": Rate(256, 128, 128),
    "bw_pro": Rate(512, 256, 128),
    "bw_dc": Rate(4096, 2048, 128),
}


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU model, or the CPU of this machine. A figure that is not known is None."""

    name: str  # "GeForce RTX 4070"
    kind: DeviceKind
    vendor: str
    arch: str  # "Ada"
    rate_class: str | None = None  # key of RATES
    compute_capability: float | None = None  # 8.9; NVIDIA only
    sm_count: int | None = None  # multiprocessors, compute units or GPU cores; None for a CPU
    threads: int | None = None  # of a CPU, usable by this process
    cpu_rates: CpuRates | None = None  # of a CPU, measured
    boost_mhz: int | None = None  # the clock its peaks are for
    memory_mib: int  # as nvidia-smi shows it; a CPU's RAM
    usable_mib: int  # what one process can use on Linux without a desktop
    context_mib: int  # what CUDA takes before the first tensor; on a CPU, Python with torch
    optimizer_mib: int = 0  # on a CPU: added by creating a torch.optim optimizer
    transformers_mib: int = 0  # on a CPU: added by importing a transformers model
    bandwidth_gbs: float | None = None  # 1e9 bytes a second
    tflops_fp16: float | None = None  # dense peaks with fp32 accumulation, 1e12 operations a second
    tflops_bf16: float | None = None
    tflops_tf32: float | None = None
    tflops_fp32: float | None = None
    bf16_emulated_tflops: float | None = None  # measured, if there is no bf16 hardware
    gemm_tflops_low: float | None = None  # large products in half precision as measured with PyTorch
    gemm_tflops_high: float | None = None
    watts: float | None = None  # board power (TDP)
    drawn_watts: float | None = None  # in training, if `oomph check --save` measured it
    eager_ratio: float = 1.0  # measured step time over predicted, if `oomph check --save` measured it
    compiled_ratio: float = 1.0  # the same under torch.compile
    usd_per_hour_low: float | None = None  # on demand, cheapest provider
    usd_per_hour_high: float | None = None  # on demand, most expensive provider
    has_bf16: bool  # in hardware
    usual: bool = False  # the one meant by a name that matches several memory sizes
    aliases: tuple[str, ...] = ()
    source: str = ""  # where the figures come from
    notes: tuple[str, ...] = ()  # what a reader should know

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability as (major, minor): (8, 9)."""
        return None if self.compute_capability is None else divmod(round(self.compute_capability * 10), 10)

    @property
    def has_tensor_cores(self) -> bool:
        """Whether it has separate units for half precision (known for NVIDIA's classes)."""
        return self.kind == "cuda" and (self.rate_class is None or RATES.get(self.rate_class, Rate(1, 0, 0)).half > 0)

    def peak_tflops(self, dtype: str, allow_tf32: bool = True) -> float | None:
        """Dense peak of matrix products in `dtype`, TFLOPS; None if it is not known.

        float32 with `allow_tf32` runs on tensor cores that support it. bfloat16 without hardware
        is emulated: the measured rate, or a tenth of float16's, the middle of the measured rates.
        """
        if dtype == "bfloat16":
            if self.has_bf16:
                return self.tflops_bf16
            if self.bf16_emulated_tflops is not None or self.tflops_fp16 is None:
                return self.bf16_emulated_tflops
            return round(self.tflops_fp16 / (10 if self.has_tensor_cores else 2), 2)
        if dtype == "float16":
            return self.tflops_fp16
        if dtype == "tf32" or (dtype == "float32" and allow_tf32 and self.tflops_tf32 is not None):
            return self.tflops_tf32
        return self.tflops_fp32


def usable_by_rule(memory_mib: int, kind: DeviceKind = "cuda") -> int:
    """MiB that one process can use, for a device without a reported figure."""
    if kind == "mps":  # Metal's recommended working set, as llama.cpp's logs show it: 2/3 up to 32 GiB, then 3/4
        return memory_mib * 2 // 3 if memory_mib <= 32768 else memory_mib * 3 // 4
    return max(0, memory_mib - max(300, round(0.019 * memory_mib)))  # the driver's reserve, on Linux


def context_by_rule(sm_count: int | None, arch: str = "", kind: DeviceKind = "cuda") -> int:
    """MiB of CUDA context with lazy loading, a fit to out-of-memory messages; about +-100 MiB."""
    if kind in ("mps", "cpu"):
        return 0
    if sm_count is None or kind != "cuda":
        return 300  # PyTorch's maintainers call this usual since CUDA 11.7; nobody has published AMD's
    return round(145 + 2.15 * sm_count) - (70 if arch == "Turing" else 0)
