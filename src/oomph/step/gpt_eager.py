"""The eager training step of a nanoGPT-shaped model, by arithmetic: every allocation and every free, in order.

It simulates the program, not an ideal: nanoGPT's loop keeps the logits of one micro-step until the next has made
its own, fetches the next batch before backward, and lets gradients go after the optimizer's step. The layers are in
`gpt_eager_layers`, attention in `gpt_eager_attention` and `gpt_eager_manual`, head and loss in `gpt_eager_loss`,
clipping and optimizers in `gpt_eager_optimizer`. Checkpointed blocks run as
torch.utils.checkpoint(use_reentrant=False) runs them.
"""

from __future__ import annotations

import os

from oomph.config.schema import TrainConfig
from oomph.step.gpt_eager_attention import attend
from oomph.step.gpt_eager_layers import add, add_backward, dropout, gelu, layer_norm, linear
from oomph.step.gpt_eager_ledger import Held
from oomph.step.gpt_eager_loss import chunked_loss, whole_loss
from oomph.step.gpt_eager_manual import attend_by_hand
from oomph.step.gpt_eager_optimizer import Optimizer
from oomph.step.gpt_eager_run import Node, Run, Sizes
from oomph.step.ops import Buffer, Kernel, Kind, Phase, Section, Step

_SCALER = ("scaler.scale", "scaler.growth_tracker")


class Program:
    """nanoGPT's training script with what its variables hold: the batch, the logits, the loss."""

    def __init__(self, config: TrainConfig, cuda: bool, threads: int) -> None:
        self.config = config
        self.run = Run(Sizes(config, cuda, threads))
        self.micro_steps = max(1, config.gradient_accumulation_steps // config.world_size)
        self.batch: tuple[Held, Held] | None = None
        self.logits: Held | None = None
        self.loss: Held | None = None
        self.scaler: list[Held] = []
        self.scaled = config.dtype == "float16" and cuda and config.autocast

    def start(self, optimizer: Optimizer, first: bool) -> list[Held]:
        """What the program's variables hold as the step begins: after an earlier one, its last logits and loss too."""
        run, rows = self.run, self.run.sizes.rows
        hold = run.ledger.hold
        self.batch = hold("batch.x", 8 * rows, Kind.INPUTS), hold("batch.y", 8 * rows, Kind.INPUTS)
        held = [*self.batch]
        if first:
            return held
        if self.scaled:
            self.scaler = [hold(name, 4, Kind.OPTIMIZER) for name in _SCALER]
            held += self.scaler
        optimizer.state = optimizer.create_state()
        held += optimizer.state
        if self.config.return_logits and not self.config.loss_chunk:
            self.logits = hold("lm_head.out", rows * run.sizes.vocab * run.sizes.compute_bytes, Kind.LOGITS)
            held.append(self.logits)
        self.loss = hold("loss.scaled", run.sizes.loss_bytes, Kind.LOGITS)
        return [*held, self.loss]

    def fetch(self) -> tuple[Held, Held]:
        """The next batch on the device: int64 tokens and targets."""
        rows = self.run.sizes.rows
        return (
            self.run.ledger.make("batch.x", 8 * rows, Kind.INPUTS, moved=8 * rows),
            self.run.ledger.make("batch.y", 8 * rows, Kind.INPUTS, moved=8 * rows),
        )

    def micro_step(self) -> None:
        """One forward and backward of the training loop."""
        run = self.run
        assert self.batch is not None
        run.ledger.phase = Phase.FORWARD
        run.nodes = []
        run.half_weights = {}
        logits, self.loss = forward(run, self.config, *self.batch)
        self.logits = logits if self.config.return_logits else None
        del logits
        run.ledger.phase = Phase.LOSS
        self.loss = run.ledger.make("loss.scaled", self.loss.bytes, Kind.LOGITS)
        run.half_weights = None
        self.batch = self.fetch()
        run.ledger.phase = Phase.BACKWARD
        if self.scaled and not self.scaler:
            self.scaler = [run.ledger.make(name, 4, Kind.OPTIMIZER) for name in _SCALER]
        amplified = run.ledger.make("loss.amplified", 4, Kind.LOGITS) if self.scaled else None
        root = run.ledger.make("loss.grad", self.loss.bytes, Kind.LOGITS)
        if self.scaled:
            run.grad = run.ledger.make("loss.amplified.dx", 4, Kind.LOGITS)
        run.grad = run.ledger.make("loss.scaled.dx", self.loss.bytes, Kind.LOGITS)
        run.backward()
        run.grad = None
        run.nodes = None
        del root, amplified

    def evaluate(self) -> list[Section]:
        """estimate_loss: a first batch, then another while the first one's tensors are still held."""
        run = self.run
        run.training, run.nodes, run.ledger.phase = False, None, Phase.EVAL
        sections: list[Section] = []
        logits: Held | None = None
        for name, times in (
            ("evaluation, first batch", 1),
            ("evaluation, later batches", 2 * self.config.eval_iters - 1),
        ):
            batch = self.fetch()
            run.half_weights = {}
            logits, loss = forward(run, self.config, *batch)
            if not self.config.return_logits:
                logits = None
            run.half_weights = None
            if sections:
                del batch, logits, loss
            sections.append(run.ledger.section(name, times))
        run.training = True
        return sections


def forward(run: Run, config: TrainConfig, tokens: Held, targets: Held) -> tuple[Held | None, Held]:
    """GPT.forward with targets."""
    sizes, ledger = run.sizes, run.ledger
    width_bytes = sizes.width * sizes.weight_bytes
    positions = ledger.make("positions", 8 * sizes.tokens, Kind.INPUTS)
    token = ledger.make("wte", sizes.rows * width_bytes, Kind.ACTIVATIONS, Kernel.INDEX, 2 * sizes.rows * width_bytes)
    position = ledger.make(
        "wpe", sizes.tokens * width_bytes, Kind.ACTIVATIONS, Kernel.INDEX, 2 * sizes.tokens * width_bytes
    )
    x = ledger.make("embedding", sizes.rows * width_bytes, Kind.ACTIVATIONS, moved=3 * sizes.rows * width_bytes)
    run.save(_embedding_backward, "embedding", [tokens, positions])
    embedded = (token, position) if config.trainer == "nanogpt" else ()  # nanoGPT's forward holds both to its end
    del token, position
    x = dropout(run, "drop", x)
    for index in range(config.n_layer):
        ledger.block = index
        if run.nodes is not None and index < config.checkpoint_layers:
            x = _checkpointed(run, f"h.{index}", x)
        else:
            x = block(run, f"h.{index}", x)
    ledger.block = None
    x = layer_norm(run, "ln_f", x)
    logits: Held | None = None
    if config.loss_chunk:
        loss = chunked_loss(run, x, config.loss_chunk)
    else:
        logits, loss = whole_loss(run, x, targets)
    del embedded
    return logits, loss


def block(run: Run, name: str, x: Held) -> Held:
    """Block.forward: attention and MLP, each added to the stream."""
    middle = add(run, f"{name}.attn.add", x, _attention(run, f"{name}.attn", layer_norm(run, f"{name}.ln_1", x)))
    return add(run, f"{name}.mlp.add", middle, _mlp(run, f"{name}.mlp", layer_norm(run, f"{name}.ln_2", middle)))


def _checkpointed(run: Run, name: str, x: Held) -> Held:
    """The block without a graph: torch.utils.checkpoint keeps its input alone."""
    nodes, run.nodes = run.nodes, None
    out = block(run, name, x)
    run.nodes = nodes
    run.save(_checkpointed_backward, name, [x])
    return out


def _checkpointed_backward(run: Run, node: Node) -> None:
    """The block once more when its first saved tensor is asked for, up to the last one, then its own backward.

    The addition that ends the block saves nothing, so its gradient is cast before that.
    """
    (x,) = node.saved
    node.saved.clear()
    sizes, name = run.sizes, node.name
    branch_bytes = sizes.rows * sizes.width * sizes.compute_bytes
    add_backward(run, Node(add_backward, f"{name}.mlp.add", [], (branch_bytes,)))
    grad = run.take_grad()
    nodes, run.nodes = run.nodes, []
    run.half_weights = {}
    _recompute(run, name, x)
    del x
    run.half_weights = None
    run.grad = grad
    del grad
    run.recomputed = True
    run.backward()
    run.recomputed = False
    run.nodes = nodes


def _recompute(run: Run, name: str, x: Held) -> None:
    """Block.forward until nothing more is to be saved."""
    middle = add(run, f"{name}.attn.add", x, _attention(run, f"{name}.attn", layer_norm(run, f"{name}.ln_1", x)))
    _mlp(run, f"{name}.mlp", layer_norm(run, f"{name}.ln_2", middle), stop=True)


def _attention(run: Run, name: str, x: Held) -> Held:
    width, bias = run.sizes.width, run.sizes.bias
    qkv = linear(run, f"{name}.c_attn", x, (width, 3 * width), bias)
    if run.sizes.by_hand:
        y, _weights = attend_by_hand(run, f"{name}.scores", qkv)  # nanoGPT's variable lives as long as this one
    else:
        y = attend(run, f"{name}.sdpa", qkv)
    return dropout(run, f"{name}.resid_dropout", linear(run, f"{name}.c_proj", y, (width, width), bias))


def _mlp(run: Run, name: str, x: Held, stop: bool = False) -> Held:
    """MLP.forward; `stop` leaves it as soon as nothing more is to be saved for backward."""
    width, bias = run.sizes.width, run.sizes.bias
    y = linear(run, f"{name}.c_fc", x, (width, 4 * width), bias)
    y = gelu(run, f"{name}.gelu", y)
    y = linear(run, f"{name}.c_proj", y, (4 * width, width), bias, stop=stop and not run.sizes.dropout)
    return dropout(run, f"{name}.dropout", y, stop)


def _embedding_backward(run: Run, node: Node) -> None:
    """Both tables' gradients; a tied head's, which has waited since the loss, joins the tokens'."""
    sizes, ledger = run.sizes, run.ledger
    tokens, positions = node.saved
    node.saved.clear()
    grad = run.take_grad()
    row_bytes = sizes.width * sizes.weight_bytes
    summed = ledger.make("wpe.dx", sizes.tokens * row_bytes, Kind.TEMPORARY, Kernel.REDUCTION, grad.bytes)
    table_bytes = sizes.tokens * row_bytes
    grads = [ledger.make("wpe.weight.grad", table_bytes, Kind.GRADIENTS, Kernel.INDEX, 3 * table_bytes)]
    del summed, positions
    run.accumulate("wpe.weight", grads)
    table_bytes = sizes.vocab * row_bytes
    grads.append(
        ledger.make("wte.weight.grad", table_bytes, Kind.GRADIENTS, Kernel.INDEX, table_bytes + 2 * grad.bytes)
    )
    del grad, tokens
    if run.waiting is not None:
        total, run.waiting = run.waiting, None
        if sizes.autocast or sizes.chunked:
            ledger.note("wte.weight.tied", (), Kernel.POINTWISE, 3 * table_bytes)
        else:  # a view, which the engine does not add into: the sum is a third buffer
            total = ledger.make("wte.weight.tied", table_bytes, Kind.GRADIENTS, moved=3 * table_bytes)
        grads[0] = total
        del total
    run.accumulate("wte.weight", grads)


def build(
    config: TrainConfig,
    cuda: bool = True,
    first: bool = False,
    workspace_bytes: tuple[int, ...] = (),
    threads: int | None = None,
    evaluates: bool = True,
) -> Step:
    """One optimizer step of a settled config, run eagerly, and, unless it is not asked for, one evaluation.

    `first` is the run's first step: evaluation comes before it, and the optimizer's state is made in it.
    `workspace_bytes` are what the matrix library holds from its first call on; `threads` the CPU's, by default one a
    core, as PyTorch has it.
    """
    program = Program(config, cuda, threads or os.cpu_count() or 1)
    run = program.run
    optimizer = Optimizer(config, run)
    weight_bytes = run.sizes.weight_bytes
    resident = [Buffer(p.name, p.numel * weight_bytes, Kind.PARAMETERS, p.block) for p in optimizer.everything]
    if run.sizes.by_hand:
        triangle_bytes = config.block_size**2 * weight_bytes
        names = [(f"transformer.h.{index}.attn.bias", index) for index in range(config.n_layer)]
        resident += [Buffer(name, triangle_bytes, Kind.ATTENTION, index) for name, index in names]
    resident += [Buffer("workspace", size, Kind.WORKSPACE) for size in workspace_bytes]
    held = program.start(optimizer, first)
    resident += [each.buffer for each in held]
    del held
    sections = program.evaluate() if first and evaluates else []
    for index in range(min(program.micro_steps, 3)):
        program.micro_step()
        last = program.micro_steps > 3 and index == 2
        name = f"micro-steps 3 to {program.micro_steps}" if last else f"micro-step {index + 1}"
        sections.append(run.ledger.section(name, program.micro_steps - 2 if last else 1))
    optimizer.step(first)
    sections.append(run.ledger.section("optimizer"))
    if not first and evaluates:
        sections += program.evaluate()
    return Step(tuple(resident), tuple(sections))
