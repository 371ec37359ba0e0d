"""DistributedDataParallel: gradients are reduced in buckets while backward runs.

Read in torch 2.13, torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp. In a run's first
backward all gradients share one bucket; then buckets are filled in the order in which gradients arrive, 1 MiB first,
25 MiB after it. A gradient is copied into its bucket and back, or, with gradient_as_bucket_view, lives there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # torch/nn/parallel/distributed.py


def buckets(sizes: Iterable[tuple[str, int]], first: bool) -> list[list[tuple[str, int]]]:
    """Gradients, by name and bytes, assigned to buckets as they arrive; to a single one in a run's `first` step."""
    found: list[list[tuple[str, int]]] = []
    bucket: list[tuple[str, int]] = []
    filled, limit = 0, FIRST_BUCKET_BYTES
    for name, size in sizes:
        bucket.append((name, size))
        filled += size
        if filled >= limit and not first:
            found.append(bucket)
            bucket, filled, limit = [], 0, BUCKET_BYTES
    return [*found, bucket] if bucket else found


class Reducer:
    """Reduces a micro-step's gradients."""

    def __init__(self, order: Sequence[tuple[str, int]], ranks: int, first: bool, views: bool) -> None:
        """`order`: the gradients as they arrive, with their bytes."""
        self.ranks, self.views = ranks, views
        self.buckets = buckets(order, first)
        sizes = [sum(size for _, size in bucket) for bucket in self.buckets]
        self.resident = [Buffer("ddp.bucket", size, Kind.COMMUNICATION) for size in sizes]

    def synced(
        self, ops: Sequence[Op], grads: Mapping[str, Buffer], made: Mapping[str, Buffer] | None = None
    ) -> tuple[Op, ...]:
        """The micro-step with its gradients reduced, each bucket as soon as its last gradient is ready.

        `made` are this micro-step's own gradients, if it adds them to `grads`.
        """
        ready = _last_ops(ops, made or grads)
        result: list[Op] = []
        waiting = {name: index for index, bucket in enumerate(self.buckets) for name, _ in bucket}
        left = [len(bucket) for bucket in self.buckets]
        following = 0
        for index, op in enumerate(ops):
            result.append(op)
            for name in ready.get(index, ()):
                result.append(self._copied(name, grads[name]))
                left[waiting[name]] -= 1
            while following < len(left) and not left[following]:  # in order, as on every rank
                result.append(self._reduced(following))
                following += 1
        result += [self._reduced(index) for index in range(following, len(left))]
        for index, buffer in enumerate(self.resident):
            result.append(Op(f"ddp.bucket.{index}", Phase.BACKWARD, kernel=Kernel.WAIT))
            if not self.views:
                moved = 2 * buffer.bytes
                result.append(Op("ddp.copy_out", Phase.BACKWARD, kernel=Kernel.POINTWISE, bytes_moved=moved))
        return tuple(result)

    def _copied(self, name: str, grad: Buffer) -> Op:
        frees = (grad,) if self.views else ()  # from now on the gradient lives in the bucket
        return Op(f"{name}.copy_in", Phase.BACKWARD, (), frees, Kernel.POINTWISE, bytes_moved=2 * grad.bytes)

    def _reduced(self, index: int) -> Op:
        shape = (self.ranks, self.resident[index].bytes)
        return Op(f"ddp.bucket.{index}", Phase.BACKWARD, kernel=Kernel.ALL_REDUCE, shape=shape)


def _last_ops(ops: Sequence[Op], grads: Mapping[str, Buffer]) -> dict[int, list[str]]:
    """For each operation index, the gradients ready after it: after AccumulateGrad, or else after their allocation."""
    names = {f"{name}.grad": name for name in grads}
    makers = {buffer: name for name, buffer in grads.items()}
    found: dict[str, int] = {}
    for index, op in enumerate(ops):
        if op.phase is not Phase.BACKWARD:
            continue
        if op.name in names:
            found[names[op.name]] = index
        for buffer in op.allocates:
            if buffer in makers and makers[buffer] not in found:
                found[makers[buffer]] = index
    at: dict[int, list[str]] = {}
    for name, index in found.items():
        at.setdefault(index, []).append(name)
    return at


def arrival(ops: Sequence[Op], grads: Mapping[str, Buffer]) -> list[tuple[str, int]]:
    """Gradients in the order in which backward makes them, with their bytes."""
    ready = _last_ops(ops, grads)
    return [(name, grads[name].bytes) for index in sorted(ready) for name in ready[index]]
