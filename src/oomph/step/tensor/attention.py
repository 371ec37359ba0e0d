"""Attention: scaled_dot_product_attention by any of its kernels or composed of products; FlashAttention 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomph.step import kernels
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import autocast_half, to
from oomph.step.tensor.elementwise import dropout, pointwise, scale
from oomph.step.tensor.layout import HALVES, ITEM_BYTES, Shape, dense_strides_like, is_contiguous
from oomph.step.tensor.products import matmul
from oomph.step.tensor.tape import Tape, decomposable
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, expand, part, reshape, transpose, unsqueeze

FLASH_HEAD_SIZE = 256  # the largest that the flash kernel supports
_FLASH_ALIGNMENT = 8  # head sizes are padded to a multiple of it


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "flash", rate: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Attention of (batch, heads, tokens, head size), causal or with a boolean or additive mask.

    Keys and values may have fewer heads than queries.
    """
    tape = q.tape
    rate = rate if tape.training else 0.0
    outer, tape.kind = tape.kind, Kind.ATTENTION
    scope, tape.scope = tape.scope, f"{tape.scope}.sdpa"
    if tape.autocast is not None:
        v, k, q = autocast_half(v), autocast_half(k), autocast_half(q)  # C++ evaluates arguments from the last
    chosen = chosen_kernel(q, k, v, kernel, rate, mask is not None)
    added = None if mask is None else _additive(mask, q.dtype, aligned=chosen == "efficient" and tape.cuda)
    if chosen == "math":
        out = _composed(q, k, v, rate, added)
    elif chosen == "flash" and tape.cuda and q.shape[-1] % _FLASH_ALIGNMENT:
        size = q.shape[-1]
        wide_q, wide_k, wide_v = (_padded(each) for each in (q, k, v))
        out = part(_fused(wide_q, wide_k, wide_v, chosen, rate), 0, size)
    else:
        out = _fused(q, k, v, chosen, rate, added)
    tape.kind, tape.scope = outer, scope
    return out


def chosen_kernel(q: Tensor, k: Tensor, v: Tensor, asked: str, rate: float, masked: bool) -> str:
    """The kernel that PyTorch 2.13 chooses if `asked` is enabled (`sdp_utils.cpp`)."""
    if asked == "math":
        return "math"
    if not q.tape.cuda:
        return "math" if rate > 0 else "flash"  # the CPU's flash kernel has no dropout
    half, size, value_size = q.dtype in HALVES, q.shape[-1], v.shape[-1]
    if asked == "flash" and half and not masked and size == value_size <= FLASH_HEAD_SIZE:
        return "flash"
    step = 8 if half else 4
    takes = size % step == 0 and value_size % step == 0 and q.shape[1] == k.shape[1]  # no grouped queries
    return "efficient" if takes else "math"


def _additive(mask: Tensor, dtype: str, aligned: bool) -> Tensor:
    """A mask as an additive bias; the memory-efficient kernel needs rows that begin at a multiple of 8."""
    tape, added = mask.tape, mask
    if mask.dtype == "bool":
        shown, hidden = (tape.made(name, (), dtype) for name in ("full_0", "full_-inf"))
        added = pointwise("where", mask, shown, hidden, dtype=dtype)
        del shown, hidden
    columns = mask.shape[-1]
    if aligned and columns % 8:
        wide = (*mask.shape[:-1], columns + 8 - columns % 8)
        added = tape.made("aligned", wide, dtype, (added,))
    return added


@decomposable
def window_mask(tape: Tape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A boolean mask of the earlier tokens inside the window; and its row and column indices."""

    def made(shape: Shape, dtype: str) -> Tensor:
        return tape.made("mask", shape, dtype, kind=Kind.ATTENTION)

    numbers = made((tokens,), "int64")
    rows = made((tokens, 1), "int64")
    del numbers
    columns = made((tokens,), "int64")
    before = made((tokens, tokens), "bool")
    distances = made((tokens, tokens), "int64")
    near = made((tokens, tokens), "bool")
    del distances
    mask = made((tokens, tokens), "bool")
    del before, near
    return mask, rows, columns


class _Sizes:
    """The sizes that the fused kernels' buffers depend on."""

    def __init__(self, q: Tensor) -> None:
        self.batch, self.heads, self.tokens, self.head_size = q.shape
        self.half = q.dtype in HALVES
        self.out_bytes = q.bytes
        self.shape = q.shape
        # Two products of (tokens, head size) matrices, the lower triangle only.
        self.flops = 2 * self.batch * self.tokens * (self.tokens + 1) * self.heads * self.head_size
        self.unit = q.dtype


def _token_major(shape: Shape) -> Shape:
    """Strides of (batch, heads, tokens, head size) in token-major order."""
    _, heads, tokens, size = shape
    return (tokens * heads * size, size, heads * size, 1)


@decomposable
def _fused(q: Tensor, k: Tensor, v: Tensor, kernel: str, rate: float, mask: Tensor | None = None) -> Tensor:
    """A fused kernel's output; it saves queries, keys, values, the mask, the output and a logsumexp."""
    tape = q.tape
    node = tape.node(_fused_backward, q, k, v)
    if node:
        node.save(q, k, v, *((mask,) if mask is not None else ()))
    s = _Sizes(q)
    results, temporaries = [("out", s.out_bytes)], list[int]()
    strides = dense_strides_like(q.shape, q.strides)
    if not tape.cuda:
        results.append(("logsumexp", kernels.flash_lse_bytes(s.batch, s.heads, s.tokens)))
        temporaries.append(kernels.cpu_flash_bytes(tape.threads, s.tokens, s.head_size, s.half))
    elif kernel == "efficient":
        strides = _token_major(q.shape)
        if node:
            results.append(("logsumexp", kernels.efficient_lse_bytes(s.batch, s.heads, s.tokens)))
    else:
        results.append(("logsumexp", kernels.flash_lse_bytes(s.batch, s.heads, s.tokens)))
        results += [("random", size) for size in kernels.FLASH_STATE_BYTES]
        if rate:  # its random state is a new allocation
            temporaries.append(kernels.FLASH_STATE_BYTES[0])
    moved = 2 * s.out_bytes + k.bytes + v.bytes
    work: dict[str, Any] = {
        "kernel": Kernel.ATTENTION,
        "moved": moved,
        "flops": s.flops,
        "shape": s.shape,
        "dtype": _unit(tape, s),
    }
    made = list(tape.kept(lambda: tuple(tape.launch("", results, temporaries=temporaries, **work))))
    out = tape.tensor(made.pop(0), q.shape, q.dtype, strides)
    if node:
        node.save(out, *made)
        node.attach(out)
    return out


def _unit(tape: Tape, s: _Sizes) -> str:
    return "tf32" if s.unit == "float32" and tape.tf32 else s.unit


def _fused_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    q, k, v, *others = node.unpack()
    out = next(each for each in reversed(others) if isinstance(each, Tensor))
    grad, tape = grads[0], node.tape
    assert grad is not None and isinstance(q, Tensor) and isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    s = _Sizes(q)
    temporaries: tuple[int, ...]
    is_flash = tape.cuda and len(others) > 3  # only flash saves a random state
    if not tape.cuda:
        temporaries = kernels.cpu_flash_backward_bytes(tape.threads, s.tokens, s.half)
    elif is_flash:
        # tensors not in token-major order are copied; grouped keys and values get a gradient for every query head
        temporaries = tuple([t.bytes for t in (grad, out) if not _lies_by_token(t)])
        temporaries += kernels.flash_backward_bytes(s.batch, s.heads, s.tokens, s.head_size, k.shape[1])
    else:
        temporaries = () if _lies_by_token(grad) else (grad.bytes,)
        temporaries += kernels.efficient_backward_bytes(s.batch, s.heads, s.tokens, s.head_size, s.half, v.shape[3])
    sizes = [("dq", q.bytes), ("dk", k.bytes), ("dv", v.bytes)]
    moved = 4 * s.out_bytes + 2 * (k.bytes + v.bytes) + 2 * sum(temporaries)
    made = tape.launch(
        "backward", sizes, temporaries=temporaries, kernel=Kernel.ATTENTION, moved=moved, flops=5 * s.flops // 2,
        shape=s.shape, dtype=_unit(tape, s),
    )  # fmt: skip
    like = [dense_strides_like(t.shape, t.strides) if is_flash else _token_major(t.shape) for t in (q, k, v)]
    parts = zip(made, (q.shape, k.shape, v.shape), like, strict=True)
    return [tape.tensor(storage, shape, q.dtype, strides) for storage, shape, strides in parts]


def _lies_by_token(x: Tensor) -> bool:
    turned = (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    return is_contiguous(turned, (x.strides[0], x.strides[2], x.strides[1], x.strides[3]))


def _padded(x: Tensor) -> Tensor:
    """Heads padded to a multiple of 8, head by head; the gradient is cut to size."""

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        return [node.tape.made("cut", node.shapes[0], grads[0].dtype, (grads[0],))]

    node = x.tape.node(backward, x)
    wide = x.shape[-1] + -x.shape[-1] % _FLASH_ALIGNMENT
    out = x.tape.made("padded", (*x.shape[:-1], wide), x.dtype, (x,))
    return node.attach(out) if node else out


def repeat_heads(x: Tensor, groups: int, copied: bool = False) -> Tensor:
    """Each head repeated: transformers' repeat_kv, which expands a single head; `copied`: repeat_interleave."""
    batch, heads, tokens, size = x.shape
    if groups == 1:
        return x
    wide = expand(unsqueeze(x, 2), batch, heads, groups, tokens, size)
    wide = contiguous(wide, "clone") if copied else wide
    return reshape(wide, batch, heads * groups, tokens, size)


def _composed(q: Tensor, k: Tensor, v: Tensor, rate: float, mask: Tensor | None) -> Tensor:
    """`_scaled_dot_product_attention_math`: plain products in float32, with every score saved."""
    tape, dtype = q.tape, q.dtype
    autocast, tape.autocast = tape.autocast, None
    if dtype in HALVES:
        q, k, v = to(q, "float32"), to(k, "float32"), to(v, "float32")
    groups = q.shape[1] // k.shape[1]
    query = scale(q)
    bias = mask or _causal_bias(tape, q.shape[2], k.shape[2])
    keys, values = repeat_heads(k, groups, copied=True), repeat_heads(v, groups, copied=True)
    scores = matmul(query, scale(transpose(keys, 2, 3)))
    scores = _biased(scores, bias)
    weights = _safe_softmax(scores)
    del scores
    weights = dropout(weights, rate)
    narrow = to(weights, dtype)  # returned besides the output
    out = to(matmul(weights, values), dtype)
    del narrow, bias
    tape.autocast = autocast
    return out


@decomposable
def _biased(scores: Tensor, bias: Tensor) -> Tensor:
    """scores += bias. The CPU adds a copy in the scores' dtype."""
    tape = scores.tape
    widened = not tape.cuda and bias.dtype != scores.dtype
    temporaries = (bias.numel * ITEM_BYTES[scores.dtype],) if widened else ()
    tape.note("masked", Kernel.POINTWISE, 2 * scores.bytes, temporaries)
    return scores


@decomposable
def _causal_bias(tape: Tape, rows: int, columns: int) -> Tensor:
    """A causal bias: 0 or -inf for each query and key."""
    ones = tape.made("mask", (rows, columns), "bool")
    mask = tape.made("mask", (rows, columns), "bool", (ones,))
    del ones
    scalars = [tape.made("scalar", (), "float32") for _ in range(2)]
    bias = tape.made("mask_bias", (rows, columns), "float32", (mask,))
    del scalars
    return bias


@decomposable
def _safe_softmax(scores: Tensor) -> Tensor:
    """Softmax that checks for rows without any score."""
    tape = scores.tape
    node = tape.node(_softmax_backward, scores)
    columns = scores.shape[-1]
    item = ITEM_BYTES[scores.dtype]
    temporaries = kernels.safe_softmax_bytes(scores.numel // columns, columns, item)
    moved = 5 * scores.bytes
    out = tape.made(
        "softmax", scores.shape, scores.dtype, kernel=Kernel.REDUCTION, temporaries=temporaries, moved=moved
    )
    if node:
        node.save(out)
        node.attach(out)
    return out


@decomposable
def softmax(scores: Tensor, dtype: str | None = None) -> Tensor:
    """F.softmax over the last dimension. CUDA's reads float16 and writes float32 in one pass."""
    tape = scores.tape
    wanted = dtype or ("float32" if tape.autocast is not None else scores.dtype)
    if scores.dtype != wanted and not (tape.cuda and scores.dtype == "float16"):
        scores = to(scores, wanted)
    node = tape.node(_softmax_backward, scores)
    out = tape.made("softmax", scores.shape, wanted, (scores,), kernel=Kernel.REDUCTION)
    if node:
        node.save(out)
        node.attach(out)
    return out


def _softmax_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    (kept,) = node.unpack()
    grad = grads[0]
    assert grad is not None and isinstance(kept, Tensor)
    return [node.tape.made("softmax.dx", kept.shape, node.dtypes[0], (grad, kept), kernel=Kernel.REDUCTION)]


@decomposable
def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """scores.masked_fill(mask, -inf): saves the mask; the gradient is zeroed there."""
    node = scores.tape.node(_masked_backward, scores)
    if node:
        node.save(mask)
    out = pointwise("masked", scores)
    return node.attach(out) if node else out


def _masked_backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
    _saved = node.unpack()  # alive while this runs
    assert grads[0] is not None
    return [pointwise("masked.dx", grads[0])]


@decomposable
def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """FlashAttention 3, causal, of (batch, tokens, heads, head size), over all earlier tokens or a window of them.

    Saves queries, keys, values, the output and a logsumexp; supports grouped queries and windows without a mask. Its
    allocations are read from its sources (hopper/flash_api.cpp, mha_fwd and mha_bwd), and have not been measured.
    """
    tape = q.tape
    batch, tokens, heads, size = q.shape
    flops = 4 * batch * heads * size * scores_of(tokens, window)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _saved = node.unpack()  # alive while this runs
        grad, (shape, key_shape, value_shape) = grads[0], node.shapes
        assert grad is not None
        temporaries = kernels.flash3_backward_bytes(batch, heads, tokens, size, key_shape[2])
        sizes = [("dq", q_bytes), ("dk", k_bytes), ("dv", k_bytes)]
        moved = 4 * q_bytes + 4 * k_bytes + 2 * sum(temporaries)
        made = node.tape.launch(
            "sdpa.backward", sizes, Kind.ATTENTION, temporaries=temporaries, kernel=Kernel.ATTENTION, moved=moved,
            flops=5 * flops // 2, shape=(batch, heads, tokens, size), dtype=dtype,
        )  # fmt: skip
        shapes = (shape, key_shape, value_shape)
        return [node.tape.tensor(each, own, dtype) for each, own in zip(made, shapes, strict=True)]

    q_bytes, k_bytes, dtype = q.bytes, k.bytes, q.dtype
    node = tape.node(backward, q, k, v)
    if node:
        node.save(q, k, v)
    results = (("out", q.bytes), ("logsumexp", kernels.flash_lse_bytes(batch, heads, tokens)))
    made = tape.launch(
        "sdpa", results, Kind.ATTENTION, kernel=Kernel.ATTENTION, moved=2 * q.bytes + k.bytes + v.bytes, flops=flops,
        shape=(batch, heads, tokens, size), dtype=dtype,
    )  # fmt: skip
    out = tape.tensor(made[0], q.shape, q.dtype, dense_strides_like(q.shape, q.strides))
    if node:
        node.save(out, made[1])
        node.attach(out)
    return out


def flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, document: int | None = None, window: int | None = None
) -> Tensor:
    """flash-attn's package (2.8), causal, of (batch, tokens, heads, head size): always in half precision.

    `document`: each row consists of documents of this many tokens, the last one possibly shorter, which attend only to
    themselves (flash_attn_varlen_func). Saves queries, keys, values, the output, a logsumexp and a random state.
    """
    tape = q.tape
    batch, tokens, heads, size = q.shape
    length = min(document or tokens, tokens)
    whole, rest = divmod(tokens, length)
    count = batch * (whole + bool(rest))
    scores = batch * (whole * scores_of(length, window) + scores_of(rest, window))
    flops, shape = 4 * heads * size * scores, (count, heads, length, size)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _saved, grad = node.unpack(), grads[0]  # alive while this runs
        assert grad is not None
        if document is None:
            temporaries = kernels.flash_backward_bytes(batch, heads, tokens, size, node.shapes[1][2])
        else:
            temporaries = kernels.flash_varlen_backward_bytes(count, heads, batch * tokens, size, node.shapes[1][2])
        sizes = [("dq", q_bytes), ("dk", k_bytes), ("dv", k_bytes)]
        moved = 4 * q_bytes + 4 * k_bytes + 2 * sum(temporaries)
        made = tape.launch(
            "sdpa.backward", sizes, Kind.ATTENTION, temporaries=temporaries, kernel=Kernel.ATTENTION, moved=moved,
            flops=5 * flops // 2, shape=shape, dtype=dtype,
        )  # fmt: skip
        return [tape.tensor(each, own, dtype) for each, own in zip(made, node.shapes, strict=True)]

    q_bytes, k_bytes, dtype = q.bytes, k.bytes, q.dtype
    node = tape.node(backward, q, k, v)
    if node:
        node.save(q, k, v)
    results = [("out", q.bytes), ("logsumexp", kernels.flash_lse_bytes(batch, heads, tokens))]
    results.append(("random", kernels.FLASH_STATE_BYTES[0]))
    made = tape.launch(
        "sdpa", results, Kind.ATTENTION, kernel=Kernel.ATTENTION, moved=2 * q.bytes + k.bytes + v.bytes, flops=flops,
        shape=shape, dtype=dtype,
    )  # fmt: skip
    out = tape.tensor(made[0], q.shape, q.dtype)
    if node:
        node.save(out, *made[1:])
        node.attach(out)
    return out


def scores_of(tokens: int, window: int | None) -> int:
    """The number of (query, key) pairs; a window admits this many tokens before the query itself."""
    seen = tokens if window is None else min(tokens, window + 1)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen
