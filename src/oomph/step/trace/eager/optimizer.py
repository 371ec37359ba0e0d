"""Clipping, scaling and the optimizer of a traced program, in nanoGPT's two parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomph.errors import InputError, Problem

TRACED = ("adamw", "sgd", "muon")  # the others read numbers on the host, or belong to other packages


def check_traced(optimizer: str) -> None:
    """Reject an optimizer that cannot be planned for a user's own model, eager or compiled."""
    if optimizer not in TRACED:
        raise InputError(Problem("optimizer", "this optimizer cannot be traced", optimizer, ", ".join(TRACED)))


def is_hidden(name: str, dimensions: int) -> bool:
    """Whether Muon updates a parameter: a matrix inside a numbered block, neither embedding nor head."""
    return dimensions == 2 and any(part.isdigit() for part in name.split("."))


class Updater:
    """Updates the parameters once their gradients exist."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: str,
        loop: str,
        grad_clip: float,
        dtype: torch.dtype | None,
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.grad_clip = grad_clip
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        self.optimizers = _build(self.parameters, optimizer, loop, model)

    def state(self) -> list[torch.Tensor]:
        """Every tensor that the optimizers and the scaler keep."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        kept = [self.scaler._scale, self.scaler._growth_tracker] if self.scaler.is_enabled() else []
        return [value for value in (*kept, *(v for s in states for v in s.values())) if isinstance(value, torch.Tensor)]

    def scale(self, loss: torch.Tensor) -> Any:
        """The loss as passed to backward."""
        return self.scaler.scale(loss)

    def clip(self) -> None:
        """Unscale and clip the gradients, as nanoGPT does."""
        if not self.grad_clip:
            return
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        _clip(self.parameters, self.grad_clip)

    def step(self) -> None:
        """Update, then free the gradients."""
        for optimizer in self.optimizers:
            self._step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _step(self, optimizer: Any) -> None:
        """GradScaler.step; for an unfused optimizer the host asks whether to step, which fake tensors cannot answer."""
        if not self.scaler.is_enabled() or getattr(optimizer, "_step_supports_amp_scaling", False):
            self.scaler.step(optimizer)
            return
        if not self.grad_clip:
            self.scaler.unscale_(optimizer)
        optimizer.step()


def _clip(parameters: list[nn.Parameter], limit: float) -> None:
    """clip_grad_norm_ as on real tensors: all norms in one call, which it does not do for fake ones."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(grads, 2.0)
    total = torch.linalg.vector_norm(torch.stack([*norms]), 2.0)
    del norms
    coefficient = torch.clamp(limit / (total + 1e-6), max=1.0)
    torch._foreach_mul_(grads, coefficient)


def _build(parameters: list[nn.Parameter], name: str, loop: str, model: nn.Module) -> list[Any]:
    """The optimizers for a config's `optimizer` and `optimizer_loop`."""
    check_traced(name)
    flags: dict[str, Any] = {"fused": loop == "fused", "foreach": loop == "foreach"}
    matrices: list[nn.Parameter] = []
    if name == "muon":
        inner = {id(p) for key, p in model.named_parameters() if is_hidden(key, p.dim())}
        matrices = [p for p in parameters if id(p) in inner]
    chosen = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=1e-3, momentum=0.9, **flags)]
    made: list[Any] = [torch.optim.Muon(matrices, lr=1e-3)] if matrices else []
    return [*made, torch.optim.AdamW(groups, lr=1e-3, **flags)]
