"""The notes of a plan, a sentence each: what its figures assume, what cannot run, what suits the device poorly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.config.keys import keys
from oomph.config.programs import EARLIEST_TRANSFORMERS, MIXTURES, TRANSFORMERS, experts_are_modules, release
from oomph.config.settle import FLASH_CAPABILITY, FLASH_HEAD_SIZE, TRL_CHUNKED_SINCE, TRL_FUSED_SINCE, follows
from oomph.config.sharing import untimed_keys
from oomph.devices import Device
from oomph.errors import Problem
from oomph.predict.spread import is_before_descriptions
from oomph.step.build import keys_read
from oomph.step.models import unsloth
from oomph.units import MIB, counted, memory_size

if TYPE_CHECKING:
    from oomph.step.trace.cache import TracedModel

TENSOR_CORE_STEP = 8  # elements: 16 bytes of half precision, which tensor-core kernels load at once
TILE = 64  # widths and vocabularies that are multiples of it keep products at the full rate
SMALL_VOCABULARY = 1024  # below it the head takes too small a share of the time to matter
SMALL_WIDTH = 256  # below it no product fills a card anyway

# Programs without a key for their version, and the release that is modelled.
DESCRIBED = {
    "torchtune": "torchtune 0.6.1, with torchao's NF4Tensor under QLoRA",
    "unsloth": "Unsloth 2026.8.19; attention is xformers', or with attention=flash2 that of flash-attn",
    "litgpt": "litgpt 0.5.13, under QLoRA with bitsandbytes_version",
}
SHARED = ("dropout", "bias")  # nanoGPT's keys that only some other architectures have
AROUND = (
    "torch_version",
    "transformers_version",
    "trl_version",
    "bitsandbytes_version",
    "dataset_tokens",
    "seed",
    "expandable_segments",
    "num_train_epochs",
    "num_samples",
    "mean_length",
    "lengths",
)  # not the model's


def notes(loaded: LoadedConfig, device: Device) -> list[str]:
    """Every note on a settled config on the device."""
    traced = loaded.model is not None
    cannot_run = [] if traced else unrunnable(loaded, device.kind == "cpu")
    return [
        *warnings(loaded.config, device, traced),
        *_assumptions(loaded, device),
        *([] if traced else _without_effect(loaded, device)),
        *(f"Planned as asked, but it cannot run: {problem}" for problem in cannot_run),
    ]


def _assumptions(loaded: LoadedConfig, device: Device) -> list[str]:
    """What the figures assume, and what they leave out."""
    config, found = loaded.config, []
    if not device.bandwidth_gbs or not device.peak_tflops(config.dtype or "float32", config.allow_tf32):
        missing = f"its rate in {config.dtype} or its bandwidth is not known"
        found.append(f"No time is given for the {device.name}: {missing}")
    found += _about_untimed(config)
    if device.kind != "cpu":
        found.append(
            "Assumed, and covered by low and high: the kernels and workspaces a real card picks, its driver's context"
            + (", and that Triton fuses what inductor plans to" if config.compile else "")
        )
    if is_before_descriptions(config):
        earliest = ".".join(map(str, EARLIEST_TRANSFORMERS))
        found.append(
            f"transformers {config.transformers_version}: what changed in its models before {earliest} is not described"
        )
    if config.trainer == "trl" and TRL_CHUNKED_SINCE <= release(config.trl_version) < TRL_FUSED_SINCE:
        found.append(f"TRL {config.trl_version} computes its loss by chunks of another kind: planned as 1.15 does it")
    found += _about_experts(config)
    if config.trainer in DESCRIBED:
        found.append(f"Described from its source: {DESCRIBED[config.trainer]}")
    if config.trainer == "unsloth" and unsloth.is_offloaded(config):
        size = memory_size(unsloth.pinned_bytes(config) / MIB)
        found.append(f"Inputs of all blocks but the last are kept on the host, in {size} of pinned memory")
    found += _about_samples(loaded)
    if config.eval_only:
        found.append("eval_only is set: memory and hours are those of the one evaluation that runs")
    if config.world_size > 1:
        found += _about_sharing(config, device)
        if config.trainer in TRANSFORMERS:
            own = counted(config.gradient_accumulation_steps // config.world_size, "micro-step")
            found.append(f"gradient_accumulation_steps counts those of all devices: {own} each, as the program counts")
    if loaded.said("dataset") and not loaded.said("vocab_size") and config.dataset_tokens is None:
        found.append(
            f"No data/{config.dataset} was found here: a vocabulary of {config.vocab_size:,} is assumed "
            "(--vocab_size=), and its number of tokens is not known (--dataset_tokens=)"
        )
    return found


# What a run waits for that is not modelled, by the key that brings it.
_WAITS = {
    "tensor_parallel_degree": "how long ranks wait for each other's parts of a layer",
    "cpu_offload": "how long the card waits for the host's arithmetic and for copies over its bus",
}


def _about_untimed(config: TrainConfig) -> list[str]:
    """What is left out of a run of memory and FLOPs alone."""
    told = "memory and FLOPs alone. No time is given"
    found = [f"{key}: {told}: {_WAITS[key]} is not modelled" for key in untimed_keys(config)]
    if 1 < config.world_size == config.tensor_parallel_degree and config.dtype != "float32":
        found.append(
            f"All devices split the layers, so there is no FSDP, whose mixed precision it is: the step is float32's, "
            f"not {config.dtype}'s"
        )
    return found


def _about_experts(config: TrainConfig) -> list[str]:
    """What is assumed about a mixture of experts."""
    if experts_are_modules(config.model_type, config.transformers_version):
        return ["Experts are taken to get equal shares of the tokens; a real router's shares vary"]
    return []


def _about_samples(loaded: LoadedConfig) -> list[str]:
    """What is assumed about the samples' lengths and number."""
    config, found = loaded.config, []
    if config.lengths:
        found.append(
            f"Memory is that of a batch of the longest samples, {config.block_size:,} tokens; time and FLOPs those of "
            f"a mean batch. Longer samples are taken to be cut"
        )
    if config.packing == "packed" and config.mean_length is None and config.lengths is None:
        found.append(
            "Rows are packed: attention is timed as if each were one sample, until --lengths= or --mean_length= is told"
        )
    if config.packing != "off" and config.attention != "flash2" and config.trainer != "unsloth":
        found.append("Samples in a row without flash-attn: a mask of all pairs of tokens is stored (attention=flash2)")
    if config.num_train_epochs is not None and config.num_samples is None and not loaded.said("max_iters"):
        found.append(f"The number of samples is not known (--num_samples=): {config.max_iters:,} steps are assumed")
    return found


def _about_sharing(config: TrainConfig, device: Device) -> list[str]:
    """What to know about a run on several devices."""
    found = ["Memory is one device's; tokens a second, energy and money are those of all"]
    if device.kind not in ("cuda", "rocm"):
        found.append(
            f"The time that devices spend exchanging data is not in the step time: no link is known of {device.name}"
        )
    has = {"nanogpt": ("none", "ddp"), "oomph": ("none", "ddp", "fsdp")}.get(config.trainer)
    if has is not None and config.parallel not in has:
        name = "nanoGPT" if config.trainer == "nanogpt" else "oomph train"
        found.append(f"{name} has no {config.parallel}: this is its step under it")
    if config.compile and config.parallel in ("ddp", "zero1") and config.trainer not in ("nanochat", "oomph"):
        found.append("DistributedDataParallel cuts a compiled graph at its buckets; the plan is that of one graph")
    return found


def _without_effect(loaded: LoadedConfig, device: Device) -> list[str]:
    """A note on set keys that neither the program nor the architecture uses, directly or through a
    key that follows from them."""
    config = loaded.config
    own = [key.name for key in keys().values() if key.needed and (key.whose == "oomph" or key.name in SHARED)]
    given = [key for key in own if key not in AROUND and loaded.said(key) and not follows(config, key)]
    given = [key for key in given if not loaded.sources[key].endswith("'s config.json")]  # the model's, not the user's
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


def about_own_model(found: TracedModel, config: TrainConfig, on_gpu: bool) -> tuple[str, ...]:
    """What the trace of the user's own model leaves out or counts differently."""
    notes = []
    if found.facts.makes_no_loss:
        notes.append(
            "The model returns one tensor and no loss, so its mean is taken as the loss: the memory and time of a real "
            "loss, such as cross-entropy over logits, are missing. Return the loss too"
        )
    if not on_gpu and (unseen_bytes := found.unseen_bytes()):
        unseen = f"up to {unseen_bytes / MIB:,.1f} MiB"
        notes.append(f"Not in the figures: the copies that a convolution makes of its tensors on a CPU, {unseen}")
    if uncounted := found.uncounted():
        names = ", ".join(uncounted)
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
    if on_cpu and config.attention == "efficient":
        add("attention", "PyTorch has no memory-efficient attention on a CPU", "flash or math")
    return problems


# --- what suits a device poorly -----------------------------------------------------------------------


def warnings(config: TrainConfig, device: Device, traced: bool = False) -> list[str]:
    """What is slow or wrong with this config on this device, and what to set instead; nothing about the shape of
    a `traced` model."""
    if device.kind == "cpu":
        return _cpu(config, device)
    shapes = [] if traced else _shapes(config)
    return [
        *_other_makers(device),
        *_precision(config, device),
        *_old_cards(config, device),
        *_quantized_experts(config),
        *shapes,
    ]


def _quantized_experts(config: TrainConfig) -> list[str]:
    grouped = config.model_type in MIXTURES and not experts_are_modules(config.model_type, config.transformers_version)
    if not grouped or config.quantization in (None, "off"):
        return []
    dtype = "float32 (upcast=off leaves them as loaded)" if config.upcast == "all" else str(config.dtype)
    return [f"bitsandbytes does not quantize transformers 5's experts, here in {dtype}; with transformers 4 it does."]


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
    follows = head_size * config.n_head == config.n_embd  # else the config sets the head size
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
