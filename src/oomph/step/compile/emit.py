"""Kernels in order as operations on buffers: what is overwritten in place, and which freed buffers are reused.

A kernel may write over a buffer that it alone still reads, number by number. A freed buffer is reused by a later one of
its dtype and size, unless keeping it would exceed inductor's estimated peak (codegen/wrapper.py `memory_plan_reuse`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oomph.step.compile.fuse import Group
from oomph.step.compile.graph import How, Value
from oomph.step.compile.tasks import LoopNest, TaskBuffer
from oomph.step.ops import Buffer, Kernel, Op, Phase
from oomph.step.tensor.layout import ITEM_BYTES, numel

_Frees = list[Buffer]


def emitted(
    order: Sequence[Group],
    live: Sequence[int],
    buffers: dict[TaskBuffer, Buffer],
    held: Collection[Buffer],
    phase: Phase,
) -> tuple[tuple[Op, ...], dict[Op, int]]:
    """The program's operations, and of the bytes each moves those that the batch does not change.

    `buffers` has the inputs' memory, and gets everything else's; `held` outlive it.
    """
    emitter = _Emitter(order, live, buffers, held, phase)
    ops = emitter.run()
    return ops, dict(zip(ops, emitter.still, strict=True))


class _Emitter:
    def __init__(
        self, order: Sequence[Group], live: Sequence[int], buffers: dict[TaskBuffer, Buffer], held: Collection[Buffer],
        phase: Phase,
    ) -> None:  # fmt: skip
        self.order, self.live, self.buffers, self.held, self.phase = order, list(live), buffers, set(held), phase
        self.limit = max(live, default=0)
        self.still: list[int] = []  # bytes moved, by operation, that are no multiple of the batch
        self.done: set[LoopNest] = set()
        self.pool: dict[tuple[str, int], list[tuple[int, _Frees, Buffer]]] = {}
        self.aliases: dict[Buffer, int] = {}  # of inputs: by how many names the program still knows them
        for source, buffer in buffers.items():
            if source.users:
                self.aliases[buffer] = self.aliases.get(buffer, 0) + 1
        self.taken: set[TaskBuffer] = set()  # overwritten in place
        self.internal: dict[
            TaskBuffer, TaskBuffer | None
        ] = {}  # what never leaves its kernel, and what it would overwrite
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

    def _outputs(self, step: int, group: Group) -> list[Buffer]:
        """The new memory that a kernel needs."""
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
        """An operand that nothing else reads any more, of the result's size, read where the result is written.

        The first such operand is taken. One that never leaves the kernel has no memory but what it overwrote itself.
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
        """The last use is over."""
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

    def _op(self, group: Group, allocates: list[Buffer], frees: _Frees) -> Op:
        value = group.tasks[-1].value
        facts = value.facts.get("facts", {})
        moved = self._moved(group)
        if value.how is How.PRODUCT:
            kernel = Kernel.GEMM
        elif value.how is How.CALL:
            kernel = facts.get("kernel", Kernel.ATTENTION)
        elif any(each.value.how in (How.GATHER, How.SCATTER) for each in group.tasks):
            kernel = Kernel.INDEX
        else:
            kernel = Kernel.REDUCTION if group.reduction else Kernel.POINTWISE
        return Op(
            value.name, self.phase, tuple(allocates), tuple(frees), kernel, facts.get("shape", ()),
            facts.get("dtype", "float32"), facts.get("flops", 0), moved, 1, value.block,
        )  # fmt: skip

    def _moved(self, group: Group) -> int:
        """Bytes read and written; of a table that rows are taken from, the rows."""
        total: list[tuple[int, bool]] = []
        for source, accesses in group.reads.items():
            if source not in group.writes:
                size = source.bytes
                if not group.is_extern:
                    rows = max([numel(access[0]) for access in accesses if access is not None], default=group.numel)
                    size = min(size, rows * ITEM_BYTES[source.dtype])
                total.append((size, source.batched))
        total += [(s.bytes, s.batched) for s in group.writes if s.root is s and s not in self.internal]
        self.still.append(sum([size for size, batched in total if not batched]))
        return sum([size for size, _ in total])


def _is_internal(source: TaskBuffer, group: Group) -> bool:
    """Whether it never leaves the kernel that computes it."""
    return not source.is_output and not group.is_extern and set(group.tasks).issuperset(source.users)


def _temporaries(value: Value) -> list[Buffer]:
    """Memory that a kernel needs only while it runs."""
    sizes = value.facts.get("facts", {}).get("temporaries", ())
    return [Buffer(f"{value.name}.temporary", size, value.kind, value.block) for size in sizes]
