"""Head and cross-entropy in one: the loss and its gradients a chunk of rows at a time, never the full logits.

`plain_loss` is the definition, and the oracle in the tests. `chunked_loss` computes the same in the memory of one
chunk: the gradient of a chunk's logits needs only those logits, so both matrix products of the backward are done
while they exist, and the backward only scales the results.

Between its products a chunk is softmax, gather, subtraction. Eagerly, torch's kernels do that one after another, on
float32 logits. With a compiled model it is compiled too: inductor's kernels read the logits in the products' precision
and overwrite them with the gradient. The half-precision copy of the head is then also padded with zeros to a multiple
of 8 rows, because tensor cores are slow otherwise; inductor pads its own products, but these are not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# A factor on the gradient of the logits until the backward: a power of two, so that it rounds nothing.
# Divided by the number of rows at once, most of a float16 gradient would vanish (1e-9 each, for 16,384 rows and a
# vocabulary of 50,304); without a factor, the sum over a chunk could overflow for a very frequent token.
_SHARE = 1 / 8
_SAFE_ROWS = 1024  # × 1/8 × 511 is below float16's 65,504
Gradients = tuple[Tensor, Tensor | None]  # of the hidden states, and of the head unless it is frozen
_GROUP = 8  # rows of the head: 16 bytes in half precision


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of hidden states (rows, width) and targets (rows,), with all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight), targets)


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, compiled: bool = False) -> Tensor:
    """The same, `chunk` rows at a time. Under autocast the products run in its precision, the softmax in float32.

    `compiled`: compile what is between the products, at the first call.
    """
    kind = hidden.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    settings = (chunk, half, learns, weight.requires_grad, compiled)
    loss: Tensor = _ChunkedLoss.apply(hidden, weight, targets, *settings)  # type: ignore[no-untyped-call]
    return loss


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, compiled: bool = False) -> Tensor:
    """The loss of hidden states (B, T, width): in chunks, or all at once if `chunk` is 0."""
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    return chunked_loss(rows, weight, wanted, chunk, compiled) if chunk else plain_loss(rows, weight, wanted)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        half: torch.dtype | None,
        learns: bool,
        head_learns: bool,
        compiled: bool,
    ) -> Tensor:
        ctx.hidden_dtype, ctx.rows = hidden.dtype, hidden.size(0)
        with torch.autocast(hidden.device.type, enabled=False):
            if half is not None:
                cast_hidden, cast_weight = hidden.to(half), _padded(weight, half) if compiled else weight.to(half)
            else:
                cast_hidden, cast_weight = hidden, weight
            words = weight.size(0) if compiled else None
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            grads: Gradients | None = None
            if learns:
                grads = torch.empty_like(cast_hidden), torch.zeros_like(weight) if head_learns else None
            for first in range(0, ctx.rows, chunk):
                part = slice(first, first + chunk)
                loss -= _chunk(cast_hidden[part], cast_weight, targets[part], part, grads, words)
            loss /= ctx.rows
        ctx.grads = grads
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        (grad_hidden, grad_weight), ctx.grads = ctx.grads, None  # so that the context does not keep them alive
        scale = incoming[0] * (1 / (ctx.rows * _SHARE))
        grad_hidden.mul_(scale)
        if grad_weight is not None:
            grad_weight.mul_(scale)
        return grad_hidden.to(ctx.hidden_dtype), grad_weight, None, None, None, None, None, None


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, part: slice, grads: Gradients | None, words: int | None
) -> Tensor:
    """The sum of the targets' log-probabilities over one chunk; its gradients go into `grads`.

    `words`: the vocabulary size without padding, for the compiled form.
    """
    learns = grads is not None
    if words is None:
        logarithms, gradient = _eager(hidden, weight, targets, learns)
    else:
        logarithms, gradient = _fused(hidden, weight, targets, learns, words)
    if grads is None or gradient is None:
        return logarithms
    grad_hidden, grad_weight = grads
    torch.mm(gradient, weight, out=grad_hidden[part])
    if grad_weight is None:
        return logarithms
    if gradient.dtype == grad_weight.dtype:
        grad_weight.addmm_(gradient.t(), hidden)
    elif gradient.dtype == torch.float16:
        share = _sum_factor(gradient.size(0))
        product = torch.addmm(
            hidden[:1], gradient.t(), hidden, beta=0, alpha=share
        )  # with beta=0 the first argument is not read
        grad_weight.add_(product[: grad_weight.size(0)], alpha=1 / share)
    else:  # add a half-precision product to the float32 gradient
        grad_weight += (gradient.t() @ hidden)[: grad_weight.size(0)]
    return logarithms


def _sum_factor(rows: int) -> float:
    """A factor on float16's sum over a chunk's rows before it is rounded: a power of two.

    With it, hidden states of up to 511 cannot overflow even if every row has the same target; the loss scale is applied
    later and could not help. (A layer norm over 1,600 numbers reaches 40 times its gain.) A smaller factor would round
    away the gradients of rare tokens.
    """
    return min(1.0, 2.0 ** (_SAFE_ROWS.bit_length() - 1 - (rows - 1).bit_length()))


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the head's weight (vocabulary, width) in that precision, padded with rows of zeros."""
    words, width = weight.shape
    if words % _GROUP == 0:
        return weight.to(dtype)
    filled = torch.zeros(words + -words % _GROUP, width, dtype=dtype, device=weight.device)
    filled[:words] = weight
    return filled


def _eager(hidden: Tensor, weight: Tensor, targets: Tensor, learns: bool) -> tuple[Tensor, Tensor | None]:
    """A chunk's sum of log-probabilities and the gradient of its logits, by torch's kernels, in place."""
    logits = (hidden @ weight.t()).float()  # half-precision logits are freed at once
    torch.log_softmax(logits, -1, out=logits)
    picked = targets.unsqueeze(1)
    logarithms = logits.gather(1, picked).sum()
    if not learns:
        return logarithms, None
    logits.exp_()
    logits.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=logits.dtype))
    logits.mul_(_SHARE)
    return logarithms, logits.to(hidden.dtype)


def _fused(hidden: Tensor, weight: Tensor, targets: Tensor, learns: bool, words: int) -> tuple[Tensor, Tensor | None]:
    """The same by compiled kernels. The padding's logits and gradients are zeros."""
    logits = hidden @ weight.t()
    if not learns:
        return _compiled(log_sum)(logits[:, :words], targets), None
    return _compiled(log_sum_and_gradient)(logits[:, :words], targets), logits


@cache
def _compiled(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Compiled once per process, not per trainer; again only if sizes change, as when memory runs out."""
    return torch.compile(function)


def log_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the targets' log-probabilities for logits (rows, vocabulary)."""
    return torch.log_softmax(logits.float(), 1).gather(1, targets.unsqueeze(1)).sum()


def log_sum_and_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """The same; the logits become the gradient of the negative sum, times `_SHARE`.

    Compares with the target instead of scattering, so that inductor needs no float32 buffer.
    """
    logarithms, picked = torch.log_softmax(logits.float(), 1), targets.unsqueeze(1)
    summed = logarithms.gather(1, picked).sum()
    is_target = torch.arange(logits.size(1), device=logits.device) == picked
    logits.copy_((logarithms.exp() - is_target.float()) * _SHARE)
    return summed
