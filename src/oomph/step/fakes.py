"""Models on fake tensors: built or copied there without their memory."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Model = nn.Module | Callable[[], nn.Module]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which would go over a tracer's many live objects again and again.

    It also makes frees certain: what goes, goes when its last name does.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def on_fakes(model: Model, mode: FakeTensorMode) -> nn.Module:
    """The model on fake tensors: built there, or copied there without its memory. Call it inside `mode`."""
    if not isinstance(model, nn.Module):
        return model()
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake = mode.from_tensor(tensor)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Every floating parameter and buffer in another precision, shared parameters still shared.

    Module.to cannot swap fake tensors.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
