"""fms-acceleration's fused LoRA over a 4-bit base (plugins/fused-ops-and-kernels, fused_ops/unsloth_lora/bnb).

Unsloth's functions of 2024, with dropout: a linear layer and its adapters in one autograd function, which saves its
input, before and after dropout. The adapters' output is a separate tensor before it is added, and so is the
input's mask in backward. Queries, keys and values are one function, which overwrites its input with the input's
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.elementwise import dropout
from oomph.step.tensor.layout import contiguous_strides
from oomph.step.tensor.quantized import dequantized
from oomph.step.tensor.tape import Module
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import as_shape, swapped


class FusedLinear:
    """A linear layer with adapters, as get_lora_parameters returns it."""

    def __init__(self, m: Module) -> None:
        weight = m.tape.weights[f"{m.name}.weight"]
        assert weight.quantization is not None
        self.tape, self.shape, self.quantization = m.tape, weight.shape, weight.quantization
        self.bias, self.dropout = m.maybe("bias"), m.config.lora_dropout
        self.a, self.b = (m / "lora_A").parameter("weight"), (m / "lora_B").parameter("weight")

    def copy(self, dtype: str) -> Tensor:
        """fast_dequantize: the weight; its scales are freed once it exists."""
        return dequantized(self.tape, self.shape, dtype, self.quantization).pop()

    def output(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """matmul_lora of (batch, tokens, inputs); and the input after dropout."""
        tape, (outputs, inputs), rows, dtype = self.tape, self.shape, _rows(x), x.dtype
        copy = self.copy(dtype)
        out = tape.product("", 1, rows, outputs, inputs, dtype)
        del copy
        dropped = dropout(x.detach(), self.dropout)
        more = self._through(rows, (self.a, inputs), (self.b, outputs), dtype)
        tape.note("add", moved=3 * more.bytes)
        del more
        if self.bias is not None:
            tape.note("bias", moved=2 * rows * outputs * 2)
        shape = (*x.shape[:-1], outputs)
        return tape.tensor(out, shape, dtype, contiguous_strides(shape)), dropped

    def _through(self, rows: int, first: tuple[Tensor, int], second: tuple[Tensor, int], dtype: str) -> Tensor:
        """(X @ A.to(dtype)) @ (s * B.to(dtype)), each adapter given with its wide dimension; swapped in backward."""
        tape, rank = self.tape, self.a.shape[0]
        copy = _cast(first[0], dtype)
        thin = tape.product("lora_A", 1, rows, rank, first[1], dtype)
        del copy
        copy = _cast(second[0], dtype)
        scaled = tape.made("mul", second[0].shape, dtype, (second[0],), Kind.HALF_WEIGHTS)
        del copy
        out = tape.tensor(tape.product("lora_B", 1, rows, second[1], rank, dtype), (rows, second[1]), dtype)
        del thin, scaled
        return out

    def adapter_gradients(self, rows: int, dtype: str) -> list[Tensor]:
        """Both adapters' gradients, each of two thin products; autocast's copy of an adapter is freed after one."""
        tape, (outputs, inputs), rank = self.tape, self.shape, self.a.shape[0]
        wide = _cast(self.b, dtype)
        thin = tape.product("lora_B.dx", 1, rows, rank, outputs, dtype)
        del wide
        d_a = tape.product("lora_A.dw", 1, inputs, rank, rows, dtype, Kind.GRADIENTS)
        del thin
        wide = _cast(self.a, dtype)
        thin = tape.product("lora_A", 1, rank, rows, inputs, dtype)
        del wide
        d_b = tape.product("lora_B.dw", 1, rank, outputs, rows, dtype, Kind.GRADIENTS)
        del thin
        return [
            swapped(tape.tensor(d_a, (inputs, rank), dtype), 0, 1),
            swapped(tape.tensor(d_b, (rank, outputs), dtype), 0, 1),
        ]

    def add_input_gradient(self, rows: int, dtype: str) -> None:
        """Add the gradient through the adapters, masked where the input is 0, to the input's gradient."""
        tape, (outputs, inputs) = self.tape, self.shape
        kept = tape.made("ne", (rows, inputs), "bool")
        through = self._through(rows, (self.b, outputs), (self.a, inputs), dtype)
        masked = tape.made("mul", through.shape, dtype, (kept, through))
        del kept, through
        tape.note("dx.add", moved=3 * masked.bytes)


def qkv(layers: Sequence[FusedLinear], x: Tensor) -> list[Tensor]:
    """LoRA_QKV: queries, keys and values of one input."""
    tape, dtype, rows = x.tape, x.dtype, _rows(x)

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        own, *_kept = node.unpack()
        assert isinstance(own, Tensor)
        _rows_of = [as_shape(each, (rows, each.shape[-1])) for each in grads if each is not None]
        grads[:] = [None] * len(grads)  # freed when this returns
        made = [each.adapter_gradients(rows, dtype) for each in layers]
        for index, layer in enumerate(layers):
            outputs, inputs = layer.shape
            copy = layer.copy(dtype)
            part = tape.product("dx", 1, rows, inputs, outputs, dtype, into=not index)  # the first overwrites the input
            if part is not None:
                tape.note("dx.add", moved=3 * part.bytes)
            del copy, part
            layer.add_input_gradient(rows, dtype)
        return [own.as_strided(own.shape, own.strides), *(grad for pair in made for grad in pair)]

    node = tape.node(backward, x, *(each for layer in layers for each in (layer.a, layer.b)))
    made = [layer.output(x) for layer in layers]
    if node:
        node.save(x, *(dropped for _, dropped in made))
        for index, (out, _) in enumerate(made):
            node.attach(out, index)
    return [out for out, _ in made]


def one(layer: FusedLinear, x: Tensor) -> Tensor:
    """LoRA_W: one layer alone."""
    tape, dtype, rows, (outputs, inputs) = x.tape, x.dtype, _rows(x), layer.shape

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        own, *_kept = node.unpack()
        assert grads[0] is not None and isinstance(own, Tensor)
        _rows_of = as_shape(grads[0], (rows, outputs))
        grads[0] = None
        made = layer.adapter_gradients(rows, dtype)
        copy = layer.copy(dtype)
        dx = tape.product("dx", 1, rows, inputs, outputs, dtype)
        del copy
        layer.add_input_gradient(rows, dtype)
        return [tape.tensor(dx, (rows, inputs), dtype).as_strided(own.shape, contiguous_strides(own.shape)), *made]

    node = tape.node(backward, x, layer.a, layer.b)
    out, dropped = layer.output(x)
    if node:
        node.save(x, dropped)
    return node.attach(out) if node else out


def _rows(x: Tensor) -> int:
    return x.numel // x.shape[-1]


def _cast(adapter: Tensor, dtype: str) -> Tensor | None:
    return adapter.tape.cast(adapter, dtype, Kind.HALF_WEIGHTS).detach() if adapter.dtype != dtype else None
