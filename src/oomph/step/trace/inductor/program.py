"""The op list of one training step of any nn.Module under torch.compile: no GPU, no Triton, nothing computed.

The model's graphs are captured on fake tensors (`capture`), inductor plans them for a GPU (`plan`)
without what only a compiler needs (`shortcuts`), its plan is read as operations on buffers
(`wrapper`), and nanoGPT's loop is put around them (`step.compile.loop`). Only what inductor would write to memory is a
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from oomph.config.programs import NEWEST_TORCH
from oomph.config.schema import TrainConfig
from oomph.errors import InputError, Problem
from oomph.step.collector import uncollected
from oomph.step.compile.model import DONATED_FROM, ONE_HOT_BEFORE
from oomph.step.ops import Buffer, Kind, Phase, Step
from oomph.step.trace.eager.optimizer import check_traced
from oomph.step.trace.fakes import DTYPES, ModelOrFactory, convert, facts, on_fakes
from oomph.step.trace.inductor.capture import capture
from oomph.step.trace.inductor.plan import plan, register_patterns, report_strides
from oomph.step.trace.inductor.wrapper import GraphOps, WrapperReader
from oomph.step.trace.loss import find_loss
from oomph.step.trace.template import Lists, step


def compiled(model: ModelOrFactory, inputs: Sequence[torch.Tensor], *, first: bool = False, **options: Any) -> Step:
    """One optimizer step and one evaluation: `compiled_run`'s first step, or a later one."""
    return compiled_run(model, inputs, **options)[0 if first else 1]


def compiled_run(
    model: ModelOrFactory,
    inputs: Sequence[torch.Tensor],
    *,
    dtype: str = "bfloat16",
    autocast: bool = True,
    cuda: bool = True,
    attention: str = "flash",
    optimizer: str = "adamw",
    optimizer_loop: str = "fused",
    accumulation: int = 3,
    grad_clip: float = 1.0,
    keep_output: bool = True,
    evaluation: bool = True,
    eval_iters: int = 200,
    torch_version: str = NEWEST_TORCH,
) -> tuple[Step, Step]:
    """The first and a later optimizer step of `torch.compile(model)(*inputs)`, each with one evaluation.

    `model` is a module, or a function that builds one, which is then called on fake tensors. Its loss is found by
    `find_loss`; everything else it returns goes to the caller, who holds it if `keep_output`.
    With `cuda` the plan is a GPU's, on any machine; without, this CPU's. Without `evaluation` there is none, and a
    third less to plan.
    """
    check_traced(optimizer)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        built = on_fakes(model, fake_mode)
        if not autocast:
            convert(built, DTYPES[dtype])
    more: dict[str, Any] = {"cuda": cuda, "attention": attention, "torch_version": torch_version}
    found = lists(
        built, inputs, fake_mode, dtype=dtype, autocast=autocast, evaluation=evaluation, keep_output=keep_output, **more
    )
    config = TrainConfig(
        dtype=dtype, autocast=autocast, optimizer=optimizer, optimizer_loop=optimizer_loop, grad_clip=grad_clip,
        gradient_accumulation_steps=accumulation, eval_iters=eval_iters,
    )  # fmt: skip
    first, later = (step(facts(built), found, config, cuda, first) for first in (True, False))
    return first, later


def lists(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    fake_mode: FakeTensorMode,
    *,
    dtype: str,
    autocast: bool,
    cuda: bool,
    attention: str,
    torch_version: str = NEWEST_TORCH,
    evaluation: bool = True,
    keep_output: bool = True,
) -> Lists:
    """The programs that inductor would generate for a model on fake tensors."""
    register_patterns()
    with fake_mode:
        batch = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inputs]
    half = DTYPES[dtype] if autocast and dtype != "float32" else None
    with uncollected():
        maker = _Maker(model, batch, half, cuda, attention, fake_mode, torch_version, keep_output)
        return maker.lists(evaluation)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers: the order of the graphs' inputs."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


class _Maker:
    """Turns a model into the programs that inductor would generate for it."""

    def __init__(
        self,
        model: nn.Module,
        batch: Sequence[torch.Tensor],
        half: torch.dtype | None,
        cuda: bool,
        attention: str,
        fake_mode: FakeTensorMode,
        torch_version: str,
        keep_output: bool,
    ) -> None:
        self.keep_output = keep_output
        self.model, self.inputs, self.half, self.fake_mode = model, batch, half, fake_mode
        self.cuda, self.attention = cuda, attention
        version = tuple(int(part) for part in torch_version.split(".")[:2])
        self.older = {"optimize_scatter_upon_const_tensor": False} if version < ONE_HOT_BEFORE else {}
        self.donates = version >= DONATED_FROM
        self.state = [Buffer(name, t.nbytes, Kind.PARAMETERS) for name, t in _state(model).items()]
        self.batch = [Buffer(f"batch.{i}", t.nbytes, Kind.INPUTS) for i, t in enumerate(batch)]
        self.graphs: dict[str, GraphOps] = {}
        self.shapes: list[torch.Tensor] = []  # the model's outputs, in order
        self.loss_index = 0  # the index of the loss among them
        self.visible = 0
        self.zeros: dict[int, Buffer] = {}  # by output: the zero gradient that autograd passes for it

    def lists(self, evaluation: bool) -> Lists:
        """Forward and backward in training, then the forward of an evaluation."""
        self._capture()
        self.graphs["inference"] = GraphOps((), (), ())
        if evaluation:
            self.model.eval()
            with torch.no_grad():
                self._capture()
            self.model.train()
        forward, backward, inference = (self.graphs[name] for name in ("forward", "backward", "inference"))
        returned, loss = forward.outputs[: self.visible], self.loss_index
        found = zip(_state(self.model), backward.outputs, strict=False)
        outputs = tuple(b for i, b in enumerate(returned) if i != loss and b is not None)
        return Lists(
            {"forward": forward.ops, "backward": backward.ops, "evaluation": inference.ops},
            {
                "batch": tuple(self.batch),
                "loss": (_present(returned[loss]),),
                "outputs": outputs,
                "kept": outputs if self.keep_output else (),
                "zeros": tuple(self.zeros.values()),
                "evaluation_outputs": tuple(b for b in inference.outputs if b is not None),
            },
            {name: buffer for name, buffer in found if buffer is not None},
        )

    def _capture(self) -> None:
        donated = torch._functorch.config.patch(donated_buffer=self.donates)
        with self.fake_mode, inductor_config.patch(self.older), donated:
            capture(
                self.model,
                self.inputs,
                self._outputs,
                self._on_graph,
                half=self.half,
                cuda=self.cuda,
                attention=self.attention,
                fake_mode=self.fake_mode,
            )

    def _outputs(self, result: Any) -> tuple[torch.Tensor, ...]:
        loss = find_loss(result)
        if not isinstance(result, torch.Tensor | tuple | list | dict):
            result = dict(result)  # a ModelOutput of transformers
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if isinstance(result, torch.Tensor):
            leaves = [loss]
        self.shapes = leaves
        self.loss_index = next(i for i, leaf in enumerate(leaves) if leaf is loss)
        return tuple(leaves)

    def _vocabulary_numel(self) -> int:
        """The number of elements from which a buffer counts as logits: all tokens times the widest layer."""
        tokens = [t for t in self.inputs if t.dim() > 1 and not t.is_floating_point()]
        rows = max((t.numel() for t in tokens), default=0)
        widest = max((p.shape[0] for p in self.model.parameters() if p.dim() == 2), default=0)
        return rows * widest

    def _on_graph(self, name: str, graph: GraphModule, inputs: Sequence[Any]) -> None:
        backward, inference = name == "backward", name == "inference"
        if not backward:
            self.visible = len(self.shapes)
        visible = 0 if backward else self.visible
        planned = plan(graph, inputs, cuda=self.cuda, backward=backward, inference=inference, visible=visible)
        if name == "forward":
            report_strides(planned)
        buffers: list[Buffer | None]
        if backward:
            buffers = self._backward_inputs(list(planned.graph.graph_inputs), inputs)
            returned = self.graphs["forward"].outputs[: self.visible]
            kept = returned if self.keep_output else [returned[self.loss_index]]
            held = {*self.state, *(b for b in kept if b is not None)}
        else:
            buffers = [*self.state, *self.batch]
            held = {*self.state, *self.batch}
        phase = Phase.BACKWARD if backward else Phase.EVAL if inference else Phase.FORWARD
        self.graphs[name] = WrapperReader(planned, phase, buffers, held, self._vocabulary_numel(), backward).read()

    def _backward_inputs(self, names: Sequence[str], inputs: Sequence[Any]) -> list[Buffer | None]:
        """The saved tensors, in order, then a gradient for each output: zeros, except for the loss."""
        saved = iter(self.graphs["forward"].outputs[self.visible :])
        wanted = [i for i, tensor in enumerate(self.shapes) if tensor.is_floating_point()]
        buffers: list[Buffer | None] = []
        for name, tensor in zip(names, inputs, strict=True):
            if not name.startswith("tangents"):
                buffers.append(next(saved))
                continue
            output = wanted.pop(0)
            buffer = Buffer(f"output.{output}.zeros", tensor.nbytes, Kind.LOGITS)
            buffers.append(None if output == self.loss_index else buffer)
            if output != self.loss_index:
                self.zeros[output] = buffer
        return buffers


def _present(buffer: Buffer | None) -> Buffer:
    if buffer is None:
        raise InputError(Problem("model", "it returns no loss", allowed="a scalar that depends on its parameters"))
    return buffer
