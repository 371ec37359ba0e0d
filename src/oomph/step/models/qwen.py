"""Qwen's first models (modeling_qwen.py of Qwen/Qwen-7B, December 2023), with flash-attn 2 if available.

flash-attn's rotary kernel is used; its RMSNorm, a library that has to be built separately, is not.
Cosines and sines are kept for twice the longest sequence. A batch's attention mask, one number per token, is left out
where the flash kernel ignores it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from oomph.step.models.common import by_head, head_dim, run_layer, shifted_loss, with_bias
from oomph.step.models.lora import linear, require_grads
from oomph.step.ops import Kind
from oomph.step.tensor.attention import attend
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import activate, add, mean, mul, neg, rsqrt, shift, square
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import HALVES, Shape
from oomph.step.tensor.libraries.flash_attn import flash_rotary
from oomph.step.tensor.loss import enter_loss
from oomph.step.tensor.tape import Module, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import cat, contiguous, part, reshape, split, transpose

_LOGN_POSITIONS = 32767  # rows of a table in each block that only inference reads


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`."""
    width, inner = c.n_embd, c.intermediate_size // 2
    yield "transformer.wte.weight", (c.vocab_size, width)
    for index in range(c.n_layer):
        block = f"transformer.h.{index}"
        yield f"{block}.ln_1.weight", (width,)
        yield from with_bias(f"{block}.attn.c_attn", (3 * width, width))
        yield f"{block}.attn.c_proj.weight", (width, width)
        yield f"{block}.ln_2.weight", (width,)
        yield f"{block}.mlp.w1.weight", (inner, width)
        yield f"{block}.mlp.w2.weight", (inner, width)
        yield f"{block}.mlp.c_proj.weight", (width, inner)
    yield "transformer.ln_f.weight", (width,)
    yield "lm_head.weight", (c.vocab_size, width)


def buffers(c: Any, compute_bytes: int) -> list[tuple[str, int]]:
    """Cosines and sines in float32, each block's table for long inputs, and without flash-attn a causal mask."""
    found = [(f"transformer.rotary.{name}", 4 * max(2 * c.block_size, 16) * head_dim(c)) for name in ("cos", "sin")]
    found += [(f"transformer.h.{index}.attn.logn", compute_bytes * _LOGN_POSITIONS) for index in range(c.n_layer)]
    if c.attention != "flash" or c.dtype not in HALVES:
        found.append(("transformer.registered_causal_mask", max(c.max_position_embeddings or 0, c.block_size) ** 2))
    return found


@forward
def model(m: Module, ids: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """QWenLMHeadModel.forward: logits and loss, of a copy of the logits without each sequence's last token."""
    hidden_states = decoder(m / "transformer", ids)
    lm_logits = linear(m / "lm_head", hidden_states, kind=Kind.LOGITS)
    enter_loss(m.tape)
    m.tape.scope = "loss"
    return lm_logits, shifted_loss(lm_logits, labels)


@forward
def decoder(m: Module, ids: Tensor) -> Tensor:
    """QWenModel.forward."""
    tape = m.tape
    inputs_embeds = require_grads(m, embedding(m / "wte", ids))
    hidden_states = inputs_embeds
    for index in tape.layers:
        tape.block = index
        hidden_states = run_layer(m.config, tape, partial(block, m / "h" / index), hidden_states)
    tape.block = None
    return norm(m / "ln_f", hidden_states)


@forward
def norm(m: Module, x: Tensor) -> Tensor:
    """RMSNorm.forward."""
    output = to(_normed(to(x, "float32")), x.dtype)
    return mul(output, m.parameter("weight"))


def _normed(x: Tensor) -> Tensor:
    return mul(x, rsqrt(shift(mean(square(x)))))


@forward
def block(m: Module, hidden_states: Tensor) -> Tensor:
    """QWenBlock.forward."""
    layernorm_output = norm(m / "ln_1", hidden_states)
    attn_output = attention(m / "attn", layernorm_output)
    residual = hidden_states
    layernorm_input = add(attn_output, residual)
    layernorm_output = norm(m / "ln_2", layernorm_input)
    residual = layernorm_input
    mlp_output = mlp(m / "mlp", layernorm_output)
    return add(residual, mlp_output)


@forward
def mlp(m: Module, hidden_states: Tensor) -> Tensor:
    """QWenMLP.forward."""
    a1 = linear(m / "w1", hidden_states)
    a2 = linear(m / "w2", hidden_states)
    intermediate_parallel = mul(a1, activate(a2, "silu"))
    return linear(m / "c_proj", intermediate_parallel)


@forward
def attention(m: Module, x: Tensor) -> Tensor:
    """QWenAttention.forward."""
    c, size = m.config, head_dim(m.config)
    mixed_x_layer = linear(m / "c_attn", x)
    query, key, value = split(mixed_x_layer, [x.shape[-1]] * 3)
    query, key, value = by_head(query, size), by_head(key, size), by_head(value, size)
    has_flash = m.tape.cuda and c.attention == "flash" and query.dtype in HALVES
    rotary = _flash_rotary if has_flash else _rotary
    query = rotary(query)
    key = rotary(key)
    mask = None if has_flash else _mask(query)
    q, k, v = (transpose(each, 1, 2) for each in (query, key, value))
    attn_output = transpose(attend(q, k, v, kernel=c.attention, mask=mask), 1, 2)
    context_layer = reshape(contiguous(attn_output), *x.shape)
    return linear(m / "c_proj", context_layer)


def _flash_rotary(t: Tensor) -> Tensor:
    return to(flash_rotary(to(t, "float32")), t.dtype)


def _rotary(t: Tensor) -> Tensor:
    """apply_rotary_pos_emb without flash-attn: in float32; the unrotated part, empty here, is appended."""
    shape = (1, t.shape[1], 1, t.shape[3])
    cos, sin = (t.tape.buffer(name, shape, "float32") for name in ("cos", "sin"))
    size = t.shape[-1]
    t_, t_pass_ = part(t, 0, size), part(t, size, size)
    t_ = to(t_, "float32")
    t_pass_ = to(t_pass_, "float32")
    t_ = add(mul(t_, cos), mul(_rotate_half(t_), sin))
    return to(cat([t_, t_pass_]), t.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = split(x, [x.shape[-1] // 2] * 2)
    return cat([neg(second), first])


def _mask(query: Tensor) -> Tensor:
    """The batch's mask combined with the causal one, made again in each block."""
    tape, (batch, tokens) = query.tape, query.shape[:2]
    inverted = tape.made("mask", (1, 1, tokens, tokens), "bool", kind=Kind.ATTENTION)
    return tape.made("mask", (batch, 1, tokens, tokens), query.dtype, (inverted,), kind=Kind.ATTENTION)
