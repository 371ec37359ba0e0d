"""Errors for the user: what is wrong, where, what was found, what to try, the nearest valid name.

Readers collect every `Problem` and raise one `InputError`, so that the user fixes a file once. Also the one list of
messages that mean memory ran out, for the trainer, which must act on it, and for logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Problem(NamedTuple):  # a dataclass would slow every command by an import
    """One thing wrong with the input, in the words the user will read."""

    where: str  # "config/run.py:12", "--n_embd=770", "preset"
    what: str  # "unknown key 'batch_sise'"
    found: str | None = None  # the value as the user wrote it
    allowed: str | None = None  # "a whole number of at least 1"
    nearest: str | None = None  # the closest valid name

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}"]
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.allowed is not None:
            parts.append(f"try: {self.allowed}")
        if self.nearest is not None:
            parts.append(f"did you mean {self.nearest}?")
        return "; ".join(parts)


class InputError(Exception):
    """The input is wrong. Carries every problem found, not only the first. The command exits with 2."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def nearest(name: str, choices: Sequence[str]) -> str | None:
    """The choice most like `name`; None if none is close."""
    from difflib import get_close_matches  # a few milliseconds, needed only when something is wrong

    folded = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), list(folded), n=1, cutoff=0.6)
    return folded[close[0]] if close else None


# As torch and the libraries below it say it. Not Triton's "out of resource: shared memory": that is a kernel too large
# for the chip. Nor oneDNN's "could not create a primitive descriptor": that is an operation it does not have.
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP|XPU|NPU|MPS backend)(?: error:)? out of memory"  # torch's allocators, the drivers
    r"|Tried to allocate [\d.]+ \w+ \(GPU \d+; [\d.]+ \w+ total capacity"  # the same without its first words
    r"|Triton Error \[\w+\]: out of memory"
    r"|(?:CUBLAS|CUBLASLT|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|ROCBLAS)_STATUS_(?:ALLOC_FAILED|MEMORY_ERROR)"
    r"|(?:CUDA_ERROR|HIP_ERROR)_OUT_?OF_?MEMORY|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)"
    r"|Cuda failure (?:\d+ )?'out of memory'"  # NCCL
    r"|could not create a (?:primitive|memory object)\b(?! desc)"  # oneDNN
    r"|can't allocate memory|not enough memory: you tried|std::bad_alloc"  # torch's CPU allocator, C++
    r"|Out of memory while trying to allocate|Out of memory allocating \d"  # XLA: JAX, TensorFlow
    r"|RESOURCE[_ ]EXHAUSTED: (?:Error allocating|Attempting to (?:allocate|reserve)|XLA:TPU|Failed to allocate)"
    r"|RESOURCE[_ ]EXHAUSTED: Ran out"
    r"|ran out of memory trying to allocate (?!.*not a failure)"
    r"|failed to allocate \S{1,20} \(\d+ bytes\) from device"  # TensorFlow's pool
    r"|Out of memory error on GPU \d+\. Cannot allocate"  # Paddle
    r"|OOM when allocating tensor|Failed to allocate memory requested by"  # TensorFlow; Ascend
    r"|numpy\S*MemoryError|Unable to allocate [\d.]+ \w+ for an array",
    re.IGNORECASE,
)


def says_out_of_memory(text: str) -> bool:
    """Whether a message means that a device or the host ran out of memory."""
    return OUT_OF_MEMORY.search(text) is not None
