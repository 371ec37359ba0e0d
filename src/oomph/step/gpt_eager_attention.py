"""scaled_dot_product_attention as an eager program runs it: flash, memory-efficient, or by plain matrix products."""

from __future__ import annotations

from oomph.step import gpt_eager_kernels as kernels
from oomph.step.gpt_eager_layers import note_product
from oomph.step.gpt_eager_ledger import Held
from oomph.step.gpt_eager_run import Node, Run
from oomph.step.ops import Kernel, Kind


def attend(run: Run, name: str, qkv: Held) -> Held:
    """Heads attend to the tokens before them. Returns (batch, tokens, width), contiguous."""
    if run.attends_plainly:
        return _math(run, name, qkv)
    return _fused(run, name, qkv)


def _flops(run: Run) -> int:
    """Of the forward: two products of (tokens, head size) matrices, the lower triangle alone."""
    sizes = run.sizes
    return 2 * sizes.rows * (sizes.tokens + 1) * sizes.heads * sizes.kernel_head_size


def _shape(run: Run) -> tuple[int, int, int, int]:
    sizes = run.sizes
    return sizes.batch, sizes.heads, sizes.tokens, sizes.kernel_head_size


def _bytes(run: Run) -> int:
    """Queries, keys, values or output as the kernel has them."""
    sizes = run.sizes
    return sizes.rows * sizes.heads * sizes.kernel_head_size * sizes.compute_bytes


def _fused(run: Run, name: str, qkv: Held) -> Held:
    """Flash and memory-efficient attention keep queries, keys, values, the output and a logsumexp."""
    sizes, ledger = run.sizes, run.ledger
    size = _bytes(run)
    inputs = [qkv]
    if sizes.pads:
        inputs = [ledger.make(f"{name}.{part}_padded", size, Kind.ATTENTION, moved=2 * size) for part in "qkv"]
    out = ledger.hold(f"{name}.out", size, Kind.ATTENTION)
    made = [out]
    spent: Held | None = None
    if not sizes.cuda:
        made.append(_lse(run, name))
        thread_bytes = kernels.cpu_flash_bytes(sizes.threads, sizes.tokens, sizes.head_size, sizes.compute_bytes == 2)
        spent = ledger.hold(f"{name}.temporary", thread_bytes, Kind.ATTENTION)
        made.append(spent)
    elif sizes.attention == "efficient":
        if run.training:
            lse_bytes = kernels.efficient_lse_bytes(sizes.batch, sizes.heads, sizes.tokens)
            made.append(ledger.hold(f"{name}.logsumexp", lse_bytes, Kind.ATTENTION))
    else:
        made.append(_lse(run, name))
        made += [ledger.hold(f"{name}.random", each, Kind.ATTENTION) for each in kernels.FLASH_STATE_BYTES]
        if sizes.dropout and run.training:  # the random state is allocated anew for it
            spent = made[2]
            made.append(ledger.hold(f"{name}.random", kernels.FLASH_STATE_BYTES[0], Kind.ATTENTION))
    ledger.note(name, tuple(made), Kernel.ATTENTION, 4 * size, _flops(run), _shape(run), sizes.dtype)
    if spent is not None:
        made.remove(spent)
        spent = None
    run.save(_fused_backward, name, [*inputs, *made])
    del inputs, made
    if not sizes.pads:
        return out
    kept = sizes.rows * sizes.width * sizes.compute_bytes
    return ledger.make(f"{name}.contiguous", kept, Kind.ATTENTION, moved=2 * kept)


def _lse(run: Run, name: str) -> Held:
    lse_bytes = kernels.flash_lse_bytes(run.sizes.batch, run.sizes.heads, run.sizes.tokens)
    return run.ledger.hold(f"{name}.logsumexp", lse_bytes, Kind.ATTENTION)


def _fused_backward(run: Run, node: Node) -> None:
    """Gradients of queries, keys and values apart, then side by side as the projection wants them."""
    sizes, ledger, name = run.sizes, run.ledger, node.name
    grad = run.take_grad()
    size, kept = _bytes(run), sizes.rows * sizes.width * sizes.compute_bytes
    if sizes.pads:
        grad = ledger.make(f"{name}.dout_padded", size, Kind.ATTENTION, moved=2 * size)
    temporary: tuple[int, ...]
    if not sizes.cuda:
        temporary = kernels.cpu_flash_backward_bytes(sizes.threads, sizes.tokens, sizes.compute_bytes == 2)
    elif sizes.attention == "flash":
        temporary = kernels.flash_backward_bytes(*_shape(run))
    else:
        temporary = kernels.efficient_backward_bytes(*_shape(run), sizes.compute_bytes == 2)
    if sizes.pads:  # padded ones lie head by head, and the kernel wants them token by token
        temporary = (size, size, *temporary)
    made = [ledger.hold(f"{name}.{part}", size, Kind.ATTENTION) for part in ("dq", "dk", "dv")]
    spent = [ledger.hold(f"{name}.temporary", each, Kind.ATTENTION) for each in temporary]
    moved = 8 * size + 2 * sum(temporary)
    ledger.note(name, (*made, *spent), Kernel.ATTENTION, moved, 5 * _flops(run) // 2, _shape(run), sizes.dtype)
    del grad
    spent.clear()
    node.saved.clear()
    if sizes.pads:
        for _ in range(2 if sizes.heads > 1 else 1):  # cut to size, then laid out token by token
            for place in range(3):
                made[place] = ledger.make(f"{name}.dqkv_cut", kept, Kind.ATTENTION, moved=2 * kept)
    run.grad = ledger.make(f"{name}.dqkv", 3 * kept, Kind.ATTENTION, moved=6 * kept)


def _math(run: Run, name: str, qkv: Held) -> Held:
    """Plain products in float32, with every score kept."""
    sizes, ledger = run.sizes, run.ledger
    half = sizes.compute_bytes == 2
    size, tokens = 4 * sizes.rows * sizes.width, sizes.tokens
    scores_bytes = 4 * sizes.batch * sizes.heads * tokens * tokens
    floats = (
        [ledger.make(f"{name}.{part}", size, Kind.ATTENTION, moved=3 * size // 2) for part in "qkv"] if half else []
    )
    scaled_q = ledger.make(f"{name}.q_scaled", size, Kind.ATTENTION, moved=2 * size)
    ones = ledger.make(f"{name}.mask", tokens * tokens, Kind.ATTENTION, moved=tokens * tokens)
    mask = ledger.make(f"{name}.mask", tokens * tokens, Kind.ATTENTION, moved=2 * tokens * tokens)
    del ones
    scalars = [ledger.make(f"{name}.scalar", 4, Kind.ATTENTION) for _ in range(2)]
    bias = ledger.make(f"{name}.mask_bias", 4 * tokens * tokens, Kind.ATTENTION, moved=5 * tokens * tokens)
    scalars.clear()
    del mask
    scaled_k = ledger.make(f"{name}.k_scaled", size, Kind.ATTENTION, moved=2 * size)
    q, k = scaled_q, scaled_k
    if _strided(run):
        q = ledger.make(f"{name}.q_rows", size, Kind.ATTENTION, moved=2 * size)
        k = ledger.make(f"{name}.k_rows", size, Kind.ATTENTION, moved=2 * size)
    products = ledger.hold(f"{name}.products", scores_bytes, Kind.ATTENTION)
    _note_scores(run, f"{name}.products", products)
    learns = run.nodes is not None
    saved = [q, k] if learns else []
    del scaled_k, q, k
    ledger.note(f"{name}.masked", (), Kernel.POINTWISE, 2 * scores_bytes)
    weights = _softmax(run, name)
    del products
    if learns:
        saved.append(weights)
    if run.training and sizes.dropout:
        weights, mask = _drop(run, name, scores_bytes)
        if learns:
            saved += [mask, weights]
        del mask
    if half:
        floats.append(
            ledger.make(f"{name}.softmax_half", scores_bytes // 2, Kind.ATTENTION, moved=3 * scores_bytes // 2)
        )
    v = floats[2] if half else qkv
    if _strided(run):
        v = ledger.make(f"{name}.v_rows", size, Kind.ATTENTION, moved=2 * size)
    out = ledger.hold(f"{name}.out", size, Kind.ATTENTION)
    _note_scores(run, f"{name}.out", out)
    if learns:
        saved.append(v)
    del v
    if half:
        out = ledger.make(f"{name}.out_half", size // 2, Kind.ATTENTION, moved=3 * size // 2)
    run.save(_math_backward, name, saved)
    floats.clear()
    del saved, weights, scaled_q, bias
    if not _strided(run) and sizes.heads == 1:
        return out
    return ledger.make(f"{name}.contiguous", out.bytes, Kind.ATTENTION, moved=2 * out.bytes)


def _softmax(run: Run, name: str) -> Held:
    """_safe_softmax, which looks for rows without any score."""
    sizes, ledger = run.sizes, run.ledger
    rows = sizes.rows * sizes.heads
    weights = ledger.hold(f"{name}.softmax", 4 * rows * sizes.tokens, Kind.ATTENTION)
    temporary = kernels.safe_softmax_bytes(rows, sizes.tokens, 4)
    spent = [ledger.hold(f"{name}.temporary", size, Kind.ATTENTION) for size in temporary]
    ledger.note(f"{name}.softmax", (weights, *spent), Kernel.REDUCTION, 5 * weights.bytes)
    return weights


def _strided(run: Run) -> bool:
    """Whether heads must be copied side by side before a batched product: not with one head or one sequence."""
    return run.sizes.heads > 1 and run.sizes.batch > 1


def _drop(run: Run, name: str, scores_bytes: int) -> tuple[Held, Held]:
    """Dropout on the weights."""
    ledger = run.ledger
    if run.sizes.cuda:
        out = ledger.hold(f"{name}.dropped", scores_bytes, Kind.ATTENTION)
        mask = ledger.hold(f"{name}.dropout_mask", scores_bytes // 4, Kind.ATTENTION)
        ledger.note(f"{name}.dropout", (out, mask), Kernel.POINTWISE, 9 * scores_bytes // 4)
        return out, mask
    mask = ledger.make(f"{name}.noise", scores_bytes, Kind.ATTENTION, moved=3 * scores_bytes)
    return ledger.make(f"{name}.dropped", scores_bytes, Kind.ATTENTION, moved=3 * scores_bytes), mask


def _note_scores(run: Run, name: str, made: Held) -> None:
    """A product between (tokens, head size) and (tokens, tokens) matrices, one a head, in float32."""
    sizes = run.sizes
    batch = sizes.batch * sizes.heads
    note_product(run, name, (made,), batch, sizes.tokens, sizes.tokens, sizes.head_size)


def _math_backward(run: Run, node: Node) -> None:
    sizes, ledger, name, saved = run.sizes, run.ledger, node.name, node.saved
    half = sizes.compute_bytes == 2
    size = 4 * sizes.rows * sizes.width
    scores_bytes = 4 * sizes.batch * sizes.heads * sizes.tokens * sizes.tokens
    grad = run.take_grad()
    if half:
        grad = ledger.make(f"{name}.dout", size, Kind.ATTENTION, moved=3 * size // 2)
    if _strided(run):
        grad = ledger.make(f"{name}.dout_rows", size, Kind.ATTENTION, moved=2 * size)
    dv = ledger.hold(f"{name}.dv", size, Kind.ATTENTION)
    _note_scores(run, f"{name}.dv", dv)
    dweights = ledger.hold(f"{name}.dsoftmax", scores_bytes, Kind.ATTENTION)
    _note_scores(run, f"{name}.dsoftmax", dweights)
    del grad
    saved.pop()
    if len(saved) > 3:
        saved.pop()
        dweights = ledger.make(f"{name}.ddropped", scores_bytes, Kind.ATTENTION, moved=3 * scores_bytes)
        saved.pop()
    dscores = ledger.make(f"{name}.dscores", scores_bytes, Kind.ATTENTION, Kernel.REDUCTION, 3 * scores_bytes)
    del dweights
    saved.pop()
    parts = [dv]
    del dv
    for part in ("dq", "dk"):
        made = ledger.hold(f"{name}.{part}_scaled", size, Kind.ATTENTION)
        _note_scores(run, f"{name}.{part}", made)
        parts.append(made)
        del made
    del dscores
    saved.clear()
    for place, part in ((1, "dq"), (2, "dk")):
        parts[place] = ledger.make(f"{name}.{part}", size, Kind.ATTENTION, moved=2 * size)
    if half:
        for place in range(3):
            parts[place] = ledger.make(f"{name}.dqkv_half", size // 2, Kind.ATTENTION, moved=3 * size // 2)
        size //= 2
    if sizes.heads > 1 and sizes.head_size > 1:
        for place in (0, 2):
            parts[place] = ledger.make(f"{name}.dqkv_rows", size, Kind.ATTENTION, moved=2 * size)
    run.grad = ledger.make(f"{name}.dqkv", 3 * size, Kind.ATTENTION, moved=6 * size)
