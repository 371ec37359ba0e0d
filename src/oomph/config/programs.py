"""Training programs, architectures and presets by name: which trains which, and the releases that are assumed."""

from __future__ import annotations

NEWEST_TORCH = "2.13"  # assumed where the config does not say which PyTorch will run
NEWEST_TRL = "1.16"  # and of TRL
NEWEST_BITSANDBYTES = "0.50"  # and of bitsandbytes
NEWEST_TRANSFORMERS = "5.22"  # the same of transformers: the version that the descriptions are held against
EARLIEST_TRANSFORMERS = (4, 48)  # the earliest release whose differences from the newest are described

TRAINERS = ("nanogpt", "oomph", "hf", "trl", "unsloth", "torch", "nanochat", "torchtune", "litgpt", "torchtitan")
TRANSFORMERS = ("hf", "trl", "unsloth", "torch")  # trainers of transformers' own models, patched or not
ON_THE_TRAINER = ("hf", "trl", "unsloth")  # those of them built on transformers' Trainer
LIGER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # families whose blocks are modelled with its kernels
UNSLOTH_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # families whose blocks are modelled as Unsloth patches them
# Trainers that implement transformers' families in their own classes, and the families modelled for each.
OWN_CLASSES: dict[str, tuple[str, ...]] = {
    "torchtune": ("llama", "mistral", "qwen2", "phi3"),
    "litgpt": ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2", "gpt_neox"),
}

# Programs described only eagerly: SFTTrainer's and Unsloth's losses, and the others' classes, are not compiled here.
EAGER = ("trl", "unsloth", *OWN_CLASSES)

# Architectures that `step.models` describes, by transformers' names.
MODEL_TYPES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2", "gemma3_text", "gpt_neox", "opt",
    "mixtral", "qwen3_moe", "qwen", "nanochat",
)  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe")  # those of them with experts
EXPERTS_GROUPED_SINCE = (5, 0)  # the release of transformers
_WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text")
LLAMAS = ("llama", "olmo2", *_WINDOWED)  # Llama and its relatives, one description
# Keys that only some of transformers' classes read, and the families whose class does.
READ_BY: dict[str, tuple[str, ...]] = {
    "sliding_window": _WINDOWED, "sliding_window_pattern": _WINDOWED, "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3_text"), "head_dim": LLAMAS, "num_key_value_heads": LLAMAS,
    "num_experts": MIXTURES, "num_experts_per_tok": MIXTURES, "moe_intermediate_size": MIXTURES,
}  # fmt: skip

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, with the heads of the released
# models; nanoGPT's GPT.from_pretrained has the same.
GPT2_SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
GPT2_VOCABULARY = 50257
GPT2_BLOCK = 1024
PRESETS = tuple(GPT2_SHAPES)


def experts_are_modules(model_type: str | None, transformers_version: str) -> bool:
    """Whether each expert of a mixture, and its router, has its own linear layers; later releases group experts in
    one parameter."""
    return model_type in MIXTURES and release(transformers_version) < EXPERTS_GROUPED_SINCE


def release(version: str) -> tuple[int, int]:
    """(2, 13) for "2.13" or "2.13.0": enough to order the releases of torch and of transformers."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
