"""What a run has where its config sets nothing: a program's own defaults, a recipe's, and those of a preset's name."""

from __future__ import annotations

from collections.abc import Mapping

from oomph.config import nanochat
from oomph.config.layer import EACH_DEVICES, Layer, SourcedValue
from oomph.config.programs import GPT2_SHAPES, TRANSFORMERS
from oomph.config.reading import hugging_face, recipes
from oomph.config.schema import ALL_BLOCKS, MANY, RECIPES

# Defaults that differ from nanoGPT's. The Trainer counts epochs and has no length: these two are assumed.
# Neither it nor a plain loop allows tf32, which is off in torch (torch.backends.cuda.matmul.allow_tf32).
PROGRAM_DEFAULTS: dict[str, dict[str, object]] = {
    "hf": {
        "batch_size": 8, "gradient_accumulation_steps": 1, "compile": False, "learning_rate": 5e-5, "weight_decay": 0.0,
        "beta2": 0.999, "warmup_iters": 0, "block_size": 1024, "max_iters": 1000, "allow_tf32": False,
    },
    "trl": {  # SFTConfig
        "batch_size": 8, "gradient_accumulation_steps": 1, "compile": False, "learning_rate": 2e-5, "weight_decay": 0.0,
        "beta2": 0.999, "warmup_iters": 0, "block_size": 1024, "max_iters": 1000, "allow_tf32": False,
        "checkpoint_layers": ALL_BLOCKS,
    },
    # SFTTrainer as Unsloth patches it, and FastLanguageModel's arguments.
    "unsloth": {
        "batch_size": 4, "gradient_accumulation_steps": 2, "compile": False, "learning_rate": 5e-5,
        "weight_decay": 0.001, "beta2": 0.999, "warmup_iters": 0, "block_size": 2048, "max_iters": 1000,
        "allow_tf32": False, "checkpoint_layers": ALL_BLOCKS, "optimizer": "adamw8bit", "method": "qlora",
        "lora_rank": 16, "lora_alpha": 16.0, "packing": "padding_free", "expandable_segments": True,
    },
    "torchtitan": {
        "model_type": "llama", "batch_size": 1, "gradient_accumulation_steps": 1, "block_size": 8192, "max_iters": 1000,
        "learning_rate": 3e-4, "warmup_iters": 200, "tie_weights": False, "compile": False,
        "checkpoint_layers": ALL_BLOCKS,
    },
    "torch": {
        "batch_size": 8, "gradient_accumulation_steps": 1, "compile": False, "learning_rate": 5e-5,
        "weight_decay": 0.01, "beta2": 0.999, "warmup_iters": 0, "block_size": 1024, "max_iters": 1000,
        "grad_clip": 0.0, "allow_tf32": False,
    },
    # Its single-device configs. They set no length and count epochs: these two are assumed.
    "torchtune": {
        "batch_size": 2, "gradient_accumulation_steps": 8, "compile": False, "learning_rate": 3e-4,
        "weight_decay": 0.01, "beta2": 0.999, "warmup_iters": 100, "block_size": 1024, "max_iters": 1000,
        "grad_clip": 0.0, "allow_tf32": False, "autocast": False, "checkpoint_layers": ALL_BLOCKS,
    },
    # finetune_lora's arguments. It takes the data's own length and counts epochs: these two are assumed.
    "litgpt": {
        "batch_size": 1, "gradient_accumulation_steps": 16, "compile": False, "learning_rate": 1e-3,
        "weight_decay": 0.01, "beta2": 0.999, "warmup_iters": 100, "block_size": 1024, "max_iters": 1000,
        "grad_clip": 0.0, "allow_tf32": False, "autocast": False, "lora_dropout": 0.05, "lora_alpha": 16.0,
        "eval_interval": 100, "eval_iters": 50,
    },
    "nanochat": {**nanochat.DEFAULTS, **nanochat.shape(nanochat.DEPTH)},
}  # fmt: skip
PROGRAM_SOURCES = {
    "torchtitan": "default of torchtitan's llama3_8b.toml",
    "hf": "default of transformers' Trainer, or assumed",
    "trl": "default of TRL's SFTTrainer, or assumed",
    "unsloth": "default of Unsloth's, or assumed",
    "torch": "default of a plain PyTorch loop, or assumed",
    "nanochat": "default of nanochat's base_train",
    "litgpt": "default of litgpt's finetune_lora, or assumed",
    "torchtune": "default of torchtune's single-device configs, or assumed",
}
# `recipe = "modern"`, which docs/recipes.md measures: Qwen3's blocks, and Muon at the learning rate of the public
# speed-runs, which holds for models of any width.
MODERN: dict[str, object] = {
    "trainer": "oomph", "position_embedding_type": "rotary", "norm_type": "rmsnorm", "use_qk_norm": True,
    "is_gated_act": True, "hidden_act": "silu", "zero_init": True, "optimizer": "muon", "matrix_lr": 0.02,
    "learning_rate": 3e-3, "min_lr": 0.0, "lr_scheduler_type": "warmup_stable_decay", "warmdown_ratio": 0.5,
}  # fmt: skip
WARM_UP_SHARE = 50  # one step in this many


def preset(name: str) -> Layer | None:
    """The layer of a preset, a program's defaults with that size; None if no preset has that name."""
    program: str | None = None
    values: Mapping[str, int | str] | None = None
    if name in GPT2_SHAPES:
        values = {"model_type": "gpt2", **GPT2_SHAPES[name]}
    if (depth := nanochat.depth_of(name)) is not None:
        program, values = "nanochat", {"model_type": "nanochat", **nanochat.shape(depth)}
    if values is None:
        return recipes.preset(name)
    given = {key: SourcedValue(value, f"preset {name}") for key, value in values.items()}
    return Layer(given, program=program, is_model=True)


def apply_recipe(values: dict[str, SourcedValue]) -> None:
    """Replace the `recipe` key by its values, for keys that are not set."""
    if values["recipe"].value not in RECIPES:
        return  # unset, or one that `check` refuses
    is_modern = values["recipe"].value == "modern"
    values["recipe"] = SourcedValue(None, "default", firm=False)
    if not is_modern:
        return
    steps = values["max_iters"].value
    lengths = {"lr_decay_iters": steps, "warmup_iters": steps // WARM_UP_SHARE} if isinstance(steps, int) else {}
    for key, value in (MODERN | lengths).items():
        if values[key].where.startswith("default"):
            values[key] = SourcedValue(value, "recipe modern")


def apply_defaults(values: dict[str, SourcedValue]) -> None:
    """Fill in the program's own defaults where they differ from nanoGPT's and the key is not set."""
    program = str(values["trainer"].value)
    found = [(key, value, PROGRAM_SOURCES[program]) for key, value in PROGRAM_DEFAULTS.get(program, {}).items()]
    if program == "torchtitan":
        world, degree = (values[key].value for key in ("world_size", "tensor_parallel_degree"))
        if isinstance(world, int) and isinstance(degree, int):  # one for each that shares the batch
            shared = max(1, world // max(1, degree))
            found = [("gradient_accumulation_steps", shared, PROGRAM_SOURCES[program]), *found]
    if program in TRANSFORMERS:
        world = values["world_size"].value  # these programs count micro-steps per device
        own = PROGRAM_DEFAULTS[program]["gradient_accumulation_steps"]
        if isinstance(world, int) and isinstance(own, int):
            where = f"{PROGRAM_SOURCES[program]}: {'one' if own == 1 else own} a device"
            found = [("gradient_accumulation_steps", own * world, where), *found]
        if values["optimizer"].value == "sgd":  # torch.optim.SGD's defaults, which no program changes
            found = [(key, 0.0, "default of torch.optim.SGD") for key in ("beta1", "weight_decay")] + found
        family = values["model_type"].value
        by_class = hugging_face.class_defaults(family)
        found += [(key, value, f"default of transformers' {family}") for key, value in by_class.items()]
    for key, value, where in found:
        if values[key].where == "default":
            values[key] = SourcedValue(value, where, firm=False)
    steps, world = (values[key] for key in ("gradient_accumulation_steps", "world_size"))
    if steps.where.endswith(EACH_DEVICES) and isinstance(steps.value, int) and isinstance(world.value, int):
        values["gradient_accumulation_steps"] = steps._replace(value=steps.value * max(1, world.value))
    if program == "nanochat":
        _keep_nanochats_batch(values)


def _keep_nanochats_batch(values: dict[str, SourcedValue]) -> None:
    """Adapt micro-steps and evaluation batches to the batch size, as nanochat does: it keeps the tokens."""
    steps = values["gradient_accumulation_steps"]
    sizes = [values[key].value for key in ("n_layer", "batch_size", "block_size")]
    depth, batch, block = (value if isinstance(value, int) and 0 < value < MANY else 0 for value in sizes)
    if (steps.where.startswith("preset") or not steps.firm) and depth and batch and block:
        value = nanochat.micro_steps(depth, batch, block)
        values["gradient_accumulation_steps"] = SourcedValue(value, steps.where, steps.firm)
    if values["eval_iters"].where == "default" and batch and block:
        count = nanochat.eval_iters(batch, block)
        values["eval_iters"] = SourcedValue(count, PROGRAM_SOURCES["nanochat"], firm=False)
