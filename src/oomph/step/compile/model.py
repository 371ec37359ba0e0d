"""The programs that inductor generates for a config's model, as operations on buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from oomph.config.programs import ON_THE_TRAINER
from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.collector import uncollected
from oomph.step.compile.decompose import RULES
from oomph.step.compile.depth import deepened
from oomph.step.compile.emit import emitted
from oomph.step.compile.fuse import fused
from oomph.step.compile.graph import GraphRecorder, GraphTensor, How, Value
from oomph.step.compile.lower import Lowering, base_of
from oomph.step.compile.order import ordered
from oomph.step.compile.partition import Graphs, partition
from oomph.step.compile.rewrite import rewritten
from oomph.step.compile.tasks import LoopNest, TaskBuffer
from oomph.step.depth import Gap, UnlikeBlocksError, block_of, sample
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase
from oomph.step.precision import precision
from oomph.step.tensor.autograd import run_backward
from oomph.step.tensor.tape import Module
from oomph.step.tensor.tensor import Tensor

T = TypeVar("T")
ONE_HOT_BEFORE = (2, 5)  # pytorch#129043: until then the loss's backward writes the targets as a float32 one-hot matrix
DONATED_FROM = (2, 6)  # pytorch#139669: since then backward may overwrite saved activations in place
MIXED_FROM = (2, 10)  # one kernel may reduce along both rows and columns: read in 2.13, the first version is assumed


class Scalable(msgspec.Struct, frozen=True, eq=False):
    """Which sizes of a program depend on the batch size."""

    fixed_bytes: dict[Op, int]  # bytes an operation moves that do not depend on the batch
    batched: frozenset[Buffer]  # buffers whose size grows with the batch


class CompiledModel(msgspec.Struct, frozen=True, eq=False):
    """A model's programs. Forward returns the loss, and the logits if they are asked for; or the hidden state."""

    batch: tuple[Buffer, ...]
    forward: tuple[Op, ...]
    returned: tuple[Buffer, ...]
    tangents: tuple[Buffer, ...]  # gradients of the outputs, backward's inputs
    backward: tuple[Op, ...]
    grads: dict[str, Buffer]  # by parameter name
    scalable: Scalable


class CompiledEvaluation(msgspec.Struct, frozen=True, eq=False):
    """A model's forward without gradients, and its outputs."""

    batch: tuple[Buffer, ...]
    forward: tuple[Op, ...]
    returned: tuple[Buffer, ...]


@lru_cache(maxsize=256)  # a search asks for many configs, some of them repeatedly
def compiled_model(config: TrainConfig, cuda: bool, threads: int) -> CompiledModel:
    """The programs of a config's model. With a chunked loss of any chunk size, the model ends with its hidden state."""
    return _from_few_blocks(config, cuda, threads, ProgramMaker.training)


def compiled_evaluation(config: TrainConfig, cuda: bool, threads: int) -> CompiledEvaluation:
    """The forward program that an evaluation of a config's model runs, independent of what training saves."""
    return _evaluation(msgspec.structs.replace(config, checkpoint_layers=0, dropout=0.0), cuda, threads)


@lru_cache(maxsize=64)
def _evaluation(config: TrainConfig, cuda: bool, threads: int) -> CompiledEvaluation:
    return _from_few_blocks(config, cuda, threads, ProgramMaker.evaluation)


@uncollected()  # a graph is full of reference cycles, all alive to the end
def _from_few_blocks(config: TrainConfig, cuda: bool, threads: int, make: Callable[[ProgramMaker], T]) -> T:
    """The programs made from a few recorded blocks, repeated; from all of them if the blocks differ."""
    maker = ProgramMaker(config, cuda, threads, *sample(models.kinds(config)))
    try:
        return make(maker)
    except UnlikeBlocksError:
        maker.let_go()
        maker = ProgramMaker(config, cuda, threads, range(config.n_layer), ())
        return make(maker)
    finally:
        maker.let_go()


class ProgramMaker:
    """Takes a config's model through the passes: record, partition, repeat, lower, fuse, order, emit."""

    def __init__(
        self, config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int], gaps: Sequence[Gap]
    ) -> None:
        """`layers` are the blocks to record, `gaps` the runs of identical blocks left out between them."""
        self.config, self.cuda, self.gaps = config, cuda, gaps
        self.precision = precision(config, cuda)
        self.version = tuple([int(part) for part in config.torch_version.split(".")[:2]])
        size = 8 * config.batch_size * config.block_size
        self.batch = {name: Buffer(f"batch.{name}", size, Kind.INPUTS) for name in ("x", "y")}
        weights = models.weights(config, self.precision)
        self.weights = {name: each for name, each in weights.items() if block_of(name) in (None, *layers)}
        self.values: list[Value] = []
        self.tasks: list[LoopNest] = []
        self.fixed_bytes: dict[Op, int] = {}
        self.batched: set[Buffer] = set()
        options: dict[str, Any] = {"cuda": cuda, "threads": threads, "tf32": cuda and config.allow_tf32}
        self.recorder = GraphRecorder(self.weights, RULES, layers=layers, **options)

    def training(self) -> CompiledModel:
        """The forward and the backward program."""
        recorder, returned = self._record(training=True)
        tangents = [
            recorder.input(f"tangent.{i}", t.shape, t.dtype, How.TANGENT, Kind.LOGITS) for i, t in enumerate(returned)
        ]
        recorder.grad_enabled, recorder.autocast = False, self.precision.autocast
        run_backward(*reversed([(out, grad.detach()) for out, grad in zip(returned, tangents, strict=True)]))
        grads: dict[str, Value] = dict(recorder.grads)  # type: ignore[arg-type]
        graphs = partition(recorder.values, [_value(each) for each in returned], grads.values())
        for gap in self.gaps:
            graphs, grads = deepened(graphs, grads, gap)
        memory = {value: self._memory(value) for value in graphs.inputs}
        forward = self._compile_forward(graphs.forward, memory, returned, graphs.saved, Phase.FORWARD)
        results = [memory[_value(each)] for each in returned]
        memory |= {
            each.value: Buffer(f"{_value(out).name}.zeros", each.bytes, Kind.LOGITS)
            for out, each in zip(returned, tangents, strict=True)
        }
        held = {memory[value] for value in graphs.inputs if value.kind is Kind.PARAMETERS}
        held.update(results if keeps_outputs(self.config) else results[:1])  # the loop holds the loss in any case
        if not self.config.loss_chunk:
            held.add(memory[tangents[0].value])  # the loss's gradient, which the loop holds
        backward, made = self._compile_backward(
            graphs.backward, graphs.saved, tangents, memory, list(grads.values()), held, results
        )
        found, copies = _apart({name: made[value] for name, value in grads.items()})
        return CompiledModel(
            batch=tuple(self.batch.values()),
            forward=forward,
            returned=tuple(results),
            tangents=tuple([memory[each.value] for each in tangents]),
            backward=(*backward, *copies),
            grads=found,
            scalable=Scalable(self.fixed_bytes, frozenset(self.batched)),
        )

    def _record(self, training: bool) -> tuple[GraphRecorder, list[Tensor]]:
        """The model's graph and its outputs: the loss first, or the hidden state that a chunked loss reads."""
        config = self.config
        recorder = self.recorder
        recorder.training = recorder.grad_enabled = training
        recorder.writes_one_hot = self.version < ONE_HOT_BEFORE
        for name in self.weights:
            recorder.parameter(name)
        shape = (config.batch_size, config.block_size)
        batch = [recorder.input(name, shape, "int64", kind=Kind.INPUTS) for name in self.batch]
        recorder.autocast = self.precision.autocast
        logits, loss = models.forward(config)(Module(recorder, config), *batch)
        recorder.autocast = None
        return recorder, [loss, *([logits] if config.return_logits and logits is not None else [])]

    def _memory(self, value: Value) -> Buffer:
        return self.batch.get(value.name) or Buffer(value.name, value.bytes, value.kind, value.block)

    def _compile_forward(
        self,
        graph: Sequence[Value],
        memory: dict[Value, Buffer],
        returned: Sequence[Tensor],
        saved: Sequence[Value],
        phase: Phase,
    ) -> tuple[Op, ...]:
        """The forward program; its outputs and saved values are added to `memory`."""
        visible = [_value(each) for each in returned]
        given = {value: _input(value) for value in memory}
        outputs = [*visible, *(value for value in saved if value.how is not How.INPUT)]
        ops, made = self._compile(graph, given, memory, outputs, set(memory.values()), phase, visible)
        memory |= made
        return ops

    def _compile_backward(
        self,
        graph: Sequence[Value],
        saved: Sequence[Value],
        tangents: Sequence[GraphTensor],
        memory: Mapping[Value, Buffer],
        outputs: list[Value],
        held: Collection[Buffer],
        returned: Collection[Buffer],
    ) -> tuple[tuple[Op, ...], dict[Value, Buffer]]:
        """The backward program, which overwrites nothing that forward `returned`, and the buffers of its gradients."""
        given = {value: _input(value) for value in (*saved, *(tangent.value for tangent in tangents))}
        for value, source in given.items():
            source.freeable = value.how is not How.INPUT
            saved_alone = value.how is not How.TANGENT and memory[value] not in returned
            source.donated = source.freeable and saved_alone and self.version >= DONATED_FROM
        return self._compile(graph, given, memory, outputs, held, Phase.BACKWARD)

    def _compile(
        self,
        graph: Sequence[Value],
        given: Mapping[Value, TaskBuffer],
        memory: Mapping[Value, Buffer],
        outputs: Sequence[Value],
        held: Collection[Buffer],
        phase: Phase,
        visible: Iterable[Value] = (),
    ) -> tuple[tuple[Op, ...], dict[Value, Buffer]]:
        for value, source in given.items():
            if value in memory and value.bytes == base_of(value).bytes:
                source.bytes = memory[value].bytes  # including its padding
        batch_size = self.config.batch_size
        for value, source in given.items():
            source.batched = value.bytes % batch_size == 0
        lowering = Lowering(rewritten(graph, outputs, self.cuda), given, outputs, self.cuda, visible, batch_size)
        found = lowering.run()
        order, live = ordered(fused(lowering.tasks, self.cuda and self.version >= MIXED_FROM), given.values())
        buffers = {source: memory[value] for value, source in given.items() if value in memory}
        ops, fixed = emitted(order, live, buffers, held, phase)
        self.values += (*given, *lowering.graph)
        self.tasks += lowering.tasks
        self.fixed_bytes |= fixed
        self.batched |= {buffer for source, buffer in buffers.items() if source.batched}
        return ops, {value: buffers[source.root] for value, source in found.items()}

    def evaluation(self) -> CompiledEvaluation:
        """The forward program without gradients."""
        recorder, returned = self._record(training=False)
        wanted = {_value(each) for each in returned}
        inputs = [value for value in recorder.values if value.how is How.INPUT]
        graph = [value for value in recorder.values if value.how is not How.INPUT]
        graphs = Graphs(tuple(inputs), tuple(_used(graph, wanted)), (), ())
        for gap in self.gaps:
            graphs, _ = deepened(graphs, {}, gap)
        memory = {value: self._memory(value) for value in graphs.inputs}
        ops = self._compile_forward(graphs.forward, memory, returned, (), Phase.EVAL)
        return CompiledEvaluation(tuple(self.batch.values()), ops, tuple([memory[_value(each)] for each in returned]))

    def let_go(self) -> None:
        """Break the reference cycles of values, tasks and buffers: a search makes many, uncollected."""
        for value in (*self.recorder.values, *self.values):
            value.users = []
        for task in self.tasks:
            task.reads, task.writes = {}, []
        self.recorder.clear()


def keeps_outputs(config: TrainConfig) -> bool:
    """Whether the loop holds the model's outputs during backward. The Trainer drops them before."""
    return config.trainer not in ON_THE_TRAINER


def _apart(grads: dict[str, Buffer]) -> tuple[dict[str, Buffer], list[Op]]:
    """Gradients with a buffer each, and the copies this takes: autograd copies a gradient that two parameters share."""
    copies: list[Op] = []
    seen: set[Buffer] = set()
    for name, buffer in grads.items():
        if buffer in seen:
            own = grads[name] = Buffer(f"{name}.grad", buffer.bytes, Kind.GRADIENTS, buffer.block)
            copies.append(Op(own.name, Phase.BACKWARD, (own,), (), Kernel.POINTWISE, bytes_moved=2 * own.bytes))
        seen.add(buffer)
    return grads, copies


def _value(tensor: Tensor) -> Value:
    assert isinstance(tensor, GraphTensor)
    return tensor.value


def _input(value: Value) -> TaskBuffer:
    return TaskBuffer(value.name, value.bytes, value.dtype, value.kind, value.block, None)


def _used(graph: Sequence[Value], wanted: Collection[Value]) -> list[Value]:
    """The graph's values that the wanted ones depend on, in order."""
    found, todo = set[Value](), list(wanted)
    while todo:
        value = todo.pop()
        if value not in found:
            found.add(value)
            todo += value.inputs
    return [value for value in graph if value in found]
