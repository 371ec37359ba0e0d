"""How far a run's memory may lie from its prediction, and how probable it is that it fits.

Three things are uncertain, and independent of each other:

- the CUDA context, which differs between cards and drivers;
- what the program allocates: kernels and their workspaces, fusions, the versions of libraries;
- how much of the allocator's cache goes unused, which turns on the order of many small requests. It has the size of
  the gap between what is allocated at the peak and what is reserved.

Half-widths of 95 % intervals add up as independent errors do: by the root of the sum of their squares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from oomph.config import TrainConfig
from oomph.config.schema import EARLIEST_TRANSFORMERS, TRANSFORMERS, release

SIGMAS = 1.96  # of a normal distribution in the half of a 95 % interval
# The context by rule is a fit to out-of-memory messages of many cards, about ± 100 MiB (devices/device.py); workspaces
# that cuBLAS and cuDNN make beside those counted are 1 to 32 MiB and within it.
CONTEXT_MIB = 100.0
# Before CUDA loaded kernels lazily, which PyTorch's builds do since 2.0, a context had all of them: 721 MiB on a GTX
# 1080, 1644 on an RTX 3090 (pytorch issues 55277 and 49877), 922 to 1823 on an A100 (stas00/ml-engineering), 1343 MB on
# a V100 (transformers' guide to one GPU, 2022), 400 to 1400 above the rule.
LAZY_SINCE = (2, 0)
EAGER_CONTEXT_MIB = 1400.0


class Spread(NamedTuple):
    """Half-widths of 95 % intervals, as shares."""

    low: float  # of what is allocated: how much less it may be
    high: float  # and how much more
    gap: float  # of the gap between allocated and reserved


# By where the list of operations comes from. Residuals of benchmarks/published.csv by benchmarks/spread.py, 2026-11-17,
# of runs of the same program on one GPU. With 19 residuals and more the largest is a 95 % bound (19 of 20 new ones lie
# within it); with fewer it is only a hint, and shares are not taken below 2 %.
#
# nanoGPT compiled, described: 29 rows, the largest 1.0 %; the allocator's part is in it.
COMPILED = Spread(0.01, 0.01, 0.1)
# Eager, described or traced: allocated bytes within 0.1 % (2 rows) and 1 % (2 rows of tier B and C), reserved bytes of
# one loop within 0.2 % (7 rows); what nvidia-smi showed of two runs of a 7B model was off by 0.6 and 0.7 of the gap.
EAGER = Spread(0.02, 0.02, 0.8)
# Compiled, but not nanoGPT: no row measures these. A trace of inductor's own plan is within 1 % of real
# compiled steps on a CPU, now and then 3 % (docs/how.md).
COMPILED_OTHERS = Spread(0.03, 0.03, 0.3)
# Kernels and allocators of other makers, and transformers from before its descriptions begin: nothing is measured.
UNVERIFIED = Spread(0.10, 0.10, 1.0)


def spread_of(config: TrainConfig, device_kind: str, source: str) -> Spread:
    """The spread of a settled config's memory on a kind of device. `source`: "described", or a trace's way."""
    older = config.trainer in TRANSFORMERS and release(config.transformers_version) < EARLIEST_TRANSFORMERS
    if device_kind not in ("cuda", "cpu") or (older and source == "described"):
        return UNVERIFIED
    if not config.compile:
        return EAGER
    if source != "described":
        return COMPILED_OTHERS
    return COMPILED if config.trainer == "nanogpt" else COMPILED_OTHERS


def context_spread_mib(config: TrainConfig) -> float:
    """By how much the context may be larger than the rule says."""
    return CONTEXT_MIB if release(config.torch_version) >= LAZY_SINCE else EAGER_CONTEXT_MIB


class Likely(NamedTuple):
    """A prediction with its spread. All sizes are MiB."""

    context_mib: float
    allocated_mib: float
    reserved_mib: float  # where there is room
    spread: Spread
    more_context_mib: float = CONTEXT_MIB  # by how much the context may be larger; smaller by CONTEXT_MIB

    @property
    def _gap_mib(self) -> float:
        return self.reserved_mib - self.allocated_mib

    def _half_mib(self, share: float, gap: float, context_mib: float = CONTEXT_MIB) -> float:
        """The half of a 95 % interval on one side."""
        return math.hypot(context_mib, share * self.allocated_mib, gap * self._gap_mib)

    @property
    def low_mib(self) -> float:
        """The interval's lower end: never less than what is allocated needs, since that is reserved too."""
        least = max(0.0, self.context_mib - CONTEXT_MIB) + (1 - self.spread.low) * self.allocated_mib
        total = self.context_mib + self.reserved_mib
        return max(least, total - self._half_mib(self.spread.low, self.spread.gap))

    @property
    def high_mib(self) -> float:
        """The interval's upper end."""
        half = self._half_mib(self.spread.high, self.spread.gap, self.more_context_mib)
        return self.context_mib + self.reserved_mib + half

    def p_fits(self, capacity_mib: float, fits: bool) -> float:
        """The probability, 0 to 1, that a process with `capacity_mib` runs through.

        It needs what is allocated, and of the gap above that somewhat: an allocator that is short of memory gives its
        cache back, but not what is split. Any share of the gap is taken for as likely as another. `fits` is what the
        simulated allocator says of this capacity: the answer is on its side of one half.
        """
        needed = self.context_mib + self.allocated_mib + self._gap_mib / 2
        more = (self.spread.high, self.more_context_mib)
        share, context_mib = more if capacity_mib >= needed else (self.spread.low, CONTEXT_MIB)
        uniform = SIGMAS / math.sqrt(12)  # of a uniform distribution's standard deviation, in halves of 95 %
        deviation = self._half_mib(share, uniform, context_mib) / SIGMAS
        p = (1 + math.erf((capacity_mib - needed) / deviation / math.sqrt(2))) / 2
        return max(p, 0.5) if fits else min(p, 0.5)
