"""How the ranks of a run share its model: each has all of it, or, with FSDP2, a part of every parameter.

`Whole` is a single process, and DDP: gradients are summed once a step, after all micro-steps, not bucket by bucket
during the backward. So no collective is in flight when memory can run out, and all ranks can undo a step together. The
price is that the last micro-step's backward does not overlap with the sum, which accumulation makes small.

`Sharded` is torch's `fully_shard` on each block and on the model. The optimizer works on this rank's parts as plain
tensors: AdamW is elementwise, so a part is updated as the whole would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from oomph.config import TrainConfig
from oomph.training.model import DTYPES, GPT
from oomph.training.ranks.group import Ranks


class Whole:
    """Every rank has the whole model."""

    in_lockstep = False  # a micro-step has no collectives

    def __init__(self, model: GPT, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())  # what the optimizer updates

    def begin(self, last: bool) -> None:
        """Called before a micro-step's forward; `last`: the last micro-step of its step."""

    def reduced(self, loss: Tensor) -> list[Tensor]:
        """The gradients of the optimizer's parameters, summed over all ranks; `loss` is summed in place."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.ranks.sum([*gradients, loss], in_step=True)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients of the model."""
        return get_total_norm(gradients)

    def swap(self, others: list[Tensor]) -> None:
        """Exchange the parameters with tensors like them."""
        for index, mine in enumerate(others):
            parameter = self.parameters[index]
            others[index], parameter.data = parameter.data, mine

    def tensors(self, parts: list[Tensor]) -> list[Tensor]:
        """Tensors like the parameters, as torch.distributed.checkpoint takes them: with their position in the whole."""
        return parts

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole model."""
        return whole

    def weights(self) -> dict[str, Tensor]:
        """All weights by nanoGPT's names, on the first rank; every rank must call it."""
        return self.model.state_dict()

    def alone(self) -> GPT:
        """The model as the first rank can run it by itself; every rank must call it."""
        return self.model

    def forget(self) -> None:
        """Free what a micro-step or an evaluation left behind."""

    def renew(self) -> GPT:
        """A usable model after a micro-step was abandoned half-way."""
        return self.model


class Sharded:
    """Every rank has a part of every parameter, its gradient and its optimizer state."""

    in_lockstep = True

    def __init__(self, model: GPT, config: TrainConfig, ranks: Ranks, device: torch.device) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        self.names = [name for name, _ in model.named_parameters()]
        self.each = config.grad_sync != "last"
        self.model = self._wrapped(model)
        self.parameters = [nn.Parameter(part) for part in self._parts()]

    def _wrapped(self, model: GPT) -> GPT:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        config = self.config
        half = config.autocast and config.dtype != "float32"
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.dtype or "float32"] if half else None,
            reduce_dtype=DTYPES[config.reduce_dtype or "float32"],
        )
        self.mesh = DeviceMesh.from_group(self.ranks.pace, self.device.type, mesh_dim_names=("shard",))
        for block in model.blocks():
            if config.compile:
                block.compile()
            fully_shard(block, mesh=self.mesh, reshard_after_forward=_reshards(config), mp_policy=policy)
        fully_shard(model, mesh=self.mesh, mp_policy=policy)
        for module in self._modules(model):
            module.set_gradient_divide_factor(1.0)  # each rank's loss is its share of the mean already
            module.set_force_sum_reduction_for_comms(True)
        return model

    @staticmethod
    def _modules(model: GPT) -> Iterator[Any]:
        return (cast(Any, module) for module in (*model.blocks(), model))

    def _parts(self) -> list[Tensor]:
        return [cast(Any, parameter).detach().to_local() for parameter in self.model.parameters()]

    def begin(self, last: bool) -> None:
        """Reduce the gradients in this micro-step, or keep them whole until the last."""
        cast(Any, self.model).set_requires_gradient_sync(last or self.each)

    def reduced(self, loss: Tensor) -> list[Tensor]:
        """The gradients of this rank's parts: backward has reduced them."""
        for mine, parameter in zip(self.parameters, self.model.parameters(), strict=True):
            if parameter.grad is not None:
                mine.grad, parameter.grad = cast(Any, parameter.grad).to_local(), None
        self.ranks.sum([loss], in_step=True)
        return [p.grad for p in self.parameters if p.grad is not None]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all ranks' gradients."""
        filled = [gradient for gradient in gradients if gradient.numel()]
        mine = get_total_norm(filled).float() if filled else torch.zeros((), device=self.device)
        squares = mine.square()
        self.ranks.sum([squares], in_step=True)
        return squares.sqrt()

    def swap(self, others: list[Tensor]) -> None:
        """Exchange the parts with tensors like them, by value: FSDP keeps reading its parts in place."""
        for parameter, other in zip(self.parameters, others, strict=True):
            held = parameter.detach().clone()
            parameter.data.copy_(other)
            other.copy_(held)

    def tensors(self, parts: list[Tensor]) -> list[Tensor]:
        """The same tensors as parts of whole ones."""
        from torch.distributed.tensor import DTensor, Shard

        return [
            DTensor.from_local(
                part, self.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            for part, parameter in zip(parts, self.model.parameters(), strict=True)
        ]

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's rows, as torch.chunk divides them."""
        rows = -(-whole.size(0) // self.ranks.size)
        return whole[self.ranks.rank * rows : (self.ranks.rank + 1) * rows]

    def weights(self) -> dict[str, Tensor]:
        """All weights by nanoGPT's names in the first rank's host memory, gathered one by one; nothing on others."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            whole = cast(Any, parameter.detach()).full_tensor()
            if self.ranks.first:
                found[name] = whole.cpu()
        if found and self.config.tie_weights:
            found["lm_head.weight"] = found["transformer.wte.weight"]
        return found

    def alone(self) -> GPT:
        """All weights in the first rank's host memory; on the others the model as it is."""
        weights = self.weights()
        if not weights:
            return self.model
        with torch.device("meta"):
            model = GPT(self.config)
        model.load_state_dict(weights, assign=True)
        return _with_tables(model, self.model, torch.device("cpu"))

    def forget(self) -> None:
        """Free gathered weights and gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for module in self._modules(self.model):
            module.reshard()

    def renew(self) -> GPT:
        """A new model with this rank's parts: FSDP cannot go on with one whose collectives were abandoned."""
        old = self.model
        with torch.device("meta"):
            model = GPT(self.config)
        model.to(dtype=self.parameters[0].dtype)
        self.model = self._wrapped(model)
        self.model.to_empty(device=self.device)
        _with_tables(self.model, old, self.device)
        for mine, part in zip(self.parameters, self._parts(), strict=True):
            part.copy_(mine.detach())
            mine.data = part
        return self.model


def _with_tables(model: GPT, like: GPT, device: torch.device) -> GPT:
    """The model with the rotary tables of `like`, which are not weights."""
    for name, table in like.named_buffers():
        model.register_buffer(name, table.to(device), persistent=False)
    return model


AnySharing = Whole | Sharded


def share(model: GPT, config: TrainConfig, ranks: Ranks, device: torch.device) -> AnySharing:
    """The model, shared as the settled config says. The optimizer must be made from its `parameters`."""
    return Sharded(model, config, ranks, device) if config.parallel == "fsdp" else Whole(model, ranks)


def _reshards(config: TrainConfig) -> bool | int:
    told = (config.reshard_after_forward or "true").lower()
    return int(told) if told.isdigit() else told != "false"
