"""The last step of a config: unset keys are filled in from the trainer and the device, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from oomph.config.hugging_face import OWN_ACTIVATIONS
from oomph.config.load import LoadedConfig
from oomph.config.schema import COMPILED_LOSS_CHUNK, DEFAULT_LOSS_CHUNK, MIXTURES, TRANSFORMERS, TrainConfig, release

Decision = tuple[str | int | float | bool, str]  # a value and its reason


class SettlingDevice(Protocol):
    """What these decisions depend on."""

    @property
    def kind(self) -> str: ...  # cuda, rocm, cpu or mps
    @property
    def name(self) -> str: ...
    @property
    def has_bf16(self) -> bool: ...
    @property
    def capability(self) -> tuple[int, int] | None: ...  # CUDA's, where it has one


# Keys of ours that nanoGPT as published does not have, and what it does.
NANOGPT_HAS = {"checkpoint_layers": 0, "loss_chunk": 0, "optimizer": "adamw"}
CPU_LOSS_CHUNK = 512  # tokens; measured: smaller ones make the products slow, larger ones only take memory
FLASH_CAPABILITY = (8, 0)  # PyTorch's flash kernel needs Ampere; before that SDPA takes the memory-efficient one
FLASH3_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0))  # what nanochat finds kernels of FlashAttention 3 for
FLASH_HEAD_SIZE = 256  # and heads of at most this size
# Since this transformers the Trainer ... (training_args.py by release, trainer.py in 5.0)
TRAINER_FUSED_SINCE = (4, 54)  # takes the fused AdamW, where torch is TORCH_FUSED_SINCE or newer
TORCH_FUSED_SINCE = (2, 8)
TRAINER_TORCH_ADAMW_SINCE = (4, 36)  # takes torch's AdamW; the one of its own before went over tensors one by one
TRAINER_UNCACHED_SINCE = (5, 0)  # switches the cache of keys and values off


def settle(loaded: LoadedConfig, device: SettlingDevice, own_model: bool = False) -> LoadedConfig:
    """The config with every None filled in but `dataset_tokens`. Set keys are kept, or a note says why not.

    `own_model`: the user's own model replaces nanoGPT's, and any optimizer is allowed.
    """
    config = loaded.config
    decisions: dict[str, Decision] = {}
    notes = list(loaded.notes)
    if config.trainer == "nanogpt":
        config, left_out = _as_published(config, loaded, own_model)
        notes += left_out
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
    decisions |= {key: rule for key, rule in _adapter_rules(config).items() if getattr(config, key) is None}
    if config.loss_chunk is None:
        dtype = decisions["dtype"][0] if "dtype" in decisions else config.dtype
        decisions["loss_chunk"] = _loss_chunk(msgspec.structs.replace(config, dtype=dtype), device)
    if config.trainer == "oomph" and config.compile and device.kind == "cpu" and not loaded.said("compile"):
        decisions["compile"] = (False, "torch.compile does not pay on a CPU")
    if config.optimizer_loop is None:
        decisions["optimizer_loop"] = _optimizer_loop(config, device)
    settled = msgspec.structs.replace(config, **{key: value for key, (value, _) in decisions.items()})
    sources = loaded.sources | {key: f"default: {reason}" for key, (_, reason) in decisions.items()}
    return LoadedConfig(settled, sources, notes, loaded.files)


def _shape_rules(config: TrainConfig) -> dict[str, Decision]:
    """Keys of a model's shape that may be left unset, as they follow from the others."""
    inner = config.intermediate_size or 4 * config.n_embd
    rules: dict[str, Decision] = {
        "num_key_value_heads": (config.n_head, "as many as n_head"),
        "head_dim": (config.n_embd // config.n_head, "n_embd / n_head"),
        "intermediate_size": (4 * config.n_embd, "4 × n_embd"),
        "hidden_act": _activation(config),
        "attention_dropout": (config.dropout, "as dropout"),
        "max_position_embeddings": (config.block_size, "block_size"),
    }
    return rules | ({"moe_intermediate_size": (inner, "as intermediate_size")} if config.num_experts else {})


# peft's own targets by family (0.21, utils/constants.py); the other families have none there.
_ATTENTION = "q_proj,k_proj,v_proj,o_proj"
PEFT_TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value"} | dict.fromkeys(
    ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "opt"), "q_proj,v_proj"
)


def _adapter_rules(config: TrainConfig) -> dict[str, Decision]:
    """What a method of fine-tuning decides where nothing is said."""
    if config.method == "full":
        return {}
    family, qlora = config.model_type, config.method == "qlora"
    assumed = _ATTENTION if family in MIXTURES else "all-linear"
    targets: Decision = (assumed, f"assumed: peft has no targets of its own for {family}")
    if family in PEFT_TARGETS:
        targets = (PEFT_TARGETS[family], f"peft's own for {family}")
    return {
        "lora_targets": targets,
        "adapter_dtype": ("float32", "peft keeps adapters in float32, whatever the base is"),
        "quantization": ("nf4", "QLoRA's") if qlora else ("off", "the base is not quantized"),
        "upcast": _upcast(config),
        "double_quantization": (qlora, "QLoRA's" if qlora else "off unless told, as in bitsandbytes"),
    }


def _upcast(config: TrainConfig) -> Decision:
    """What is brought to float32 of a quantized base beside its linear layers."""
    quantization = config.quantization or ("nf4" if config.method == "qlora" else "off")
    if quantization in ("off", "gptq"):
        return "off", "peft casts weights beside quantized ones alone, and none beside GPTQ's"
    return "all", "peft's prepare_model_for_kbit_training casts all"


def follows(config: TrainConfig, key: str) -> bool:
    """Whether a settled key has the value that the rest of the model's shape gives it."""
    rule = _shape_rules(config).get(key)
    return rule is not None and rule[0] == getattr(config, key)


def _activation(config: TrainConfig) -> Decision:
    if config.model_type == "nanochat":
        return "relu", "nanochat squares what relu leaves"
    if config.trainer in TRANSFORMERS:
        return OWN_ACTIVATIONS.get(config.model_type, "silu"), f"{config.model_type}'s in transformers"
    return "gelu", "nanoGPT's"


def _as_published(config: TrainConfig, loaded: LoadedConfig, own_model: bool) -> tuple[TrainConfig, list[str]]:
    """The config as nanoGPT can run it, and a note for each key that only oomph train has."""
    asked = {key: value for key, value in NANOGPT_HAS.items() if getattr(config, key) not in (value, None)}
    if own_model:
        asked.pop("optimizer", None)
        return msgspec.structs.replace(config, **asked), []
    notes = [
        f"{loaded.sources[key]}: nanoGPT as published has no {key}, so its figures are without it; oomph train has it"
        for key in asked
    ]
    return msgspec.structs.replace(config, **asked), notes


def _flash3(dtype: str, device: SettlingDevice) -> dict[str, Decision]:
    """nanochat takes FlashAttention 3 where its kernels are built for the card and compute in its dtype."""
    if device.kind == "cuda" and device.capability in FLASH3_CAPABILITIES and dtype == "bfloat16":
        return {"attention": ("flash3", f"nanochat takes FlashAttention 3 on {device.name}")}
    return {}


def _no_flash(config: TrainConfig, device: SettlingDevice) -> str | None:
    """Why PyTorch will not use its flash kernel; None where it will."""
    if device.kind == "cuda" and device.capability is not None and device.capability < FLASH_CAPABILITY:
        return f"{device.name} is too old for the flash kernel, and PyTorch uses its memory-efficient one"
    if device.kind == "cuda" and (config.head_dim or config.n_embd // config.n_head) > FLASH_HEAD_SIZE:
        return f"heads wider than {FLASH_HEAD_SIZE} are too wide for the flash kernel"
    return None


def _no_autocast(device: SettlingDevice) -> bool:
    """nanoGPT treats every device without "cuda" in its name as a CPU, without autocast. ROCm's name is cuda."""
    return device.kind not in ("cuda", "rocm")


def _dtype(config: TrainConfig, device: SettlingDevice) -> Decision:
    if _no_autocast(device):
        if config.trainer == "nanogpt":
            return "float32", f"nanoGPT does not autocast on {device.name}"
        return "float32", f"half precision is rarely faster on {device.name}"
    if config.trainer == "torch":
        return "float32", "a plain loop computes in its weights' own precision"
    if config.trainer == "nanochat" and not device.has_bf16:
        return "float32", f"{device.name} has no bfloat16, and nanochat takes float32 then"
    if device.has_bf16:
        return "bfloat16", f"{device.name} has bfloat16"
    return "float16", f"{device.name} has no bfloat16"


def _return_logits(config: TrainConfig) -> Decision:
    if config.loss_chunk:
        return False, "a loss in chunks never holds all logits"
    if config.trainer == "hf":
        return bool(config.compile), "the Trainer lets them go, but a compiled model is given a gradient of them"
    if config.trainer == "torch":
        return True, "a plain loop holds the model's outputs until the next are there"
    if config.trainer == "nanochat":
        return False, "nanochat's training step returns only the loss"
    if config.trainer == "nanogpt":
        return True, "nanoGPT's training step returns its logits"
    return False, "oomph's training step returns only the loss"


def _use_cache(config: TrainConfig) -> Decision:
    """Keys and values that generation would go on from. In training nobody reads them, but `outputs` holds them."""
    if config.trainer not in TRANSFORMERS:
        return False, "there is no such cache"
    if config.trainer == "hf" and release(config.transformers_version) >= TRAINER_UNCACHED_SINCE:
        return False, "transformers' Trainer switches it off"
    if config.checkpoint_layers:
        return False, "transformers switches it off where blocks are checkpointed"
    if config.compile:
        return False, "not described for compiled models"
    return True, "transformers' models have it on unless they are told otherwise"


_BY_SETTING = {"return_logits": _return_logits, "use_cache": _use_cache}  # what other settings of a run decide


def left_open(loaded: LoadedConfig) -> tuple[str, ...]:
    """The keys that transformers' programs decide by the other settings, and nobody gave."""
    return tuple(key for key in _BY_SETTING if loaded.config.trainer in TRANSFORMERS and not loaded.said(key))


def decided(config: TrainConfig, keys: Iterable[str]) -> TrainConfig:
    """A setting that a search tries, with those keys as its program decides them."""
    return msgspec.structs.replace(config, **{key: _BY_SETTING[key](config)[0] for key in keys})


def _loss_chunk(config: TrainConfig, device: SettlingDevice) -> Decision:
    if config.trainer != "oomph":
        return 0, f"{config.trainer} computes all logits at once"
    if config.return_logits:
        return 0, "return_logits needs all logits at once"
    if device.kind == "cpu":
        return CPU_LOSS_CHUNK, f"chunks of {CPU_LOSS_CHUNK} tokens are fastest on a CPU"
    return usual_loss_chunk(config), f"oomph computes the loss in chunks of {usual_loss_chunk(config)} tokens"


def usual_loss_chunk(config: TrainConfig) -> int:
    """Tokens per chunk of the loss on a GPU, for a config whose dtype is settled.

    Under autocast each chunk adds to the head's float32 gradient, so fewer, larger chunks are faster. Compiled ones can
    be larger, since a logit then takes 2 bytes instead of 6.
    """
    larger = config.compile and config.autocast and config.dtype != "float32"
    return COMPILED_LOSS_CHUNK if larger else DEFAULT_LOSS_CHUNK


def _trainers_loop(config: TrainConfig, device: SettlingDevice) -> Decision:
    """What transformers' Trainer takes where it is not told."""
    version, in_words = release(config.transformers_version), f"in transformers {config.transformers_version}"
    if version >= TRAINER_FUSED_SINCE and release(config.torch_version) >= TORCH_FUSED_SINCE:
        return "fused", "the Trainer's default is adamw_torch_fused"
    if version < TRAINER_TORCH_ADAMW_SINCE or device.kind not in ("cuda", "rocm"):
        return "forloop", f"the Trainer's AdamW goes over tensors one by one {in_words}"
    return "foreach", f"the Trainer's default is adamw_torch {in_words}"


def _optimizer_loop(config: TrainConfig, device: SettlingDevice) -> Decision:
    if config.trainer == "oomph":
        return "fused", "oomph fuses the optimizer on every device"
    if config.trainer == "hf":
        return _trainers_loop(config, device)
    if config.trainer == "torch":
        own = "foreach" if device.kind in ("cuda", "rocm") else "forloop"
        return own, f"torch.optim's default on {device.name}"
    if config.trainer == "nanochat":
        return "fused", "nanochat compiles its optimizer's step"
    if _no_autocast(device):
        return "forloop", "nanoGPT fuses AdamW on CUDA only, and torch loops over tensors elsewhere"
    return "fused", "nanoGPT fuses AdamW on CUDA"
