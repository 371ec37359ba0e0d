"""Unsloth's Llama, Mistral, Qwen2 and Qwen3 with adapters (2026.8.19, models/llama.py and qwen3.py).

If a block's queries, keys and values, its output projection or its MLP have adapters without dropout and bias, they
run in Unsloth's own functions; else in peft's layers. Variables live as long as in Unsloth's own forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from oomph.step.models import llama
from oomph.step.models.common import by_head, document_length, head_dim, heads
from oomph.step.models.lora import is_adapted, is_saved, linear, require_grads
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.attention import attend, flash_attention_2
from oomph.step.tensor.checkpoint import checkpoint_reentrant
from oomph.step.tensor.elementwise import add
from oomph.step.tensor.indexing import embedding
from oomph.step.tensor.layout import ITEM_BYTES, Shape, numel
from oomph.step.tensor.libraries import liger, unsloth_lora
from oomph.step.tensor.libraries.unsloth_lora import Adapted
from oomph.step.tensor.libraries.unsloth_loss import fused_loss
from oomph.step.tensor.loss import enter_loss
from oomph.step.tensor.quantized import Quantization, unpacked_scales_bytes
from oomph.step.tensor.tape import TRAINED_COPY, Module, Tape, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import expand, reshape, transpose, unsqueeze

_FEW = 2**20  # elements: block inputs up to this size are not offloaded
_STARTED = 2 * 256 * 2048  # initial elements of each of the two buffers that inputs return to
_PINNED, _PINNED_NUMBERS = 200, 128 * 1024  # preallocated buffers on the host, and elements in each
_ROPE_AT_FIRST, _ROPE_STEP = 4 * 8192, 8192  # positions in the table of cosines and sines


def parameters(c: Any) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of `named_parameters()`: transformers' own."""
    return llama.parameters(c)


def buffers(c: Any, item_bytes: int) -> list[tuple[str, int]]:
    """Cosines and sines for as many positions as the model supports; buffers for one dequantized weight and its scales;
    and two buffers for block inputs that come back from the host."""
    positions = c.max_position_embeddings or c.block_size
    rows = min(positions, _ROPE_AT_FIRST)
    rows = -(-positions // _ROPE_STEP) * _ROPE_STEP if positions > rows else rows
    found = [(f"rope.{name}", rows * head_dim(c) * item_bytes) for name in ("cos", "sin")]
    linears = [shape for name, shape in parameters(c) if len(shape) == 2 and ".layers." in name]
    if c.quantization not in (None, "off"):
        largest = max(linears, key=numel)
        how = Quantization(c.quantization, bool(c.double_quantization))
        found += [
            ("WEIGHT_BUFFER", numel(largest) * item_bytes),
            ("ABSMAX_BUFFER", unpacked_scales_bytes(how, largest)),
        ]
    if c.checkpoint_layers:
        count = max(_STARTED, _hidden_numbers(c) if is_offloaded(c) else 0)
        found += [(f"GPU_BUFFERS.{index}", count * item_bytes) for index in range(2)]
    return found


def kind_of(buffer: str) -> Kind:
    """The kind of one of the model's buffers."""
    kinds = {"GPU_BUFFERS": Kind.ACTIVATIONS, "WEIGHT_BUFFER": Kind.HALF_WEIGHTS, "ABSMAX_BUFFER": Kind.HALF_WEIGHTS}
    return kinds.get(buffer.partition(".")[0], Kind.PARAMETERS)


def _hidden_numbers(c: Any) -> int:
    return int(c.batch_size * c.block_size * c.n_embd)


def is_offloaded(c: Any) -> bool:
    """Whether inputs of checkpointed blocks are offloaded to the host."""
    return bool(c.checkpoint_layers) and _hidden_numbers(c) > _FEW


def is_on_host(c: Any, name: str) -> bool:
    """Whether a parameter is only on the host: the original of a module that is trained whole, as a copy."""
    return TRAINED_COPY not in name and is_saved(c, name.rpartition(".")[0])


def host_bytes(c: Any) -> int:
    """Bytes of host memory that training takes: originals of modules trained whole, and block inputs."""
    item = ITEM_BYTES[c.base_dtype or c.dtype or "bfloat16"]
    return pinned_bytes(c) + sum(numel(shape) * item for name, shape in parameters(c) if is_on_host(c, name))


def pinned_bytes(c: Any) -> int:
    """Pinned bytes among these, for block inputs: each buffer is a power of two."""
    if not c.checkpoint_layers:
        return 0
    item = ITEM_BYTES[c.dtype or "bfloat16"]
    started = _PINNED * _PINNED_NUMBERS * item
    if not is_offloaded(c):
        return started
    each = 1 << (_hidden_numbers(c) * item - 1).bit_length()
    return int(max(0, started - c.n_layer * _PINNED_NUMBERS * item) + c.n_layer * each)


@forward
def model(m: Module, ids: Tensor, labels: Tensor) -> tuple[None, Tensor]:
    """CausalLM_fast_forward: the loss alone. In batches without padding the first label of each sequence is masked, in
    a copy."""
    c, tape = m.config, m.tape
    hidden_states = decoder(m / "model", ids)
    head = (m / "model.embed_tokens" if c.tie_weights else m / "lm_head").parameter("weight")
    enter_loss(tape)
    tape.scope, tape.kind = "loss", Kind.LOGITS
    if c.packing != "off":
        labels = tape.made("labels", labels.shape, "int64", (labels,), Kind.INPUTS, kernel=Kernel.INDEX)
    return None, fused_loss(hidden_states, head, labels, _loss_chunk(c, labels.numel))


def _loss_chunk(c: Any, tokens: int) -> int:
    """Tokens in a chunk: get_chunk_size makes one chunk, or a multiple of four, none larger than allowed."""
    most = c.loss_chunk or tokens
    count = 1 if tokens <= most else 4 * -(-tokens // (4 * most))
    return -(-tokens // count)


@forward
def decoder(m: Module, ids: Tensor) -> Tensor:
    """LlamaModel_fast_forward. The last block's input stays on the card."""
    c, tape = m.config, m.tape
    indices: Tensor | None = None
    if c.packing != "off":
        indices = tape.made("position_ids", ids.shape, "int32", (ids,), Kind.INPUTS)
    inputs_embeds = embedding(m / "embed_tokens", ids)
    hidden_states = require_grads(m, inputs_embeds)
    for index in tape.layers:
        tape.block = index
        hidden_states = _run_block(c, tape, m / "layers" / index, hidden_states, indices)
    tape.block = None
    return norm(m / "norm", hidden_states)


def _run_block(c: Any, tape: Tape, m: Module, hidden_states: Tensor, indices: Tensor | None) -> Tensor:
    run = partial(block, m, indices=indices)
    if not c.checkpoint_layers or not tape.grad_enabled:
        return run(hidden_states)
    offloaded = is_offloaded(c) and tape.block != c.n_layer - 1
    return checkpoint_reentrant(tape, run, hidden_states, random=True, offloaded=offloaded)


def kinds(c: Any) -> list[bool]:
    """Whether each block is the last, whose input is not offloaded."""
    return [index == c.n_layer - 1 and is_offloaded(c) for index in range(c.n_layer)]


@forward
def norm(m: Module, hidden_states: Tensor) -> Tensor:
    """Fast_RMS_Layernorm: no gradient of the weight; its input's gradient overwrites its output's."""
    return liger.rms_norm(hidden_states, m.parameter("weight").detach())


@forward
def block(m: Module, hidden_states: Tensor, indices: Tensor | None) -> Tensor:
    """LlamaDecoderLayer_fast_forward."""
    residual = hidden_states
    hidden_states = norm(m / "input_layernorm", hidden_states)
    hidden_states = attention(m / "self_attn", hidden_states, indices)
    hidden_states = add(residual, hidden_states)
    residual = hidden_states
    hidden_states = norm(m / "post_attention_layernorm", hidden_states)
    hidden_states = mlp(m / "mlp", hidden_states)
    return add(residual, hidden_states)


@forward
def mlp(m: Module, x: Tensor) -> Tensor:
    """apply_lora_mlp_swiglu, or transformers' MLP."""
    layers = _patched(m, ("gate_proj", "up_proj", "down_proj"))
    return unsloth_lora.lora_mlp(x, *layers) if layers else llama.mlp(m, x)


def _patched(m: Module, names: Sequence[str]) -> list[Adapted]:
    """These layers of a module if Unsloth's functions compute them: all have adapters, none dropout or a bias."""
    weights, c = m.tape.weights, m.config
    if c.lora_dropout or any(f"{m.name}.{name}.bias" in weights for name in names):
        return []
    adapted = [is_adapted(c, f"{m.name}.{name}", weights[f"{m.name}.{name}.weight"].shape) for name in names]
    return [Adapted(m / name) for name in names] if all(adapted) else []


@forward
def attention(m: Module, x: Tensor, indices: Tensor | None) -> Tensor:
    """LlamaAttention_fast_forward and Qwen3's, which has norms of queries and keys."""
    c, size = m.config, head_dim(m.config)
    names = ("q_proj", "k_proj", "v_proj")
    layers = _patched(m, names)
    q, k, v = unsloth_lora.lora_qkv(x, layers) if layers else [linear(m / name, x) for name in names]
    v = heads(v, size)
    if c.model_type == "qwen3":
        q, k = norm(m / "q_norm", by_head(q, size)), norm(m / "k_norm", by_head(k, size))
        q, k = transpose(q, 1, 2), transpose(k, 1, 2)
    else:
        q, k = heads(q, size), heads(k, size)
    q, k = unsloth_lora.rope(q, k) if indices is None else unsloth_lora.indexed_rope(q, k, indices)
    a = reshape(_run_attention(c, x, q, k, v), *x.shape[:2], c.n_head * size)
    output = _patched(m, ("o_proj",))
    return unsloth_lora.lora_w(a, output[0]) if output else linear(m / "o_proj", a)


def _run_attention(c: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """run_attention: flash-attn's package (flash2) or xformers, for whose backward keys and values are repeated for all
    heads; (batch, tokens, heads, head size)."""
    tape = q.tape
    outer, tape.kind = tape.kind, Kind.ATTENTION
    if c.attention != "flash2" and x.requires_grad:
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    if c.attention in ("flash", "flash2"):
        out = flash_attention_2(transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2), document_length(c))
    else:
        out = _by_documents(c, q, k, v)
    tape.kind = outer
    return out


def _by_documents(c: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The other kernels, applied to each document separately: what they allocate for a block mask differs only by
    padding."""
    (batch, count, tokens, size), length = q.shape, document_length(c) or q.shape[2]
    length = length if tokens % length == 0 else tokens

    def apart(each: Tensor) -> Tensor:
        rows = reshape(transpose(each, 1, 2), batch * tokens // length, length, each.shape[1], size)
        return transpose(rows, 1, 2)

    out = attend(*map(apart, (q, k, v)), kernel=c.attention)
    return reshape(transpose(out, 1, 2), batch, tokens, count, size)


def _repeated(x: Tensor, count: int) -> Tensor:
    """Keys or values repeated for every query head, in token-major order: a copy."""
    batch, own, tokens, size = x.shape
    if own == count:
        return x
    wide = expand(unsqueeze(transpose(x, 1, 2), 3), batch, tokens, own, count // own, size)
    return transpose(reshape(wide, batch, tokens, count, size), 1, 2)
