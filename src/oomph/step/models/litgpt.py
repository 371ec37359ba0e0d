"""litgpt's GPT (0.5.13) for the families it shares with transformers, its adapters, and its chunked loss.

Queries, keys and values come from one matrix, and so do their adapters. Head and embedding are two matrices, tied
in the checkpoint or not. Fabric casts the logits to float32. Variables live as long as in litgpt's own functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from oomph.config.reading.hugging_face import windowed
from oomph.step.models import lora
from oomph.step.models.common import by_head, head_dim, turned_by_halves, with_bias
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor import products, quantized
from oomph.step.tensor.attention import attend, repeat_heads, softmax
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import (
    activate,
    activation_from_result,
    add,
    dropout,
    mean,
    mul,
    pointwise,
    rsqrt,
    scale,
    shift,
    total,
)
from oomph.step.tensor.indexing import embedding, put_columns
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.loss import cross_entropies, cross_entropy, enter_loss
from oomph.step.tensor.norms import layer_norm
from oomph.step.tensor.products import grouped_conv1d, matmul
from oomph.step.tensor.quantized import of_bitsandbytes
from oomph.step.tensor.tape import Module, Tape, Weight, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import cat, part, reshape, split, transpose

PARTS = ("query", "key", "value")
TARGETS = (*PARTS, "projection", "mlp", "head")
_WTE = "transformer.wte"


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`; a LoRA layer's base without `.linear` in its name."""
    width, inner, size, neox = c.n_embd, c.intermediate_size or 4 * c.n_embd, head_dim(c), c.model_type == "gpt_neox"
    queries, keys = c.n_head * size, _groups(c) * size
    yield "lm_head.weight", (c.vocab_size, width)
    yield f"{_WTE}.weight", (c.vocab_size, width)
    if _is_stable(c):
        yield from with_bias(f"{_WTE}.norm", (width,))
    for index in range(c.n_layer):
        block = f"transformer.h.{index}"
        if c.model_type != "olmo2":
            yield from with_bias(f"{block}.norm_1", (width,), neox)
        yield from with_bias(f"{block}.attn.qkv", (queries + 2 * keys, width), neox or c.model_type == "qwen2")
        yield from with_bias(f"{block}.attn.proj", (width, queries), neox)
        if c.model_type in ("qwen3", "olmo2"):
            whole = c.model_type == "olmo2"
            yield f"{block}.attn.norm_q.weight", (queries if whole else size,)
            yield f"{block}.attn.norm_k.weight", (keys if whole else size,)
        if c.model_type in ("gemma2", "olmo2"):
            yield f"{block}.post_attention_norm.weight", (width,)
        if c.model_type != "olmo2":
            yield from with_bias(f"{block}.norm_2", (width,), neox)
        for name in ("fc",) if neox else ("fc_1", "fc_2"):
            yield from with_bias(f"{block}.mlp.{name}", (inner, width), neox)
        yield from with_bias(f"{block}.mlp.proj", (width, inner), neox)
        if c.model_type in ("gemma2", "olmo2"):
            yield f"{block}.post_mlp_norm.weight", (width,)
    yield from with_bias("transformer.ln_f", (width,), neox)


def _groups(c: Any) -> int:
    return int(c.num_key_value_heads or c.n_head)


def _target(module: str) -> str:
    """The name of a layer in litgpt's `lora_*` options; its joint projection has three parts."""
    if module == "lm_head":
        return "head"
    return "mlp" if ".mlp." in module else "projection" if module.endswith(".attn.proj") else ""


def _wanted(c: Any) -> list[str]:
    return list(TARGETS[:-1]) if c.lora_targets == lora.ALL_LINEAR else lora.targets(c)


def unknown_targets(c: Any, _found: Iterable[tuple[str, Shape]]) -> tuple[list[str], list[str]]:
    """The names in `lora_targets` that litgpt has no option for, and those it has."""
    return [each for each in _wanted(c) if each not in TARGETS], list(TARGETS)


def _enabled(c: Any) -> list[int]:
    """The width of each adapted part of the joint projection: queries, keys, values."""
    size = head_dim(c)
    widths = {"query": c.n_head * size, "key": _groups(c) * size, "value": _groups(c) * size}
    return [widths[part] for part in PARTS if part in _wanted(c)]


def with_adapters(c: Any, found: Iterable[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    """The parameters, with those of LoRALinear and LoRAQKVLinear before the layer's own."""
    for module, group in groupby(found, key=lambda each: each[0].rpartition(".")[0]):
        own = list(group)
        outputs, inputs = own[0][1] if len(own[0][1]) == 2 else (0, 0)
        if module.endswith(".attn.qkv") and (enabled := _enabled(c)):
            yield f"{module}.lora_A", (c.lora_rank * len(enabled), inputs)
            yield f"{module}.lora_B", (sum(enabled), c.lora_rank)
        elif outputs and _target(module) in _wanted(c):
            yield f"{module}.lora_A", (c.lora_rank, inputs)
            yield f"{module}.lora_B", (outputs, c.lora_rank)
        yield from own


def weight(c: Any, name: str, shape: Shape, adapter_dtype: str, base_dtype: str) -> Weight:
    """A parameter as litgpt keeps it. With `quantize` every linear layer is quantized, also the head; the embedding
    is replaced by bitsandbytes' after everything but the adapters was frozen: it gets gradients, which no optimizer
    uses or frees."""
    if lora.ADAPTER in name:
        return Weight(shape, adapter_dtype)
    if not _is_stable(c):
        return Weight(shape, base_dtype, False)
    if name.startswith(_WTE):
        return Weight(shape, base_dtype)
    if len(shape) == 2:
        return Weight(shape, base_dtype, False, of_bitsandbytes(c))
    return Weight(shape, base_dtype, False)


def _is_stable(c: Any) -> bool:
    """Whether the embedding is bitsandbytes' StableEmbedding, which has a norm."""
    return c.method != "full" and c.quantization not in (None, "off")


def buffers(c: Any, _item_bytes: int) -> list[tuple[str, int]]:
    """Cosines and sines in float32 for the longest sequence; and the indices of the adapted columns."""
    found = [(name, 4 * c.block_size * _turned(c)) for name in ("cos", "sin")]
    if c.method != "full" and 0 < len(_enabled(c)) < len(PARTS):
        found.append(("lora_ind", 8 * c.n_layer * sum(_enabled(c))))
    return found


def _turned(c: Any) -> int:
    """How many elements of each head are rotated."""
    return int(head_dim(c) * c.partial_rotary_factor)


def kinds(c: Any) -> list[bool]:
    """Whether each block has a sliding window, which litgpt supports for Gemma 2 only."""
    return windowed(c) if c.model_type == "gemma2" else [False] * int(c.n_layer)


# --- forward ------------------------------------------------------------------------------------------------------


@forward
def model(m: Module, idx: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor]:
    """The logits and the loss that a step of litgpt's scripts computes for a batch."""
    logits = outputs(m, idx)
    return logits, chunked_cross_entropy(m, logits, targets)


def outputs(m: Module, idx: Tensor) -> list[Tensor]:
    """The model's call through Fabric: logits in float32, in chunks of tokens if LoRA is trained."""
    tape = m.tape
    logits = gpt(m, idx)
    tape.scope, tape.kind, tape.autocast, tape.casts = "outputs", Kind.LOGITS, None, {}
    return [to(chunk, "float32") for chunk in logits]


@forward
def gpt(m: Module, idx: Tensor) -> list[Tensor]:
    """GPT.forward."""
    c, tape = m.config, m.tape
    cos, sin = (tape.buffer(name, (1, 1, idx.shape[1], _turned(c)), "float32") for name in ("cos", "sin"))
    x = embed(m / "transformer" / "wte", idx)
    if c.model_type == "gemma2":
        x = mul(x, tape.buffer("sqrt", (), x.dtype) if tape.cuda else tape.made("sqrt", (), x.dtype))  # on the host
    for index in tape.layers:
        tape.block = index
        x = block(m / "transformer" / "h" / index, x, cos, sin)
    tape.block = None
    x = norm(m / "transformer" / "ln_f", x)
    if not chunks_head(c) or not tape.training:
        return [_head(m, x)]
    tokens = x.shape[1]
    sizes = [min(c.loss_chunk, tokens - low) for low in range(0, tokens, c.loss_chunk)]
    return [_head(m, chunk) for chunk in split(x, sizes, dim=1)]


def chunks_head(c: Any) -> bool:
    """Whether the head computes chunks, as it does for LoRA. Otherwise only the loss does."""
    return bool(c.method != "full" and c.loss_chunk)


def _head(m: Module, x: Tensor) -> Tensor:
    logits = linear(m / "lm_head", x, Kind.LOGITS)
    if m.config.final_logit_softcapping:
        logits = _capped(logits)
    return logits


def _capped(x: Tensor) -> Tensor:
    """do_softcapping"""
    return scale(activation_from_result(scale(x, "div"), "tanh"))


@forward
def embed(m: Module, idx: Tensor) -> Tensor:
    """nn.Embedding, or StableEmbedding, whose norm is in Fabric's dtype."""
    x = embedding(m, idx)
    return layer_norm(m / "norm", x) if _is_stable(m.config) else x


@forward
def norm(m: Module, x: Tensor) -> Tensor:
    """nn.LayerNorm, or litgpt's RMSNorm in float32."""
    if m.config.model_type == "gpt_neox":
        return layer_norm(m, x)
    dtype, weight = x.dtype, m.parameter("weight")
    x = to(x, "float32")
    norm_x = mean(mul(x, x))
    x_normed = mul(x, rsqrt(shift(norm_x)))
    weight = shift(weight) if m.config.model_type == "gemma2" else weight
    return to(mul(x_normed, to(weight, "float32")), dtype)


@forward
def block(m: Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Block.forward."""
    kind = m.config.model_type
    x_normed = x if kind == "olmo2" else norm(m / "norm_1", x)
    attention_output = attention(m / "attn", x_normed, cos, sin)
    if kind in ("gemma2", "olmo2"):
        attention_output = norm(m / "post_attention_norm", attention_output)
    if kind == "gpt_neox" and m.config.use_parallel_residual:
        x_normed = norm(m / "norm_2", x)
        x = add(attention_output, x)
    else:
        x = add(attention_output, x)
        x_normed = x if kind == "olmo2" else norm(m / "norm_2", x)
    return add(_after_mlp(m, x_normed), x)


def _after_mlp(m: Module, x: Tensor) -> Tensor:
    out = mlp(m / "mlp", x)
    return norm(m / "post_mlp_norm", out) if m.config.model_type in ("gemma2", "olmo2") else out


@forward
def mlp(m: Module, x: Tensor) -> Tensor:
    """GptNeoxMLP, LLaMAMLP or GemmaMLP. F.gelu is one kernel, with or without tanh."""
    name = "gelu" if m.config.model_type in ("gpt_neox", "gemma2") else "silu"
    if m.config.model_type == "gpt_neox":
        x = linear(m / "fc", x)
        x = activate(x, name)
        return linear(m / "proj", x)
    x_fc_1 = linear(m / "fc_1", x)
    x_fc_2 = linear(m / "fc_2", x)
    x = mul(activate(x_fc_1, name), x_fc_2)
    return linear(m / "proj", x)


@forward
def attention(m: Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """CausalSelfAttention.forward."""
    c, size, kind = m.config, head_dim(m.config), m.config.model_type
    groups = _groups(c)
    qkv = linear(m / "qkv", x)
    q, k, v = split(qkv, [c.n_head * size, groups * size, groups * size])
    if kind == "olmo2":
        q, k = norm(m / "norm_q", q), norm(m / "norm_k", k)
    q, k, v = by_head(q, size), by_head(k, size), by_head(v, size)
    q, k, v = transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)
    if kind == "qwen3":
        q, k = norm(m / "norm_q", q), norm(m / "norm_k", k)
    turned = _turned(c)
    q_roped = turned_by_halves(_first(q, turned), cos, sin)
    k_roped = turned_by_halves(_first(k, turned), cos, sin)
    q = cat([q_roped, part(q, turned, size)])
    k = cat([k_roped, part(k, turned, size)])
    k = repeat_heads(k, c.n_head // groups, copied=True)
    v = repeat_heads(v, c.n_head // groups, copied=True)
    window = kind == "gemma2" and m.tape.block is not None and windowed(c)[m.tape.block]
    mask = _window_mask(m.tape, q) if window else None
    y = _attended(m, q, k, v, mask)
    y = reshape(y, *x.shape[:2], c.n_head * size)
    return linear(m / "proj", y)


def _first(x: Tensor, count: int) -> Tensor:
    """x[..., :count], a new view even if that is all of x."""
    return part(x, 0, count) if count < x.shape[-1] else reshape(x, *x.shape)


def _attended(m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """CausalSelfAttention.scaled_dot_product_attention."""
    c, tape = m.config, m.tape
    outer, tape.kind = tape.kind, Kind.ATTENTION
    if not (c.model_type == "gemma2" and c.attn_logit_softcapping):
        y = attend(q, k, v, kernel=c.attention, mask=mask)
    else:
        scores = scale(matmul(q, transpose(k, 2, 3)))
        scores = _capped(scores)
        mask = mask if mask is not None else _causal_mask(tape, q)
        scores = add(scores, mask)
        scores = to(softmax(scores, "float32"), q.dtype)
        y = matmul(scores, v)
    tape.kind = outer
    return transpose(y, 1, 2)


def _causal_mask(tape: Tape, q: Tensor) -> Tensor:
    """An additive mask in the scores' dtype."""
    square = (q.shape[2], q.shape[2])
    ones = tape.made("ones", square, q.dtype)
    mask = tape.made("triu", square, q.dtype, (ones,))
    del ones
    hidden = tape.made("bool", square, "bool", (mask,))
    tape.note("masked_fill", moved=2 * mask.bytes)
    del hidden
    return mask


def _window_mask(tape: Tape, q: Tensor) -> Tensor:
    """The same for a window: first the causal mask, then the window's, written row by row."""
    tokens = q.shape[2]
    _causal = _causal_mask(tape, q)
    mask = tape.made("full", (tokens, tokens), q.dtype)
    return reshape(mask, 1, 1, tokens, tokens)


# --- adapters -----------------------------------------------------------------------------------------------------


@forward
def linear(m: Module, x: Tensor, kind: Kind | None = None) -> Tensor:
    """nn.Linear, bitsandbytes', LoRALinear or LoRAQKVLinear."""
    weights = m.tape.weights
    if weights[f"{m.name}.weight"].quantization is None:
        pretrained = products.linear(m, x, kind=kind)
    else:
        pretrained = quantized.linear(m, x)
    if f"{m.name}.lora_A" not in weights:
        return pretrained
    return _with_qkv_lora(m, x, pretrained) if m.name.endswith(".qkv") else add(pretrained, _lora(m, x))


def _lora(m: Module, x: Tensor) -> Tensor:
    """(dropout(x) @ A.T @ B.T) * scaling"""
    dropped = dropout(x, m.config.lora_dropout)
    after_a = products.linear(m / "lora_A", dropped, m.parameter("lora_A"))
    del dropped
    return scale(products.linear(m / "lora_B", after_a, m.parameter("lora_B")))


def _with_qkv_lora(m: Module, x: Tensor, pretrained: Tensor) -> Tensor:
    """LoRAQKVLinear.forward: a convolution for each adapted part, then zeros for the others."""
    c, enabled = m.config, _enabled(m.config)
    after_a = products.linear(m / "lora_A", dropout(x, c.lora_dropout), m.parameter("lora_A"))
    after_b = transpose(_conv1d(c, transpose(after_a, 1, 2), m.parameter("lora_B"), enabled), 1, 2)
    padded = after_b if len(enabled) == len(PARTS) else put_columns(after_b, pretrained.shape[-1])
    lora_out = scale(padded)
    del padded
    return add(pretrained, lora_out)


def _conv1d(c: Any, x: Tensor, weight: Tensor, enabled: list[int]) -> Tensor:
    """LoRAQKVLinear.conv1d: one grouped convolution or, for grouped queries, one for each part."""
    weight = reshape(weight, *weight.shape, 1)
    if c.n_head == _groups(c):
        return grouped_conv1d(x, weight, len(enabled))
    inputs = split(x, [c.lora_rank] * len(enabled), dim=1)
    weights = split(weight, enabled, dim=0)
    return cat([grouped_conv1d(a, b, 1) for a, b in zip(inputs, weights, strict=True)], dim=1)


# --- the loss -----------------------------------------------------------------------------------------------------


def chunked_cross_entropy(m: Module, logits: list[Tensor], targets: Tensor) -> Tensor:
    """The loss of all tokens but each sequence's last, a chunk at a time. Modifies `logits` like fit()."""
    tape, c, (batch, tokens) = m.tape, m.config, targets.shape
    enter_loss(tape)
    tape.scope = "loss"
    targets = part(targets, 1, tokens, 1)
    if not chunks_head(c) or not tape.training:
        return _loss_of_all(c, part(logits[0], 0, tokens - 1, 1), targets, tape.training)
    last = logits[-1]
    logits[-1] = part(last, 0, last.shape[1] - 1, 1)
    del last
    logit_chunks = [reshape(chunk, batch * chunk.shape[1], chunk.shape[2]) for chunk in logits]
    width = logits[0].shape[1]
    sizes = [min(width, tokens - 1 - low) for low in range(0, tokens - 1, width)]
    target_chunks = [reshape(chunk, batch * chunk.shape[1]) for chunk in split(targets, sizes, dim=1)]
    losses = [cross_entropies(*pair) for pair in zip(logit_chunks, target_chunks, strict=False)]
    return _mean(losses, targets)


def _loss_of_all(c: Any, logits: Tensor, targets: Tensor, in_chunks: bool) -> Tensor:
    """The same for logits in one piece: in chunks of rows in training, whole in an evaluation."""
    rows = targets.numel
    logits = reshape(logits, rows, logits.shape[-1])
    targets = reshape(targets, rows)
    if not in_chunks or not c.loss_chunk:
        return cross_entropy(logits, targets)
    sizes = [min(c.loss_chunk, rows - low) for low in range(0, rows, c.loss_chunk)]
    pairs = zip(split(logits, sizes, dim=0), split(targets, sizes, dim=0), strict=True)
    return _mean([cross_entropies(*pair) for pair in pairs], targets)


def _mean(losses: list[Tensor], targets: Tensor) -> Tensor:
    """torch.cat(losses).sum() / the number of tokens that count, at least one"""
    tape = targets.tape
    counted = pointwise("ne", targets, dtype="bool")
    non_masked = tape.made("count", (), "int64", (counted,), kernel=Kernel.REDUCTION)
    del counted
    summed = total(cat(losses, dim=0), 0)
    least = tape.made("ones_like", (), "int64")
    divisor = tape.made("maximum", (), "int64", (non_masked, least))
    del least
    return mul(summed, divisor)  # the division
