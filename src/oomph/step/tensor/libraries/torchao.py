"""torchao's NF4Tensor (0.18), torchtune's 4-bit base, and the product with it.

Blocks of 64 weights share an 8-bit scale; 256 scales share one of their own. Eager PyTorch dequantizes a weight with
plain operations, on indices of 8 bytes: while one linear layer runs, that needs 14 bytes for each of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor.autograd import Gradients, Node
from oomph.step.tensor.layout import ITEM_BYTES, Shape, numel
from oomph.step.tensor.tape import Module, Tape, forward
from oomph.step.tensor.tensor import Tensor

KIND = "nf4-torchao"
_BLOCK, _SCALES = 64, 256


def stored(count: int, dtype: str) -> list[tuple[str, int]]:
    """The buffers that hold `count` weights: names and bytes."""
    blocks, item = count // _BLOCK, ITEM_BYTES[dtype]
    found = [("quantized_data", count // 2), ("quantized_scalers", blocks)]
    return [*found, ("quantization_factor", item * (blocks // _SCALES)), ("scaler_mean", item), ("nf4", 16 * item)]


@forward
def linear(module: Module, x: Tensor) -> Tensor:
    """linear_nf4: saves only the quantized weight, which is dequantized again in backward."""
    tape, weight = x.tape, module.tape.weights[f"{module.name}.weight"]
    shape, (outputs, inputs) = weight.shape, weight.shape

    def backward(_node: Node, grads: Gradients) -> Sequence[Tensor | None]:
        grad = grads[0]
        assert grad is not None
        _copy = _original_weight(tape, shape, weight.dtype)
        storage = tape.product("dx", 1, grad.numel // outputs, inputs, outputs, grad.dtype)
        return [tape.tensor(storage, x_shape, grad.dtype)]

    x_shape = x.shape
    node = tape.node(backward, x)
    _copy = _original_weight(tape, shape, weight.dtype)
    storage = tape.product("", 1, x.numel // inputs, outputs, inputs, x.dtype)
    out = tape.tensor(storage, (*x_shape[:-1], outputs), x.dtype)
    return node.attach(out) if node else out


def _original_weight(tape: Tape, shape: Shape, dtype: str) -> Tensor:
    """NF4Tensor.get_original_weight: its variables live until it returns."""
    half, blocks = (numel(shape) // 2,), (numel(shape) // _BLOCK,)

    def made(name: str, shape: Shape, dtype: str, *reads: Tensor) -> Tensor:
        return tape.made(name, shape, dtype, reads, Kind.HALF_WEIGHTS)

    def elements(shifted: Tensor) -> Tensor:
        return made("to_long", half, "int64", shifted)

    first_elements = elements(made("shift", half, "uint8"))
    second_elements = elements(made("and", half, "uint8"))
    dequantized = [
        tape.made("index", half, dtype, (each,), Kind.HALF_WEIGHTS, kernel=Kernel.INDEX)
        for each in (first_elements, second_elements)
    ]
    scalers = made("scalers", blocks, dtype)
    scalers = made("add_mean", blocks, dtype, scalers)
    scaled = []
    for each in dequantized:
        repeated = made("flatten", half, dtype, scalers)
        scaled.append(made("mul", half, dtype, each, repeated))
        del repeated
    return made("stack", shape, dtype, *scaled)
