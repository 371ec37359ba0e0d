"""AdamW by torch's fused kernel, called directly: torch.optim.AdamW's state and arithmetic without its import.

Making a torch.optim optimizer imports torch.compile's machinery: two seconds, and 72 MiB of the memory we are here to
save. The state's names and the form of `state_dict` are torch.optim's, so that nanoGPT's checkpoints go both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_EPSILON = 1e-8


class FusedAdamW:
    """One kernel over all tensors of a group; all state is made at once."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        self.param_groups = [{**group, "lr": lr, "betas": betas, "eps": _EPSILON} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameter in self._parameters()
        }

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None) -> None:
        """Update the weights; gradients are divided by `divisor` first, in the same pass over them."""
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            steps = [self.state[parameter]["step"] for parameter in learning]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                learning,
                [parameter.grad for parameter in learning],
                [self.state[parameter]["exp_avg"] for parameter in learning],
                [self.state[parameter]["exp_avg_sq"] for parameter in learning],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )

    def zero_grad(self) -> None:
        """Let the gradients go."""
        for parameter in self._parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW writes it: parameters by number."""
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        return {
            "state": {numbers[parameter]: dict(state) for parameter, state in self.state.items()},
            "param_groups": [
                {**group, "params": [numbers[parameter] for parameter in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over the moments and counts. Raises `ValueError` where they are another model's."""
        parameters = self._parameters()
        if len(saved["state"]) not in (0, len(parameters)):  # nanoGPT's first checkpoint may come before any step
            raise ValueError(f"state of {len(saved['state'])} tensors for {len(parameters)}")
        for number, entry in saved["state"].items():
            mine = self.state[parameters[number]]
            for name in mine:
                if entry[name].shape != mine[name].shape:
                    raise ValueError(f"tensor {number} has the shape {tuple(entry[name].shape)}")
                mine[name].copy_(entry[name])
