"""A compiled model in its program: followed by the chunked loss, if any, and inside the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step import models
from oomph.step.compile.loop import CompiledLoop, CompiledNanochatLoop, Programs
from oomph.step.compile.model import (
    CompiledEvaluation,
    CompiledModel,
    compiled_evaluation,
    compiled_model,
    keeps_outputs,
)
from oomph.step.compile.scale import scaled_model
from oomph.step.loop import ALONE, model_buffers
from oomph.step.models import torchtitan
from oomph.step.models.gpt2 import attends_by_hand
from oomph.step.nanochat_optimizer import NanochatOptimizer
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Step, exchanged
from oomph.step.optimizer import Optimizer
from oomph.step.precision import precision
from oomph.step.sharding.rank import rank_of
from oomph.step.tensor.autograd import Leaf, run_backward
from oomph.step.tensor.loss import chunked_cross_entropy
from oomph.step.tensor.tape import Module, Tape
from oomph.step.tensor.tensor import Storage, Tensor

_replace = msgspec.structs.replace
# Keys that concern the code around a compiled model, not the model itself.
_AROUND = {
    **ALONE, "optimizer": "adamw", "optimizer_loop": "fused",
    "expandable_segments": False, "grad_clip": 1.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95,
    "learning_rate": 1.0, "min_lr": 0.0, "max_iters": 1, "warmup_iters": 0, "lr_decay_iters": 0, "decay_lr": False,
    "eval_only": False, "eval_interval": 1, "dataset": "", "dataset_tokens": None,
}  # fmt: skip


def build(
    config: TrainConfig,
    cuda: bool = True,
    first: bool = False,
    threads: int = 1,
    evaluates: bool = True,
    nearly: bool = False,
) -> Step:
    """One optimizer step of a settled config under torch.compile and, if `evaluates`, one evaluation.

    `nearly`: the model's programs may be scaled from those of other batch sizes.
    """
    rank = rank_of(config, cuda)
    alike = _replace(rank.model, **_AROUND)
    if cuda and config.trainer == "nanogpt" and not attends_by_hand(config):
        alike = _replace(alike, trainer="oomph")  # its compiled model is the same
    micro_steps = max(1, config.gradient_accumulation_steps // config.world_size)
    found = programs(alike, cuda, threads, evaluates, nearly)
    is_nanochat = config.trainer == "nanochat"
    loop = (CompiledNanochatLoop if is_nanochat else CompiledLoop)(
        found, micro_steps, 2 * config.eval_iters, keeps_outputs(config)
    )
    optimizer = (NanochatOptimizer if is_nanochat else Optimizer)(config, cuda, rank.updated(), rank.weight_bytes)
    return loop.step(optimizer, rank.kept(model_buffers(config, cuda)), first, rank=rank)


@lru_cache(maxsize=16)  # a plan asks twice, for the first step and a later one; a search for many accumulations
def programs(config: TrainConfig, cuda: bool, threads: int, evaluates: bool = True, nearly: bool = False) -> Programs:
    """The model's programs with the loss; without `evaluates`, for training only."""
    make = scaled_model if nearly else compiled_model
    own_head = config.trainer == "torchtitan"
    alike = _replace(config, loss_chunk=1 if own_head else min(config.loss_chunk or 0, 1))
    model = make(alike, cuda, threads)
    evaluation = compiled_evaluation(alike, cuda, threads) if evaluates else None
    if alike.loss_chunk:
        return _with_chunks(model, evaluation, config, cuda, threads)
    return Programs(
        batch=model.batch,
        forward=model.forward,
        loss=model.returned[0],
        outputs=model.returned[1:],
        zeros=model.tangents[1:],
        backward=model.backward,
        grads=model.grads,
        **_evaluated(evaluation, model.batch),
    )


def _evaluated(evaluation: CompiledEvaluation | None, batch: Sequence[Buffer], *after: Op) -> dict[str, Any]:
    """The evaluation's part of the programs, on training's batch."""
    if evaluation is None:
        return {"evaluation": (), "evaluation_outputs": ()}
    ops = exchanged(evaluation.forward, dict(zip(evaluation.batch, batch, strict=True)))
    return {"evaluation": (*ops, *after), "evaluation_outputs": evaluation.returned}


def _with_chunks(
    model: CompiledModel, evaluation: CompiledEvaluation | None, config: TrainConfig, cuda: bool, threads: int
) -> Programs:
    after = TitanHead if config.trainer == "torchtitan" else Chunks
    chunks = after(config, cuda, threads, model.returned[0], learns=True)
    own = {chunks.hidden_grad: model.tangents[0]}
    first, last = exchanged(chunks.backward, own), exchanged(chunks.forward, own)
    grads = dict(model.grads)
    backward = (*first, *model.backward, *chunks.added(grads))
    evaluated = _evaluated(evaluation, model.batch)
    if evaluation is not None:
        alone = Chunks(config, cuda, threads, evaluation.returned[0], learns=False)
        evaluated = _evaluated(evaluation, model.batch, *alone.forward) | {"evaluation_outputs": (alone.loss,)}
    return Programs(
        batch=model.batch,
        forward=(*model.forward, *last),
        loss=chunks.loss,
        outputs=(),
        zeros=(),
        backward=backward,
        grads=grads,
        **evaluated,
    )


class Chunks:
    """The chunked loss after a compiled model: a function that runs eagerly between the two programs."""

    def __init__(self, config: TrainConfig, cuda: bool, threads: int, hidden: Buffer, learns: bool) -> None:
        dtypes = precision(config, cuda)
        weights = models.weights(config, dtypes)
        tape = Tape(weights, cuda=cuda, threads=threads, tf32=cuda and config.allow_tf32)
        tape.autocast, tape.compiles_loss, tape.grad_enabled = dtypes.autocast, True, learns
        tape.ledger.phase = Phase.FORWARD if learns else Phase.EVAL
        tape.kind, tape.scope = Kind.LOGITS, "loss"
        shape = (config.batch_size, config.block_size, config.n_embd)
        state = tape.tensor(Storage(tape.ledger, hidden), shape, dtypes.weights)
        if learns:
            state.edge = (Leaf(tape, "hidden", shape, state.dtype), 0)
        self.head = "transformer.wte.weight" if config.tie_weights else "lm_head.weight"
        loss = self._loss(tape, config, state)
        del state
        self.forward = tape.ledger.ops()
        assert loss.storage is not None
        self.loss = loss.storage.buffer
        self.backward: tuple[Op, ...] = ()
        if learns:
            self._back(tape, loss)

    def _loss(self, tape: Tape, config: TrainConfig, state: Tensor) -> Tensor:
        return chunked_cross_entropy(state, tape.parameter(self.head), config.loss_chunk or 0)

    def _back(self, tape: Tape, loss: Tensor) -> None:
        tape.ledger.phase = Phase.BACKWARD
        kept = loss.storage
        incoming = Tensor(tape, None, (), (), "float32")
        run_backward((loss, incoming))
        del loss
        self.backward = tape.ledger.ops()
        hidden, head = tape.grads["hidden"], tape.grads[self.head]
        assert hidden is not None and head is not None and kept is not None
        self.hidden_grad, self.head_grad = hidden.buffer, head.buffer

    def added(self, grads: dict[str, Buffer]) -> list[Op]:
        """Use this function's gradient as the head's. Returns the addition of the compiled program's, if it has one."""
        own = grads.get(self.head)
        grads[self.head] = self.head_grad
        if own is None:
            return []
        return [Op(f"{self.head}.grad", Phase.BACKWARD, (), (own,), Kernel.POINTWISE, bytes_moved=3 * own.bytes)]


class TitanHead(Chunks):
    """torchtitan's output layer and loss, which stay uncompiled."""

    def _loss(self, tape: Tape, config: TrainConfig, state: Tensor) -> Tensor:
        self.head = "output.weight"
        tape.scope = ""
        labels = tape.buffer("labels", (config.batch_size, config.block_size), "int64")
        return torchtitan.head(Module(tape, config), state, labels)[1]
