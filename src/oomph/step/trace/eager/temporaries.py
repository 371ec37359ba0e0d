"""What kernels allocate unseen by dispatch modes: their temporaries, and an LSTM's workspace."""

from __future__ import annotations

from typing import Any

import torch

from oomph.step import kernels as kernels

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_CPU_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SAFE_SOFTMAX = aten._safe_softmax.default
_LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default
_LSTM = aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = aten.mkldnn_rnn_layer_backward.default
_PROMOTING = tuple(getattr(aten, name).Tensor for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"))
_EMBEDDING = (aten.embedding.default, aten.embedding_dense_backward.default)
_CUMULATING = (aten.cumsum.default, aten.cumprod.default)
_HALVES = (torch.bfloat16, torch.float16)


def _place(func: Any, name: str) -> int:
    return [argument.name for argument in func._schema.arguments].index(name)


_TRAINS, _GRAD = _place(_LSTM, "train"), _place(_LSTM_BACKWARD, "grad_output")


def temporary_bytes(func: Any, args: Any, result: Any, cuda: bool) -> tuple[int, ...]:
    """The bytes that an operator allocates while it runs."""
    if func in _EMBEDDING:  # contiguous copies of the indices and, in backward, the gradient
        gradient_or_weight, indices = args[:2]
        return tuple(_bytes(each) for each in (indices, gradient_or_weight) if not each.is_contiguous())
    if func in _CUMULATING:
        return () if args[0].dtype is result.dtype else (_bytes(result),)
    if func is _SAFE_SOFTMAX:
        columns = args[0].shape[-1]
        return kernels.safe_softmax_bytes(args[0].numel() // columns, columns, args[0].element_size())
    return _cuda_bytes(func, args) if cuda else _cpu_bytes(func, args)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _cuda_bytes(func: Any, args: Any) -> tuple[int, ...]:
    if func is _FLASH:
        drops = len(args) > 3 and args[3] > 0
        return kernels.FLASH_STATE_BYTES[:1] if drops else ()
    if func is _EFFICIENT_BACKWARD:
        grad, query, value = args[0], args[1], args[3]
        half = query.dtype in _HALVES
        batch, heads, tokens, size = query.shape
        temporaries = kernels.efficient_backward_bytes(batch, heads, tokens, size, half, value.shape[3])
        return (*_laid_out(grad), *temporaries)
    if func is _FLASH_BACKWARD:
        grad, query, key, out = args[0], args[1], args[2], args[4]
        batch, heads, tokens, size = query.shape
        temporaries = kernels.flash_backward_bytes(batch, heads, tokens, size, key.shape[1])
        return (*_laid_out(grad), *_laid_out(out), *temporaries)
    return ()


def _laid_out(x: torch.Tensor) -> tuple[int, ...]:
    """The copy of a tensor of heads that is not in token-major order, as CUDA's kernels require."""
    return () if x.transpose(1, 2).is_contiguous() else (_bytes(x),)


def _cpu_bytes(func: Any, args: Any) -> tuple[int, ...]:
    """The same for the CPU's kernels: most of it is per thread."""
    threads = torch.get_num_threads()
    if func in _PROMOTING:
        return _promoted_bytes(args)
    if func is _CPU_FLASH:
        query = args[0]
        return (kernels.cpu_flash_bytes(threads, query.shape[2], query.shape[3], query.dtype in _HALVES),)
    if func is _CPU_FLASH_BACKWARD:
        return kernels.cpu_flash_backward_bytes(threads, args[1].shape[2], args[1].dtype in _HALVES)
    if func is _LAYER_NORM_BACKWARD:
        return (kernels.cpu_layer_norm_backward_bytes(threads, args[1].shape[-1], args[1].element_size()),)
    if func is _LSTM:
        return kernels.cpu_lstm_bytes(*_lstm_shape(args))
    if func is _LSTM_BACKWARD:
        grad = args[_GRAD]  # copied into time-major order if necessary
        copied = () if grad is None or grad.is_contiguous() else (4 * grad.numel(),)
        return (*kernels.cpu_lstm_bytes(*_lstm_shape(args)), *copied)
    return ()


def workspace_bytes(func: Any, args: Any) -> int:
    """What oneDNN saves for the backward of a float32 LSTM: the last of its results, which is empty on fake tensors."""
    if func is not _LSTM or not args[_TRAINS] or args[0].dtype is not torch.float32:
        return 0
    return kernels.cpu_lstm_workspace_bytes(*_lstm_shape(args))


def _lstm_shape(args: Any) -> tuple[int, int, int, int]:
    steps, rows, inputs = args[0].shape
    return steps, rows, inputs, args[2].shape[1]


def _promoted_bytes(args: Any) -> tuple[int, ...]:
    """The copies made by arithmetic on two dtypes: operands of the lesser one, in the common dtype."""
    tensors = [each for each in args[:2] if isinstance(each, torch.Tensor) and each.dim()]
    if len(tensors) < 2 or tensors[0].dtype is tensors[1].dtype:
        return ()
    common = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return tuple(each.numel() * common.itemsize for each in tensors if each.dtype is not common)
