"""`TrainConfig`: every setting of a training run, with nanoGPT's names and defaults, and ours beside them.

Each field carries its description and its limits, and they live nowhere else: `oomph plan --help`, the web
form and `validate` all read them from here. A value of None means "not said": `settle` fills it from the trainer
and the device, and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

NEWEST_TORCH = "2.13"  # what is assumed when nobody says which PyTorch will run
DEFAULT_LOSS_CHUNK = 2048  # tokens: large enough for full-speed matrix products, small beside a micro-batch
COMPILED_LOSS_CHUNK = 4096  # where a compiled loss has no float32 copy of them
TRAINERS = ("nanogpt", "oomph")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("flash", "efficient", "math")
OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "adafactor", "muon")
OPTIMIZER_LOOPS = ("fused", "foreach", "forloop")
INITS = ("scratch", "resume", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

# The largest sizes taken: far beyond any real run, and small enough that every later product stays a sane number.
MANY = 10_000_000  # sequences, micro-steps, devices
MANY_STEPS = 10**12


def _key(
    description: str,
    *,
    whose: str = "nanogpt",
    needed: bool = True,  # a prediction needs its value; a mere label may stay unread
    choices: Sequence[str] = (),
    **limits: Any,  # ge, le, lt, pattern, as msgspec has them
) -> msgspec.Meta:
    extra = {"whose": whose, "needed": needed}
    schema = {"enum": list(choices)} if choices else None
    return msgspec.Meta(description=description, extra=extra, extra_json_schema=schema, **limits)


_our = partial(_key, whose="oomph")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run. Frozen: change it with `msgspec.structs.replace`."""

    # --- nanoGPT's keys, with nanoGPT's defaults -------------------------------------------------
    out_dir: Annotated[str, _key("where the run is written", needed=False)] = "out"
    eval_interval: Annotated[int, _key("optimizer steps between evaluations", ge=1, le=MANY_STEPS)] = 2000
    log_interval: Annotated[int, _key("optimizer steps between log lines", ge=1, le=MANY_STEPS)] = 1
    eval_iters: Annotated[int, _key("batches of each split an evaluation reads", ge=1, le=10**9)] = 200
    eval_only: Annotated[bool, _key("evaluate once and leave")] = False
    always_save_checkpoint: Annotated[bool, _key("save after each evaluation, better or not", needed=False)] = True
    init_from: Annotated[str, _key("a new model, a resumed run, or OpenAI's weights", choices=INITS)] = "scratch"
    wandb_log: Annotated[bool, _key("log to Weights & Biases", needed=False)] = False
    wandb_project: Annotated[str, _key("the project at Weights & Biases", needed=False)] = "owt"
    wandb_run_name: Annotated[str, _key("the run at Weights & Biases", needed=False)] = "gpt2"
    dataset: Annotated[str, _key("data/NAME/ with train.bin and val.bin, or a path", needed=False)] = "openwebtext"
    gradient_accumulation_steps: Annotated[
        int, _key("micro-steps to one optimizer step, over all devices", ge=1, le=MANY)
    ] = 40
    batch_size: Annotated[int, _key("sequences to one micro-step", ge=1, le=MANY)] = 12
    block_size: Annotated[int, _key("tokens to one sequence", ge=1, le=100_000_000)] = 1024
    n_layer: Annotated[int, _key("transformer blocks", ge=1, le=1000)] = 12
    n_head: Annotated[int, _key("attention heads to a block", ge=1, le=1_000_000)] = 12
    n_embd: Annotated[int, _key("width", ge=1, le=1_000_000)] = 768
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
        Annotated[str, _key("precision of the arithmetic; unsaid: bfloat16 where the device has it", choices=DTYPES)]
        | None
    ) = None
    compile: Annotated[bool, _key("torch.compile the model")] = True

    # --- ours -----------------------------------------------------------------------------------
    vocab_size: Annotated[int, _our("words; nanoGPT takes it from the data's meta.pkl, else 50304", ge=1, le=2**32)] = (
        50304
    )
    tie_weights: Annotated[bool, _our("one matrix for the token embedding and the head")] = True
    trainer: Annotated[str, _our("the program that runs: nanogpt as published, or oomph", choices=TRAINERS)] = "nanogpt"
    return_logits: (
        Annotated[bool, _our("a training step returns logits; unsaid: nanogpt does, oomph does not")] | None
    ) = None
    loss_chunk: (
        Annotated[int, _our("tokens a chunk of head and loss, 0 for all at once; unsaid: the trainer's", ge=0, le=MANY)]
        | None
    ) = None
    checkpoint_layers: Annotated[
        int, _our("blocks, from the first, whose activations are computed again in backward", ge=0, le=10_000)
    ] = 0
    attention: Annotated[str, _our("the attention kernel", choices=ATTENTIONS)] = "flash"
    autocast: Annotated[bool, _our("False with bfloat16: weights, gradients and optimizer are bfloat16 themselves")] = (
        True
    )
    allow_tf32: Annotated[bool, _our("float32 matrix products on tensor cores, as nanoGPT allows")] = True
    optimizer: Annotated[str, _our("the optimizer", choices=OPTIMIZERS)] = "adamw"
    optimizer_loop: (
        Annotated[str, _our("how the optimizer goes over tensors; unsaid: fused on a GPU", choices=OPTIMIZER_LOOPS)]
        | None
    ) = None
    expandable_segments: Annotated[bool, _our("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")] = False
    world_size: Annotated[int, _our("devices; gradient_accumulation_steps is shared out among them", ge=1, le=MANY)] = 1
    torch_version: Annotated[
        str,
        _our(
            "the PyTorch that will run, such as 2.4 or 2.13.0",
            pattern=r"^[0-9]{1,2}\.[0-9]{1,2}(\.[0-9]{1,3})?(\+[A-Za-z0-9.]{1,20})?$",
        ),
    ] = NEWEST_TORCH
    dataset_tokens: (
        Annotated[int, _our("tokens in the training split, for epochs; 3.68B is understood", ge=1, le=10**18)] | None
    ) = None
    seed: Annotated[int, _our("of the random numbers; nanoGPT's is 1337", needed=False, ge=0, le=2**63 - 1)] = 1337
