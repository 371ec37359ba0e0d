"""Linear layers with a quantized frozen weight: before each product the weight is dequantized to the input's dtype.

bitsandbytes 0.50 (`autograd/_functions.py`, `backends/cuda/ops.py`); GPTQ's and AWQ's 4-bit layouts in groups of
128. For up to 1536 tokens bitsandbytes may compute forward without the copy; backward always makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import add
from oomph.step.tensor.layout import ITEM_BYTES, Shape, contiguous_strides, numel
from oomph.step.tensor.libraries import torchao
from oomph.step.tensor.products import product
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Storage, Tensor
from oomph.step.tensor.views import reshape

_BLOCK, _SCALES = 64, 256  # weights per scale; scales per second-level scale, if they are quantized too
INPUT_LET_GO_SINCE = (0, 43, 2)  # the bitsandbytes release that stopped holding the input (its #1270)
LOOKED_UP_SINCE = (0, 48)  # 4 bits index a table; before, a tree of 15 branches (its #1746)
# Per weight in that tree: 15 selections by 4 tests; unpacking, scaling, rounding and a trip through shared memory. On
# an A100 and an H100 the table was measured 1.36 to 2.07 times as fast (its #1747).
_TREE_INSTRUCTIONS = 15 + 4 + 9
# Per element of a kernel that broadcasts, by its dimensions and operands (ATen/cuda/detail/OffsetCalculator.cuh and
# IntegerDivider.cuh): in each dimension a division by multiplication (5), and a multiplication per operand; then
# addresses (2 each), and the loop (2). A cast on the way is a switch over dtypes (c10/core/DynamicCast.h): 6 per input.
_BROADCAST_INSTRUCTIONS = 3 * (5 + 3) + 2 * 3 + 2
_CASTING_INSTRUCTIONS = _BROADCAST_INSTRUCTIONS + 2 * 6
_GROUP = 128  # weights per group in GPTQ and AWQ
_CODE_BYTES, _SCALES_CODE_BYTES = 4 * 16, 4 * 256  # the float32 values of 4-bit and 8-bit codes


class Quantization(NamedTuple):
    """How a weight is stored."""

    kind: str  # nf4, fp4, int8, gptq or awq; or torchao's own nf4
    double: bool = False  # the scales of 4-bit blocks are quantized too
    scales: str = "float32"  # dtype of the scales that are not quantized
    keeps_input: bool = False  # a 4-bit product holds its input, as in bitsandbytes before 0.43.2
    by_tree: bool = False  # 4 bits are decoded by a tree of branches, as in bitsandbytes before 0.48


def stored(how: Quantization, shape: Shape) -> list[tuple[str, int]]:
    """The buffers that hold a weight of shape (outputs, inputs): names and bytes."""
    outputs, inputs = shape
    count = numel(shape)
    if how.kind == "int8":
        return [("CB", count), ("SCB", 4 * outputs)]
    if how.kind == torchao.KIND:
        return torchao.stored(count, how.scales)
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


def of_bitsandbytes(c: Any) -> Quantization:
    """How a config's bitsandbytes stores and multiplies a weight."""
    version = tuple(int(part) for part in c.bitsandbytes_version.split("."))
    keeps, tree = version < INPUT_LET_GO_SINCE, version < LOOKED_UP_SINCE
    return Quantization(c.quantization, bool(c.double_quantization), keeps_input=keeps, by_tree=tree)


def unpacked_scales_bytes(how: Quantization, shape: Shape) -> int:
    """Bytes of a 4-bit weight's scales in float32, if they are quantized and have to be unpacked; else 0."""
    return 4 * -(-numel(shape) // _BLOCK) if how.double else 0


@forward
def linear(module: Module, x: Tensor) -> Tensor:
    """Linear4bit or Linear8bitLt: computed in the dtype that the weight represents, returned in the input's."""
    weight = module.tape.weights[f"{module.name}.weight"]
    assert weight.quantization is not None
    bias, dtype = module.maybe("bias"), x.dtype
    x = to(x, weight.dtype)
    bias = to(bias, weight.dtype) if bias is not None else None
    if weight.quantization.kind == "gptq":
        return _unpacked_product(x, weight.shape, bias)
    out = _product(x, weight.shape, weight.quantization)
    return to(out, dtype)


def _unpacked_product(x: Tensor, shape: Shape, bias: Tensor | None) -> Tensor:
    """AutoGPTQ's QuantLinear for many tokens: the weight by torch's own operations, then a product that saves it."""
    tape = x.tape
    zeros = _unpacked(tape, "zeros", (numel(shape) // _GROUP,))
    integers = _unpacked(tape, "weights", shape)
    moved = 2 * integers.bytes + zeros.bytes
    shifted = _computed(tape, "sub", shape, "int8", moved, _BROADCAST_INSTRUCTIONS)
    moved = shifted.bytes + numel(shape) * ITEM_BYTES[x.dtype]
    weight = _computed(tape, "dequantize", shape, x.dtype, moved, _CASTING_INSTRUCTIONS)
    del integers, shifted
    out = product(reshape(x, x.numel // x.shape[-1], x.shape[-1]), weight)
    out = reshape(out, *x.shape[:-1], shape[0])
    return add(out, bias) if bias is not None else out


def _unpacked(tape: Tape, name: str, shape: Shape) -> Tensor:
    """Packed 4-bit integers as one byte each: shifted in int32, cast, masked."""
    kind, count = Kind.HALF_WEIGHTS, numel(shape)
    wide = _computed(tape, name, shape, "int32", count // 2 + 4 * count, _BROADCAST_INSTRUCTIONS)
    narrow = tape.made(f"{name}.to", shape, "int8", (wide,), kind=kind)
    del wide
    return tape.made(f"{name}.and", shape, "int8", (narrow,), kind=kind)


def _computed(tape: Tape, name: str, shape: Shape, dtype: str, moved: int, instructions: int) -> Tensor:
    """A result that costs `instructions` per element, besides the bytes moved."""
    count = numel(shape)
    results, work = (("", count * ITEM_BYTES[dtype]),), (count, instructions)
    made = tape.launch(name, results, Kind.HALF_WEIGHTS, kernel=Kernel.INTEGER, shape=work, moved=moved)
    return tape.tensor(made.pop(), shape, dtype)


def _product(x: Tensor, shape: Shape, how: Quantization) -> Tensor:
    tape, (outputs, inputs) = x.tape, shape

    def backward(node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        tape.kept_inputs += [each.storage for each in node.unpack() if isinstance(each, Tensor)]
        _copy = dequantized(tape, shape, grad.dtype, how).pop()  # its scales are freed already
        storage = tape.product("dx", 1, grad.numel // outputs, inputs, outputs, grad.dtype)
        return [tape.tensor(storage, x_shape, grad.dtype)]

    x_shape = x.shape
    node = tape.node(backward, x)
    rows = x.numel // inputs
    if node and (how.kind == "int8" or how.keeps_input):
        node.saved.append(x.detach())  # an attribute of the function: neither checkpointing nor backward frees it
    if how.kind == "int8":
        storage = _int8_product(x, rows, outputs, inputs)
    else:
        _copies = dequantized(tape, shape, x.dtype, how, passes=2)
        storage = tape.product("", 1, rows, outputs, inputs, x.dtype)
    out = tape.tensor(storage, (*x_shape[:-1], outputs), x.dtype)
    return node.attach(out) if node else out


def dequantized(tape: Tape, shape: Shape, dtype: str, how: Quantization, passes: int = 1) -> list[Tensor]:
    """The weight in `dtype`, last; before it, if the scales are quantized, their float32 copies, one per pass."""
    packed = sum(size for _, size in stored(how, shape))
    made: list[Tensor] = []
    if how.kind in ("nf4", "fp4") and how.double:
        blocks = (unpacked_scales_bytes(how, shape) // 4,)
        made = [tape.made("scales", blocks, "float32", kind=Kind.HALF_WEIGHTS) for _ in range(passes)]
    moved = packed + numel(shape) * ITEM_BYTES[dtype]
    if how.by_tree and how.kind in ("nf4", "fp4"):
        return [*made, _computed(tape, "dequantize", shape, dtype, moved, _TREE_INSTRUCTIONS)]
    return [*made, tape.made("dequantize", shape, dtype, kind=Kind.HALF_WEIGHTS, moved=moved)]


def _int8_product(x: Tensor, rows: int, outputs: int, inputs: int) -> Storage | None:
    """int8_vectorwise_quant, an int8 product with an int32 result, and that in x's dtype. Outliers, which depend on
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
