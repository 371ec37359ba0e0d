"""nanochat's GPT (github.com/karpathy/nanochat at 92d63d4, July 2026: nanochat/gpt.py, flash_attention.py).

Weights of linear layers are float32 and cast to the activations' dtype where they are used, without autocast;
embedding tables are kept in that dtype, unless it is float16. Norms have no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomph.step.ops import Kind
from oomph.step.tensor.attention import attend, flash_attention_3, window_mask
from oomph.step.tensor.casts import to
from oomph.step.tensor.checkpoint import checkpoint
from oomph.step.tensor.elementwise import activation_from_result, add, mul, pointwise, scale, square, sub
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.loss import cross_entropy, enter_loss
from oomph.step.tensor.norms import rms_norm
from oomph.step.tensor.products import product
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import cat, contiguous, part, reshape, select, transpose, unsqueeze

VOCABULARY_MULTIPLE = 64
ROTARY_TIMES = 10  # the tables of cosines and sines are this many times as long as a sequence
_SMEAR_CHANNELS, _GATE_CHANNELS = 24, 12
_TILE = 128


def padded_vocabulary(c: Any) -> int:
    """Rows of the embeddings and the head."""
    return int(-(-c.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)


def has_value_embedding(c: Any, index: int) -> bool:
    """Whether a block has a value embedding: every second one, and the last."""
    return bool(index % 2 == (c.n_layer - 1) % 2)


def windows(c: Any) -> list[int | None]:
    """The number of tokens each block sees: a quarter of them, in whole tiles, where the pattern says S."""
    pattern = (c.window_pattern or "L").upper()
    short = -(-c.block_size // 4 // _TILE) * _TILE
    found: list[int | None] = [
        short if pattern[index % len(pattern)] == "S" else c.block_size for index in range(c.n_layer)
    ]
    return [*found[:-1], c.block_size]


def kinds(c: Any) -> list[int]:
    """A different kind for every block: each adds to the gradient of the first embedding."""
    return list(range(c.n_layer))


def is_table(name: str) -> bool:
    """Whether a parameter is an embedding table."""
    return "wte." in name or "value_embeds." in name


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`."""
    width, rows = c.n_embd, padded_vocabulary(c)
    keys = (c.num_key_value_heads or c.n_head) * (width // c.n_head)
    yield "resid_lambdas", (c.n_layer,)
    yield "x0_lambdas", (c.n_layer,)
    yield "smear_lambda", (1,)
    yield "backout_lambda", (1,)
    yield "transformer.wte.weight", (rows, width)
    for index in range(c.n_layer):
        block = f"transformer.h.{index}"
        yield f"{block}.attn.c_q.weight", (width, width)
        yield f"{block}.attn.c_k.weight", (keys, width)
        yield f"{block}.attn.c_v.weight", (keys, width)
        yield f"{block}.attn.c_proj.weight", (width, width)
        if has_value_embedding(c, index):
            yield f"{block}.attn.ve_gate.weight", (c.num_key_value_heads or c.n_head, _GATE_CHANNELS)
        yield f"{block}.mlp.c_fc.weight", (4 * width, width)
        yield f"{block}.mlp.c_proj.weight", (width, 4 * width)
    yield "lm_head.weight", (rows, width)
    yield "smear_gate.weight", (1, _SMEAR_CHANNELS)
    for index in range(c.n_layer):
        if has_value_embedding(c, index):
            yield f"value_embeds.{index}.weight", (rows, keys)


@forward
def linear(m: Module, x: Tensor, kind: Kind | None = None) -> Tensor:
    """Linear.forward: the weight in the input's dtype."""
    scope, m.tape.scope = m.tape.scope, f"{m.name}.weight"
    weight = to(m.parameter("weight"), x.dtype, Kind.HALF_WEIGHTS)
    m.tape.scope = scope
    return product(x, weight, kind=kind)


@forward
def model(m: Module, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
    """GPT.forward with targets: the loss alone."""
    c, tape, tokens = m.config, m.tape, idx.shape[1]
    dtype, t = c.dtype or "float32", m / "transformer"  # COMPUTE_DTYPE
    cos, sin = (_rotary(tape, c, name, dtype, tokens) for name in ("cos", "sin"))
    x = embedding(t / "wte", idx)
    x = to(x, dtype)
    x = rms_norm(x)
    gate = smear_gate(m, x)
    x = cat([part(x, 0, 1, 1), add(part(x, 1, tokens, 1), mul(gate, part(x, 0, tokens - 1, 1)))], 1)
    x0, x_backout = x, None
    seen = windows(c)
    for index in tape.layers:
        tape.block = index
        resid, first = (tape.parameter(name) for name in ("resid_lambdas", "x0_lambdas"))
        x = add(mul(select(resid, index), x), mul(select(first, index), x0))
        ve = to(embedding(m / "value_embeds" / index, idx), dtype) if has_value_embedding(c, index) else None
        x = _run(t / "h" / index, x, ve, cos, sin, seen[index])
        if index == c.n_layer // 2:
            x_backout = x
    tape.block = None
    if x_backout is not None:
        x = sub(x, mul(to(tape.parameter("backout_lambda"), dtype), x_backout))
    x = rms_norm(x)
    logits = linear(m / "lm_head", x, Kind.LOGITS)
    enter_loss(tape)
    tape.scope = "loss"
    logits = part(logits, 0, c.vocab_size)
    logits = to(logits, "float32")
    logits = scale(activation_from_result(scale(logits, "div"), "tanh"))
    return None, cross_entropy(logits, targets)


def smear_gate(m: Module, x: Tensor) -> Tensor:
    """How much of the token before is mixed into each token."""
    weight = to(m.tape.parameter("smear_lambda"), x.dtype)
    seen = part(part(x, 1, x.shape[1], 1), 0, _SMEAR_CHANNELS)
    return mul(weight, activation_from_result(linear(m / "smear_gate", seen), "sigmoid"))


def _rotary(tape: Tape, c: Any, name: str, dtype: str, tokens: int) -> Tensor:
    """The first rows of a table that exists before the program begins."""
    table = tape.buffer(name, (1, ROTARY_TIMES * c.block_size, 1, c.n_embd // c.n_head // 2), dtype)
    return part(table, 0, tokens, 1)


def _run(m: Module, x: Tensor, ve: Tensor | None, cos: Tensor, sin: Tensor, window: int | None) -> Tensor:
    """A block, recomputed in backward if the config says so (nanochat itself does not)."""
    tape, index = m.tape, m.tape.block
    if not tape.grad_enabled or index is None or index >= m.config.checkpoint_layers:
        return block(m, x, ve, cos, sin, window)
    if ve is None:
        return checkpoint(tape, lambda x: block(m, x, None, cos, sin, window), x, random=False)
    return checkpoint(tape, lambda x, ve: block(m, x, ve, cos, sin, window), x, ve, random=False)


@forward
def block(m: Module, x: Tensor, ve: Tensor | None, cos: Tensor, sin: Tensor, window: int | None) -> Tensor:
    x = add(x, attention(m / "attn", rms_norm(x), ve, cos, sin, window))
    return add(x, mlp(m / "mlp", rms_norm(x)))


@forward
def attention(m: Module, x: Tensor, ve: Tensor | None, cos: Tensor, sin: Tensor, window: int | None) -> Tensor:
    """CausalSelfAttention.forward: (batch, tokens, heads, head size)."""
    c, tape, (batch, tokens, width) = m.config, m.tape, x.shape
    size = width // c.n_head
    heads = (batch, tokens, c.num_key_value_heads or c.n_head, size)
    q = reshape(linear(m / "c_q", x), batch, tokens, c.n_head, size)
    k = reshape(linear(m / "c_k", x), *heads)
    v = reshape(linear(m / "c_v", x), *heads)
    if ve is not None:
        ve = reshape(ve, *heads)
        gate = scale(activation_from_result(linear(m / "ve_gate", part(x, 0, _GATE_CHANNELS)), "sigmoid"))
        v = add(v, mul(unsqueeze(gate, 3), ve))
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    q, k = rms_norm(q), rms_norm(k)
    q = scale(q)
    k = scale(k)
    y = flash_attn_func(m, q, k, v, window)
    outer, tape.kind = tape.kind, Kind.ATTENTION
    y = contiguous(y)
    tape.kind = outer
    return linear(m / "c_proj", reshape(y, batch, tokens, width))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_emb."""
    middle = x.shape[3] // 2
    x1, x2 = part(x, 0, middle), part(x, middle, x.shape[3])
    y1 = add(mul(x1, cos), mul(x2, sin))
    y2 = add(mul(x1, pointwise("neg", sin)), mul(x2, cos))
    return cat([y1, y2], 3)


def flash_attn_func(m: Module, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """FlashAttention 3 or, where unavailable, PyTorch's attention, which needs a mask for a window."""
    kernel, tokens = m.config.attention, q.shape[1]
    windowed = window is not None and window < tokens
    if kernel == "flash3":
        return flash_attention_3(q, k, v, window if windowed else None)
    q, k, v = transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)
    if not windowed:
        return transpose(attend(q, k, v, kernel=kernel), 1, 2)
    mask, _rows, _columns = window_mask(m.tape, tokens)
    return transpose(attend(q, k, v, kernel=kernel, mask=mask), 1, 2)


@forward
def mlp(m: Module, x: Tensor) -> Tensor:
    x = linear(m / "c_fc", x)
    x = square(activation_from_result(x, "relu"))
    return linear(m / "c_proj", x)


def buffers(c: Any, item_bytes: int) -> list[tuple[str, int]]:
    """What the model keeps besides its parameters: tables of cosines and sines."""
    half = c.n_embd // c.n_head // 2
    return [(name, ROTARY_TIMES * c.block_size * half * item_bytes) for name in ("cos", "sin")]
