"""Unsloth's kernels (2026.8.19, kernels/): adapters and their base in one autograd function, rotary positions in place.

A function saves its input and, in an MLP, the inputs of the activation; the adapters' products are recomputed. The
input's gradient overwrites the input. A quantized weight is dequantized into one buffer shared by all layers; the
weight that backward needs for its input's gradient, into memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import ITEM_BYTES, contiguous_strides, dense_strides_like, numel
from oomph.step.tensor.quantized import stored, unpacked_scales_bytes
from oomph.step.tensor.tape import Module
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import contiguous, swapped


class Adapted:
    """A linear layer with adapters, as `get_lora_parameters` returns it."""

    def __init__(self, m: Module) -> None:
        self.tape, self.name = m.tape, m.name
        weight = m.tape.weights[f"{m.name}.weight"]
        self.shape, self.quantization = weight.shape, weight.quantization
        self.a, self.b = (m / "lora_A").parameter("weight"), (m / "lora_B").parameter("weight")

    def product(self, x: Tensor, dtype: str, adapters: Sequence[Tensor] | None = None) -> Tensor:
        """matmul_lora: x times the weight, with the adapters' output added in place.

        `adapters`: in backward, with both already in `dtype`, x is a gradient and the weight is transposed.
        """
        tape, (outputs, inputs) = self.tape, self.shape
        if adapters is not None:
            inputs, outputs = outputs, inputs
        rows, rank = x.numel // inputs, self.a.shape[0]
        if self.quantization is not None:
            tape.note("dequantize", moved=self._copied_bytes(dtype))
        out = tape.product("", 1, rows, outputs, inputs, dtype)
        first = self._cast(self.a, dtype) if adapters is None else None
        through = tape.product("lora_A", 1, rows, rank, inputs, dtype)
        del first
        second = self._cast(self.b, dtype) if adapters is None else None
        tape.product("lora_B", 1, rows, outputs, rank, dtype, into=True)
        del second, through
        return tape.tensor(out, (rows, outputs), dtype)

    def _copied_bytes(self, dtype: str) -> int:
        assert self.quantization is not None
        return sum(size for _, size in stored(self.quantization, self.shape)) + numel(self.shape) * ITEM_BYTES[dtype]

    def _cast(self, adapter: Tensor, dtype: str) -> Tensor | None:
        return self.tape.cast(adapter.detach(), dtype, Kind.HALF_WEIGHTS) if adapter.dtype != dtype else None

    def casts(self, dtype: str) -> list[Tensor]:
        """Both adapters in the products' dtype, held to the end of backward."""
        return [each for adapter in (self.a, self.b) if (each := self._cast(adapter, dtype)) is not None]

    def gradients(self, dtype: str) -> list[Tensor]:
        """Empty tensors for the adapters' gradients, in the products' dtype."""
        kind = Kind.GRADIENTS
        return [self.tape.made("empty", each.shape, dtype, kind=kind, kernel=Kernel.NONE, moved=0) for each in
                (self.a, self.b)]  # fmt: skip

    def fill(self, rows: int, dtype: str) -> None:
        """Compute the adapters' gradients: each from the input, or the output's gradient, and a thin product."""
        tape, (outputs, inputs), rank = self.tape, self.shape, self.a.shape[0]
        thin = tape.product("lora_B.dx", 1, rows, rank, outputs, dtype)
        tape.product("lora_A.dw", 1, inputs, rank, rows, dtype, into=True)
        del thin
        thin = tape.product("lora_A", 1, rank, rows, inputs, dtype)
        tape.product("lora_B.dw", 1, rank, outputs, rows, dtype, into=True)
        del thin

    def copy(self, dtype: str) -> Tensor | None:
        """The weight dequantized into new memory; its scales are freed afterwards. None if it is not quantized."""
        if self.quantization is None:
            return None
        made = self.tape.made("dequantize", self.shape, dtype, kind=Kind.HALF_WEIGHTS, moved=self._copied_bytes(dtype))
        scales = self.tape.allocate("scales", unpacked_scales_bytes(self.quantization, self.shape), Kind.HALF_WEIGHTS)
        del scales
        return made

    def into_input(self, rows: int, dtype: str) -> None:
        """Write the input's gradient, or a layer's part of it, into existing memory."""
        tape, (outputs, inputs), rank = self.tape, self.shape, self.a.shape[0]
        copy = self.copy(dtype)
        tape.product("dx", 1, rows, inputs, outputs, dtype, into=True)
        del copy
        thin = tape.product("lora_B.dx", 1, rows, rank, outputs, dtype)
        tape.product("lora_A.dx", 1, rows, inputs, rank, dtype, into=True)
        del thin


def lora_mlp(x: Tensor, gate: Adapted, up: Adapted, down: Adapted) -> Tensor:
    """LoRA_MLP with SwiGLU: saves its input, the gate and the gated values."""
    tape, dtype, width = x.tape, x.dtype, x.shape[-1]
    rows = x.numel // width

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        kept = node.unpack()
        grad, own, grads[0] = grads[0], kept[0], None
        assert grad is not None and isinstance(own, Tensor)
        _casts = [each.casts(dtype) for each in (gate, up, down)]
        inner = down.product(grad, dtype, (down.b, down.a))
        tape.note("swiglu.dx", moved=6 * inner.bytes)
        made = {each: each.gradients(dtype) for each in (down, gate, up)}
        for each in (down, up, gate):
            each.fill(rows, dtype)
        for each in (up, gate):
            each.into_input(rows, dtype)
        return [own.as_strided(own.shape, own.strides), *made[gate], *made[up], *made[down]]

    node = tape.node(backward, x, gate.a, gate.b, up.a, up.b, down.a, down.b)
    e, g = gate.product(x, dtype), up.product(x, dtype)
    h = tape.made("swiglu", e.shape, dtype, (e, g))
    out = down.product(h, dtype)
    if node:
        node.save(x, e, g)
    out = out.as_strided((*x.shape[:-1], out.shape[-1]), contiguous_strides((*x.shape[:-1], out.shape[-1])))
    return node.attach(out) if node else out


def lora_qkv(x: Tensor, layers: Sequence[Adapted]) -> list[Tensor]:
    """LoRA_QKV: queries, keys and values of one input, which it saves."""
    tape, dtype, width = x.tape, x.dtype, x.shape[-1]
    rows = x.numel // width

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        (own,) = node.unpack()
        assert isinstance(own, Tensor)
        _copies = [contiguous(each) for each in grads if each is not None]  # of those that cannot be viewed as rows
        grads[:] = [None] * len(grads)
        _casts = [each.casts(dtype) for each in layers]
        made = [each.gradients(dtype) for each in layers]
        for each in layers:
            each.fill(rows, dtype)
        for each in layers:
            each.into_input(rows, dtype)
        return [own.as_strided(own.shape, own.strides), *(grad for pair in made for grad in pair)]

    node = tape.node(backward, x, *(each for layer in layers for each in (layer.a, layer.b)))
    outs = []
    for layer in layers:
        flat = layer.product(x, dtype)
        shape = (*x.shape[:-1], flat.shape[-1])
        outs.append(flat.as_strided(shape, contiguous_strides(shape)))
    if node:
        node.save(x)
        outs = [node.attach(out, index) for index, out in enumerate(outs)]
    return outs


def lora_w(x: Tensor, layer: Adapted) -> Tensor:
    """LoRA_W: one layer. The input's gradient is a new tensor."""
    tape, dtype, (outputs, inputs) = x.tape, x.dtype, layer.shape
    rows, rank = x.numel // inputs, layer.a.shape[0]

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        (own,) = node.unpack()
        assert grads[0] is not None and isinstance(own, Tensor)
        _rows = contiguous(grads[0])
        grads[0] = None
        _casts = layer.casts(dtype)
        made = layer.gradients(dtype)
        layer.fill(rows, dtype)
        copy = layer.copy(dtype)
        dx = tape.product("dx", 1, rows, inputs, outputs, dtype)
        del copy
        thin = tape.product("lora_B.dx", 1, rows, rank, outputs, dtype)
        tape.product("lora_A.dx", 1, rows, inputs, rank, dtype, into=True)
        del thin
        return [tape.tensor(dx, own.shape, dtype), *made]

    node = tape.node(backward, x, layer.a, layer.b)
    flat = layer.product(x, dtype)
    if node:
        node.save(x)
    shape = (*x.shape[:-1], outputs)
    out = flat.as_strided(shape, contiguous_strides(shape))
    return node.attach(out) if node else out


def rope(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Fast_RoPE_Embedding of both: rotated in place, and so are their gradients."""
    return _turned(q), _turned(k)


def _turned(x: Tensor) -> Tensor:
    tape = x.tape

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        assert grads[0] is not None
        grad = contiguous(swapped(grads[0], 1, 2))
        tape.note("rope.dx", moved=2 * grad.bytes)
        return [swapped(grad, 1, 2)]

    node = tape.node(backward, x)
    out = swapped(contiguous(swapped(x.detach(), 1, 2)), 1, 2)
    tape.note("rope", moved=2 * x.bytes)
    return node.attach(out) if node else out


def indexed_rope(q: Tensor, k: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Fast_RoPE_Embedding_QK, with every token's position: on copies, unless queries and keys are contiguous."""
    tape = q.tape

    def copied(x: Tensor) -> Tensor:
        if x.is_contiguous:
            return x
        return tape.made("clone", x.shape, x.dtype, (x,), strides=dense_strides_like(x.shape, x.strides))

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        _indices = node.unpack()
        found = [None if each is None else copied(each) for each in grads]
        tape.note("rope.dx", moved=2 * sum(each.bytes for each in found if each is not None))
        return found

    node = tape.node(backward, q, k)
    outs = [copied(each.detach()) for each in (q, k)]
    tape.note("rope", moved=2 * (q.bytes + k.bytes))
    if node:
        node.saved.append(indices.detach())  # held by the function itself
        outs = [node.attach(out, index) for index, out in enumerate(outs)]
    return outs[0], outs[1]
