"""Hugging Face models: built from a config, and making the same decisions on fake tensors as in a real run.

transformers checks whether it is being traced, and on fake tensors it is. An eager run is not, and skips the causal
mask where attention needs none; a compiled run is, and keeps it. Both checks are patched here to answer as in the
real run. Works with transformers 4.50 to 5.x: a check that a version lacks needs no patch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from oomph.config.reading.hugging_face import written
from oomph.config.schema import TrainConfig
from oomph.errors import InputError, Problem


def causal_model_builder(source: Path | TrainConfig, checkpointed: bool) -> Callable[[], nn.Module]:
    """A function that builds the model of a config.json, or of our config, with random weights and without remote code.

    Raises `InputError` if transformers is missing or cannot read the config; the function does if it cannot
    build the model.
    """
    where = str(source) if isinstance(source, Path) else f"model_type = {source.model_type!r}"
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        allowed = "pip install 'oomph[hf]'"
        raise InputError(Problem(where, "needs the package transformers", allowed=allowed)) from None
    try:
        if isinstance(source, Path):
            config: Any = AutoConfig.from_pretrained(source, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(source.model_type, **written(source))
    except Exception as error:
        raise InputError(_refused(where, "read", error)) from error

    def build() -> nn.Module:
        try:
            auto: Any = AutoModelForCausalLM  # its types differ between releases
            model = auto.from_config(config)
            if checkpointed:
                with warnings.catch_warnings(action="ignore", category=FutureWarning):  # renamed in 5.23
                    model.gradient_checkpointing_enable({"use_reentrant": False})
        except RuntimeError:  # possibly out of memory
            raise
        except Exception as error:
            raise InputError(_refused(where, "build", error)) from error
        return cast(nn.Module, model.train())

    return build


def _refused(where: str, doing: str, error: Exception) -> Problem:
    words = textwrap.shorten(str(error).partition("\n")[0], 200)
    return Problem(
        where, f"transformers {version('transformers')} cannot {doing} it", f"{type(error).__name__}: {words}"
    )


class CachingOutputs(NamedTuple):
    """What a transformers model returns in training if it also returns its key-value cache."""

    logits: torch.Tensor
    loss: torch.Tensor
    cache: tuple[torch.Tensor, ...]  # keys and values, for generation to continue from


class CausalWithLoss(nn.Module):
    """A transformers model with nanoGPT's interface: ids and targets in, logits and loss out."""

    def __init__(self, model: nn.Module, use_cache: bool = False) -> None:
        super().__init__()
        self.model, self.use_cache = model, use_cache

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> CachingOutputs | tuple[torch.Tensor, torch.Tensor]:
        result = self.model(input_ids=ids, labels=targets, use_cache=self.use_cache)
        if not self.use_cache:
            return result.logits, result.loss
        return CachingOutputs(result.logits, result.loss, tuple(_tensors(getattr(result, "past_key_values", None))))


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors in a cache of transformers 4 or 5."""
    layers = getattr(cache, "layers", None)
    if layers is None:  # before 4.54: two lists, or a tuple per block
        pairs = zip(cache.key_cache, cache.value_cache, strict=True) if hasattr(cache, "key_cache") else cache or ()
    else:
        pairs = ((layer.keys, layer.values) for layer in layers)
    yield from (tensor for pair in pairs for tensor in pair if isinstance(tensor, torch.Tensor) and tensor.numel())


@contextlib.contextmanager
def deciding_as_eager() -> Iterator[None]:
    """While active, transformers treats fake tensors as real ones."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    masks: Any = sys.modules.get("transformers.masking_utils")
    models: Any = sys.modules.get("transformers.modeling_utils")
    with contextlib.ExitStack() as stack:
        if hasattr(utils, "is_fake_tensor"):  # is_tracing() calls it
            stack.enter_context(mock.patch.object(utils, "is_fake_tensor", lambda _: False))
        # A batch has one sequence per row and no padding: both functions read values to check for the opposite.
        for owner, name in (
            (masks, "find_packed_sequence_indices"),
            (getattr(models, "PreTrainedModel", None), "warn_if_padding_and_no_attention_mask"),
        ):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, _none_where_it_reads(getattr(owner, name))))
        yield


def _none_where_it_reads(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, returning None where it would read a tensor's value."""

    @functools.wraps(function)
    def find(*args: Any) -> Any:
        try:
            return function(*args)
        except DataDependentOutputException:
            return None

    return find


@contextlib.contextmanager
def deciding_as_compiled() -> Iterator[None]:
    """While active, torch.compiler.is_compiling() is True, as it is under torch.compile.

    float32 experts would run in a loop that reads each one's number of tokens, outside the
    compiled graph. Here they are one operator, which allocates as much.
    """
    experts: Any = sys.modules.get("transformers.integrations.moe")
    with contextlib.ExitStack() as stack:
        if hasattr(experts, "_can_use_grouped_mm"):
            stack.enter_context(mock.patch.object(experts, "_can_use_grouped_mm", lambda *_, **__: True))
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        yield
