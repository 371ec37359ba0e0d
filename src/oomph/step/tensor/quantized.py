"""Linear layers whose frozen weight is quantized: before each product the weight is copied into the input's dtype.

bitsandbytes 0.50 (`autograd/_functions.py`, `backends/cuda/ops.py`); GPTQ's and AWQ's layouts of 4 bits in groups of
128. For up to 1536 tokens bitsandbytes may compute forward without the copy; backward always makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import to
from oomph.step.tensor.layout import ITEM_BYTES, Shape, contiguous_strides, numel
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Storage, Tensor

_BLOCK, _SCALES = 64, 256  # weights with one scale; scales with one scale of their own, where they are quantized too
_GROUP = 128  # of GPTQ and AWQ
_CODE_BYTES, _SCALES_CODE_BYTES = 4 * 16, 4 * 256  # float32 values that 4 and 8 bits stand for


class Quantization(NamedTuple):
    """How a weight is stored."""

    kind: str  # nf4, fp4, int8, gptq or awq
    double: bool = False  # the scales of 4-bit blocks are quantized too


def stored(how: Quantization, shape: Shape) -> list[tuple[str, int]]:
    """The buffers that hold a weight of shape (outputs, inputs): names and bytes."""
    outputs, inputs = shape
    count = numel(shape)
    if how.kind == "int8":
        return [("CB", count), ("SCB", 4 * outputs)]
    if how.kind in ("gptq", "awq"):
        groups = -(-inputs // _GROUP)
        found = [("qweight", -(-count // 2)), ("qzeros", -(-groups * outputs // 2)), ("scales", 2 * groups * outputs)]
        return [*found, ("g_idx", 4 * inputs)] if how.kind == "gptq" else found
    blocks = -(-count // _BLOCK)
    found = [("packed", -(-count // 2)), ("code", _CODE_BYTES)]
    if not how.double:
        return [*found, ("absmax", 4 * blocks)]
    scales = [("absmax", blocks), ("offset", 4), ("nested_absmax", 4 * -(-blocks // _SCALES))]
    return [*found, *scales, ("nested_code", _SCALES_CODE_BYTES)]


@forward
def linear(module: Module, x: Tensor) -> Tensor:
    """Linear4bit or Linear8bitLt: computed in the dtype that the weight stands for, returned in the input's."""
    weight = module.tape.weights[f"{module.name}.weight"]
    assert weight.quantization is not None
    bias, dtype = module.maybe("bias"), x.dtype
    x = to(x, weight.dtype)
    bias = to(bias, weight.dtype) if bias is not None else None
    out = _product(x, weight.shape, weight.quantization)
    return to(out, dtype)


def _product(x: Tensor, shape: Shape, how: Quantization) -> Tensor:
    tape, (outputs, inputs) = x.tape, shape

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        _copy = _dequantized(tape, shape, grad.dtype, how).pop()  # its scales are gone by now
        storage = tape.product("dx", 1, grad.numel // outputs, inputs, outputs, grad.dtype)
        return [tape.tensor(storage, x_shape, grad.dtype)]

    x_shape = x.shape
    node = tape.node(backward, x)
    rows = x.numel // inputs
    if how.kind == "int8":
        if node:
            node.saved.append(x.detach())  # held by the function itself, so that checkpointing does not let it go
        storage = _int8_product(x, rows, outputs, inputs)
    else:
        _copies = _dequantized(tape, shape, x.dtype, how, passes=2)
        storage = tape.product("", 1, rows, outputs, inputs, x.dtype)
    out = tape.tensor(storage, (*x_shape[:-1], outputs), x.dtype)
    return node.attach(out) if node else out


def _dequantized(tape: Tape, shape: Shape, dtype: str, how: Quantization, passes: int = 1) -> list[Tensor]:
    """The weight in `dtype`, last; before it its scales, where they are quantized themselves, after so many passes."""
    packed = sum(size for _, size in stored(how, shape))
    made: list[Tensor] = []
    if how.kind in ("nf4", "fp4") and how.double:
        blocks = (-(-numel(shape) // _BLOCK),)
        made = [tape.made("scales", blocks, "float32", kind=Kind.HALF_WEIGHTS) for _ in range(passes)]
    moved = packed + numel(shape) * ITEM_BYTES[dtype]
    return [*made, tape.made("dequantize", shape, dtype, kind=Kind.HALF_WEIGHTS, moved=moved)]


def _int8_product(x: Tensor, rows: int, outputs: int, inputs: int) -> Storage | None:
    """int8_vectorwise_quant, a product in int8 with a result in int32, and that in x's dtype. Outliers, which depend on
    the data, are not counted."""
    tape = x.tape
    half = tape.cast(x, "float16") if x.dtype != "float16" else x
    quantized = tape.made("quantize", (rows, inputs), "int8", (half,))
    scales = tape.made("scales", (rows,), "float32")
    del half
    shape, flops = (1, rows, outputs, inputs), 2 * rows * outputs * inputs
    moved = 4 * rows * outputs + rows * inputs + outputs * inputs
    made = tape.launch(
        "", (("int32", 4 * rows * outputs),), kernel=Kernel.GEMM, moved=moved, flops=flops, shape=shape, dtype="int8"
    )
    whole = tape.tensor(made.pop(), (rows, outputs), "int32", contiguous_strides((rows, outputs)))
    out = tape.made("dequantize", (rows, outputs), "float16", (whole,))
    del whole, quantized, scales
    return (tape.cast(out, x.dtype) if x.dtype != "float16" else out).storage
