"""A model of the user's own: built from their file or a Hugging Face config, traced into the same op lists.

`file.py:function` runs the user's code, because it is asked to: the one exception to "input is never executed".
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.config.schema import TrainConfig
from oomph.errors import InputError, Problem, nearest
from oomph.step.fakes import converting
from oomph.step.gpt import workspaces
from oomph.step.ops import Buffer, Kind, Step
from oomph.step.params import Parameter
from oomph.step.trace_flops import uncounted
from oomph.step.user_failure import failure, unplannable

FAILURES = (Exception, SystemExit)  # a model that leaves must not take the plan, and its exit code, along


class Traced(msgspec.Struct, frozen=True):
    """A user's model as plans need it."""

    parameters: tuple[Parameter, ...]
    steps: tuple[Step, Step]  # the first optimizer step, and a later one
    trained: tuple[Parameter, ...]  # of the parameters, those that get a gradient
    makes_no_loss: bool = False  # it returns one tensor, whose mean stands for a loss
    own_inputs: tuple[tuple[int, ...], ...] = ()  # shapes, where the function brought its inputs
    uncounted: tuple[str, ...] = ()  # operators whose arithmetic is in no figure
    unseen_bytes: int = 0  # at most: what a CPU's convolutions copy while they run
    recurrent: tuple[str, ...] = ()  # kinds of recurrent layers whose steps a card does not take as a trace has them


def trace_model(spec: str, config: TrainConfig, cuda: bool = True, capability: tuple[int, int] | None = None) -> Traced:
    """The op lists of the model that `spec` names: `file.py:function`, or a Hugging Face `config.json`.

    The function takes nothing and returns a module that is called with token ids and targets, both (batch_size,
    block_size), and returns a loss, or a tuple with one; or it returns that module and the inputs to call it with.
    """
    with redirect_stdout(sys.stderr):  # what the model prints is not part of our answer
        build, inputs, own = _builder(spec, config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build()
        if problems := unplannable(spec, model):
            raise InputError(problems)
        found = list(model.named_parameters())
        returned: list[bool] = []
        parameters = {n: Parameter(n, tuple(p.shape), p.dim() >= 2) for n, p in found}
        trained = tuple(parameters[n] for n, p in found if p.requires_grad)
        steps = _steps(spec, lambda: _watched(build(), returned), inputs, config, cuda, capability)
    shapes = tuple(tuple(t.shape) for t in inputs) if own else ()
    ops = [op for section in steps[1].sections for op in section.ops]
    copied = 0 if cuda else max((op.bytes_moved for op in ops if ".convolution" in f".{op.name}"), default=0)
    recurrent = dict.fromkeys(type(each).__name__ for each in model.modules() if cuda and isinstance(each, nn.RNNBase))
    return Traced(
        parameters=tuple(parameters.values()),
        steps=steps,
        trained=trained,
        makes_no_loss=any(returned),
        own_inputs=shapes,
        uncounted=tuple(uncounted(ops)),
        unseen_bytes=copied,
        recurrent=tuple(recurrent),
    )


def _watched(model: nn.Module, returned: list[bool]) -> nn.Module:
    """The model; each time it is called, whether it returned a tensor that is no loss is added to `returned`."""

    def look(_module: nn.Module, _inputs: Any, result: Any) -> None:
        returned.append(isinstance(result, torch.Tensor) and result.dim() > 0)

    model.register_forward_hook(look)
    return model


def _steps(
    spec: str,
    build: Callable[[], nn.Module],
    inputs: tuple[torch.Tensor, ...],
    config: TrainConfig,
    cuda: bool,
    capability: tuple[int, int] | None,
) -> tuple[Step, Step]:
    """The first and a later step."""
    options: dict[str, Any] = {
        "dtype": config.dtype,
        "autocast": config.autocast,
        "cuda": cuda,
        "attention": config.attention,
        "optimizer": config.optimizer,
        "optimizer_loop": config.optimizer_loop,
        "accumulation": config.gradient_accumulation_steps // config.world_size,
        "grad_clip": config.grad_clip,
    }
    workspace_bytes = workspaces(capability) if cuda else ()
    try:
        if config.compile:
            from oomph.step.compiled import compiled_run

            more: dict[str, Any] = {"torch_version": config.torch_version, "eval_iters": config.eval_iters}
            return compiled_run(build, inputs, workspace_bytes=workspace_bytes, **more, **options)
        from oomph.step.trace import trace

        first, later = (trace(build, inputs, first=first, **options) for first in (True, False))
    except InputError:
        raise
    except FAILURES as error:
        how = "as torch.compile would" if config.compile else "eagerly"
        raise InputError(failure(spec, f"the model cannot be traced {how}", error)) from error
    held = tuple(Buffer("cublas", size, Kind.WORKSPACE) for size in workspace_bytes)
    return Step(first.resident + held, first.sections), Step(later.resident + held, later.sections)


def _builder(spec: str, config: TrainConfig) -> tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], bool]:
    """The function that builds the model, the inputs it is called with, and whether these are its own."""
    path, colon, function = spec.rpartition(":")
    ids = torch.zeros((config.batch_size, config.block_size), dtype=torch.int64)
    if spec.endswith(".json"):
        return _hugging_face(Path(spec)), (ids, ids), False
    if not colon or not path.endswith(".py"):
        raise InputError(Problem(f"--model {spec}", "names no model", allowed="file.py:function, or a config.json"))
    build = _function(Path(path), function)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = _call(spec, build)
    if isinstance(made, nn.Module):
        return build, (ids, ids), False
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return _with_inputs(spec, build, made[1])
    allowed = "an nn.Module, or a tuple of an nn.Module and its inputs"
    raise InputError(Problem(spec, "returns no model", found=type(made).__name__, allowed=allowed))


def _with_inputs(
    spec: str, build: Callable[[], Any], given: Any
) -> tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], bool]:
    """A model and its inputs: one tensor, several in order, or several by name."""
    names = tuple(given) if isinstance(given, Mapping) else ()
    found = [given] if isinstance(given, torch.Tensor) else list(given.values()) if names else given
    if not isinstance(found, list | tuple) or not all(isinstance(each, torch.Tensor) for each in found):
        allowed = "a tensor, a tuple of tensors, or a dict of them"
        raise InputError(Problem(spec, "its inputs are no tensors", found=type(given).__name__, allowed=allowed))
    inputs = tuple(torch.zeros(each.shape, dtype=each.dtype) for each in found)
    return (lambda: _Named(build()[0], names) if names else build()[0]), inputs, True


class _Named(nn.Module):
    """A model whose inputs have names, called with them in order."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def _function(path: Path, name: str) -> Callable[[], Any]:
    """The function `name` of a Python file, which is run to find it."""
    if not path.is_file():
        raise InputError(Problem(str(path), "there is no such file"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # so that the file's own imports work
    try:
        with mock.patch.object(sys, "argv", [str(path)]):  # ours are not the file's
            spec.loader.exec_module(module)
    except FAILURES as error:
        raise InputError(failure(str(path), "running it raised", error)) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    found: Any = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if _defined_in(module, value) and key[0] != "_"]
        allowed = ", ".join(functions) or None
        problem = Problem(str(path), f"has no function '{name}'", allowed=allowed, nearest=nearest(name, functions))
        raise InputError(problem)
    return lambda: _call(f"{path}:{name}", found)


def _defined_in(module: Any, value: Any) -> bool:
    """Whether a file defines a function or class itself, rather than importing it."""
    return isinstance(value, FunctionType | type) and value.__module__ == module.__name__


def _call(spec: str, build: Callable[[], Any]) -> Any:
    try:
        with mock.patch.object(sys, "argv", [spec.rpartition(":")[0]]), converting():
            return build()
    except InputError:
        raise
    except FAILURES as error:
        raise InputError(failure(spec, "calling it raised", error)) from error


class _Causal(nn.Module):
    """A transformers model called as nanoGPT's is: ids and targets in, logits and loss out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.model(input_ids=ids, labels=targets, use_cache=False)
        return result.logits, result.loss


def _hugging_face(path: Path) -> Callable[[], nn.Module]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        allowed = "pip install transformers"
        raise InputError(Problem(str(path), "needs the package transformers", allowed=allowed)) from None
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:
        raise InputError(Problem(str(path), f"transformers cannot read it: {error}")) from error
    made: Callable[[Any], nn.Module] = AutoModelForCausalLM.from_config
    return lambda: _Causal(made(config))
