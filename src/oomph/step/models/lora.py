"""peft's adapters (0.21) on a transformers model: small trained matrices beside frozen linear layers.

A layer is adapted if the model has adapters of its name. The base is computed as usual; its input, in the
adapters' dtype, goes through both adapters, and the result is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from oomph.config.adapters import is_target, listed
from oomph.config.programs import TRANSFORMERS, experts_are_modules
from oomph.step.ops import Kernel, Kind
from oomph.step.tensor import products, quantized
from oomph.step.tensor.autograd import InputLeaf
from oomph.step.tensor.casts import to
from oomph.step.tensor.elementwise import add, clone, dropout, mul, scale, shift, sub
from oomph.step.tensor.layout import Shape
from oomph.step.tensor.tape import TRAINED_COPY, Module, Weight, forward
from oomph.step.tensor.tensor import Tensor
from oomph.step.tensor.views import reshape, transpose

ALL_LINEAR = "all-linear"  # peft's name for every linear layer except the head
ADAPTER = ".lora_"  # only in the names of adapters' parameters
# Matrices that do not belong to a linear layer, by module name: tables, and a router, unless the experts are
# modules; and heads, which peft skips unless they are named.
_TABLES = ("embed_tokens", "embed_positions", "embed_in", "tok_embeddings", "wte", "wpe")
_ROUTER = "gate"
_HEADS = ("lm_head", "embed_out", "output")
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # transformers' Conv1D: its weight is (inputs, outputs)


def with_adapters(c: Any, parameters: Iterable[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    """A model's parameters, with a layer's adapters after its own, in the order of `named_parameters()`."""
    for module, group in groupby(parameters, key=lambda each: each[0].rpartition(".")[0]):
        own = list(group)
        yield from own
        matrix = own[0][1]
        if is_adapted(c, module, matrix):
            outputs, inputs = reversed(matrix) if _is_transposed(c, module) else matrix
            yield f"{module}.lora_A.weight", (c.lora_rank, inputs)
            yield f"{module}.lora_B.weight", (outputs, c.lora_rank)
            if c.method == "dora":
                yield f"{module}.lora_magnitude_vector.weight", (outputs,)
        if is_saved(c, module):
            for name, shape in own:
                yield f"{module}{TRAINED_COPY}{name.rpartition('.')[2]}", shape


def unknown_targets(c: Any, parameters: Iterable[tuple[str, Shape]]) -> tuple[list[str], list[str]]:
    """The names in `lora_targets` that no layer has, and the last names of all layers that can have adapters."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name, shape in parameters if len(shape) == 2)
    layers = [module for module in modules if not _is_table(c, module)]
    wanted = [] if c.lora_targets == ALL_LINEAR else targets(c)
    known = list(dict.fromkeys(module.rpartition(".")[2] for module in layers))
    return [each for each in wanted if not any(f".{module}".endswith(f".{each}") for module in layers)], known


def is_saved(c: Any, module: str) -> bool:
    """Whether peft trains a copy of a module: its name ends with one of `modules_to_save`."""
    return is_target(module, c.modules_to_save)


def whole_dtype(c: Any, name: str, base_dtype: str) -> str:
    """The dtype of a parameter that is not quantized. peft copies `modules_to_save` after the frozen ones were cast."""
    if TRAINED_COPY in name and c.trainer == "unsloth" and base_dtype == "float16":
        return "float32"  # it never trains these in float16
    is_norm = "norm" in name or ".ln_" in name
    return "float32" if c.upcast == "all" or (c.upcast == "norms" and is_norm) else base_dtype


def weight(c: Any, name: str, shape: Shape, adapter_dtype: str, base_dtype: str) -> Weight:
    """A parameter as the program keeps it: adapters are trained, the rest is frozen.

    In a quantized base all linear layers except the head are quantized. The rest may be cast to float32.
    """
    if ADAPTER in name:
        return Weight(shape, adapter_dtype)
    if TRAINED_COPY in name:
        return Weight(shape, whole_dtype(c, name, base_dtype))
    if (
        c.quantization not in (None, "off")
        and name.endswith(".weight")
        and is_linear(c, name.rpartition(".")[0], shape)
    ):
        return Weight(shape, c.dtype, False, quantized.of_bitsandbytes(c))
    return Weight(shape, whole_dtype(c, name, base_dtype), False)


def is_linear(c: Any, module: str, shape: Shape) -> bool:
    """Whether a module with a weight of that shape is a linear layer, but not the head."""
    return len(shape) == 2 and not _is_table(c, module) and module.rpartition(".")[2] not in _HEADS


def _is_table(c: Any, module: str) -> bool:
    """Whether a module's matrix does not belong to a linear layer."""
    name = module.rpartition(".")[2]
    return name in _TABLES or (name == _ROUTER and not experts_are_modules(c.model_type, c.transformers_version))


def is_adapted(c: Any, module: str, shape: Shape) -> bool:
    """Whether a module with a weight of that shape gets adapters: its name ends with one of `lora_targets`."""
    if c.lora_targets == ALL_LINEAR:
        return is_linear(c, module, shape)
    matrix = len(shape) == 2 and not _is_table(c, module)
    return matrix and is_target(module, c.lora_targets)


def targets(c: Any) -> list[str]:
    """The names in `lora_targets`."""
    return listed(c.lora_targets)


def _is_transposed(c: Any, module: str) -> bool:
    return c.model_type == "gpt2" and c.trainer in TRANSFORMERS and module.rpartition(".")[2] in _TRANSPOSED


def require_grads(m: Module, inputs_embeds: Tensor) -> Tensor:
    """The embedded tokens. If blocks are checkpointed, `enable_input_require_grads` makes them require a gradient:
    reentrant checkpointing would not run backward otherwise."""
    frozen = inputs_embeds.edge is None
    if m.config.method != "full" and m.config.checkpoint_layers and m.tape.grad_enabled and frozen:
        inputs_embeds.edge = (InputLeaf(inputs_embeds), 0)
    return inputs_embeds


@forward
def linear(m: Module, x: Tensor, weight: Tensor | None = None, kind: Kind | None = None) -> Tensor:
    """nn.Linear, or peft's lora.Linear if there are adapters."""
    return _adapted(m, x, partial(products.linear, weight=weight, kind=kind))


@forward
def conv1d(m: Module, x: Tensor) -> Tensor:
    """transformers' Conv1D, or peft's lora.Linear around it."""
    return _adapted(m, x, products.conv1d)


def _adapted(m: Module, x: Tensor, base_layer: Callable[[Module, Tensor], Tensor]) -> Tensor:
    """base_layer(x) + lora_B(lora_A(dropout(x))) * scaling"""
    weights = m.tape.weights
    base, adapter = weights.get(f"{m.name}.weight"), weights.get(f"{m.name}.lora_A.weight")
    how = None if base is None else base.quantization
    if how is not None and how.kind != "gptq":
        return _beside_quantized(m, x, how.kind, adapter)
    result = quantized.linear(m, x) if how is not None else base_layer(m, x)
    if adapter is None:
        return result
    dtype = result.dtype
    x = to(x, adapter.dtype)
    result = _dora(m, x, result) if m.config.method == "dora" else add(result, _through_adapters(m, x))
    return to(result, dtype)


def are_fused(m: Module, *names: str) -> bool:
    """Whether fms-acceleration fuses these layers: all have adapters, over a 4-bit base."""
    adapted = all(f"{m.name}.{name}.lora_A.weight" in m.tape.weights for name in names)
    return bool(m.config.fast_kernels) and m.config.quantization in ("nf4", "fp4") and adapted


def _beside_quantized(m: Module, x: Tensor, kind: str, adapter: Weight | None) -> Tensor:
    """peft's Linear4bit and Linear8bitLt: under autocast they leave casting the input to it."""
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
    """DoraLinearVariant.forward: with dropout, the base is recomputed on the input after dropout."""
    rate = m.config.lora_dropout if m.tape.training else 0.0
    base_result = None if rate else result
    x = dropout(x, rate)
    return add(result, _with_magnitude(m, x, base_result))


@forward
def _with_magnitude(m: Module, x: Tensor, base_result: Tensor | None) -> Tensor:
    """DoraLinearLayer.forward: the term to add so that the weights get their learned magnitudes."""
    lora_weight = to(_lora_weight(m), x.dtype)
    weight = to(m.parameter("weight"), x.dtype)
    weight_norm = row_norms(weight, lora_weight.detach())
    magnitude = m.parameter("lora_magnitude_vector.weight")
    mag_norm_scale = reshape(mul(magnitude, weight_norm), 1, magnitude.shape[0])  # the division
    lora_result = products.linear(m / "lora_B", products.linear(m / "lora_A", x))
    if base_result is None:
        base_result = products.linear(m / "base", x, weight)  # without the bias
    elif (bias := m.maybe("bias")) is not None:
        base_result = sub(base_result, bias)
    return add(mul(shift(mag_norm_scale), base_result), scale(mul(mag_norm_scale, lora_result)))


def _lora_weight(m: Module) -> Tensor:
    """The adapters' product, as their output for an identity matrix."""
    adapter = m.tape.weights[f"{m.name}.lora_A.weight"]
    inputs = adapter.shape[1]
    x_eye = m.tape.made("eye", (inputs, inputs), adapter.dtype)
    lora_weight = products.linear(m / "lora_B", products.linear(m / "lora_A", x_eye))
    return transpose(lora_weight, 0, 1)


def row_norms(weight: Tensor, lora_weight: Tensor) -> Tensor:
    """The row norms of the sum of both."""
    weight = add(weight, scale(lora_weight))
    return weight.tape.made("norm", weight.shape[:1], weight.dtype, (weight,), kernel=Kernel.REDUCTION)
