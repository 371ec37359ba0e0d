"""The op list of one training step of any nn.Module, from a run on fake tensors: nothing is computed or allocated.

`trace` runs nanoGPT's loop on the model: micro-steps that keep the last output until the next exists and fetch the
next batch before backward, then clipping, the optimizer, and an evaluation. With `cuda` it follows a GPU's autocast
rules and kernels, on any machine; without, the CPU's. `fake=False` runs and records it for real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from oomph.config.programs import ON_THE_TRAINER, TRANSFORMERS
from oomph.step.collector import uncollected
from oomph.step.ops import Buffer, Kind, Op, Phase, Section, Step, copied
from oomph.step.trace.eager.kernels import random_states, rules
from oomph.step.trace.eager.optimizer import Updater
from oomph.step.trace.eager.record import MOST_CALLS, Live, Recorder
from oomph.step.trace.fakes import DTYPES, ModelOrFactory, convert, drawing_ones, grouping_floats, on_fakes
from oomph.step.trace.hugging_face import deciding_as_eager
from oomph.step.trace.loss import find_loss
from oomph.step.trace.template import Lists

LossOf = Callable[[Any, tuple[torch.Tensor, ...]], torch.Tensor]


def trace(
    model: ModelOrFactory,
    inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    *,
    loss: LossOf | None = None,
    dtype: str = "bfloat16",
    autocast: bool = True,
    cuda: bool = True,
    attention: str = "flash",
    optimizer: str = "adamw",
    optimizer_loop: str = "fused",
    accumulation: int = 3,
    grad_clip: float = 1.0,
    keep_output: bool = True,
    first: bool = False,
    fake: bool = True,
) -> Step:
    """One optimizer step and one evaluation of `model(*inputs)`, or of `model(**inputs)` if they are named.

    `model` is a module, or a function that builds one, which is then called on fake tensors. `loss` selects the loss
    from the model's result; by default the entry named `loss`, the last scalar of a tuple, or the result itself.
    `keep_output` holds the rest of the result as nanoGPT's loop holds its logits. `first` is a run's first step.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with mode:
        built = _prepare(model, mode if isinstance(mode, FakeTensorMode) else None)
        if not autocast:
            convert(built, DTYPES[dtype])
        names = tuple(inputs) if isinstance(inputs, Mapping) else ()
        given = inputs.values() if isinstance(inputs, Mapping) else inputs
        batch = tuple(torch.zeros_like(tensor) if fake else tensor for tensor in given)
        with recording(built, cuda=cuda, attention=attention) as recorder:
            half = DTYPES[dtype] if autocast and dtype != "float32" else None
            program = _Program(built, batch, names, recorder, loss or _loss_of, keep_output, accumulation, half)
            program.updater = Updater(built, optimizer, optimizer_loop, grad_clip, half)
            program.scale = program.updater.scale
            del batch
            return program.play(first)


def lists(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    dtype: str,
    autocast: bool,
    cuda: bool,
    attention: str,
    trainer: str = "nanogpt",
    most_alone: int = MOST_CALLS,
) -> Lists:
    """The first micro-step of a step that is not the run's first, and an evaluation batch if the program has
    one.

    Call it inside the fake tensors' mode. The loop around both is the same for all models. Raises
    `LoopError` if a module makes more than `most_alone` consecutive calls.
    """
    half = DTYPES[dtype] if autocast and dtype != "float32" else None
    with recording(model, cuda=cuda, attention=attention, most_alone=most_alone) as recorder:
        batch = tuple(torch.zeros_like(tensor) for tensor in inputs)
        programs = {"torch": _PlainProgram} | dict.fromkeys(ON_THE_TRAINER, _TrainerProgram)
        kind: type[_Program] = programs.get(trainer, _Program)
        program = kind(model, batch, (), recorder, _loss_of, True, 1, half)
        if half is torch.float16:
            amplifier = torch.ones(())
            program.scale = lambda loss: loss * amplifier
        del batch
        program.adopt()
        program.recorder.section("before")
        sections = {} if trainer in TRANSFORMERS else {"evaluation": program.evaluate(batches=1)[0].ops}
        fetched, stand_ins = program.hold()
        program.micro_step()
        ops = recorder.section("micro-step").ops
        after = program.held()
        kept = after[len(fetched) :]  # the model's outputs, then the loss
        old = [tuple(map(copied, found)) for found in (kept[:-1], kept[-1:])] if stand_ins else []
        sections["micro-step"] = tuple(_freeing(ops, dict(zip(stand_ins, old, strict=True))))
        grads = {n: made.settle() for n, p in model.named_parameters() if (made := _gradient(recorder, p))}
        for parameter in model.parameters():
            parameter.grad = None
        roles = {"batch": fetched, "before": (*fetched, *(b for found in old for b in found)), "after": after}
        return Lists(sections, roles, grads, program.cached())


def _freeing(ops: Sequence[Op], instead: Mapping[Buffer, tuple[Buffer, ...]]) -> Iterator[Op]:
    """The operations, freeing other buffers in place of some."""
    for op in ops:
        if instead.keys().isdisjoint(op.frees):
            yield op
        else:
            yield op.on(op.allocates, tuple(b for freed in op.frees for b in instead.get(freed, (freed,))))


def _gradient(recorder: Recorder, parameter: nn.Parameter) -> Live | None:
    return None if parameter.grad is None else recorder.find(parameter.grad)


@contextlib.contextmanager
def recording(
    model: nn.Module, *, cuda: bool = True, attention: str = "flash", most_alone: int = MOST_CALLS
) -> Iterator[Recorder]:
    """A recorder that is active for `model`, under CUDA's rules or the CPU's."""
    recorder = Recorder(cuda, attention, most_alone)
    kernel = sdpa_kernel(SDPBackend.MATH) if attention == "math" else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        for each in (uncollected(), rules(recorder), random_states(recorder), kernel):
            stack.enter_context(each)
        for each in (deciding_as_eager(), drawing_ones(), grouping_floats(), recorder, _module_names(model, recorder)):
            stack.enter_context(each)
        recorder.calibrate()
        yield recorder


def _loss_of(result: Any, _batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return find_loss(result)


def _prepare(model: ModelOrFactory, mode: FakeTensorMode | None) -> nn.Module:
    """The model on fake tensors or, for a real run, unchanged."""
    if mode is not None:
        return on_fakes(model, mode)
    return model if isinstance(model, nn.Module) else model()


@contextlib.contextmanager
def _module_names(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder whose forward is running, and which autograd nodes it creates."""
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            recorder.enter(name)

        def leave(*_: Any) -> None:
            recorder.leave()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Program:
    """The training loop, and what its variables hold."""

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[torch.Tensor, ...],
        names: tuple[str, ...],
        recorder: Recorder,
        loss: LossOf,
        keep_output: bool,
        accumulation: int,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self.model, self.batch, self.names, self.recorder = model, batch, names, recorder
        self.loss_of, self.keep_output, self.accumulation = loss, keep_output, accumulation
        self.output: Any = None
        self.loss: torch.Tensor | None = None
        self.autocast_dtype = autocast_dtype
        self.cache: tuple[torch.Tensor, ...] = ()  # keys and values that a transformers model returned
        self.scale: Callable[[torch.Tensor], Any] = lambda loss: loss
        self.updater: Updater

    def play(self, first: bool) -> Step:
        recorder = self.recorder
        self.adopt()
        if not first:  # one unrecorded step, to leave behind what later steps find
            self.micro_step()
            self.update()
            recorder.section("before")
        resident = recorder.resident()
        sections = self.evaluate() if first else []
        for index in range(min(self.accumulation, 3)):
            self.micro_step()
            last = self.accumulation > 3 and index == 2
            name = f"micro-steps 3 to {self.accumulation}" if last else f"micro-step {index + 1}"
            sections.append(recorder.section(name, self.accumulation - 2 if last else 1))
        self.update()
        sections.append(recorder.section("optimizer"))
        if not first:
            sections += self.evaluate()
        return Step(resident, tuple(sections))

    def adopt(self) -> None:
        """Count what exists before the program begins."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.recorder.adopt(tensor, Kind.PARAMETERS, name)
        for tensor in self.batch:
            self.recorder.adopt(tensor, Kind.INPUTS, "batch")

    def autocast(self) -> Any:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.autocast_dtype)

    def call(self, batch: tuple[torch.Tensor, ...]) -> Any:
        """The model's result for a batch."""
        if self.names:
            return self.model(**dict(zip(self.names, batch, strict=True)))
        return self.model(*batch)

    def fetch(self) -> tuple[torch.Tensor, ...]:
        """The next batch, on the device."""
        return tuple(tensor.clone() for tensor in self.batch)

    def micro_step(self) -> None:
        """One forward and backward."""
        self.recorder.phase = Phase.FORWARD
        with self.autocast():
            self._forward()
            self.recorder.phase = Phase.LOSS
            assert self.loss is not None
            self.loss = self.loss / self.accumulation
        self.batch = self.fetch()
        self.recorder.phase = Phase.BACKWARD
        self.scale(self.loss).backward()

    def _forward(self) -> None:
        result = self.call(self.batch)
        loss = self.loss_of(result, self.batch)
        self.recorder.know_logits(result)
        kept = _without(result, loss) if self.keep_output else None
        del result
        self.output = kept
        self.loss = loss

    def update(self) -> None:
        self.recorder.phase = Phase.CLIP
        self.updater.clip()
        self.recorder.phase = Phase.OPTIMIZER
        self.updater.step()
        for tensor in self.updater.state():
            made = self.recorder.find(tensor)
            if made is not None:
                made.kind = Kind.OPTIMIZER

    def hold(self) -> tuple[tuple[Buffer, ...], list[Buffer]]:
        """Hold stand-ins for what an earlier micro-step would have left. Returns the batch, and those for the results
        and the loss, whose sizes are not known yet."""
        self.output, self.loss = [torch.empty(1)], torch.empty(())
        self.recorder.section("before")
        held = self.held()
        return held[: len(self.batch)], list(held[len(self.batch) :])

    def cached(self) -> dict[str, Buffer]:
        """The buffers of keys and values that the program's variables hold, by unique names."""
        found = [made.settle() for tensor in self.cache if (made := self.recorder.find(tensor)) is not None]
        return {f"{buffer.name}.{index % 2}": buffer for index, buffer in enumerate(dict.fromkeys(found))}

    def held(self) -> tuple[Buffer, ...]:
        """The buffers that the program's variables hold: the batch, the model's outputs, the loss."""
        leaves = [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, torch.Tensor)]
        assert self.loss is not None
        found = [self.recorder.find(tensor) for tensor in (*self.batch, *leaves, self.loss)]
        return tuple(dict.fromkeys(made.settle() for made in found if made and made.kind is not Kind.PARAMETERS))

    def evaluate(self, batches: int = 2) -> list[Section]:
        """estimate_loss: a first batch, then another while the first one's tensors are alive."""
        self.recorder.phase = Phase.EVAL
        self.model.eval()
        sections: list[Section] = []
        output: Any = None
        loss: torch.Tensor | None = None
        with torch.no_grad():
            for name in ("evaluation, first batch", "evaluation, later batches")[:batches]:
                batch = self.fetch()
                with self.autocast():
                    result = self.call(batch)
                    found = self.loss_of(result, batch)
                    kept = _without(result, found) if self.keep_output else None
                    del result
                    output = kept
                    loss = found
                    del kept, found
                if sections:
                    del batch, output, loss
                sections.append(self.recorder.section(name))
        self.model.train()
        return sections


class _TrainerProgram(_Program):
    """transformers' Trainer: batches are fetched before, and the model's outputs freed before backward."""

    def micro_step(self) -> None:
        """training_step."""
        self.recorder.phase = Phase.FORWARD
        loss = self._compute_loss()
        self.recorder.phase = Phase.BACKWARD
        self.scale(loss).backward()

    def _compute_loss(self) -> torch.Tensor:
        with self.autocast():
            result = self.call(self.batch)
            loss = self.loss_of(result, self.batch)
        self.recorder.know_logits(result)
        if self.autocast_dtype is not None:  # accelerate's convert_outputs_to_fp32
            tree_map_only(torch.Tensor, lambda found: found.float(), _without(result, loss))
        return loss / self.accumulation  # by the number of tokens in all of the step's batches

    def hold(self) -> tuple[tuple[Buffer, ...], list[Buffer]]:
        """Hold nothing but the batch."""
        return self.held(), []

    def held(self) -> tuple[Buffer, ...]:
        """The batch."""
        return tuple([made.settle() for tensor in self.batch if (made := self.recorder.find(tensor)) is not None])


class _PlainProgram(_Program):
    """The simplest loop: `outputs` and the batch are held until the next ones exist."""

    def micro_step(self) -> None:
        """One iteration of the loop, without the optimizer."""
        self.recorder.phase = Phase.FORWARD
        self.batch = self.fetch()
        with self.autocast():
            result = self.call(self.batch)
        loss = self.loss_of(result, self.batch)
        self.recorder.know_logits(result)
        self.cache = getattr(result, "cache", ())
        self.output, self.loss = _without(result, loss), loss
        del result, loss
        self.recorder.phase = Phase.BACKWARD
        self.scale(self.loss).backward()


def _without(result: Any, loss: torch.Tensor) -> Any:
    """A model's result without its loss and its key-value cache."""
    if isinstance(result, (tuple, list)):
        cache = getattr(result, "cache", None)
        return [part for part in result if part is not loss and part is not cache]
    if isinstance(result, dict):
        return [part for part in result.values() if part is not loss]
    return None if result is loss else result
