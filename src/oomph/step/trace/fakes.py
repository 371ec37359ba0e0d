"""Models on fake tensors: built or copied without memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import _meta_registrations as registrations
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.step.parameters import Parameter
from oomph.step.trace.template import TemplateFacts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ModelOrFactory = nn.Module | Callable[[], nn.Module]


def on_fakes(model: ModelOrFactory, mode: FakeTensorMode) -> nn.Module:
    """The model on fake tensors: built on them, or copied without its memory. Call it inside `mode`."""
    if not isinstance(model, nn.Module):
        with building():
            return model()
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = mode.from_tensor(tensor)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


def facts(model: nn.Module, **more: Any) -> TemplateFacts:
    """The facts about a model that do not depend on its batch."""
    found = list(model.named_parameters())
    parameters = {name: Parameter(name, tuple(p.shape), p.dim() >= 2) for name, p in found}
    trained = [(name, p) for name, p in found if p.requires_grad]
    weight_bytes = max((p.element_size() for _, p in trained), default=4)  # it may have been built in half precision
    state = {name: t.nbytes for name, t in (*found, *model.named_buffers())}
    return TemplateFacts(
        tuple(parameters.values()), tuple(parameters[n] for n, _ in trained), tuple(state.items()), weight_bytes, **more
    )


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert every floating-point parameter and buffer to another dtype, keeping shared parameters shared."""
    with converting():
        model.to(dtype)


@contextlib.contextmanager
def building() -> Iterator[None]:
    """While active, models are built on fake tensors: they can be converted, and initialization does nothing."""

    def leave(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with contextlib.ExitStack() as stack:
        stack.enter_context(converting())
        for name in (
            name for name in vars(nn.init) if name.startswith("_no_grad_")
        ):  # nn.init's functions end up in these
            stack.enter_context(mock.patch.object(nn.init, name, leave))
        yield


@contextlib.contextmanager
def drawing_ones() -> Iterator[None]:
    """While active, a scalar random draw is 1.0: `if torch.rand([]) < layerdrop` skips no layer, and reads no value."""
    draw: Any = torch.rand

    def rand(*size: Any, **kwargs: Any) -> Any:
        return 1.0 if size in (([],), ((),)) else draw(*size, **kwargs)

    with mock.patch.object(torch, "rand", rand):
        yield


@contextlib.contextmanager
def grouping_floats() -> Iterator[None]:
    """While active, fake experts may be float32: the real operator allows it, its fake rule only bfloat16."""
    common: Any = registrations._meta_grouped_mm_common

    def grouped(left: torch.Tensor, right: torch.Tensor, **more: Any) -> Any:
        if left.dtype is torch.bfloat16 or more["scale_a"] is not None:
            return common(left, right, **more)
        make: Any = registrations._create_grouped_mm_output_tensor
        return make(left, right, more["offs"], more["out_dtype"])

    with mock.patch.object(registrations, "_meta_grouped_mm_common", grouped):
        yield


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """While active, modules on fake tensors can be converted: `.bfloat16()`, `.to(dtype)`, `.double()`.

    PyTorch would swap each parameter for its converted one, and refuses if something refers to it, as is the case for
    fake tensors. Here a module gets a new parameter, the same one wherever the old one was. Devices are
    left alone: `.cuda()` and `.to("cuda")` do nothing, since the planned device is set elsewhere.
    """
    made: dict[tuple[Any, nn.Parameter], nn.Parameter] = {}

    def apply(module: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if recurse:
            for child in module.children():
                child._apply(fn)  # a module may override it, as recurrent ones do
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if (fn, parameter) not in made:
                    made[fn, parameter] = nn.Parameter(fn(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = made[fn, parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        return original_to(module, torch.device("cpu"), dtype, memory_format=layout)

    def stay(module: nn.Module, _device: Any = None) -> nn.Module:
        return module

    original_to: Any = nn.Module.to
    with (
        mock.patch.object(nn.Module, "_apply", apply),
        mock.patch.object(nn.Module, "to", to),
        mock.patch.object(nn.Module, "cuda", stay),
    ):
        yield
