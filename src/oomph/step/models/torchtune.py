"""torchtune's TransformerDecoder (0.6.1) for Llama 2 to 3.3, Mistral, Qwen2, Qwen2.5 and Phi-3, its adapters, and the
loss as its recipes compute it.

Weights, adapters and activations have one dtype; there is no autocast. Norms are computed in float32, and so are
Llama's rotary positions. Variables live as long as in torchtune's own forwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from oomph.step.models import lora
from oomph.step.models.common import by_head, head_dim, run_layer, turned_by_halves, with_bias
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor import products
from oomph.step.tensor.attention import attend, repeat_heads
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import activate, add, add_into, dropout, mul, pointwise, scale, shift, sub
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.libraries import torchao
from oomph.step.tensor.loss import cross_entropy, enter_loss
from oomph.step.tensor.norms import rms_norm
from oomph.step.tensor.quantized import Quantization
from oomph.step.tensor.tape import Module, Weight, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, part, reshape, select, split, stack, transpose

_MAGNITUDE = "magnitude"  # of DoRA


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`. A tied head is left out."""
    width, inner, size = c.n_embd, c.intermediate_size or 4 * c.n_embd, head_dim(c)
    queries, keys = c.n_head * size, (c.num_key_value_heads or c.n_head) * size
    yield "tok_embeddings.weight", (c.vocab_size, width)
    for index in range(c.n_layer):
        layer, biased = f"layers.{index}", c.model_type == "qwen2"
        for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from with_bias(f"{layer}.attn.{name}", (outputs, width), biased)
        yield f"{layer}.attn.output_proj.weight", (width, queries)
        yield f"{layer}.mlp.w1.weight", (inner, width)
        yield f"{layer}.mlp.w2.weight", (width, inner)
        yield f"{layer}.mlp.w3.weight", (inner, width)
        yield f"{layer}.sa_norm.scale", (width,)
        yield f"{layer}.mlp_norm.scale", (width,)
    yield "norm.scale", (width,)
    if not c.tie_weights:
        yield "output.weight", (c.vocab_size, width)


def with_adapters(c: Any, found: Iterable[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    """The parameters, with those of LoRALinear or DoRALinear where a layer is adapted."""
    for module, group in groupby(found, key=lambda each: each[0].rpartition(".")[0]):
        own = list(group)
        yield from own
        matrix = own[0][1]
        if lora.is_adapted(c, module, matrix):
            if c.method == "dora":
                yield f"{module}.{_MAGNITUDE}", matrix[:1]
            yield f"{module}.lora_a.weight", (c.lora_rank, matrix[1])
            yield f"{module}.lora_b.weight", (matrix[0], c.lora_rank)


def unknown_targets(c: Any, found: Iterable[tuple[str, Shape]]) -> tuple[list[str], list[str]]:
    """The names in `lora_targets` that no layer has, and the layers' names."""
    return lora.unknown_targets(c, found)


def is_adapter(name: str) -> bool:
    return lora.ADAPTER in name or name.endswith(f".{_MAGNITUDE}")


def weight(c: Any, name: str, shape: Shape, adapter_dtype: str, base_dtype: str) -> Weight:
    """A parameter as a LoRA recipe keeps it. With `quantize_base` every linear layer but the head is an NF4Tensor."""
    if is_adapter(name):
        return Weight(shape, adapter_dtype)
    module, _, kind = name.rpartition(".")
    if c.quantization not in (None, "off") and kind == "weight" and lora.is_linear(c, module, shape):
        return Weight(shape, base_dtype, False, Quantization(torchao.KIND, True, base_dtype))
    return Weight(shape, base_dtype, False)


def buffers(c: Any, _item_bytes: int) -> list[tuple[str, int]]:
    """The rotary cache, in float32: cosines and sines for as many positions as the model supports."""
    times = 2 if _turns_by_halves(c) else 1
    return [("rope.cache", 4 * times * head_dim(c) * (c.max_position_embeddings or c.block_size))]


@forward
def model(m: Module, tokens: Tensor, labels: Tensor) -> tuple[None, Tensor]:
    """The recipes' `_loss_step`: logits in chunks, shifted labels, and the loss."""
    tape = m.tape
    logits = decoder(m, tokens)
    enter_loss(tape)
    tape.scope = "loss"
    batch, count = labels.shape
    labels = tape.made("hstack", (batch, count), "int64", (labels,), kind=Kind.INPUTS)
    if isinstance(logits, Tensor):
        labels = reshape(labels, batch * count)
        logits = reshape(logits, batch * count, logits.shape[-1])
        return None, cross_entropy(logits, labels)
    return None, _chunked_loss(m.config, logits, labels)


def _chunked_loss(c: Any, logits: list[Tensor], labels: Tensor) -> Tensor:
    """CEWithChunkedOutputLoss.forward: each chunk's logits in float32, summed over its tokens."""
    tape, batch = labels.tape, labels.shape[0]
    total_elements = counted(labels)
    targets = [reshape(chunk, batch * chunk.shape[1]) for chunk in _chunks(c, labels)]
    flat = [reshape(chunk, batch * chunk.shape[1], chunk.shape[2]) for chunk in logits]
    total_loss: Tensor | None = None
    for chunk, target in zip(flat, targets, strict=True):
        if total_loss is None:
            total_loss = shift(cross_entropy(to(chunk, "float32"), target))
        else:
            total_loss = add_into(total_loss, cross_entropy(to(chunk, "float32"), target))
    assert total_loss is not None
    tape.scope = "loss"
    return mul(total_loss, total_elements)  # the division


def counted(labels: Tensor) -> Tensor:
    """(labels != ignore_index).sum()"""
    counted = pointwise("ne", labels, dtype="bool")
    return labels.tape.made("sum", (), "int64", (counted,), kernel=Kernel.REDUCTION)


def _chunks(c: Any, x: Tensor) -> list[Tensor]:
    """x.chunk(num_output_chunks, dim=1)"""
    tokens, size = x.shape[1], c.loss_chunk
    return split(x, [min(size, tokens - low) for low in range(0, tokens, size)], dim=1)


@forward
def decoder(m: Module, tokens: Tensor) -> Tensor | list[Tensor]:
    """TransformerDecoder.forward: logits, in float32, or a list of chunks of them."""
    c, tape = m.config, m.tape
    h = embedding(m / "tok_embeddings", tokens)
    for index in tape.layers:
        tape.block = index
        h = run_layer(c, tape, partial(block, m / "layers" / index), h)
    tape.block = None
    return _unembed(m, h)


def _unembed(m: Module, h: Tensor) -> Tensor | list[Tensor]:
    h = norm(m / "norm", h)
    if not m.config.loss_chunk:
        return to(_output(m, h), "float32")
    return [_output(m, chunk) for chunk in _chunks(m.config, h)]


def _output(m: Module, h: Tensor) -> Tensor:
    """The head, or the embedding it is tied to."""
    if m.config.tie_weights:
        return products.linear(m / "output", h, (m / "tok_embeddings").parameter("weight"), Kind.LOGITS)
    return linear(m / "output", h, Kind.LOGITS)


@forward
def norm(m: Module, x: Tensor) -> Tensor:
    """RMSNorm.forward, on a copy in float32."""
    return to(rms_norm(to(x, "float32"), m.parameter("scale")), x.dtype)


@forward
def block(m: Module, x: Tensor) -> Tensor:
    """TransformerSelfAttentionLayer.forward."""
    h = norm(m / "sa_norm", x)
    attn_out = attention(m / "attn", h)
    h = add(attn_out, x)
    mlp_out = mlp(m / "mlp", norm(m / "mlp_norm", h))
    return add(h, mlp_out)


@forward
def attention(m: Module, x: Tensor) -> Tensor:
    """MultiHeadAttention.forward: keys and values are repeated for grouped queries."""
    c, size = m.config, head_dim(m.config)
    q = by_head(linear(m / "q_proj", x), size)
    q = transpose(positions(m, q), 1, 2)
    k = linear(m / "k_proj", x)
    v = linear(m / "v_proj", x)
    k, v = by_head(k, size), by_head(v, size)
    k = positions(m, k)
    k, v = transpose(k, 1, 2), transpose(v, 1, 2)
    groups = q.shape[1] // k.shape[1]
    k = repeat_heads(k, groups)
    v = repeat_heads(v, groups)
    output = attend(q, k, v, kernel=c.attention, rate=c.attention_dropout or 0.0)
    outer, m.tape.kind = m.tape.kind, Kind.ATTENTION
    output = contiguous(transpose(output, 1, 2))
    m.tape.kind = outer
    return linear(m / "output_proj", reshape(output, *x.shape[:2], c.n_head * size))


def _turns_by_halves(c: Any) -> bool:
    """Qwen2 and Phi-3 rotate the halves of a head, as in transformers; Llama and Mistral rotate adjacent pairs."""
    return c.model_type in ("qwen2", "phi3")


def positions(m: Module, x: Tensor) -> Tensor:
    """RotaryPositionalEmbeddings.forward, or a variant's, of (batch, tokens, heads, head size)."""
    c, tokens, size = m.config, x.shape[1], x.shape[-1]
    tape, rows = m.tape, c.max_position_embeddings or c.block_size
    if _turns_by_halves(c):
        return _by_halves(c, x, tape.buffer("cache", (rows, 2 * size), "float32"))
    rope_cache = reshape(
        part(tape.buffer("cache", (rows, size // 2, 2), "float32"), 0, tokens, 0), 1, tokens, 1, size // 2, 2
    )
    xshaped = reshape(to(x, "float32"), *x.shape[:-1], size // 2, 2)
    x_out = stack(
        [
            sub(_product(xshaped, rope_cache, 0, 0), _product(xshaped, rope_cache, 1, 1)),
            add(_product(xshaped, rope_cache, 1, 0), _product(xshaped, rope_cache, 0, 1)),
        ]
    )
    x_out = reshape(x_out, *x.shape)
    return to(x_out, x.dtype)


def _product(x: Tensor, cache: Tensor, own: int, other: int) -> Tensor:
    """x[..., own] * cache[..., other]"""
    return mul(select(x, own, -1), select(cache, other, -1))


def _by_halves(c: Any, x: Tensor, cache: Tensor) -> Tensor:
    tokens, size = x.shape[1], x.shape[-1]
    rope_cache = reshape(part(cache, 0, tokens, 0), 1, tokens, 1, 2 * size)
    cos, sin = part(rope_cache, 0, size), part(rope_cache, size, 2 * size)
    if c.model_type == "qwen2":
        cos, sin = to(cos, x.dtype), to(sin, x.dtype)
    return turned_by_halves(x, cos, sin)


@forward
def mlp(m: Module, x: Tensor) -> Tensor:
    """FeedForward.forward."""
    h = activate(linear(m / "w1", x), m.config.hidden_act or "silu")
    h = mul(h, linear(m / "w3", x))
    return linear(m / "w2", h)


@forward
def linear(m: Module, x: Tensor, kind: Kind | None = None) -> Tensor:
    """nn.Linear, FrozenNF4Linear, LoRALinear or DoRALinear."""
    weights = m.tape.weights
    base = weights[f"{m.name}.weight"]
    if base.quantization is None:
        out = products.linear(m, x, kind=kind)
    else:
        out = torchao.linear(m, x)
        if (bias := m.maybe("bias")) is not None:
            out = add(out, bias)
    if f"{m.name}.lora_a.weight" not in weights:
        return out
    return _dora(m, x, out) if m.config.method == "dora" else add(out, _lora(m, x))


def _lora(m: Module, x: Tensor) -> Tensor:
    lora_out = products.linear(m / "lora_a", dropout(x, m.config.lora_dropout))
    return scale(products.linear(m / "lora_b", lora_out))


def _dora(m: Module, x: Tensor, base_out: Tensor) -> Tensor:
    """DoRALinear.forward after its dropout: `_held` is what its variables hold to the end."""
    x = dropout(x, m.config.lora_dropout)
    lora_out = products.linear(m / "lora_b", products.linear(m / "lora_a", x))
    inputs = x.shape[-1]
    x_eye = m.tape.made("eye", (inputs, inputs), x.dtype)
    lora_weight = transpose(products.linear(m / "lora_b", products.linear(m / "lora_a", x_eye)), 0, 1)
    magnitude = m.parameter(_MAGNITUDE)
    weight_norm = lora.row_norms(m.parameter("weight"), lora_weight.detach())
    mag_norm_scale = reshape(mul(magnitude, weight_norm), 1, magnitude.shape[0])  # the division
    dora_out = add(mul(shift(mag_norm_scale), base_out), scale(mul(mag_norm_scale, lora_out)))
    return add(dora_out, base_out)
