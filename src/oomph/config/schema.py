"""`TrainConfig`: every setting of a training run, with nanoGPT's names and defaults, then ours; and its keys as data.

Each field carries its description and limits, and they are written nowhere else: `oomph plan --help`, the web form and
`validate` read them from here. None means "not set": `settle` fills it in from trainer and device, with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

NEWEST_TORCH = "2.13"  # assumed where the config does not say which PyTorch will run
NEWEST_TRANSFORMERS = "5.22"  # the same of transformers: the version that the descriptions are held against
EARLIEST_TRANSFORMERS = (4, 48)  # the earliest release whose differences from the newest are described
DEFAULT_LOSS_CHUNK = 2048  # tokens: large enough for full-speed matrix products, small beside a micro-batch
COMPILED_LOSS_CHUNK = 4096  # a compiled loss makes no float32 copy of the chunk's logits
TRAINERS = ("nanogpt", "oomph", "hf", "torch", "nanochat")
TRANSFORMERS = ("hf", "torch")  # those that train transformers' own models
ZERO_GRADS = ("after_step", "before_backward")
# Architectures that `step.models` describes, by transformers' names for them.
MODEL_TYPES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2", "gemma3_text", "gpt_neox", "opt",
    "mixtral", "qwen3_moe", "nanochat",
)  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe")  # of them those with experts
_WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text")
_GROUPED = ("llama", "olmo2", *_WINDOWED)
# Keys that not every class of transformers reads, and the families whose class does.
READ_BY: dict[str, tuple[str, ...]] = {
    "sliding_window": _WINDOWED, "sliding_window_pattern": _WINDOWED, "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3_text"), "head_dim": _GROUPED, "num_key_value_heads": _GROUPED,
    "num_experts": MIXTURES, "num_experts_per_tok": MIXTURES, "moe_intermediate_size": MIXTURES,
}  # fmt: skip
ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("flash", "efficient", "math", "flash3")
METHODS = ("full", "lora", "dora", "qlora")
QUANTIZATIONS = ("off", "nf4", "fp4", "int8", "gptq", "awq")
UPCASTS = ("off", "norms", "all")  # all: peft prepares the base; norms: TRL then casts the rest back (before 1.0)
FUSED_LOSSES = ("off", "liger")
OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "adafactor", "muon")
OPTIMIZER_LOOPS = ("fused", "foreach", "forloop")
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
INITS = ("scratch", "resume", *PRESETS)

# The largest sizes accepted: far beyond any real run, and small enough that later products stay finite.
MANY = 10_000_000  # sequences, micro-steps, devices
MANY_STEPS = 10**12
MOST_BLOCKS = 1000
ALL_BLOCKS = "all"  # what checkpoint_layers may be told instead of a number


def _key(
    description: str,
    *,
    whose: str = "nanogpt",
    needed: bool = True,  # predictions depend on its value; False for mere labels
    choices: Sequence[str] = (),
    **limits: Any,  # ge, gt, le, lt, pattern, as msgspec has them
) -> msgspec.Meta:
    extra = {"whose": whose, "needed": needed}
    schema = {"enum": list(choices)} if choices else None
    return msgspec.Meta(description=description, extra=extra, extra_json_schema=schema, **limits)


_our = partial(_key, whose="oomph")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of one training run. Frozen: change it with `msgspec.structs.replace`."""

    # --- nanoGPT's keys, with nanoGPT's defaults -------------------------------------------------
    out_dir: Annotated[str, _key("where the run is written", needed=False)] = "out"
    eval_interval: Annotated[int, _key("optimizer steps between evaluations", ge=1, le=MANY_STEPS)] = 2000
    log_interval: Annotated[int, _key("optimizer steps between log lines", ge=1, le=MANY_STEPS)] = 1
    eval_iters: Annotated[int, _key("batches of each split per evaluation", ge=1, le=10**9)] = 200
    eval_only: Annotated[bool, _key("evaluate once and stop")] = False
    always_save_checkpoint: Annotated[bool, _key("save after each evaluation, better or not", needed=False)] = True
    init_from: Annotated[str, _key("a new model, a resumed run, or OpenAI's weights", choices=INITS)] = "scratch"
    wandb_log: Annotated[bool, _key("log to Weights & Biases", needed=False)] = False
    wandb_project: Annotated[str, _key("the project at Weights & Biases", needed=False)] = "owt"
    wandb_run_name: Annotated[str, _key("the run at Weights & Biases", needed=False)] = "gpt2"
    dataset: Annotated[str, _key("data/NAME/ with train.bin and val.bin, or a path", needed=False)] = "openwebtext"
    gradient_accumulation_steps: Annotated[
        int, _key("micro-steps per optimizer step, over all devices", ge=1, le=MANY)
    ] = 40
    batch_size: Annotated[int, _key("sequences per micro-step", ge=1, le=MANY)] = 12
    block_size: Annotated[int, _key("tokens per sequence", ge=1, le=100_000_000)] = 1024
    n_layer: Annotated[int, _key("transformer blocks", ge=1, le=MOST_BLOCKS)] = 12
    n_head: Annotated[int, _key("attention heads per block", ge=1, le=1_000_000)] = 12
    n_embd: Annotated[int, _key("width of the model", ge=1, le=1_000_000)] = 768
    dropout: Annotated[float, _key("probability that a value is dropped", ge=0, lt=1)] = 0.0
    bias: Annotated[bool, _key("biases in linear layers and layer norms")] = False
    learning_rate: Annotated[float, _key("learning rate at the top of the schedule", ge=0)] = 6e-4
    max_iters: Annotated[int, _key("optimizer steps", ge=1, le=MANY_STEPS)] = 600000
    weight_decay: Annotated[float, _key("decay of tensors of two dimensions and more", ge=0)] = 1e-1
    beta1: Annotated[float, _key("Adam's first moment", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, _key("Adam's second moment", ge=0, lt=1)] = 0.95
    grad_clip: Annotated[float, _key("largest gradient norm; 0 leaves gradients alone", ge=0)] = 1.0
    decay_lr: Annotated[bool, _key("follow the cosine schedule")] = True
    warmup_iters: Annotated[int, _key("optimizer steps of linear warm-up", ge=0, le=MANY_STEPS)] = 2000
    lr_decay_iters: Annotated[int, _key("optimizer step at which min_lr is reached", ge=0, le=MANY_STEPS)] = 600000
    min_lr: Annotated[float, _key("learning rate at the end of the schedule", ge=0)] = 6e-5
    backend: Annotated[str, _key("torch.distributed's backend", needed=False)] = "nccl"
    device: Annotated[
        str,
        _key(
            "cuda, cuda:0, cpu or mps; cuda means the card named with --gpu",
            pattern=r"^(cuda|cpu|mps)(:[0-9]{1,3})?$",
        ),
    ] = "cuda"
    dtype: (
        Annotated[str, _key("precision of the arithmetic; unset: bfloat16 where the device has it", choices=DTYPES)]
        | None
    ) = None
    compile: Annotated[bool, _key("torch.compile the model")] = True

    # --- ours -----------------------------------------------------------------------------------
    vocab_size: Annotated[int, _our("vocabulary size; nanoGPT reads it from meta.pkl, else 50304", ge=1, le=2**32)] = (
        50304
    )
    model_type: Annotated[str, _our("the architecture, by transformers' name for it", choices=MODEL_TYPES)] = "gpt2"
    num_key_value_heads: (
        Annotated[int, _our("heads of keys and values, fewer than n_head with grouped queries", ge=1, le=1_000_000)]
        | None
    ) = None
    head_dim: Annotated[int, _our("size of a head; not set: n_embd / n_head", ge=1, le=1_000_000)] | None = None
    intermediate_size: Annotated[int, _our("width inside the MLP; not set: 4 × n_embd", ge=1, le=10_000_000)] | None = (
        None
    )
    hidden_act: (
        Annotated[str, _our("the MLP's activation; not set: the architecture's own", choices=ACTIVATIONS)] | None
    ) = None
    max_position_embeddings: (
        Annotated[int, _our("rows of a table of positions; not set: block_size", ge=1, le=100_000_000)] | None
    ) = None
    word_embed_proj_dim: (
        Annotated[int, _our("width of the token embedding where it is not the model's (OPT)", ge=1, le=1_000_000)]
        | None
    ) = None
    do_layer_norm_before: Annotated[bool, _our("norms before attention and MLP, not after them (OPT)")] = True
    use_parallel_residual: Annotated[bool, _our("attention and MLP read the same input (GPT-NeoX)")] = True
    attention_dropout: (
        Annotated[float, _our("dropout of attention's weights; not set: as dropout", ge=0, lt=1)] | None
    ) = None
    num_experts: Annotated[int, _our("experts per block, of a mixture of experts", ge=1, le=100_000)] | None = None
    num_experts_per_tok: (
        Annotated[int, _our("experts that compute a token, of num_experts", ge=1, le=100_000)] | None
    ) = None
    moe_intermediate_size: (
        Annotated[int, _our("width inside an expert; not set: intermediate_size", ge=1, le=10_000_000)] | None
    ) = None
    norm_topk_prob: Annotated[bool, _our("the chosen experts' weights are made to sum to 1")] = True
    sliding_window: Annotated[int, _our("tokens that a windowed block attends to", ge=1, le=100_000_000)] | None = None
    sliding_window_pattern: (
        Annotated[int, _our("every so many blocks one attends to all tokens; not set: none does", ge=1, le=1000)] | None
    ) = None
    window_pattern: (
        Annotated[
            str, _our("nanochat's windows by block, repeated: L sees all, S a quarter", pattern=r"^[SLsl]{1,100}$")
        ]
        | None
    ) = None
    attn_logit_softcapping: Annotated[float, _our("soft cap of attention's scores", gt=0)] | None = None
    final_logit_softcapping: Annotated[float, _our("soft cap of the logits", gt=0)] | None = None
    partial_rotary_factor: Annotated[float, _our("share of each head that is rotated", gt=0, le=1)] = 1.0
    tie_weights: Annotated[bool, _our("one matrix for the token embedding and the head")] = True
    method: Annotated[
        str,
        _our(
            "what is trained: full (all weights), or peft's lora or dora; qlora is lora on a 4-bit base",
            choices=METHODS,
        ),
    ] = "full"
    lora_rank: Annotated[int, _our("rank of the adapters", ge=1, le=100_000)] = 8
    lora_alpha: Annotated[float, _our("scale of the adapters, times the rank", needed=False, gt=0)] = 8.0
    lora_dropout: Annotated[float, _our("dropout of what goes into the adapters", ge=0, lt=1)] = 0.0
    lora_targets: (
        Annotated[str, _our("modules with adapters, by name: q_proj,v_proj or all-linear; not set: peft's own")] | None
    ) = None
    adapter_dtype: Annotated[str, _our("dtype of the adapters; not set: float32, as peft", choices=DTYPES)] | None = (
        None
    )
    base_dtype: (
        Annotated[str, _our("dtype that the frozen weights are loaded in; not set: dtype", choices=DTYPES)] | None
    ) = None
    quantization: (
        Annotated[str, _our("of the frozen linear layers; not set: nf4 with qlora", choices=QUANTIZATIONS)] | None
    ) = None
    double_quantization: (
        Annotated[bool, _our("the scales of 4-bit blocks are quantized too; not set: with qlora")] | None
    ) = None
    upcast: (
        Annotated[str, _our("frozen weights beside quantized ones that are brought to float32", choices=UPCASTS)] | None
    ) = None
    trainer: Annotated[
        str,
        _our(
            "the program that runs: nanogpt as published, oomph, hf (transformers' Trainer), torch (a plain loop with "
            "transformers' models) or nanochat",
            choices=TRAINERS,
        ),
    ] = "nanogpt"
    return_logits: (
        Annotated[bool, _our("a training step returns logits; unset: nanogpt does, oomph does not")] | None
    ) = None
    loss_chunk: (
        Annotated[int, _our("tokens per chunk of head and loss, 0: all at once; unset: the trainer's", ge=0, le=MANY)]
        | None
    ) = None
    fused_loss: Annotated[
        str, _our("head and loss in one, without all logits: Liger's, of transformers' models", choices=FUSED_LOSSES)
    ] = "off"
    checkpoint_layers: Annotated[
        int,
        _our(
            "blocks, from the first, whose activations are recomputed in the backward; all: every one", ge=0, le=10_000
        ),
    ] = 0
    attention: Annotated[str, _our("the attention kernel", choices=ATTENTIONS)] = "flash"
    autocast: Annotated[bool, _our("False with bfloat16: weights, gradients and optimizer are bfloat16 themselves")] = (
        True
    )
    allow_tf32: Annotated[bool, _our("float32 matrix products on tensor cores, as nanoGPT allows")] = True
    optimizer: Annotated[str, _our("the optimizer", choices=OPTIMIZERS)] = "adamw"
    optimizer_loop: (
        Annotated[str, _our("how the optimizer goes over tensors; unset: fused on a GPU", choices=OPTIMIZER_LOOPS)]
        | None
    ) = None
    use_cache: (
        Annotated[bool, _our("transformers keeps each block's keys and values; unset: a plain loop does")] | None
    ) = None
    padding: Annotated[bool, _our("batches are padded, and transformers makes a mask of each")] = False
    zero_grad: Annotated[
        str, _our("when a plain loop lets gradients go: after the step or before backward", choices=ZERO_GRADS)
    ] = "after_step"
    expandable_segments: Annotated[bool, _our("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")] = False
    world_size: Annotated[int, _our("devices; gradient_accumulation_steps is divided among them", ge=1, le=MANY)] = 1
    torch_version: Annotated[
        str,
        _our(
            "the PyTorch that will run, such as 2.4 or 2.13.0",
            pattern=r"^[0-9]{1,2}\.[0-9]{1,2}(\.[0-9]{1,3})?(\+[A-Za-z0-9.]{1,20})?$",
        ),
    ] = NEWEST_TORCH
    transformers_version: Annotated[
        str,
        _our(
            "the transformers that will run, such as 4.50 or 5.22.2",
            pattern=r"^[0-9]{1,2}\.[0-9]{1,2}(\.[0-9]{1,3})?$",
        ),
    ] = NEWEST_TRANSFORMERS
    dataset_tokens: (
        Annotated[int, _our("tokens in the training split, for epochs; 3.68B is understood", ge=1, le=10**18)] | None
    ) = None
    seed: Annotated[int, _our("of the random numbers; nanoGPT's is 1337", needed=False, ge=0, le=2**63 - 1)] = 1337


def release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13" or "2.13.0": enough to order the releases of torch and of transformers."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


Whose = Literal["nanogpt", "oomph"]
KeyType = type[int] | type[float] | type[str] | type[bool]
KEYS = TrainConfig.__struct_fields__  # every name, in the schema's order
_WORDS = {int: "whole number", float: "number", str: "text", bool: "True or False"}


@dataclass(frozen=True)
class Key:
    """One key of a config: enough to document it, to make a form field for it and to check a value."""

    name: str
    type: str  # in words: "whole number", "number", "text", "True or False"
    default: int | float | str | bool | None
    description: str
    whose: Whose
    kind: KeyType
    optional: bool  # None is allowed and means "not set"
    needed: bool  # predictions depend on its value
    choices: tuple[str, ...]
    pattern: str | None
    ge: float | None
    gt: float | None
    le: float | None
    lt: float | None

    @property
    def allowed(self) -> str:
        """What a value may be, as an error message says it."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.pattern is not None:
            return self.description
        if self.kind is str:
            return "text on one line, of at most 4096 characters"
        if self.kind is bool:
            return "True or False"
        return f"a {self.type}{self._limits()}"

    def _limits(self) -> str:
        if self.gt is not None:
            return f" of more than {self.gt:,}" + (f", at most {self.le:,}" if self.le is not None else "")
        if self.ge is None:
            return ""
        if self.lt is not None:
            return f" from {self.ge:,} up to but not including {self.lt:,}"
        if self.le is not None:
            return f" from {self.ge:,} to {self.le:,}"
        return f" of at least {self.ge:,}"


@cache
def keys() -> dict[str, Key]:
    """Every key by name, in the schema's order."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    defaults = TrainConfig.__struct_defaults__
    return {name: _key_of(name, hints[name], default) for name, default in zip(KEYS, defaults, strict=True)}


def describe_keys() -> list[Key]:
    """Every key in the schema's order, nanoGPT's first: for `oomph plan --help` and for a form."""
    return list(keys().values())


def _key_of(name: str, hint: object, default: int | float | str | bool | None) -> Key:
    parts = [hint] if get_origin(hint) is Annotated else [part for part in get_args(hint) if part is not NoneType]
    kind, meta = get_args(parts[0])
    extra = meta.extra
    schema = meta.extra_json_schema or {}
    return Key(
        name=name,
        type=_WORDS[kind],
        default=default,
        description=meta.description,
        whose=extra["whose"],
        kind=kind,
        optional=get_origin(hint) is not Annotated,
        needed=extra["needed"],
        choices=tuple(schema.get("enum", ())),
        pattern=meta.pattern,
        ge=meta.ge,
        gt=meta.gt,
        le=meta.le,
        lt=meta.lt,
    )
