"""The last step of a config: unset keys are filled in from the trainer and the device, each with its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Protocol

import msgspec

from oomph.config.adapters import Decision, adapter_rules, quantization_of
from oomph.config.lengths import mean_length
from oomph.config.load import LoadedConfig
from oomph.config.programs import ON_THE_TRAINER, OWN_CLASSES, TRANSFORMERS, release
from oomph.config.reading.hugging_face import OWN_ACTIVATIONS
from oomph.config.schema import COMPILED_LOSS_CHUNK, DEFAULT_LOSS_CHUNK, TrainConfig
from oomph.config.shape import inner_size


class SettlingDevice(Protocol):
    """The properties of a device that these decisions depend on."""

    @property
    def kind(self) -> str: ...  # cuda, rocm, cpu or mps
    @property
    def name(self) -> str: ...
    @property
    def has_bf16(self) -> bool: ...
    @property
    def capability(self) -> tuple[int, int] | None: ...  # CUDA's, if it has one
    @property
    def usable_mib(self) -> int | None: ...  # by one process


# Keys that nanoGPT as published does not have, and the values it behaves like.
NANOGPT_HAS = {
    "checkpoint_layers": 0, "loss_chunk": 0, "optimizer": "adamw", "ema": 0.0, "position_embedding_type": "absolute",
    "norm_type": "layernorm", "use_qk_norm": False, "is_gated_act": False, "hidden_act": "gelu",
    "num_key_value_heads": None, "head_dim": None, "zero_init": False, "matrix_lr": None,
    "lr_scheduler_type": "cosine",
}  # fmt: skip
CPU_LOSS_CHUNK = 512  # tokens; measured: smaller ones make the products slow, larger ones only take memory
FLASH_CAPABILITY = (8, 0)  # PyTorch's flash kernel needs Ampere; before that SDPA takes the memory-efficient one
FLASH3_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0))  # for which nanochat finds FlashAttention 3 kernels
TORCHTUNE_CHUNKS = 8  # num_output_chunks
UNSLOTH_LOGITS_BYTES = 4 * 2**30  # the most that a chunk of its loss takes
LITGPT_CHUNK = 128  # tokens: lm_head_chunk_size
FLASH_HEAD_SIZE = 256  # and heads of at most this size
# Since this transformers the Trainer ... (training_args.py by release, trainer.py in 5.0)
TRAINER_FUSED_SINCE = (4, 54)  # takes the fused AdamW, if torch is TORCH_FUSED_SINCE or newer
TORCH_FUSED_SINCE = (2, 8)
TRAINER_TORCH_ADAMW_SINCE = (4, 36)  # takes torch's AdamW; its own before went over tensors one by one
_EPOCHS = {"litgpt": 5.0, "torchtune": 1.0}  # finetune_lora's default; what torchtune's own configs say
_TRAINER_EPOCHS = 3.0  # TrainingArguments.num_train_epochs
TRAINER_UNCACHED_SINCE = (5, 0)  # switches the cache of keys and values off
# Since this TRL the SFTTrainer ... (sft_trainer.py by release)
TRL_CHUNKED_SINCE = (1, 7)  # computes the loss without all logits, ...
TRL_FUSED_SINCE = (1, 15)  # ... and in the way modelled here


# How programs share the work among several devices, if not by DDP.
PARALLEL_OF = {
    "torchtitan": ("fsdp", "torchtitan's"),
    "nanochat": ("zero1", "nanochat's optimizer shares out its state"),
}


def settle(loaded: LoadedConfig, device: SettlingDevice) -> LoadedConfig:
    """The config with every None but `dataset_tokens` filled in. Set keys are kept, or a note says why not.

    A traced model takes whatever optimizer is set, and comes from the installed transformers.
    """
    config = loaded.config
    decisions: dict[str, Decision] = {}
    notes = list(loaded.notes)
    if config.trainer == "nanogpt" and loaded.model is None:
        config, left_out = _as_published(config, loaded)
        notes += left_out
    version = installed("transformers") if loaded.traces_transformers else None
    if version is not None and not loaded.said("transformers_version"):
        decisions["transformers_version"] = (version, "the installed one, whose model is traced")
        config = msgspec.structs.replace(config, transformers_version=version)
    if config.trainer == "litgpt" and config.method == "qlora" and config.optimizer == "adamw":
        decisions["optimizer"] = "paged_adamw", "litgpt takes bitsandbytes' PagedAdamW beside a quantized base"
    if config.trainer == "litgpt" and config.tie_weights:
        decisions["tie_weights"] = False, "litgpt keeps head and embedding apart, tied in the checkpoint or not"
    if config.attention == "flash" and (reason := _no_flash(config, device)):
        decisions["attention"] = ("efficient", reason)
    if config.dtype is None:
        decisions["dtype"] = _dtype(config, device)
    elif config.trainer == "nanogpt" and config.dtype != "float32" and _no_autocast(device):
        decisions["dtype"] = ("float32", f"nanoGPT does not autocast on {device.name}")
        notes.append(
            f"{loaded.sources['dtype']}: dtype = {config.dtype!r} has no effect: nanoGPT switches autocast off where "
            f"the device is not CUDA, so it computes in float32"
        )
    if config.trainer == "nanochat" and not loaded.said("attention"):
        dtype = decisions["dtype"][0] if "dtype" in decisions else config.dtype
        decisions |= _flash3(str(dtype), device)
    decisions |= {key: rule for key, rule in _shape_rules(config).items() if getattr(config, key) is None}
    decisions |= {key: rule(config) for key, rule in _BY_SETTING.items() if getattr(config, key) is None}
    dtype = str(decisions["dtype"][0] if "dtype" in decisions else config.dtype)
    decisions |= {key: rule for key, rule in adapter_rules(config, dtype).items() if getattr(config, key) is None}
    if config.trainer == "oomph" and config.compile and not loaded.said("compile"):
        decisions |= _eagerly(config, device)
    compiles = bool(decisions["compile"][0] if "compile" in decisions else config.compile)
    if config.loss_chunk is None:
        decisions["loss_chunk"] = _loss_chunk(msgspec.structs.replace(config, dtype=dtype, compile=compiles), device)
    if config.parallel in (None, "auto"):
        alone = config.world_size == 1
        own = PARALLEL_OF.get(config.trainer, ("ddp", "several devices share the batch"))
        if config.deepspeed != "off" and not alone:
            own = ("none", "DeepSpeed shares the work by itself")
        decisions["parallel"] = ("none", "one device") if alone else own
    if config.checkpoint_policy is None:
        titan = config.trainer == "torchtitan"
        decisions["checkpoint_policy"] = ("op", "torchtitan's") if titan else ("full", "a block keeps its input alone")
    if config.optimizer_loop is None:
        decisions["optimizer_loop"] = _optimizer_loop(config, device)
    if config.num_samples is not None and not loaded.said("max_iters"):
        decisions["max_iters"] = _steps_of_epochs(config)
    settled = msgspec.structs.replace(config, **{key: value for key, (value, _) in decisions.items()})
    sources = loaded.sources | {key: f"default: {reason}" for key, (_, reason) in decisions.items()}
    return msgspec.structs.replace(loaded, config=settled, sources=sources, notes=notes)


def installed(package: str) -> str | None:
    """The installed release of a package; None if it is missing or has no version."""
    from importlib import metadata  # 10 ms, needed only if a model is traced or run

    try:
        number = re.match(r"\d+\.\d+(\.\d+)?", metadata.version(package))
    except metadata.PackageNotFoundError:
        return None
    return number.group() if number else None


def _steps_of_epochs(config: TrainConfig) -> Decision:
    """The steps in the config's epochs, or in as many as the program trains by default."""
    epochs = config.num_train_epochs or _EPOCHS.get(config.trainer, _TRAINER_EPOCHS)
    batch, samples = config.batch_size * config.gradient_accumulation_steps, config.num_samples or 0
    if config.packing == "packed":
        samples = math.ceil(samples * mean_length(config) / config.block_size)
    steps = max(1, math.ceil(epochs * math.ceil(samples / batch)))
    what = "samples" if config.packing != "packed" else f"rows, packed of {config.num_samples:,} samples"
    return steps, f"{epochs:g} epochs of {samples:,} {what}, {batch} a step"


def _shape_rules(config: TrainConfig) -> dict[str, Decision]:
    """The values of unset shape keys that follow from the others."""
    inner = inner_size(config)
    usual = "4 × n_embd" if not config.is_gated_act else "8/3 × n_embd, in multiples of 16"
    rules: dict[str, Decision] = {
        "num_key_value_heads": (config.n_head, "as many as n_head"),
        "head_dim": (config.n_embd // config.n_head, "n_embd / n_head"),
        "intermediate_size": (inner_size(msgspec.structs.replace(config, intermediate_size=None)), usual),
        "hidden_act": _activation(config),
        "attention_dropout": (config.dropout, "as dropout"),
        "max_position_embeddings": (config.block_size, "block_size"),
    }
    return rules | ({"moe_intermediate_size": (inner, "as intermediate_size")} if config.num_experts else {})


def follows(config: TrainConfig, key: str) -> bool:
    """Whether a settled key has the value that follows from the rest of the model's shape."""
    rule = _shape_rules(config).get(key)
    return rule is not None and rule[0] == getattr(config, key)


def _activation(config: TrainConfig) -> Decision:
    if config.model_type == "nanochat":
        return "relu", "nanochat squares what relu leaves"
    if config.trainer == "torchtitan":
        return "silu", "Llama's"
    if config.trainer in (*TRANSFORMERS, *OWN_CLASSES):
        return OWN_ACTIVATIONS.get(config.model_type, "silu"), f"{config.model_type}'s in transformers"
    if config.is_gated_act:
        return "silu", "SwiGLU's"
    return "gelu", "nanoGPT's"


def _as_published(config: TrainConfig, loaded: LoadedConfig) -> tuple[TrainConfig, list[str]]:
    """The config as nanoGPT can run it, and a note for each key that only oomph train has."""
    asked = {
        key: value
        for key, value in NANOGPT_HAS.items()
        if getattr(config, key) not in (value, None) and not follows(config, key)
    }
    together: dict[str, list[str]] = {}
    for key in asked:
        together.setdefault(loaded.sources[key], []).append(key)
    notes = [
        f"{source}: nanoGPT as published has no {', '.join(found)}, so its figures are without; oomph train has it"
        for source, found in together.items()
    ]
    return msgspec.structs.replace(config, **asked), notes


def _flash3(dtype: str, device: SettlingDevice) -> dict[str, Decision]:
    """FlashAttention 3 for nanochat, if its kernels are built for the card and support the dtype."""
    if device.kind == "cuda" and device.capability in FLASH3_CAPABILITIES and dtype == "bfloat16":
        return {"attention": ("flash3", f"nanochat takes FlashAttention 3 on {device.name}")}
    return {}


def _no_flash(config: TrainConfig, device: SettlingDevice) -> str | None:
    """Why PyTorch will not use its flash kernel; None if it will."""
    if device.kind == "cuda" and device.capability is not None and device.capability < FLASH_CAPABILITY:
        return f"{device.name} is too old for the flash kernel, and PyTorch uses its memory-efficient one"
    if device.kind == "cuda" and (config.head_dim or config.n_embd // config.n_head) > FLASH_HEAD_SIZE:
        return f"heads wider than {FLASH_HEAD_SIZE} are too wide for the flash kernel"
    return None


def _no_autocast(device: SettlingDevice) -> bool:
    """Whether nanoGPT runs without autocast: on any device without "cuda" in its name. ROCm's name is cuda."""
    return device.kind not in ("cuda", "rocm")


def _dtype(config: TrainConfig, device: SettlingDevice) -> Decision:
    if _no_autocast(device):
        if config.trainer == "nanogpt":
            return "float32", f"nanoGPT does not autocast on {device.name}"
        return "float32", f"half precision is rarely faster on {device.name}"
    if config.trainer == "torch":
        return "float32", "a plain loop computes in its weights' own precision"
    if config.trainer == "torchtune" and not device.has_bf16:
        return "float32", f"{device.name} has no bfloat16, and torchtune takes float32 or bfloat16"
    if config.trainer == "nanochat" and not device.has_bf16:
        return "float32", f"{device.name} has no bfloat16, and nanochat takes float32 then"
    if device.has_bf16:
        return "bfloat16", f"{device.name} has bfloat16"
    return "float16", f"{device.name} has no bfloat16"


def _return_logits(config: TrainConfig) -> Decision:
    if config.loss_chunk:
        return False, "a loss in chunks never holds all logits"
    if config.trainer in ON_THE_TRAINER:
        return bool(config.compile), "the Trainer lets them go, but a compiled model is given a gradient of them"
    if config.trainer == "torch":
        return True, "a plain loop holds the model's outputs until the next are there"
    if config.trainer == "nanochat":
        return False, "nanochat's training step returns only the loss"
    if config.trainer in OWN_CLASSES:
        return False, f"{config.trainer}'s training step keeps only the loss"
    if config.trainer == "torchtitan":
        return False, "torchtitan lets its logits go before backward"
    if config.trainer == "nanogpt":
        return True, "nanoGPT's training step returns its logits"
    return False, "oomph's training step returns only the loss"


def _use_cache(config: TrainConfig) -> Decision:
    """Whether keys and values are kept for generation. Training does not read them, but `outputs` holds them."""
    if config.trainer not in TRANSFORMERS:
        return False, "there is no such cache"
    if config.trainer in ("trl", "unsloth"):
        return False, "SFTTrainer switches it off"
    if config.trainer == "hf" and release(config.transformers_version) >= TRAINER_UNCACHED_SINCE:
        return False, "transformers' Trainer switches it off"
    if config.checkpoint_layers:
        return False, "transformers switches it off where blocks are checkpointed"
    if config.compile:
        return False, "not described for compiled models"
    return True, "transformers' models have it on unless they are told otherwise"


def _fused_loss(config: TrainConfig) -> Decision:
    if config.trainer == "unsloth":
        return "unsloth", "Unsloth's own"
    if config.trainer == "trl" and release(config.trl_version) >= TRL_CHUNKED_SINCE:
        return "trl", f"SFTTrainer's own since TRL {'.'.join(map(str, TRL_CHUNKED_SINCE))}"
    if config.liger_kernel:
        return "liger", "among Liger's kernels"
    return "off", f"{config.trainer} has all logits unless it is told otherwise"


_BY_SETTING = {
    "return_logits": _return_logits,
    "use_cache": _use_cache,
    "fused_loss": _fused_loss,
}  # what other settings of a run decide


def _own_loss_chunk(config: TrainConfig) -> Decision:
    """Tokens of each sequence in a chunk of the head and the loss, for a program with its own classes."""
    if config.trainer == "torchtune":
        return -(-config.block_size // TORCHTUNE_CHUNKS), "torchtune's CEWithChunkedOutputLoss makes 8 chunks"
    return LITGPT_CHUNK, f"litgpt fine-tunes with the head in chunks of {LITGPT_CHUNK} tokens"


_SEARCHED = dict.fromkeys(TRANSFORMERS, _BY_SETTING) | {"torchtune": {"loss_chunk": _own_loss_chunk}}


def left_open(loaded: LoadedConfig) -> tuple[str, ...]:
    """The unset keys that a program derives from other settings that a search varies."""
    return tuple(key for key in _SEARCHED.get(loaded.config.trainer, ()) if not loaded.said(key))


def decided(config: TrainConfig, keys: Iterable[str]) -> TrainConfig:
    """A setting that a search tries, with those keys as its program derives them."""
    rules = _SEARCHED.get(config.trainer, {})
    return msgspec.structs.replace(config, **{key: rules[key](config)[0] for key in keys})


def _eagerly(config: TrainConfig, device: SettlingDevice) -> dict[str, Decision]:
    """Why `oomph train` does not compile by default; nothing if it does."""
    if device.kind == "cpu":
        return {"compile": (False, "torch.compile does not pay on a CPU")}
    return {"compile": (False, "compiled adapters are not planned")} if config.method != "full" else {}


def _loss_chunk(config: TrainConfig, device: SettlingDevice) -> Decision:
    if config.trainer in OWN_CLASSES:
        return _own_loss_chunk(config)
    if config.trainer == "unsloth":
        return _unsloth_chunk(config, device)
    if config.trainer != "oomph":
        return 0, f"{config.trainer} computes all logits at once"
    if config.return_logits:
        return 0, "return_logits needs all logits at once"
    if device.kind == "cpu":
        return CPU_LOSS_CHUNK, f"chunks of {CPU_LOSS_CHUNK} tokens are fastest on a CPU"
    return usual_loss_chunk(config), f"oomph computes the loss in chunks of {usual_loss_chunk(config)} tokens"


def _unsloth_chunk(config: TrainConfig, device: SettlingDevice) -> Decision:
    """The most tokens in a chunk of Unsloth's loss, whose float32 logits would take half of what is free on the card as
    the first loss is computed, and 4 GiB at most (unsloth_zoo, fused_losses/cross_entropy_loss.py)."""
    words, width = config.vocab_size, config.n_embd
    size, inner = config.head_dim or width // config.n_head, config.intermediate_size or 4 * width
    heads = 2 * (config.n_head + (config.num_key_value_heads or config.n_head))
    linear = config.n_layer * width * (heads * size + 3 * inner)
    tables = words * width * (1 if config.tie_weights else 2)
    weights = linear * (0.5 + 1 / 64 if quantization_of(config) != "off" else 2) + 2 * tables
    free = (device.usable_mib or 0) * 2**20 - weights
    target = min(UNSLOTH_LOGITS_BYTES, free / 2 if free > 0 else UNSLOTH_LOGITS_BYTES)  # nothing is free: it cannot run
    why = "4 GiB" if target == UNSLOTH_LOGITS_BYTES else f"{target / 2**30:.1f} GiB, half of what the weights leave"
    return max(1, int(target / (4 * words))), f"a chunk of Unsloth's loss has at most {why} of float32 logits"


def usual_loss_chunk(config: TrainConfig) -> int:
    """Tokens per chunk of the loss on a GPU, for a config whose dtype is settled.

    Under autocast each chunk adds to the head's float32 gradient, so fewer, larger chunks are faster. Compiled ones can
    be larger, since a logit then takes 2 bytes instead of 6.
    """
    larger = config.compile and config.autocast and config.dtype != "float32"
    return COMPILED_LOSS_CHUNK if larger else DEFAULT_LOSS_CHUNK


def _trainers_loop(config: TrainConfig, device: SettlingDevice) -> Decision:
    """The default optimizer loop of transformers' Trainer."""
    version, in_words = release(config.transformers_version), f"in transformers {config.transformers_version}"
    if version >= TRAINER_FUSED_SINCE and release(config.torch_version) >= TORCH_FUSED_SINCE:
        return "fused", "the Trainer's default is adamw_torch_fused"
    if version < TRAINER_TORCH_ADAMW_SINCE or device.kind not in ("cuda", "rocm"):
        return "forloop", f"the Trainer's AdamW goes over tensors one by one {in_words}"
    return "foreach", f"the Trainer's default is adamw_torch {in_words}"


def _optimizer_loop(config: TrainConfig, device: SettlingDevice) -> Decision:
    if config.trainer == "oomph":
        return "fused", "oomph fuses the optimizer on every device"
    if config.trainer in ON_THE_TRAINER:
        return _trainers_loop(config, device)
    if config.trainer == "torch":
        own = "foreach" if device.kind in ("cuda", "rocm") else "forloop"
        return own, f"torch.optim's default on {device.name}"
    if config.trainer == "torchtune":
        return "fused", "torchtune's configs fuse AdamW"
    if config.trainer == "litgpt":
        own = "foreach" if device.kind in ("cuda", "rocm") else "forloop"
        return own, f"litgpt leaves it to torch.optim's default on {device.name}"
    if config.trainer == "torchtitan":
        return "foreach", "torch.optim's default, which torchtitan took until it asked for fused"
    if config.trainer == "nanochat":
        return "fused", "nanochat compiles its optimizer's step"
    if _no_autocast(device):
        return "forloop", "nanoGPT fuses AdamW on CUDA only, and torch loops over tensors elsewhere"
    return "fused", "nanoGPT fuses AdamW on CUDA"
