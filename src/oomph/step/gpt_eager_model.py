"""nanoGPT's model as an eager program runs it: embeddings, blocks, head, and what autograd does with each.

Checkpointed blocks run as torch.utils.checkpoint(use_reentrant=False) runs them. The layers are in `gpt_eager_layers`,
attention in `gpt_eager_attention` and `gpt_eager_manual`, head and loss in `gpt_eager_loss`.
"""

from __future__ import annotations

from oomph.config.schema import TrainConfig
from oomph.step.gpt_eager_attention import attend
from oomph.step.gpt_eager_kernels import RANDOM_STATE_BYTES
from oomph.step.gpt_eager_layers import add, add_backward, dropout, gelu, layer_norm, linear
from oomph.step.gpt_eager_ledger import Held
from oomph.step.gpt_eager_loss import chunked_loss, whole_loss
from oomph.step.gpt_eager_manual import attend_by_hand
from oomph.step.gpt_eager_run import Node, Run
from oomph.step.ops import Kernel, Kind


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
    kept = [x, *_random_state(run, name)]
    out = block(run, name, x)
    run.nodes = nodes
    run.save(_checkpointed_backward, name, kept)
    return out


def _random_state(run: Run, name: str) -> list[Held]:
    """Where the random numbers stand, so that dropout drops the same ones again; on a GPU the host keeps it."""
    if run.sizes.cuda or not run.sizes.dropout:
        return []
    return [run.ledger.make(f"{name}.random_state", RANDOM_STATE_BYTES, Kind.TEMPORARY)]


def _checkpointed_backward(run: Run, node: Node) -> None:
    """The block once more when its first saved tensor is asked for, up to the last one, then its own backward.

    The addition that ends the block saves nothing, so its gradient is cast before that.
    """
    x, *random_state = node.saved
    node.saved.clear()
    sizes, name = run.sizes, node.name
    branch_bytes = sizes.rows * sizes.width * sizes.compute_bytes
    add_backward(run, Node(add_backward, f"{name}.mlp.add", [], (branch_bytes,)))
    grad = run.take_grad()
    nodes, run.nodes = run.nodes, []
    run.half_weights = {}
    now = _random_state(run, name)
    _recompute(run, name, x)
    del x, now
    run.half_weights = None
    run.grad = grad
    del grad
    run.recomputed = True
    run.backward()
    run.recomputed = False
    run.nodes = nodes
    del random_state


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
