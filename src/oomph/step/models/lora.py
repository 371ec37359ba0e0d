"""peft's adapters (0.21) on a transformers model: small trained matrices beside linear layers that are frozen.

A layer is adapted where the model has adapters of its name. The base is computed as without them; its input, in the
adapters' dtype, goes through both adapters and is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from oomph.step.ops import Kernel, Kind
from oomph.step.tensor import products, quantized
from oomph.step.tensor.autograd import InputLeaf
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import add, clone, dropout, mul, scale, shift, sub
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.quantized import Quantization
from oomph.step.tensor.tape import Module, Weight, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import reshape, transpose

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
ADAPTER = ".lora_"  # in the name of an adapter's parameter, and in no other
# Matrices that are not a linear layer's, by the names of their modules: tables, the router of experts; and heads, which
# peft leaves alone unless they are named.
_TABLES = ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "gate")
_HEADS = ("lm_head", "embed_out")
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # transformers' Conv1D: its weight is (inputs, outputs)


def with_adapters(c: Any, parameters: Iterable[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    """A model's parameters with an adapted layer's adapters after its own, as `named_parameters()` has them."""
    for module, group in groupby(parameters, key=lambda each: each[0].rpartition(".")[0]):
        own = list(group)
        yield from own
        matrix = own[0][1]
        if is_adapted(c, module, matrix):
            outputs, inputs = reversed(matrix) if _is_transposed(module) else matrix
            yield f"{module}.lora_A.weight", (c.lora_rank, inputs)
            yield f"{module}.lora_B.weight", (outputs, c.lora_rank)
            if c.method == "dora":
                yield f"{module}.lora_magnitude_vector.weight", (outputs,)


def unknown_targets(c: Any, parameters: Iterable[tuple[str, Shape]]) -> tuple[list[str], list[str]]:
    """The names in `lora_targets` that no layer has, and the last names of all layers that can have adapters."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name, shape in parameters if len(shape) == 2)
    layers = [module for module in modules if module.rpartition(".")[2] not in _TABLES]
    wanted = [] if c.lora_targets == ALL_LINEAR else targets(c)
    known = list(dict.fromkeys(module.rpartition(".")[2] for module in layers))
    return [each for each in wanted if not any(f".{module}".endswith(f".{each}") for module in layers)], known


def weight(c: Any, name: str, shape: Shape, adapter_dtype: str, base_dtype: str) -> Weight:
    """A parameter as the program keeps it: adapters are trained, the rest is frozen.

    Of a quantized base all linear layers but the head are quantized. What is left may be brought to float32.
    """
    if ADAPTER in name:
        return Weight(shape, adapter_dtype)
    if c.quantization not in (None, "off") and name.endswith(".weight") and _is_linear(name.rpartition(".")[0], shape):
        return Weight(shape, c.dtype, False, Quantization(c.quantization, bool(c.double_quantization)))
    is_norm = "norm" in name or ".ln_" in name
    upcast = c.upcast == "all" or (c.upcast == "norms" and is_norm)
    return Weight(shape, "float32" if upcast else base_dtype, False)


def _is_linear(module: str, shape: Shape) -> bool:
    """Whether a module with a weight of that shape is a linear layer, and not the head."""
    return len(shape) == 2 and module.rpartition(".")[2] not in (*_TABLES, *_HEADS)


def is_adapted(c: Any, module: str, shape: Shape) -> bool:
    """Whether a module with a weight of that shape gets adapters: its name ends as one of `lora_targets` does."""
    if c.lora_targets == ALL_LINEAR:
        return _is_linear(module, shape)
    matrix = len(shape) == 2 and module.rpartition(".")[2] not in _TABLES
    return matrix and any(module == target or module.endswith(f".{target}") for target in targets(c))


def targets(c: Any) -> list[str]:
    """The names in `lora_targets`."""
    return [name for part in c.lora_targets.split(",") if (name := part.strip())]


def _is_transposed(module: str) -> bool:
    return module.rpartition(".")[2] in _TRANSPOSED


def require_grads(m: Module, inputs_embeds: Tensor) -> Tensor:
    """The embedded tokens. Where blocks are checkpointed, `enable_input_require_grads` makes them need a gradient: the
    older kind of checkpointing would not run backward without."""
    if m.config.method != "full" and m.config.checkpoint_layers and m.tape.grad_enabled:
        inputs_embeds.edge = (InputLeaf(inputs_embeds), 0)
    return inputs_embeds


@forward
def linear(m: Module, x: Tensor, weight: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """nn.Linear, or peft's lora.Linear where there are adapters."""
    return _adapted(m, x, partial(products.linear, weight=weight, kind=kind))


@forward
def conv1d(m: Module, x: Tensor) -> Tensor:
    """transformers' Conv1D, or peft's lora.Linear around it."""
    return _adapted(m, x, products.conv1d)


def _adapted(m: Module, x: Tensor, base_layer: Callable[[Module, Tensor], Tensor]) -> Tensor:
    """base_layer(x) + lora_B(lora_A(dropout(x))) * scaling"""
    weights = m.tape.weights
    base, adapter = weights.get(f"{m.name}.weight"), weights.get(f"{m.name}.lora_A.weight")
    if base is not None and base.quantization is not None:
        return _beside_quantized(m, x, base.quantization.kind, adapter)
    result = base_layer(m, x)
    if adapter is None:
        return result
    dtype = result.dtype
    x = to(x, adapter.dtype)
    result = _dora(m, x, result) if m.config.method == "dora" else add(result, _through_adapters(m, x))
    return to(result, dtype)


def _beside_quantized(m: Module, x: Tensor, kind: str, adapter: Weight | None) -> Tensor:
    """peft's Linear4bit and Linear8bitLt: under autocast they leave it to autocast to cast the input."""
    result = quantized.linear(m, x)
    if adapter is None:
        return result
    if kind in ("nf4", "fp4"):
        result = clone(result)
    if m.tape.autocast is None:
        x = to(x, adapter.dtype)
    output = _through_adapters(m, x)
    if m.tape.autocast is None:
        output = to(output, result.dtype)
    return add(result, output)


def _through_adapters(m: Module, x: Tensor) -> Tensor:
    return scale(products.linear(m / "lora_B", products.linear(m / "lora_A", dropout(x, m.config.lora_dropout))))


def _dora(m: Module, x: Tensor, result: Tensor) -> Tensor:
    """DoraLinearVariant.forward: with dropout the base is computed again, of what is left of its input."""
    rate = m.config.lora_dropout if m.tape.training else 0.0
    base_result = None if rate else result
    x = dropout(x, rate)
    return add(result, _with_magnitude(m, x, base_result))


@forward
def _with_magnitude(m: Module, x: Tensor, base_result: Tensor | None) -> Tensor:
    """DoraLinearLayer.forward: what is to be added for weights of the magnitudes that are learned."""
    lora_weight = to(_lora_weight(m), x.dtype)
    weight = to(m.parameter("weight"), x.dtype)
    weight_norm = _weight_norm(weight, lora_weight.detach())
    magnitude = m.parameter("lora_magnitude_vector.weight")
    mag_norm_scale = reshape(mul(magnitude, weight_norm), 1, magnitude.shape[0])  # divided by it
    lora_result = products.linear(m / "lora_B", products.linear(m / "lora_A", x))
    if base_result is None:
        base_result = products.linear(m / "base", x, weight)  # without its bias
    elif (bias := m.maybe("bias")) is not None:
        base_result = sub(base_result, bias)
    return add(mul(shift(mag_norm_scale), base_result), scale(mul(mag_norm_scale, lora_result)))


def _lora_weight(m: Module) -> Tensor:
    """The adapters' product, as what they make of a unit matrix."""
    adapter = m.tape.weights[f"{m.name}.lora_A.weight"]
    inputs = adapter.shape[1]
    x_eye = m.tape.made("eye", (inputs, inputs), adapter.dtype)
    lora_weight = products.linear(m / "lora_B", products.linear(m / "lora_A", x_eye))
    return transpose(lora_weight, 0, 1)


def _weight_norm(weight: Tensor, lora_weight: Tensor) -> Tensor:
    """The norms of the rows of both together."""
    weight = add(weight, scale(lora_weight))
    return weight.tape.made("norm", weight.shape[:1], weight.dtype, (weight,), kernel=Kernel.REDUCTION)
