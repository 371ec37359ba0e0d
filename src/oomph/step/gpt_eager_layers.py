"""The layers of nanoGPT as an eager program runs them: each forward, and beside it what its autograd nodes do.

Operations are PyTorch's, in the order its dispatcher sees them. Autograd nodes that follow one another with nothing
between them are one function here. A backward function ends with its saved tensors let go and the gradient of its
input in `run.grad`.
"""

from __future__ import annotations

from oomph.step.gpt_eager_kernels import cpu_layer_norm_backward_bytes
from oomph.step.gpt_eager_ledger import Held
from oomph.step.gpt_eager_run import Node, Run
from oomph.step.ops import Kernel, Kind

Extra = tuple[int, ...]


def layer_norm(run: Run, name: str, x: Held) -> Held:
    """F.layer_norm: keeps its input and each row's mean and deviation."""
    sizes, ledger = run.sizes, run.ledger
    out_bytes, stat_bytes = sizes.rows * sizes.width * sizes.stream_bytes, sizes.rows * sizes.stat_bytes
    out = ledger.hold(f"{name}.out", out_bytes, Kind.ACTIVATIONS)
    mean = ledger.hold(f"{name}.mean", stat_bytes, Kind.ACTIVATIONS)
    deviation = ledger.hold(f"{name}.rstd", stat_bytes, Kind.ACTIVATIONS)
    ledger.note(name, (out, mean, deviation), Kernel.REDUCTION, 2 * out_bytes)
    run.save(layer_norm_backward, name, [x, mean, deviation])
    return out


def layer_norm_backward(run: Run, node: Node) -> None:
    """The gradients of the input, the weight and the bias; at a residual connection the branches join here."""
    sizes, ledger, name = run.sizes, run.ledger, node.name
    grad = run.take_grad()
    grad_bytes, weight_bytes = sizes.rows * sizes.width * sizes.stream_bytes, sizes.width * sizes.weight_bytes
    dx = ledger.hold(f"{name}.dx", grad_bytes, Kind.TEMPORARY)
    weights = [ledger.hold(f"{name}.weight.grad", weight_bytes, Kind.GRADIENTS)]
    if sizes.bias:
        weights.insert(0, ledger.hold(f"{name}.bias.grad", weight_bytes, Kind.GRADIENTS))
    made = (dx, *weights)
    if not sizes.cuda:
        size = cpu_layer_norm_backward_bytes(sizes.threads, sizes.width, sizes.weight_bytes)
        made = (*made, ledger.hold(f"{name}.temporary", size, Kind.TEMPORARY))
    ledger.note(name, made, Kernel.REDUCTION, 3 * grad_bytes)
    del grad, made
    node.saved.clear()
    if run.residual:
        total = run.residual.pop()
        ledger.note(f"{name}.residual", (), Kernel.POINTWISE, 3 * grad_bytes)
        run.grad = total
    else:
        run.grad = dx
    del dx
    run.accumulate(f"{name}.weight", weights)
    if sizes.bias:
        run.accumulate(f"{name}.bias", weights)


def linear(
    run: Run, name: str, x: Held, wide: Extra, bias: bool, kind: Kind = Kind.ACTIVATIONS, stop: bool = False
) -> Held:
    """F.linear from `wide[0]` to `wide[1]`. Under autocast bias, weight and a float32 input are cast, in this order.

    With `stop` the product itself is not run, and the input comes back in its place.
    """
    sizes, ledger = run.sizes, run.ledger
    width_in, width_out = wide
    saved = [x]
    cast = False
    if sizes.autocast:
        if bias:
            run.cast_weight(f"{name}.bias", width_out)
        weight = run.cast_weight(f"{name}.weight", width_out * width_in)
        half_bytes = 2 * sizes.rows * width_in
        cast = x.bytes != half_bytes
        if cast:
            x = ledger.make(f"{name}.input", half_bytes, Kind.ACTIVATIONS, moved=3 * half_bytes)
        saved = [x, weight]
    out = x
    if not stop:
        out = ledger.hold(f"{name}.out", sizes.rows * width_out * sizes.compute_bytes, kind)
        note_product(run, name, (out,), 1, sizes.rows, width_out, width_in)
    run.save(linear_backward, name, saved, width_in, width_out, cast, bias)
    return out


def linear_backward(run: Run, node: Node) -> None:
    """Two matrix products, the bias summed, then the casts back to the parameters' and the stream's precision."""
    sizes, ledger, name = run.sizes, run.ledger, node.name
    width_in, width_out, cast, bias = node.extra
    grad = run.take_grad()
    compute = sizes.compute_bytes
    own = Kind.TEMPORARY if sizes.autocast else Kind.GRADIENTS
    dx = ledger.hold(f"{name}.dx", sizes.rows * width_in * compute, Kind.TEMPORARY)
    dw = [ledger.hold(f"{name}.weight.grad", width_in * width_out * compute, own)]
    db: list[Held] = []
    if bias:  # addmm's formula asks for the input's gradient first, mm's for the weight's
        note_product(run, f"{name}.dx", (dx,), 1, sizes.rows, width_in, width_out)
        note_product(run, f"{name}.dw", (dw[0],), 1, width_out, width_in, sizes.rows)
        if run.recomputed:
            node.saved.clear()
        db.append(ledger.make(f"{name}.bias.grad", width_out * compute, own, Kernel.REDUCTION, grad.bytes))
    else:
        note_product(run, f"{name}.dw", (dw[0],), 1, width_out, width_in, sizes.rows)
        note_product(run, f"{name}.dx", (dx,), 1, sizes.rows, width_in, width_out)
    del grad
    node.saved.clear()
    if cast:
        dx = ledger.make(f"{name}.dx.float", 4 * sizes.rows * width_in, Kind.TEMPORARY, moved=6 * sizes.rows * width_in)
    run.grad = dx
    del dx
    if not sizes.autocast and bias:
        run.accumulate(f"{name}.bias", db)
    _accumulate_cast(run, f"{name}.weight", dw, width_in * width_out)
    if sizes.autocast and bias:
        _accumulate_cast(run, f"{name}.bias", db, width_out)


def _accumulate_cast(run: Run, parameter: str, grads: list[Held], count: int) -> None:
    """A parameter's gradient back to float32 if autocast had it in half, and on to `.grad`."""
    if run.sizes.autocast:
        grads[0] = run.ledger.make(f"{parameter}.grad", 4 * count, Kind.GRADIENTS, moved=6 * count)
    run.accumulate(parameter, grads)


def note_product(run: Run, name: str, made: tuple[Held, ...], batch: int, m: int, n: int, k: int) -> None:
    """A matrix product of (m, k) and (k, n), `batch` times."""
    moved = batch * (m * n + n * k + m * k) * run.sizes.compute_bytes
    run.ledger.note(name, made, Kernel.GEMM, moved, 2 * batch * m * n * k, (batch, m, n, k), run.sizes.dtype)


def gelu(run: Run, name: str, x: Held) -> Held:
    """F.gelu: keeps its input."""
    out = run.ledger.make(name, x.bytes, Kind.ACTIVATIONS, moved=2 * x.bytes)
    run.save(pointwise_backward, name, [x])
    return out


def pointwise_backward(run: Run, node: Node) -> None:
    """One pass over the gradient and what was kept: gelu's input or a dropout's mask."""
    grad = run.take_grad()
    run.grad = run.ledger.make(f"{node.name}.dx", grad.bytes, Kind.TEMPORARY, moved=3 * grad.bytes)
    del grad
    node.saved.clear()


def dropout(run: Run, name: str, x: Held, stop: bool = False) -> Held:
    """F.dropout: a GPU keeps a mask of a byte per number, the CPU noise of the input's own type.

    With `stop` the last step after saving is not run: the GPU's kernel makes the mask itself, so it has none.
    """
    sizes, ledger = run.sizes, run.ledger
    if not run.training or sizes.dropout == 0:
        return x
    count = sizes.rows * sizes.width
    if sizes.cuda:
        out = ledger.hold(f"{name}.out", x.bytes, Kind.ACTIVATIONS)
        mask = ledger.hold(f"{name}.mask", count, Kind.ACTIVATIONS)
        ledger.note(name, (out, mask), Kernel.POINTWISE, 2 * x.bytes + count)
    else:
        mask = ledger.make(f"{name}.noise", x.bytes, Kind.ACTIVATIONS, moved=3 * x.bytes)
        out = x if stop else ledger.make(f"{name}.out", x.bytes, Kind.ACTIVATIONS, moved=3 * x.bytes)
    run.save(pointwise_backward, name, [mask])
    return out


def add(run: Run, name: str, x: Held, branch: Held) -> Held:
    """The residual connection: a half branch is promoted as it is added to a float32 stream, on the CPU by a copy."""
    ledger = run.ledger
    made = [ledger.hold(name, x.bytes, Kind.ACTIVATIONS)]
    if branch.bytes != x.bytes and not run.sizes.cuda:
        made.append(ledger.hold(f"{name}.promoted", x.bytes, Kind.TEMPORARY))
    ledger.note(name, tuple(made), Kernel.POINTWISE, 2 * x.bytes + branch.bytes)
    out = made[0]
    del made
    run.save(add_backward, name, [], branch.bytes)
    return out


def add_backward(run: Run, node: Node) -> None:
    """The stream's gradient waits for the branch's, which starts from it, cast if the branch was half."""
    (branch_bytes,) = node.extra
    grad = run.take_grad()
    run.residual.append(grad)
    if branch_bytes != grad.bytes:
        moved = branch_bytes + grad.bytes
        grad = run.ledger.make(f"{node.name}.dx", branch_bytes, Kind.TEMPORARY, moved=moved)
    run.grad = grad
