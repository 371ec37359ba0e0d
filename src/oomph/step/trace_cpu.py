"""What the CPU's kernels allocate where no dispatch mode watches: their temporaries, and an LSTM's workspace."""

from __future__ import annotations

from typing import Any

import torch

from oomph.step import gpt_eager_kernels as kernels

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default
_LSTM = aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = aten.mkldnn_rnn_layer_backward.default
_PROMOTING = tuple(getattr(aten, name).Tensor for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"))
_HALVES = (torch.bfloat16, torch.float16)


def _place(func: Any, name: str) -> int:
    return [argument.name for argument in func._schema.arguments].index(name)


_TRAINS, _GRAD = _place(_LSTM, "train"), _place(_LSTM_BACKWARD, "grad_output")


def temporary_bytes(func: Any, args: Any) -> tuple[int, ...]:
    """What an operator allocates for as long as it runs; most of it is shared out among threads."""
    threads = torch.get_num_threads()
    if func in _PROMOTING:
        return _promoted_bytes(args)
    if func is _FLASH:
        query = args[0]
        return (kernels.cpu_flash_bytes(threads, query.shape[2], query.shape[3], query.dtype in _HALVES),)
    if func is _FLASH_BACKWARD:
        return kernels.cpu_flash_backward_bytes(threads, args[1].shape[2], args[1].dtype in _HALVES)
    if func is _LAYER_NORM_BACKWARD:
        weight_bytes = (args[1] if args[5] is None else args[5]).element_size()
        return (kernels.cpu_layer_norm_backward_bytes(threads, args[1].shape[-1], weight_bytes),)
    if func is _LSTM:
        return kernels.cpu_lstm_bytes(*_lstm_shape(args))
    if func is _LSTM_BACKWARD:
        grad = args[_GRAD]  # laid out step by step where it is not
        copied = () if grad is None or grad.is_contiguous() else (4 * grad.numel(),)
        return (*kernels.cpu_lstm_bytes(*_lstm_shape(args)), *copied)
    return ()


def workspace_bytes(func: Any, args: Any) -> int:
    """What oneDNN keeps for the backward of an LSTM in float32: the last of its results, empty on fake tensors."""
    if func is not _LSTM or not args[_TRAINS] or args[0].dtype is not torch.float32:
        return 0
    return kernels.cpu_lstm_workspace_bytes(*_lstm_shape(args))


def _lstm_shape(args: Any) -> tuple[int, int, int, int]:
    steps, rows, inputs = args[0].shape
    return steps, rows, inputs, args[2].shape[1]


def _promoted_bytes(args: Any) -> tuple[int, ...]:
    """Arithmetic on numbers of two kinds copies those of the lesser kind first, in the common type."""
    tensors = [each for each in args[:2] if isinstance(each, torch.Tensor) and each.dim()]
    if len(tensors) < 2 or tensors[0].dtype is tensors[1].dtype:
        return ()
    common = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return tuple(each.numel() * common.itemsize for each in tensors if each.dtype is not common)
