"""Head and cross-entropy in one: the loss and its gradients a chunk of rows at a time, never the full logits.

`plain_loss` is the definition, and the oracle of the tests. `chunked_loss` computes the same in the memory of one
chunk: the gradient of a chunk's logits needs nothing but those logits, so both products of the backward are done
while they exist, and the backward only hands the results on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of hidden states (rows, width) against targets (rows,), with all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight), targets)


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """The same, `chunk` rows at a time. Under autocast the products run in its precision, the softmax in float32."""
    kind = hidden.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = _ChunkedLoss.apply(hidden, weight, targets, chunk, half, learns)  # type: ignore[no-untyped-call]
    return loss


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """The loss of hidden states (B, T, width): in chunks, or all at once where `chunk` is 0."""
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    return chunked_loss(rows, weight, wanted, chunk) if chunk else plain_loss(rows, weight, wanted)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, half: torch.dtype | None, learns: bool
    ) -> Tensor:
        ctx.hidden_dtype = hidden.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            if half is not None:
                cast_hidden, cast_weight = hidden.to(half), weight.to(half)
            else:
                cast_hidden, cast_weight = hidden, weight
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            grads = (torch.empty_like(cast_hidden), torch.zeros_like(weight)) if learns else None
            for first in range(0, hidden.size(0), chunk):
                part = slice(first, first + chunk)
                loss -= _chunk(cast_hidden[part], cast_weight, targets[part], part, grads, hidden.size(0))
            loss /= hidden.size(0)
        ctx.grads = grads
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        (grad_hidden, grad_weight), ctx.grads = ctx.grads, None  # each is handed on: nothing here holds it
        (scale,) = incoming
        grad_hidden.mul_(scale)
        grad_weight.mul_(scale)
        return grad_hidden.to(ctx.hidden_dtype), grad_weight, None, None, None, None


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, part: slice, grads: tuple[Tensor, Tensor] | None, rows: int
) -> Tensor:
    """Sum of the targets' logarithms over one chunk; its share of both gradients is added to `grads`."""
    logits = (hidden @ weight.t()).float()  # the half ones, if they were half, go at once
    torch.log_softmax(logits, -1, out=logits)
    picked = targets.unsqueeze(1)
    logarithms = logits.gather(1, picked).sum()
    if grads is None:
        return logarithms
    grad_hidden, grad_weight = grads
    logits.exp_()
    logits.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=logits.dtype))
    logits.mul_(1 / rows)
    gradient = logits.to(hidden.dtype)
    del logits
    torch.mm(gradient, weight, out=grad_hidden[part])
    if gradient.dtype == grad_weight.dtype:
        grad_weight.addmm_(gradient.t(), hidden)
    else:  # a half product is summed into the float32 gradient
        grad_weight += gradient.t() @ hidden
    return logarithms
