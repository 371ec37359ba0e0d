"""The compiled loss in chunks: its arithmetic against inductor's own plan of a chunk, and against a real run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from oomph.config import TrainConfig
from oomph.predict.memory import find_peak
from oomph.step.compile.programs import Chunks
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section, Step
from oomph.step.trace.inductor.plan import plan, register_patterns
from oomph.step.trace.inductor.wrapper import WrapperReader
from oomph.training import loss as real

INPUTS = ("loss.chunk_logits", "targets")


class Arithmetic(nn.Module):
    """What lies between a chunk's products, as a module."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.function = real.log_sum_and_gradient if learns else real.log_sum

    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (self.function(logits, targets),)


def planned_for_a_card(rows: int, vocab: int, dtype: torch.dtype, learns: bool) -> tuple[Op, ...]:
    """Inductor's operations. Its graph changes an input, which AOTAutograd must leave to inductor, as dynamo does."""
    found: list[tuple[Op, ...]] = []
    register_patterns()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def compiler(graph: Any, inputs: Sequence[Any]) -> Any:
        planned = plan(graph, inputs, cuda=True, backward=False, inference=True, visible=1)
        buffers = [Buffer(name, t.nbytes, Kind.INPUTS) for name, t in zip(INPUTS, inputs, strict=True)]
        found.append(WrapperReader(planned, Phase.FORWARD, buffers, set(buffers), rows * vocab, False).read().ops)
        return graph.forward

    with fake_mode, torch.no_grad(), tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        aot_module_simplified(
            Arithmetic(learns),
            [torch.empty(rows, vocab, dtype=dtype), torch.empty(rows, dtype=torch.int64)],
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
    return found[0]


def described(cuda: bool, dtype: str, rows: int, vocab: int, chunk: int, learns: bool, width: int = 64) -> Chunks:
    """The head and the loss, from a hidden state of their own."""
    config = TrainConfig(
        dtype=dtype, batch_size=1, block_size=rows, vocab_size=vocab, n_embd=width, n_head=1, loss_chunk=chunk,
        return_logits=False, trainer="oomph",
    )  # fmt: skip
    hidden = Buffer("hidden", 4 * rows * width, Kind.ACTIVATIONS)
    return Chunks(config, cuda, 1, hidden, learns)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "vocab"), [(2048, 50304), (512, 50257), (300, 65)])
def test_a_chunks_kernels_are_those_of_inductors_plan(rows: int, vocab: int, dtype: str, learns: bool) -> None:
    planned = planned_for_a_card(rows, vocab, getattr(torch, dtype), learns)
    ops = described(True, dtype, rows, vocab, rows, learns).forward
    kernels = [op for op in ops if op.name in ("loss.chunk_softmax", "loss.chunk_sum", "loss.chunk_dlogits")]
    assert [_shape(op) for op in kernels] == [_shape(op) for op in planned]  # nothing of the vocabulary's size
    assert kernels[0].bytes_moved == pytest.approx(planned[0].bytes_moved, rel=0.1)  # one pass over the logits


def _shape(op: Op) -> tuple[Kernel, list[int]]:
    return op.kernel, [buffer.bytes for buffer in op.allocates]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_compiled_loss_takes_what_the_arithmetic_says(dtype: str) -> None:
    rows, vocab, width, chunk = 700, 3001, 64, 256
    half = dtype == "bfloat16"
    loss = described(half, dtype, rows, vocab, chunk, True, width)  # autocast is for cards
    resident = (Buffer("hidden", 4 * rows * width, Kind.ACTIVATIONS),)
    said = find_peak(Step(resident, (Section("loss", (*loss.forward, *loss.backward)),)), rounding_bytes=1)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(vocab, (rows,))

    def once() -> None:
        hidden = torch.randn(rows, width, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = real.chunked_loss(hidden, weight, targets, chunk, compiled=True)
        torch.autograd.grad(loss, (hidden, weight))

    once()  # compiles
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        once()
    results = recorded.profiler.kineto_results.events()
    events = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(results) if e.name() == "[memory]")
    live = most = 0
    for _, _, size in events:
        live += size
        most = max(most, live)
    casts = 4 * vocab * width if half else 0  # what a CPU adds to a float32 sum it casts first, a card as it adds
    assert said.allocated_bytes + casts == pytest.approx(most, rel=0.01)
