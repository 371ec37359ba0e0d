"""What a reader of a plan should know beyond its figures, a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.config import LoadedConfig, TrainConfig
from oomph.config.refused import refused
from oomph.devices import Device
from oomph.units import MIB

if TYPE_CHECKING:
    from oomph.step.user_model import Traced  # imports torch

DECIDED_BY_THE_MODEL = (
    "n_layer", "n_head", "n_embd", "vocab_size", "dropout", "bias", "tie_weights", "init_from", "return_logits",
    "loss_chunk", "checkpoint_layers",
)  # fmt: skip


def remarks(loaded: LoadedConfig, device: Device, own_model: bool) -> list[str]:
    """Of the config on the device."""
    config, found = loaded.config, []
    if not device.bandwidth_gbs or not device.peak_tflops(config.dtype or "float32", config.allow_tf32):
        missing = f"its rate in {config.dtype} or its bandwidth is not known"
        found.append(f"No time is given for the {device.name}: {missing}")
    if device.kind != "cpu":
        found.append(
            "Assumed, and covered by low and high: the kernels and workspaces a real card picks, its driver's context"
            + (", and that Triton fuses what inductor plans to" if config.compile else "")
        )
    if config.eval_only:
        found.append("eval_only is set: the run evaluates once and leaves, so memory and hours are those of that")
    if config.world_size > 1:
        found.append("Memory is one device's. The time that devices spend exchanging gradients is not in the step's")
    if loaded.said("dataset") and not loaded.said("vocab_size") and config.dataset_tokens is None:
        found.append(
            f"No data/{config.dataset} was found here: a vocabulary of {config.vocab_size} is assumed "
            "(--vocab_size=), and its number of tokens is not known (--dataset_tokens=)"
        )
    return found + (_not_used(loaded) if own_model else _cannot_run(loaded, device))


def _not_used(loaded: LoadedConfig) -> list[str]:
    """The keys somebody set that a model of one's own decides itself."""
    unused = [key for key in DECIDED_BY_THE_MODEL if loaded.said(key)]
    return [f"Not used, because the model of your own decides it: {', '.join(unused)}"] if unused else []


def _cannot_run(loaded: LoadedConfig, device: Device) -> list[str]:
    """What the figures are of, though it cannot be had."""
    return [f"Planned as asked, but it cannot run: {problem}" for problem in refused(loaded, device.kind == "cpu")]


def about_own_model(found: Traced, config: TrainConfig) -> tuple[str, ...]:
    """Of a model of the user's own: what its trace does not tell."""
    notes = []
    if found.makes_no_loss:
        notes.append(
            "The model returns one tensor and no loss: its mean stands for the loss, so the memory and time of a real "
            "loss, such as cross-entropy over logits, are missing. Return the loss too"
        )
    if found.unseen_bytes:
        unseen = f"up to {found.unseen_bytes / MIB:,.1f} MiB"
        notes.append(f"Not in the figures: the copies that a convolution makes of its tensors on a CPU, {unseen}")
    if found.uncounted:
        names = ", ".join(found.uncounted)
        notes.append(f"Not counted is the arithmetic of {names}: times may be far too short, for low and high too")
    if found.recurrent:
        names = ", ".join(found.recurrent)
        notes.append(
            f"Recurrent layers ({names}): a card takes their steps one after another in one call. The time of an LSTM "
            "is a lower bound; a GRU or RNN is traced step by step, which a real one does not launch: an upper one"
        )
    if found.own_inputs:
        shapes = " and ".join(str(shape) for shape in found.own_inputs)
        counted = f"{config.batch_size} × {config.block_size}"
        notes.append(
            f"The model brings inputs of its own, {shapes}: tokens are counted as batch_size × block_size, {counted}"
        )
    return tuple(notes)
