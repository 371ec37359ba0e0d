"""peft's adapters (0.21) on a transformers model: small trained matrices beside linear layers that are frozen.

A layer is adapted where the model has adapters of its name. The base is computed as without them; its input, in the
adapters' dtype, goes through both adapters and is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from oomph.step.ops import Kind
from oomph.step.tensor import products, quantized
from oomph.step.tensor.autograd import InputLeaf
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import add, clone, dropout, scale
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.quantized import Quantization
from oomph.step.tensor.tape import Module, Weight, forward
from oomph.step.tensor.tensor import Tensor

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
ADAPTER = ".lora_"  # in the name of an adapter's parameter, and in no other
# Matrices that are not a linear layer's, by the names of their modules: tables, the router of experts; and heads, which
# peft leaves alone unless they are named.
_TABLES = ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "gate")
_HEADS = ("lm_head", "embed_out")
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # transformers' Conv1D: its weight is (inputs, outputs)


def with_adapters(c: Any, parameters: Iterable[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    """A model's parameters with an adapted layer's adapters after its own, as `named_parameters()` has them."""
    found = list(parameters)
    for index, (name, shape) in enumerate(found):
        yield name, shape
        module = name.rpartition(".")[0]
        last = index + 1 == len(found) or found[index + 1][0].rpartition(".")[0] != module
        matrix = next((s for n, s in found[max(0, index - 1) : index + 1] if n == f"{module}.weight"), ())
        if last and is_adapted(c, module, matrix):
            outputs, inputs = reversed(matrix) if _is_transposed(module) else matrix
            yield f"{module}.lora_A.weight", (c.lora_rank, inputs)
            yield f"{module}.lora_B.weight", (outputs, c.lora_rank)


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
    result = add(result, _through_adapters(m, x))
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
