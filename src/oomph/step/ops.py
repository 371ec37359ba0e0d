"""The vocabulary of a training step: operations that allocate and free buffers, compute and move bytes.

Everything oomph reports is computed from a list of these: peak memory and its owners, what the caching
allocator reserves, seconds, joules. Several sources write such lists (arithmetic, a fake-tensor trace,
a compiled graph, a real memory snapshot), and they must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What a buffer is for, as reports name it."""

    PARAMETERS = "parameters"
    GATHERED = "gathered parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    HALF_WEIGHTS = "half copies of weights"
    ACTIVATIONS = "activations"
    ATTENTION = "attention"
    LOGITS = "logits and loss"
    TEMPORARY = "temporaries"
    WORKSPACE = "workspaces"
    INPUTS = "inputs"
    COMMUNICATION = "communication buffers"


class Phase(StrEnum):
    """The part of the program an operation belongs to."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVAL = "evaluation"


class Kernel(StrEnum):
    """How an operation spends its time, for the clock."""

    GEMM = "gemm"  # shape = (batch, m, n, k)
    ATTENTION = "attention"  # shape = (batch, heads, tokens, head size); causal
    POINTWISE = "pointwise"  # bandwidth-bound: only bytes_moved counts
    REDUCTION = "reduction"  # norms, softmax, losses: bandwidth-bound too
    INDEX = "index"  # gathers and scatters of embeddings
    INTEGER = "integer"  # much integer arithmetic per element: shape = (elements, instructions for one)
    OPTIMIZER = "optimizer"  # one pass over parameters, gradients and state
    ALL_GATHER = "all-gather"  # collectives: shape = (ranks, bytes of the whole); they run beside other kernels
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"
    WAIT = "wait"  # for the collective of the same name
    NONE = "none"  # no device work: views, the caller freeing a tensor


COLLECTIVES = frozenset((Kernel.ALL_GATHER, Kernel.REDUCE_SCATTER, Kernel.ALL_REDUCE, Kernel.BROADCAST))


class Buffer(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One allocation. Compared by identity: two buffers with equal fields are two buffers."""

    name: str  # "h.3.mlp.gelu": the module and the tensor
    bytes: int  # as the program requests them, before any rounding
    kind: Kind
    block: int | None = None  # the transformer block it belongs to
    stream: int = 0  # the CUDA stream whose cache it comes from: PyTorch's allocator keeps one per stream
    recorded: bool = False  # another stream uses it too (record_stream): it is reused only once that one is done


class Op(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One operation: its allocations happen first, then it runs, then its frees.

    A buffer in both `allocates` and `frees` is a temporary that lives only while the operation runs.
    Consecutive operations with the same `times` above one are the body of a loop that runs that often. Time and
    FLOPs are multiplied by it; memory is computed for one run, because each frees what it allocates. If runs keep
    something, as a loop over tokens does, one buffer stands for all of it.
    """

    name: str  # "h.3.mlp.c_fc"
    phase: Phase
    allocates: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    kernel: Kernel = Kernel.NONE
    shape: tuple[int, ...] = ()
    dtype: str = "float32"  # of the arithmetic: float32, tf32, bfloat16, float16
    flops: int = 0  # multiply and add count as two
    bytes_moved: int = 0  # read from and written to device memory
    times: int = 1  # how often the loop it belongs to runs
    block: int | None = None  # the transformer block it belongs to, if known

    def on(self, allocates: tuple[Buffer, ...], frees: tuple[Buffer, ...]) -> Op:
        """The same work on other buffers."""
        work = (self.kernel, self.shape, self.dtype, self.flops, self.bytes_moved, self.times, self.block)
        return Op(self.name, self.phase, allocates, frees, *work)


def copied(buffer: Buffer) -> Buffer:
    """A new buffer like this one."""
    return Buffer(buffer.name, buffer.bytes, buffer.kind, buffer.block, buffer.stream, buffer.recorded)


def exchanged(ops: Iterable[Op], new: Mapping[Buffer, Buffer | None]) -> list[Op]:
    """The operations with buffers replaced; those mapped to None are dropped."""
    result: list[Op] = []
    keys = new.keys()
    for op in ops:
        if not (keys.isdisjoint(op.allocates) and keys.isdisjoint(op.frees)):
            op = op.on(_exchanged(op.allocates, new), _exchanged(op.frees, new))
        result.append(op)
    return result


def _exchanged(buffers: Iterable[Buffer], new: Mapping[Buffer, Buffer | None]) -> tuple[Buffer, ...]:
    found = [new.get(buffer, buffer) for buffer in buffers]
    return tuple([buffer for buffer in found if buffer is not None])


class Section(msgspec.Struct, frozen=True, eq=False):
    """A named run of operations, and how often one optimizer step executes it.

    Memory is computed for one run: its repeats allocate and free the same sizes in the same order.
    """

    name: str  # "micro-step 1", "micro-steps 3 to 40", "optimizer", "evaluation"
    ops: tuple[Op, ...]
    times: int = 1


class Step(msgspec.Struct, frozen=True, eq=False):
    """A program: what is allocated before it begins, and its sections in the order they run."""

    resident: tuple[Buffer, ...]
    sections: tuple[Section, ...]
