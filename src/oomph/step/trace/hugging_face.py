"""Hugging Face models: built from a config, and on fake tensors taking the decisions a real run takes.

transformers asks whether it is being traced, and on fake tensors it is. An eager run is not, and skips the causal mask
where attention can do without one; a compiled run is, and keeps it. Both questions are answered here as the real run
would answer them. Works with transformers 4.50 to 5.x: what a version does not ask needs no answer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from oomph.config.hugging_face import written
from oomph.config.schema import TrainConfig
from oomph.errors import InputError, Problem


def causal_model_builder(source: Path | TrainConfig, checkpointed: bool) -> Callable[[], nn.Module]:
    """What builds the model of a config.json, or of a config of ours, with random weights and never with remote code.

    Raises `InputError` where transformers is missing, or cannot read the config; so does the builder, where it cannot
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
            auto: Any = AutoModelForCausalLM  # whose types differ between releases
            model = auto.from_config(config)
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
        except RuntimeError:  # memory may have run out
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


class CausalWithLoss(nn.Module):
    """A transformers model called as nanoGPT's is: ids and targets in, logits and loss out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.model(input_ids=ids, labels=targets, use_cache=False)
        return result.logits, result.loss


@contextlib.contextmanager
def deciding_as_eager() -> Iterator[None]:
    """While active, transformers takes fake tensors for real ones."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    masks: Any = sys.modules.get("transformers.masking_utils")
    models: Any = sys.modules.get("transformers.modeling_utils")
    with contextlib.ExitStack() as stack:
        if hasattr(utils, "is_fake_tensor"):  # is_tracing() asks it
            stack.enter_context(mock.patch.object(utils, "is_fake_tensor", lambda _: False))
        # A batch has one sequence a row and no padding: both functions read values to find the opposite.
        for owner, name in (
            (masks, "find_packed_sequence_indices"),
            (getattr(models, "PreTrainedModel", None), "warn_if_padding_and_no_attention_mask"),
        ):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, _none_where_it_reads(getattr(owner, name))))
        yield


def _none_where_it_reads(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which finds nothing where it reads a value."""

    @functools.wraps(function)
    def find(*args: Any) -> Any:
        try:
            return function(*args)
        except DataDependentOutputException:
            return None

    return find


@contextlib.contextmanager
def deciding_as_compiled() -> Iterator[None]:
    """While active, torch.compiler.is_compiling() says what it says under torch.compile, to transformers as to all.

    Experts in float32 would be computed in a loop that reads how many tokens each has, and that runs outside the
    compiled graph. Here they are one operator, which allocates as much.
    """
    experts: Any = sys.modules.get("transformers.integrations.moe")
    with contextlib.ExitStack() as stack:
        if hasattr(experts, "_can_use_grouped_mm"):
            stack.enter_context(mock.patch.object(experts, "_can_use_grouped_mm", lambda *_, **__: True))
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        yield
