"""Loading a model before training: the card's peak memory meanwhile, and what the host must hold.

transformers 5.23 (`core_model_loading.py`): tensors are read from memory-mapped safetensors one after another. A base
that is quantized on the way goes to the card in 16 bits, a tensor at a time, so that workers do not run ahead. Without
a device map, as in most scripts, a model that is not quantized is loaded on the host and moved by the Trainer.
"""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig
from oomph.config.programs import TRANSFORMERS
from oomph.devices import Device
from oomph.step import models
from oomph.step.models import unsloth
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import trained
from oomph.step.precision import precision
from oomph.step.tensor.layout import ITEM_BYTES, numel
from oomph.step.tensor.quantized import stored
from oomph.step.tensor.tape import Weight
from oomph.units import MIB, memory_size

WHOLE_ON_EACH = ("none", "ddp", "zero1")  # every device holds all weights
ON_THE_WAY = ("nf4", "fp4", "int8")  # quantized by bitsandbytes during loading; GPTQ and AWQ are stored quantized


class Loading(msgspec.Struct, frozen=True):
    """What loading takes."""

    card_mib: float  # the card's peak during loading, with the process's own memory
    host_mib: float  # weights, paged state and offloaded activations, without Python itself and the file cache
    on_the_host: bool  # the whole model is loaded there before it moves to the card
    fits: bool | None  # on the card; None if its memory is not known

    @property
    def text(self) -> str:
        """The peak and the host's share, in a sentence."""
        way = (
            "the whole model on the host, then moved"
            if self.on_the_host
            else "a tensor at a time, straight to the card"
        )
        return f"{way}: {memory_size(self.card_mib)} on the card at its peak, {memory_size(self.host_mib)} on the host"


def loading(config: TrainConfig, device: Device, context_mib: float) -> Loading | None:
    """What loading a settled config's model takes; None if the program trains from scratch or has no card, or if
    weights are sharded: how each rank loads its shard is not modelled."""
    if config.trainer not in TRANSFORMERS or device.kind == "cpu" or config.parallel not in (None, *WHOLE_ON_EACH):
        return None
    weights = [
        (name, weight)
        for name, weight in models.weights(config, precision(config, True)).items()
        if not models.is_trained(name)
    ]
    base_bytes = ITEM_BYTES[(config.base_dtype or config.dtype or "float32") if config.method != "full" else "float32"]
    if config.method == "full" and not config.autocast:
        base_bytes = ITEM_BYTES[config.dtype or "float32"]
    quantized = config.quantization in ON_THE_WAY
    on_the_host = not quantized and config.trainer not in ("trl", "unsloth")
    sizes = [numel(weight.shape) * base_bytes for _, weight in weights]
    card_bytes = _peak_bytes([weight for _, weight in weights], base_bytes, quantized)
    paged = Optimizer(config, True, trained(config)).paged_bytes()
    paged += unsloth.host_bytes(config) if config.trainer == "unsloth" else 0
    host_bytes = (sum(sizes) if on_the_host else max(sizes, default=0)) + paged
    card_mib, room = context_mib + card_bytes / MIB, device.usable_mib
    return Loading(card_mib, host_bytes / MIB, on_the_host, None if room is None else card_mib <= room)


def _peak_bytes(weights: list[Weight], base_bytes: int, quantized: bool) -> int:
    """The most that the card holds: both copies of a tensor while it is quantized or upcast."""
    held = most = 0
    for weight in weights:
        whole = numel(weight.shape) * base_bytes
        kept = sum(size for _, size in stored(weight.quantization, weight.shape)) if weight.quantization else whole
        most = max(most, held + kept + (whole if weight.quantization and quantized else 0))
        held += kept
    for weight in weights:  # prepare_model_for_kbit_training
        if weight.quantization is None and ITEM_BYTES[weight.dtype] > base_bytes:
            more = numel(weight.shape) * ITEM_BYTES[weight.dtype]
            most = max(most, held + more)
            held += more - numel(weight.shape) * base_bytes
    return max(most, held)
