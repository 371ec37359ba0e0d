"""The notes of a plan, a sentence each: what its figures assume, what cannot run, what suits the device badly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.config.schema import EARLIEST_TRANSFORMERS, TRANSFORMERS, keys, release
from oomph.config.settle import FLASH_CAPABILITY, FLASH_HEAD_SIZE, follows
from oomph.devices import Device
from oomph.errors import Problem
from oomph.step.build import keys_read
from oomph.units import MIB, counted

if TYPE_CHECKING:
    from oomph.step.trace.cache import TracedModel

TENSOR_CORE_STEP = 8  # elements: sixteen bytes of half precision, which tensor-core kernels load at once
TILE = 64  # widths and vocabularies that are multiples of it keep products at the full rate
SMALL_VOCABULARY = 1024  # below it the head takes too small a share of the time to matter
SMALL_WIDTH = 256  # below it no product fills a card anyway

SHARED = ("dropout", "bias")  # nanoGPT's keys that other architectures may have, or not
AROUND = ("torch_version", "transformers_version", "dataset_tokens", "seed", "expandable_segments")  # not of a model
DECIDED_BY_THE_MODEL = (
    "n_layer", "n_head", "n_embd", "vocab_size", "dropout", "bias", "tie_weights", "init_from", "return_logits",
    "loss_chunk", "checkpoint_layers",
)  # fmt: skip


def notes(loaded: LoadedConfig, device: Device, own_model: str | None) -> list[str]:
    """Every note on a settled config on the device; `own_model` names the user's own, which is traced."""
    cannot_run = [] if own_model else unrunnable(loaded, device.kind == "cpu")
    return [
        *warnings(loaded.config, device),
        *_assumptions(loaded, device),
        *(_not_used(loaded, own_model) if own_model else _without_effect(loaded, device)),
        *(f"Planned as asked, but it cannot run: {problem}" for problem in cannot_run),
    ]


def _assumptions(loaded: LoadedConfig, device: Device) -> list[str]:
    """What the figures assume, and what they leave out."""
    config, found = loaded.config, []
    if not device.bandwidth_gbs or not device.peak_tflops(config.dtype or "float32", config.allow_tf32):
        missing = f"its rate in {config.dtype} or its bandwidth is not known"
        found.append(f"No time is given for the {device.name}: {missing}")
    if device.kind != "cpu":
        found.append(
            "Assumed, and covered by low and high: the kernels and workspaces a real card picks, its driver's context"
            + (", and that Triton fuses what inductor plans to" if config.compile else "")
        )
    if config.trainer in TRANSFORMERS and release(config.transformers_version) < EARLIEST_TRANSFORMERS:
        earliest = ".".join(map(str, EARLIEST_TRANSFORMERS))
        found.append(
            f"transformers {config.transformers_version}: what changed in its models before {earliest} is not described"
        )
    if config.eval_only:
        found.append("eval_only is set: memory and hours are those of the one evaluation that runs")
    if config.world_size > 1:
        found.append("Memory is one device's. The time devices spend exchanging gradients is not in the step time")
        if config.trainer in TRANSFORMERS:
            own = counted(config.gradient_accumulation_steps // config.world_size, "micro-step")
            found.append(f"gradient_accumulation_steps counts those of all devices: {own} each, as the program counts")
    if loaded.said("dataset") and not loaded.said("vocab_size") and config.dataset_tokens is None:
        found.append(
            f"No data/{config.dataset} was found here: a vocabulary of {config.vocab_size:,} is assumed "
            "(--vocab_size=), and its number of tokens is not known (--dataset_tokens=)"
        )
    return found


def _not_used(loaded: LoadedConfig, model: str) -> list[str]:
    """Which of the keys that the user set their own model decides instead; transformers' checkpoints all blocks."""
    unused = [key for key in DECIDED_BY_THE_MODEL if loaded.said(key)]
    found = []
    if model.endswith(".json") and "checkpoint_layers" in unused:
        unused.remove("checkpoint_layers")
        if loaded.config.checkpoint_layers:
            found.append("checkpoint_layers: transformers checkpoints all blocks or none, here all")
    return [*found, *([f"Not used, because your own model decides it: {', '.join(unused)}"] if unused else [])]


def _without_effect(loaded: LoadedConfig, device: Device) -> list[str]:
    """Which of the keys that were given neither the program nor the architecture looks at, by themselves or through a
    key that follows from them."""
    config = loaded.config
    own = [key.name for key in keys().values() if key.needed and (key.whose == "oomph" or key.name in SHARED)]
    given = [key for key in own if key not in AROUND and loaded.said(key) and not follows(config, key)]
    if not given:
        return []
    read = keys_read(config, device.kind != "cpu")
    usual = configs.from_dict({"trainer": config.trainer, "model_type": config.model_type}).config
    decided = {key: None for key, where in loaded.sources.items() if where.startswith("default: ")}
    idle = []
    for key in given:
        if key in read or getattr(config, key) in (None, getattr(usual, key)):
            continue
        unset = {name: None for name in decided if keys()[name].optional} | {key: getattr(usual, key)}
        without = msgspec.structs.replace(loaded, config=msgspec.structs.replace(config, **unset))
        other = configs.settle(without, device).config
        if all(getattr(other, name) == getattr(config, name) for name in read):
            idle.append(key)
    what = f"trainer = {config.trainer!r} and model_type = {config.model_type!r}"
    return [f"Given, but changes nothing with {what}: {', '.join(idle)}"] if idle else []


def about_own_model(found: TracedModel, config: TrainConfig) -> tuple[str, ...]:
    """What the trace of the user's own model leaves out or counts another way."""
    notes = []
    if found.facts.makes_no_loss:
        notes.append(
            "The model returns one tensor and no loss, so its mean is taken as the loss: the memory and time of a real "
            "loss, such as cross-entropy over logits, are missing. Return the loss too"
        )
    if found.unseen_bytes:
        unseen = f"up to {found.unseen_bytes / MIB:,.1f} MiB"
        notes.append(f"Not in the figures: the copies that a convolution makes of its tensors on a CPU, {unseen}")
    if found.uncounted:
        names = ", ".join(found.uncounted)
        notes.append(f"The arithmetic of {names} is not counted: times may be far too short, low and high too")
    if found.facts.recurrent:
        names = ", ".join(found.facts.recurrent)
        notes.append(
            f"Recurrent layers ({names}): a GPU runs all their time steps in one call. The time of an LSTM is a lower "
            "bound; that of a GRU or RNN, traced step by step, is an upper bound"
        )
    if found.facts.own_inputs:
        shapes = " and ".join(str(shape) for shape in found.facts.own_inputs)
        counted = f"{config.batch_size} × {config.block_size}"
        notes.append(
            f"The model's inputs are its own, {shapes}: tokens are counted as batch_size × block_size, {counted}"
        )
    return tuple(notes)


def unrunnable(loaded: LoadedConfig, on_cpu: bool) -> list[Problem]:
    """Settings that can be planned but that the config's trainer cannot run on this kind of device."""
    config, problems = loaded.config, []

    def add(key: str, what: str, allowed: str) -> None:
        where = loaded.sources[key] if loaded.said(key) else key
        problems.append(Problem(where, what, found=str(getattr(config, key)), allowed=allowed))

    if config.trainer == "oomph" and config.return_logits:
        add("return_logits", "oomph train never returns logits", "return_logits = False")
    if config.dtype == "float16" and not config.autocast:
        what = "float16 weights cannot be trained: their gradients underflow"
        add("dtype", what, "autocast = True, or dtype = 'bfloat16'")
    if config.trainer in TRANSFORMERS and config.checkpoint_layers not in (0, config.n_layer):
        add("checkpoint_layers", "transformers checkpoints all blocks or none", f"0 or {config.n_layer}")
    if on_cpu and config.attention == "efficient":
        add("attention", "PyTorch has no memory-efficient attention on a CPU", "flash or math")
    return problems


# --- what suits a device badly ------------------------------------------------------------------------


def warnings(config: TrainConfig, device: Device) -> list[str]:
    """What is slow or wrong with this config on this device, and what to set instead."""
    if device.kind == "cpu":
        return _cpu(config, device)
    return [*_other_makers(device), *_precision(config, device), *_old_cards(config, device), *_shapes(config)]


def _cpu(config: TrainConfig, device: Device) -> list[str]:
    if config.dtype == "bfloat16" and not device.has_bf16:
        return ["This CPU has no bfloat16 instructions, so dtype=bfloat16 is slower than dtype=float32 here."]
    if config.dtype == "float16":
        return ["CPUs compute float16 slowly: dtype=float32 is faster here."]
    return []


def _other_makers(device: Device) -> list[str]:
    if device.kind == "cuda":
        return []
    return [f"Memory is predicted for CUDA's allocator and kernels: on {device.name} it is unverified."]


def _precision(config: TrainConfig, device: Device) -> list[str]:
    if config.dtype == "bfloat16" and not device.has_bf16:
        emulated = device.bf16_emulated_tflops
        if not device.has_tensor_cores:
            slower = "slower than float32"
        elif emulated is None:
            slower = "about 10 times slower than float16"
        else:
            slower = f"at {emulated:g} TFLOPS, where float16 has {device.tflops_fp16:g}"
        return [f"{device.name} has no bfloat16 hardware and PyTorch emulates it {slower}: set dtype=float16."]
    if config.dtype == "float16" and device.has_bf16:
        return [
            "float16 needs a gradient scaler (nanoGPT and oomph have one); dtype=bfloat16 is as fast on "
            f"{device.name} and needs none."
        ]
    return []


def _old_cards(config: TrainConfig, device: Device) -> list[str]:
    if device.kind != "cuda":
        return []
    said = []
    if not device.has_tensor_cores:
        said.append(f"{device.name} has no tensor cores: half precision saves memory here, but little time.")
    capability = device.compute_capability
    if capability is None:
        return said
    if config.compile and capability < 7.0:
        said.append(
            f"torch.compile needs compute capability 7.0 and {device.name} has {capability:.1f}: set compile=False."
        )
    if config.attention == "flash" and (device.capability or (0, 0)) < FLASH_CAPABILITY:
        said.append(
            f"Flash attention needs compute capability 8.0 and {device.name} has {capability:.1f}: PyTorch takes its "
            "memory-efficient kernel instead (attention=efficient)."
        )
    return said


def _shapes(config: TrainConfig) -> list[str]:
    said = []
    head_size = config.head_dim or config.n_embd // config.n_head
    follows = head_size * config.n_head == config.n_embd  # else the config gives heads a size of their own
    if head_size % TENSOR_CORE_STEP:
        said.append(_uneven_heads(config, head_size, follows))
    elif config.n_embd % TILE and config.n_embd >= SMALL_WIDTH:
        heads = f", with heads of {TILE}" if follows else ""
        said.append(
            f"n_embd={config.n_embd} is not a multiple of {TILE}, so matrix products waste part of a tile; near it: "
            f"{_either(*_multiples(config.n_embd, TILE))}{heads}."
        )
    if head_size > FLASH_HEAD_SIZE and config.attention == "flash":
        said.append(
            f"Flash attention takes heads of at most {FLASH_HEAD_SIZE}, and these have {head_size}: PyTorch falls back "
            "to a slower kernel; use more heads."
        )
    pretrained = config.init_from.startswith("gpt2")  # its vocabulary comes with the weights
    if config.vocab_size % TILE and config.vocab_size >= SMALL_VOCABULARY and not pretrained:
        said.append(
            f"vocab_size={config.vocab_size} is not a multiple of {TILE}, which slows the largest product of the step; "
            f"{-(-config.vocab_size // TILE) * TILE} is the next that is, and the extra tokens cost nothing."
        )
    return said


def _uneven_heads(config: TrainConfig, head_size: int, follows: bool) -> str:
    n_embd, n_head = config.n_embd, config.n_head
    padded = -(-head_size // TENSOR_CORE_STEP) * TENSOR_CORE_STEP
    slow = f"attention pads each to {padded} and its products miss the fast tensor-core path"
    if not follows:
        return f"heads of head_dim={head_size} are not a multiple of {TENSOR_CORE_STEP}: {slow}; near it: {padded}."
    widths = _either(*_multiples(n_embd, TENSOR_CORE_STEP * n_head))
    heads = [count for count in range(1, n_embd // TENSOR_CORE_STEP + 1) if n_embd % (count * TENSOR_CORE_STEP) == 0]
    fitting = [count for count in heads if 32 <= n_embd // count <= 128]
    other = f", or n_head={min(fitting, key=lambda count: abs(count - n_head))}" if fitting else ""
    return (
        f"n_embd={n_embd} with n_head={n_head} gives heads of {head_size}, not a multiple of {TENSOR_CORE_STEP}: "
        f"{slow}; near it: n_embd={widths}{other}."
    )


def _multiples(value: int, step: int) -> tuple[int, int]:
    """The multiples of `step` just below and just above `value`."""
    return value // step * step, -(-value // step) * step


def _either(below: int, above: int) -> str:
    return f"{below} or {above}" if 0 < below != above else str(above)
