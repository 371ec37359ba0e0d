"""The dtypes in which a config's program keeps its weights and computes."""

from __future__ import annotations

from typing import NamedTuple

from oomph.config.schema import TrainConfig
from oomph.step.tensor.layout import HALVES, ITEM_BYTES


class Precision(NamedTuple):
    """The dtypes of a program."""

    weights: str  # of trained parameters, gradients and the optimizer's state
    autocast: str | None  # autocast's dtype; None: it is off
    activations: str | None = None  # the dtype a model itself casts its weights to; None: it does not
    frozen: str | None = None  # of frozen parameters; None: all are trained

    @property
    def compute(self) -> str:
        """The dtype of matrix products."""
        return self.autocast or self.activations or self.frozen or self.weights

    @property
    def weight_bytes(self) -> int:
        return ITEM_BYTES[self.weights]

    @property
    def compute_bytes(self) -> int:
        return ITEM_BYTES[self.compute]

    @property
    def is_scaled(self) -> bool:
        """Whether a GradScaler multiplies the loss."""
        return "float16" in (self.autocast, self.activations)


def precision(config: TrainConfig, cuda: bool) -> Precision:
    """The dtypes of a settled config. nanoGPT enters autocast on a GPU only: on a CPU it trains in float32."""
    dtype = config.dtype or "float32"
    if config.trainer == "nanochat":
        return Precision("float32", None, dtype)
    if config.deepspeed != "off":  # DeepSpeed casts the whole model
        return Precision(dtype, None, frozen=None if config.method == "full" else dtype)
    if config.method != "full":
        autocast = dtype if config.autocast and dtype in HALVES else None
        return Precision(config.adapter_dtype or "float32", autocast, frozen=config.base_dtype or dtype)
    if dtype not in HALVES:
        return Precision("float32", None)
    if not config.autocast:
        return Precision(dtype, None)
    return Precision("float32", dtype if cuda or config.trainer != "nanogpt" else None)
