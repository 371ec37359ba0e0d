"""Which of a model's outputs is its loss: one rule for the eager and the compiled trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oomph.errors import InputError, Problem

_ALLOWED = "a scalar that depends on its parameters: alone, last in a tuple, or as 'loss'"


def find_loss(result: Any) -> torch.Tensor:
    """The loss in a model's result: the entry named `loss`, the last scalar of a tuple, or the mean of a tensor."""
    if isinstance(result, torch.Tensor):
        found: Any = result if result.dim() == 0 else result.float().mean()
    else:
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        if found is None and isinstance(result, (tuple, list)):
            scalars = [part for part in result if isinstance(part, torch.Tensor) and part.dim() == 0]
            found = scalars[-1] if scalars else None
    if not isinstance(found, torch.Tensor) or found.dim() != 0:
        raise InputError(Problem("model", "it returns no loss", found=_described(result), allowed=_ALLOWED))
    if torch.is_grad_enabled() and not found.requires_grad:
        raise InputError(Problem("model", "its loss depends on no parameter that is trained", allowed=_ALLOWED))
    return found


def _described(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {', '.join(map(_described, result)) or 'nothing'}"
    return type(result).__name__
