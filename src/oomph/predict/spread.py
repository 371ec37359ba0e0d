"""How far a run's memory may lie from its prediction, and the probability that it fits.

Three things are uncertain, and independent of each other:

- the CUDA context, which differs between cards and drivers;
- what the program allocates: kernels and their workspaces, fusions, the versions of libraries;
- how much of the allocator's cache goes unused, which depends on the order of many small requests. Its scale is
  the gap between the memory allocated at the peak and the memory reserved.

Half-widths of 95 % intervals add like independent errors: the root of the sum of their squares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from oomph.config import TrainConfig
from oomph.config.programs import EARLIEST_TRANSFORMERS, TRANSFORMERS, experts_are_modules, release

SIGMAS = 1.96  # half-width of a 95 % interval, in standard deviations of a normal distribution
# The rule for the context is a fit to out-of-memory messages of many cards, about ± 100 MiB (devices/device.py);
# workspaces of cuBLAS and cuDNN besides those counted are 1 to 32 MiB and within it.
CONTEXT_MIB = 100.0
# Before CUDA loaded kernels lazily a context held all of them: 721 MiB on a GTX 1080, 1644 on an RTX 3090 (pytorch
# issues 55277 and 49877), 922 to 1823 on an A100 (stas00/ml-engineering), 1343 MB on a V100 (transformers' guide to one
# GPU, 2022), 400 to 1400 above the rule. CUDA 11.7 and 11.8, which PyTorch 2.0 was built with, load lazily only with an
# equally new driver (CUDA's programming guide, "Lazy Loading").
LAZY_SINCE = (2, 1)
EAGER_CONTEXT_MIB, EAGER_SPREAD_MIB = 900.0, 500.0  # above the rule's, and the uncertainty of that
# DeepSpeed creates an NCCL communicator even for one device. Its size is unpublished; on 8 H100s it is
# this much (1512 MiB of context against 1180 on one, modded-nanogpt's logs).
NCCL_MIB = 330.0


class Spread(NamedTuple):
    """Half-widths of 95 % intervals, as shares."""

    low: float  # allocated memory: how much lower it may be
    high: float  # and how much higher
    gap: float  # of the gap between allocated and reserved memory


# By the source of the op list. Residuals of benchmarks/published.csv by benchmarks/spread.py, 2026-11-17,
# of runs of the same program on one GPU. With 19 or more residuals the largest is a 95 % bound (19 of 20 new ones lie
# within it); with fewer it is only a hint, and shares below 2 % are not used.
#
# nanoGPT compiled, described: 29 rows, the largest 1.0 %, which includes the allocator's part.
COMPILED = Spread(0.01, 0.01, 0.1)
# Eager, described or traced: allocated bytes within 0.1 % (9 rows) and 1.3 % (3 more), reserved bytes of one loop
# within 0.2 % (7 rows). For nvidia-smi's figures of 75 runs, two thirds of the gap cover 19 of 20; in the others
# the cache held one large block more or less.
EAGER = Spread(0.02, 0.02, 0.65)
# Compiled, but not nanoGPT: no row measures these. A trace of inductor's own plan is within 1 % of real
# compiled steps on a CPU, now and then 3 % (docs/how.md).
COMPILED_OTHERS = Spread(0.03, 0.03, 0.3)
# Other vendors' kernels and allocators, and transformers older than the descriptions: nothing is measured. Experts
# called one by one: the router decides the sizes of their tensors, which the plan takes as equal; nvidia-smi's figures
# of four runs are 5 to 7 % above it.
UNVERIFIED = Spread(0.10, 0.10, 1.0)


def is_before_descriptions(config: TrainConfig) -> bool:
    """Whether transformers is older than the described models. The first Qwen models ship their own code."""
    own_code = config.model_type == "qwen"
    older = release(config.transformers_version) < EARLIEST_TRANSFORMERS
    return config.trainer in TRANSFORMERS and older and not own_code


def spread_of(config: TrainConfig, device_kind: str, source: str) -> Spread:
    """The spread of a settled config's memory on a kind of device. `source`: "described", or the kind of trace."""
    unknown = is_before_descriptions(config) or experts_are_modules(config.model_type, config.transformers_version)
    if device_kind not in ("cuda", "cpu") or (unknown and source == "described"):
        return UNVERIFIED
    if not config.compile:
        return EAGER
    if source != "described":
        return COMPILED_OTHERS
    return COMPILED if config.trainer == "nanogpt" else COMPILED_OTHERS


def kernels_mib(config: TrainConfig) -> float:
    """CUDA context beyond the rule's: all kernels, if they are not loaded lazily."""
    return 0.0 if release(config.torch_version) >= LAZY_SINCE else EAGER_CONTEXT_MIB


def context_spread_mib(config: TrainConfig) -> float:
    """How much larger or smaller the context may be."""
    kernels_mib = CONTEXT_MIB if release(config.torch_version) >= LAZY_SINCE else EAGER_SPREAD_MIB
    return kernels_mib + (NCCL_MIB if config.deepspeed != "off" else 0.0)


class Likely(NamedTuple):
    """A prediction with its spread. All sizes are MiB."""

    context_mib: float
    allocated_mib: float
    reserved_mib: float  # with unlimited capacity
    spread: Spread
    context_spread_mib: float = CONTEXT_MIB  # how much larger or smaller the context may be

    @property
    def _gap_mib(self) -> float:
        return self.reserved_mib - self.allocated_mib

    def _half_mib(self, share: float, gap: float) -> float:
        """The half-width of the 95 % interval on one side."""
        return math.hypot(self.context_spread_mib, share * self.allocated_mib, gap * self._gap_mib)

    @property
    def least_mib(self) -> float:
        """Allocated memory with the smallest context: an allocator short of memory may hold no more than that."""
        return max(0.0, self.context_mib - self.context_spread_mib) + (1 - self.spread.low) * self.allocated_mib

    @property
    def low_mib(self) -> float:
        """The interval's lower end: at least `least_mib`, since allocated memory is reserved too."""
        total = self.context_mib + self.reserved_mib
        return max(self.least_mib, total - self._half_mib(self.spread.low, self.spread.gap))

    @property
    def high_mib(self) -> float:
        """The interval's upper end."""
        return self.context_mib + self.reserved_mib + self._half_mib(self.spread.high, self.spread.gap)

    def p_fits(self, capacity_mib: float, fits: bool) -> float:
        """The probability, 0 to 1, that a process with `capacity_mib` does not run out of memory.

        It needs the allocated memory and some of the gap above it: an allocator short of memory returns its cache, but
        not segments partly in use. Any share of the gap is taken to be equally likely. `fits` is the simulated
        allocator's verdict for this capacity: the answer stays on its side of one half.
        """
        needed = self.context_mib + self.allocated_mib + self._gap_mib / 2
        share = self.spread.high if capacity_mib >= needed else self.spread.low
        uniform = SIGMAS / math.sqrt(12)  # half-width for a uniform distribution, by its standard deviation
        deviation = self._half_mib(share, uniform) / SIGMAS
        p = (1 + math.erf((capacity_mib - needed) / deviation / math.sqrt(2))) / 2
        return max(p, 0.5) if fits else min(p, 0.5)
