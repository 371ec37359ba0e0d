"""`TrainConfig`: every setting of a training run, with nanoGPT's names and defaults, then ours.

Each field carries its description and limits, and they are written nowhere else: `oomph plan --help`, the web form and
`validate` read them from here. None means "not set": `settle` fills it in from trainer and device, with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from oomph.config.programs import (
    MODEL_TYPES,
    NEWEST_BITSANDBYTES,
    NEWEST_TORCH,
    NEWEST_TRANSFORMERS,
    NEWEST_TRL,
    PRESETS,
    TRAINERS,
)

DEFAULT_LOSS_CHUNK = 2048  # tokens: large enough for full-speed matrix products, small beside a micro-batch
COMPILED_LOSS_CHUNK = 4096  # a compiled loss makes no float32 copy of the chunk's logits
ZERO_GRADS = ("after_step", "before_backward", "in_backward")  # the last: each right after its own step
ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu", "relu2")
RECIPES = ("nanogpt", "modern")  # defaults of architecture, optimizer and schedule: `config.defaults` has the second
POSITIONS = ("absolute", "rotary")
NORMS = ("layernorm", "rmsnorm")
SCHEDULES = ("cosine", "warmup_stable_decay")
DTYPES = ("float32", "bfloat16", "float16")
CHECKPOINT_POLICIES = ("full", "op")
ATTENTIONS = ("flash", "efficient", "math", "eager", "flash2", "flash3")
PACKINGS = ("off", "padding_free", "packed")
METHODS = ("full", "lora", "dora", "qlora")
QUANTIZATIONS = ("off", "nf4", "fp4", "int8", "gptq", "awq")
UPCASTS = ("off", "norms", "all")  # all: peft prepares the base; norms: TRL then casts the rest back (before 1.0)
FUSED_LOSSES = ("off", "liger", "cce", "trl", "unsloth")
DEEPSPEEDS = ("off", "zero1", "zero2", "zero3")
CPU_OFFLOADS = ("off", "optimizer", "all")  # what is kept on the host; all: the parameters too
OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "sgd", "adafactor", "muon")
PAGED = "paged_"  # prefix of optimizers whose state is in unified memory
PARALLELS = ("auto", "none", "ddp", "zero1", "fsdp", "hsdp", "fsdp1")
GRAD_SYNCS = ("each", "last")
OPTIMIZER_LOOPS = ("fused", "foreach", "forloop")
INITS = ("scratch", "resume", *PRESETS)

# The largest sizes accepted: far beyond any real run, and small enough that later products stay finite.
MANY = 10_000_000  # sequences, micro-steps, devices
MANY_STEPS = 10**12
MOST_BLOCKS = 1000
ALL_BLOCKS = "all"  # a value of checkpoint_layers instead of a number


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
    init_from: Annotated[
        str, _key("a new model, a resumed run, OpenAI's weights, or a path to others", choices=INITS)
    ] = "scratch"
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
    recipe: (
        Annotated[
            str,
            _our(
                "stands for other keys where they are not set: nanogpt's defaults, or modern, which is Qwen3's blocks, "
                "Muon and a schedule that ends at 0",
                choices=RECIPES,
            ),
        ]
        | None
    ) = None
    model_type: Annotated[str, _our("the architecture, by transformers' name for it", choices=MODEL_TYPES)] = "gpt2"
    num_key_value_heads: (
        Annotated[int, _our("heads of keys and values, fewer than n_head with grouped queries", ge=1, le=1_000_000)]
        | None
    ) = None
    head_dim: Annotated[int, _our("size of a head; not set: n_embd / n_head", ge=1, le=1_000_000)] | None = None
    intermediate_size: (
        Annotated[int, _our("width inside the MLP; not set: 4 × n_embd, with a gate 8/3", ge=1, le=10_000_000)] | None
    ) = None
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
    position_embedding_type: Annotated[
        str,
        _our("positions of oomph train's GPT: a learned table, or rotations of queries and keys", choices=POSITIONS),
    ] = "absolute"
    rope_theta: Annotated[float, _our("base of the rotations' frequencies", needed=False, gt=1)] = 10_000.0
    norm_type: Annotated[str, _our("norms of oomph train's GPT", choices=NORMS)] = "layernorm"
    rms_norm_eps: Annotated[float, _our("added to the mean square in an RMSNorm", needed=False, gt=0)] = 1e-6
    use_qk_norm: Annotated[bool, _our("an RMSNorm of each head's queries and keys, in oomph train")] = False
    is_gated_act: Annotated[bool, _our("a gate in the MLP of oomph train's GPT: with silu it is SwiGLU")] = False
    zero_init: Annotated[
        bool, _our("projections into the residual stream begin at 0, in oomph train", needed=False)
    ] = False
    tie_weights: Annotated[bool, _our("one matrix for the token embedding and the head")] = True
    method: Annotated[
        str,
        _our(
            "what is trained: full (all weights), lora or dora, by default peft's; qlora is lora on a 4-bit base",
            choices=METHODS,
        ),
    ] = "full"
    lora_rank: Annotated[int, _our("rank of the adapters", ge=1, le=100_000)] = 8
    lora_alpha: Annotated[float, _our("scale of the adapters, times the rank", needed=False, gt=0)] = 8.0
    lora_dropout: Annotated[float, _our("dropout of what goes into the adapters", ge=0, lt=1)] = 0.0
    lora_targets: (
        Annotated[str, _our("modules with adapters, by name: q_proj,v_proj or all-linear; not set: the program's")]
        | None
    ) = None
    modules_to_save: (
        Annotated[str, _our("modules trained whole beside the adapters, by name: embed_tokens,lm_head")] | None
    ) = None
    adapter_dtype: Annotated[str, _our("dtype of the adapters; not set: float32 with peft", choices=DTYPES)] | None = (
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
            "the program that runs: nanogpt as published, oomph, hf (transformers' Trainer), trl (TRL's SFTTrainer), "
            "unsloth, torch (a plain loop with transformers' models), nanochat, torchtune, litgpt or torchtitan",
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
    fast_kernels: Annotated[bool, _our("fms-acceleration's fast RMSNorm, rope and, over 4 bits, LoRA")] = False
    liger_kernel: Annotated[bool, _our("Liger's RMSNorm, SwiGLU and rope in every block, and its loss")] = False
    fused_loss: (
        Annotated[
            str,
            _our(
                "head and loss in one, without all logits; cce: cut cross-entropy; not set: the program's",
                choices=FUSED_LOSSES,
            ),
        ]
        | None
    ) = None
    checkpoint_layers: Annotated[
        int,
        _our(
            "blocks, from the first, whose activations are recomputed in the backward; all: every one", ge=0, le=10_000
        ),
    ] = 0
    checkpoint_policy: (
        Annotated[
            str,
            _our(
                "what checkpointed blocks keep: nothing but their input (full), or torchtitan's choice by operation "
                "(op): attention and every other product",
                choices=CHECKPOINT_POLICIES,
            ),
        ]
        | None
    ) = None
    attention: Annotated[
        str,
        _our(
            "the attention kernel: PyTorch's flash, efficient or math; transformers' eager; flash-attn's package "
            "(flash2: attn_implementation=flash_attention_2); flash3",
            choices=ATTENTIONS,
        ),
    ] = "flash"
    autocast: Annotated[bool, _our("False with bfloat16: weights, gradients and optimizer are bfloat16 themselves")] = (
        True
    )
    allow_tf32: Annotated[bool, _our("float32 matrix products on tensor cores, as nanoGPT allows")] = True
    optimizer: Annotated[str, _our("the optimizer", choices=OPTIMIZERS)] = "adamw"
    matrix_lr: (
        Annotated[
            float,
            _our(
                "Muon's own learning rate: the size of an update's singular values; not set: learning_rate, with "
                "updates as large as AdamW's",
                needed=False,
                gt=0,
            ),
        ]
        | None
    ) = None
    lr_scheduler_type: Annotated[
        str,
        _our("after the warm-up: cosine to min_lr, or level and then straight to it", needed=False, choices=SCHEDULES),
    ] = "cosine"
    warmdown_ratio: Annotated[
        float, _our("share of lr_decay_iters in which a warmup_stable_decay schedule falls", needed=False, gt=0, le=1)
    ] = 0.5
    optimizer_loop: (
        Annotated[str, _our("how the optimizer goes over tensors; unset: fused on a GPU", choices=OPTIMIZER_LOOPS)]
        | None
    ) = None
    use_cache: (
        Annotated[bool, _our("transformers keeps each block's keys and values; unset: a plain loop does")] | None
    ) = None
    padding: Annotated[bool, _our("batches are padded, and transformers makes a mask of each")] = False
    packing: Annotated[
        str,
        _our(
            "samples in a row: of a batch, without padding (padding_free), or in rows filled to block_size (packed); "
            "mean_length is a sample's",
            choices=PACKINGS,
        ),
    ] = "off"
    zero_grad: Annotated[
        str,
        _our(
            "when gradients go: after the step; a plain loop's before backward; torchtune's in it", choices=ZERO_GRADS
        ),
    ] = "after_step"
    deepspeed: Annotated[str, _our("DeepSpeed under transformers' Trainer", choices=DEEPSPEEDS)] = "off"
    reduce_bucket_size: Annotated[int, _our("numbers in a bucket of DeepSpeed's gradients", ge=1, le=10**12)] = (
        500_000_000
    )
    overlap_comm: Annotated[bool, _our("DeepSpeed has a second bucket, to reduce one while it fills the other")] = False
    stage3_prefetch_bucket_size: Annotated[int, _our("numbers that ZeRO-3 gathers ahead", ge=0, le=10**12)] = 50_000_000
    stage3_param_persistence_threshold: Annotated[
        int, _our("ZeRO-3 keeps parameters of at most this many numbers gathered", ge=0, le=10**12)
    ] = 100_000
    stage3_max_live_parameters: Annotated[
        int, _our("ZeRO-3 gathers nothing ahead beyond this many numbers", ge=0, le=10**12)
    ] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[
        int, _our("ZeRO-3 keeps parameters that are used again within this many numbers", ge=0, le=10**12)
    ] = 1_000_000_000
    cpu_offload: Annotated[
        str, _our("what DeepSpeed or FSDP keeps on the host: the optimizer's state, or all", choices=CPU_OFFLOADS)
    ] = "off"
    expandable_segments: Annotated[bool, _our("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")] = False
    world_size: Annotated[int, _our("devices; gradient_accumulation_steps is divided among them", ge=1, le=MANY)] = 1
    nodes: Annotated[int, _our("machines that the devices are in, as many in each", ge=1, le=100_000)] = 1
    link: (
        Annotated[str, _our("between the cards of a machine: nvlink, pcie4, none, or as nvidia-smi topo -m prints it")]
        | None
    ) = None
    network: (
        Annotated[str, _our("between machines, for each card: ib400, ib200, roce400, eth100, eth10 ...")] | None
    ) = None
    parallel: (
        Annotated[
            str, _our("how the devices share the work; auto, or unset: ddp on several, if it fits", choices=PARALLELS)
        ]
        | None
    ) = None
    reshard_after_forward: (
        Annotated[
            str,
            _our(
                "fsdp frees a block's gathered weights after its forward: true, false, or a number of ranks to reshard "
                "over; unset: the program's",
                pattern=r"^(true|false|True|False|[1-9][0-9]{0,5})$",
            ),
        ]
        | None
    ) = None
    reduce_dtype: (
        Annotated[str, _our("dtype that fsdp reduces gradients in; unset: the program's", choices=DTYPES)] | None
    ) = None
    grad_sync: (
        Annotated[
            str, _our("when fsdp reduces gradients while accumulating: each micro-step or the last", choices=GRAD_SYNCS)
        ]
        | None
    ) = None
    shard_size: (
        Annotated[int, _our("hsdp: devices that share one copy; unset: those of a machine", ge=1, le=MANY)] | None
    ) = None
    tensor_parallel_degree: Annotated[
        int, _our("torchtitan: devices that split each layer; the others share the batch", ge=1, le=MANY)
    ] = 1
    gradient_as_bucket_view: Annotated[bool, _our("ddp: gradients are views of its buckets, not copies")] = False
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
    trl_version: Annotated[
        str,
        _our("the TRL that will run, such as 0.24 or 1.16.0", pattern=r"^[0-9]{1,2}\.[0-9]{1,2}(\.[0-9]{1,3})?$"),
    ] = NEWEST_TRL
    bitsandbytes_version: Annotated[
        str,
        _our("the bitsandbytes that will run, such as 0.42 or 0.45.2", pattern=r"^[0-9]\.[0-9]{1,2}(\.[0-9]{1,3})?$"),
    ] = NEWEST_BITSANDBYTES
    dataset_tokens: (
        Annotated[int, _our("tokens in the training split, for epochs; 3.68B is understood", ge=1, le=10**18)] | None
    ) = None
    num_train_epochs: Annotated[float, _our("passes over num_samples: sets max_iters", gt=0, le=10_000)] | None = None
    num_samples: Annotated[int, _our("samples of the data set, for epochs", ge=1, le=10**12)] | None = None
    mean_length: (
        Annotated[int, _our("tokens of a sample in the mean, for times; block_size is the longest", ge=1, le=10**8)]
        | None
    ) = None
    lengths: (
        Annotated[str, _our("the samples' lengths: a file of them, or percentiles (p50:300,p95:1200,max:2048)")] | None
    ) = None
    seed: Annotated[int, _our("of the random numbers; nanoGPT's is 1337", needed=False, ge=0, le=2**63 - 1)] = 1337
    ema: Annotated[
        float, _our("decay of an average of the weights, which is evaluated and sampled; 0: none", ge=0, lt=1)
    ] = 0.0
    time_limit: (
        Annotated[float, _our("minutes after which a run saves and ends; not set: none", needed=False, gt=0)] | None
    ) = None
    until_loss: (
        Annotated[float, _our("validation loss at which a run is done; not set: max_iters alone", needed=False, gt=0)]
        | None
    ) = None
    sample_tokens: Annotated[
        int, _our("tokens of text written to samples/ at each evaluation; 0: none", needed=False, ge=0, le=10**6)
    ] = 0
    eval_tokens: (
        Annotated[
            int,
            _our("tokens per evaluation of a split; not set: eval_iters × batch_size × block_size", ge=1, le=10**15),
        ]
        | None
    ) = None


def eval_tokens(config: TrainConfig) -> int:
    """Tokens that an evaluation reads from each split."""
    return config.eval_tokens or config.eval_iters * config.batch_size * config.block_size
