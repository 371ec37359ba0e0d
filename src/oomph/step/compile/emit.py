"""Ordered kernels as operations on buffers: what is overwritten in place, and which freed buffers are reused.

A kernel may write over a buffer of which it is the last reader, element by element. A freed buffer is reused by a later
one of the same dtype and size, unless that would exceed inductor's estimated peak (wrapper.py `memory_plan_reuse`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oomph.step.compile.fuse import FusedTasks
from oomph.step.compile.graph import How, Value
from oomph.step.compile.tasks import LoopNest, TaskBuffer
from oomph.step.ops import Buffer, Kernel, Op, Phase
from oomph.step.tensor.layout import ITEM_BYTES, numel

_Frees = list[Buffer]


def emitted(
    order: Sequence[FusedTasks],
    live: Sequence[int],
    buffers: dict[TaskBuffer, Buffer],
    held: Collection[Buffer],
    phase: Phase,
) -> tuple[tuple[Op, ...], dict[Op, int]]:
    """The program's operations, and the bytes moved by each that do not depend on the batch.

    `buffers` holds the inputs' memory, and is extended by everything allocated; `held` buffers outlive the program.
    """
    emitter = _Emitter(order, live, buffers, held, phase)
    ops = emitter.run()
    return ops, dict(zip(ops, emitter.fixed_bytes, strict=True))


class _Emitter:
    def __init__(
        self, order: Sequence[FusedTasks], live: Sequence[int], buffers: dict[TaskBuffer, Buffer],
        held: Collection[Buffer], phase: Phase,
    ) -> None:  # fmt: skip
        self.order, self.live, self.buffers, self.held, self.phase = order, list(live), buffers, set(held), phase
        self.limit = max(live, default=0)
        self.fixed_bytes: list[int] = []  # bytes moved, by operation, that do not scale with the batch
        self.done: set[LoopNest] = set()
        self.pool: dict[tuple[str, int], list[tuple[int, _Frees, Buffer]]] = {}
        self.aliases: dict[Buffer, int] = {}  # for inputs: how many live names refer to them
        for source, buffer in buffers.items():
            if source.users:
                self.aliases[buffer] = self.aliases.get(buffer, 0) + 1
        self.taken: set[TaskBuffer] = set()  # overwritten in place
        self.internal: dict[
            TaskBuffer, TaskBuffer | None
        ] = {}  # results that never leave their kernel, and what they would overwrite
        self.last = self._last_uses()

    def run(self) -> tuple[Op, ...]:
        memory: list[tuple[list[Buffer], _Frees]] = []
        for step, group in enumerate(self.order):
            fresh = self._outputs(step, group)
            self.done.update(group.tasks)
            temporaries = _temporaries(group.tasks[-1].value)
            frees: _Frees = list(temporaries)
            memory.append((fresh + temporaries, frees))
            for source in self.last[step]:
                self._drop(step, source, frees)
        return tuple([self._op(group, *each) for group, each in zip(self.order, memory, strict=True)])

    def _last_uses(self) -> list[list[TaskBuffer]]:
        last: dict[TaskBuffer, int] = {}
        for step, group in enumerate(self.order):
            for source in group.writes:
                last[source.root] = step
            for source in group.reads:
                last[source.root] = step
        result: list[list[TaskBuffer]] = [[] for _ in self.order]
        outputs = {source.root for group in self.order for source in group.writes if source.is_output}
        for source, step in last.items():
            if source not in outputs and not source.is_output:
                result[step].append(source)
        return result

    # --- memory -------------------------------------------------------------------------------------------------

    def _outputs(self, step: int, group: FusedTasks) -> list[Buffer]:
        """The buffers that a kernel newly allocates."""
        fresh: list[Buffer] = []
        for task in group.tasks:
            for source, access in task.writes:
                if source.root is not source:
                    continue
                victim = None if task.is_extern else self._overwritten(task, source, access)
                if _is_internal(source, group):
                    self.internal[source] = victim
                elif victim is not None:
                    self.buffers[source] = self.buffers[victim]
                    self.taken.add(victim)
                elif task.is_extern and task.value.how is How.CALL:
                    fresh.append(self._new(source))
                else:
                    fresh += self._allocated(step, source)
        return fresh

    def _overwritten(self, task: LoopNest, out: TaskBuffer, access: object) -> TaskBuffer | None:
        """The first operand without later readers, of the result's size, read where the result is written; or None.

        An operand that never leaves the kernel has no memory except what it overwrote itself.
        """
        if access is None:
            return None
        for source, accesses in task.reads.items():
            if not source.donated or source.is_output or source.root is not source or source in self.taken:
                continue
            if source.dtype != out.dtype or source.bytes != out.bytes or accesses != {access}:
                continue
            buffer = self.buffers.get(source)
            if buffer is not None and (buffer in self.held or self.aliases.get(buffer, 1) > 1):
                continue
            if all(user is task or user in self.done or task.ancestors >> user.index & 1 for user in source.users):
                return source if buffer is not None else self.internal.get(source)
        return None

    def _allocated(self, step: int, source: TaskBuffer) -> list[Buffer]:
        waiting = self.pool.get((source.dtype, source.bytes))
        if waiting:
            since, frees, buffer = waiting[-1]
            between = self.live[since + 1 : step]
            if since + 1 == step or since == step or max(between, default=0) + source.bytes <= self.limit:
                waiting.pop()
                frees.remove(buffer)
                for place in range(since + 1, step):
                    self.live[place] += source.bytes
                self.buffers[source] = buffer
                return []
        return [self._new(source)]

    def _new(self, source: TaskBuffer) -> Buffer:
        buffer = self.buffers[source] = Buffer(source.name, source.bytes, source.kind, source.block)
        return buffer

    def _drop(self, step: int, source: TaskBuffer, frees: _Frees) -> None:
        """Free a buffer after its last use."""
        buffer = self.buffers.get(source)
        if buffer is None or source in self.taken:
            return
        if source.task is None:
            self.aliases[buffer] -= 1
            if self.aliases[buffer] or buffer in self.held:
                return
            frees.append(buffer)
        elif buffer not in self.held:
            frees.append(buffer)
            self.pool.setdefault((source.dtype, source.bytes), []).append((step, frees, buffer))

    # --- work ---------------------------------------------------------------------------------------------------

    def _op(self, group: FusedTasks, allocates: list[Buffer], frees: _Frees) -> Op:
        value = group.tasks[-1].value
        work = value.facts.get("work", {})
        moved = self._moved(group)
        if value.how is How.PRODUCT:
            kernel = Kernel.GEMM
        elif value.how is How.CALL:
            kernel = work.get("kernel", Kernel.ATTENTION)
        elif any(each.value.how in (How.GATHER, How.SCATTER) for each in group.tasks):
            kernel = Kernel.INDEX
        else:
            kernel = Kernel.REDUCTION if group.reduction else Kernel.POINTWISE
        return Op(
            value.name, self.phase, tuple(allocates), tuple(frees), kernel, work.get("shape", ()),
            work.get("dtype", "float32"), work.get("flops", 0), moved, 1, value.block,
        )  # fmt: skip

    def _moved(self, group: FusedTasks) -> int:
        """Bytes read and written; of a table that rows are gathered from, only the rows."""
        total: list[tuple[int, bool]] = []
        for source, accesses in group.reads.items():
            if source not in group.writes:
                size = source.bytes
                if not group.is_extern:
                    rows = max([numel(access[0]) for access in accesses if access is not None], default=group.numel)
                    size = min(size, rows * ITEM_BYTES[source.dtype])
                total.append((size, source.batched))
        total += [(s.bytes, s.batched) for s in group.writes if s.root is s and s not in self.internal]
        self.fixed_bytes.append(sum([size for size, batched in total if not batched]))
        return sum([size for size, _ in total])


def _is_internal(source: TaskBuffer, group: FusedTasks) -> bool:
    """Whether a buffer never leaves the kernel that computes it."""
    return not source.is_output and not group.is_extern and set(group.tasks).issuperset(source.users)


def _temporaries(value: Value) -> list[Buffer]:
    """Buffers that a kernel needs only while it runs."""
    sizes = value.facts.get("work", {}).get("temporaries", ())
    return [Buffer(f"{value.name}.temporary", size, value.kind, value.block) for size in sizes]
