"""All values of a config checked, one by one and then together: the valid ones, and every problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from oomph.config import sharing
from oomph.config.adapters import adapter_problems
from oomph.config.keys import keys
from oomph.config.layer import SourcedValue, UnknownValue
from oomph.config.programs import (
    EAGER,
    LIGER_FAMILIES,
    LLAMAS,
    MIXTURES,
    OWN_CLASSES,
    READ_BY,
    TRANSFORMERS,
    UNSLOTH_FAMILIES,
    experts_are_modules,
)
from oomph.config.schema import PAGED, TrainConfig
from oomph.config.values import ConfigValue, Given, coerce, place, show
from oomph.errors import Problem


def validate(config: TrainConfig, sources: Mapping[str, str] | None = None) -> list[Problem]:
    """Every problem with a config; empty if it is valid. `sources` says where each value came from."""
    said = {name: SourcedValue(getattr(config, name), (sources or {}).get(name, "default")) for name in keys()}
    return check(said)[1]


def check(values: Mapping[str, SourcedValue]) -> tuple[dict[str, ConfigValue], list[Problem]]:
    """The valid values, each as its key's type, and every problem."""
    valid: dict[str, ConfigValue] = {}
    problems: list[Problem] = []
    for name, key in keys().items():
        said = values[name]
        if isinstance(said.value, UnknownValue):
            advice = f"give --{name}=VALUE; {key.allowed}"
            problems.append(Problem(where=said.where, what=f"{name}: {said.value.reason}", allowed=advice))
            continue
        result = coerce(key, said.value, place(name, said))
        if isinstance(result, Problem):
            problems.append(result)
        else:
            valid[name] = result
    return valid, [_in_its_words(problem, values) for problem in problems + _together(Given(valid, values))]


def _in_its_words(problem: Problem, values: Mapping[str, SourcedValue]) -> Problem:
    """The problem, with each key under the name that its file uses."""
    theirs = {key: said.name for key, said in values.items() if said.name not in (None, key)}
    if not theirs:
        return problem

    def told(text: str) -> str:
        return re.sub(r"\w+", lambda word: theirs.get(word.group()) or word.group(), text)

    found, allowed = (text and told(text) for text in (problem.found, problem.allowed))
    return problem._replace(what=told(problem.what), found=found, allowed=allowed)


def _together(given: Given) -> list[Problem]:
    """Problems with combinations of valid values."""
    problems: list[Problem] = []

    def numbers(*names: str) -> list[int] | None:
        found = [value for name in names if isinstance(value := given.get(name), int)]
        return found if len(found) == len(names) else None

    if (pair := numbers("n_embd", "n_head")) and pair[0] % pair[1] and given.get("head_dim") is None:
        width, heads = pair
        near = f"{width // heads * heads or heads} or {(width // heads + 1) * heads}"
        what = "n_embd is not a multiple of n_head"
        problems.append(given.problem("n_embd", what, f"{width} over {heads} heads", f"such as {near}"))
    problems += sharing.tensor_parallel(given)
    if (found := numbers("gradient_accumulation_steps", "world_size", "tensor_parallel_degree")) and (
        found[0] % (shared := max(1, found[1] // found[2]))
    ):
        split = " / tensor_parallel_degree" if found[2] > 1 else ""
        what = f"gradient_accumulation_steps is not a multiple of world_size{split}"
        allowed = f"a multiple of {shared}: the micro-steps are divided among the devices"
        problems.append(given.problem("gradient_accumulation_steps", what, f"{found[0]} over {shared}", allowed))
    if given.said["world_size"].firm and (pair := numbers("world_size", "nodes")) and pair[0] % pair[1]:
        what, allowed = "world_size is not a multiple of nodes", f"a multiple of {pair[1]}: machines have equally many"
        problems.append(given.problem("nodes", what, f"{pair[0]} devices in {pair[1]}", allowed))
    if (pair := numbers("world_size", "shard_size")) and pair[0] % pair[1]:
        what, allowed = "world_size is not a multiple of shard_size", f"a divisor of {pair[0]}"
        problems.append(given.problem("shard_size", what, f"{pair[1]} of {pair[0]} devices", allowed))
    if (pair := numbers("checkpoint_layers", "n_layer")) and pair[0] > pair[1]:
        what = "checkpoint_layers is more than the model's layers"
        problems.append(given.problem("checkpoint_layers", what, str(pair[0]), f"from 0 to n_layer = {pair[1]}"))
    if (pair := numbers("n_head", "num_key_value_heads")) and pair[0] % pair[1]:
        what = "n_head is not a multiple of num_key_value_heads"
        problems.append(given.problem("num_key_value_heads", what, f"{pair[0]} over {pair[1]}", "a divisor of n_head"))
    problems += _program(given) + _experts(given) + adapter_problems(given)
    problems += sharing.deepspeed(given) + sharing.cpu_offload(given) + _qwen(given)
    if given.get("return_logits") and given.get("loss_chunk"):
        what = "a loss in chunks never holds the logits that return_logits asks for"
        allowed = "loss_chunk = 0, or return_logits = False"
        problems.append(given.problem("loss_chunk", what, f"loss_chunk = {given.valid['loss_chunk']}", allowed))
    return problems


_TRAINS = {
    "nanogpt": ("gpt2",), "oomph": ("gpt2",), "nanochat": ("nanochat",), "torchtitan": ("llama",),
    "unsloth": UNSLOTH_FAMILIES, **OWN_CLASSES,
}  # fmt: skip
# Other trainers train everything except nanochat's model.
_DESCRIBED = ("unsloth", "torchtitan", *OWN_CLASSES)  # of these, the ones that can train other families too
_OF_TRANSFORMERS = {
    "fused_loss": "only transformers' models are planned with a fused loss",
    "liger_kernel": "only transformers' models are planned with Liger's kernels",
    "fast_kernels": "only transformers' models are planned with fms-acceleration's kernels",
    "use_cache": "only transformers' models keep keys and values",
    "padding": "only transformers' models take padded batches",
}


def _program(given: Given) -> list[Problem]:
    """Problems with an architecture under a trainer: those of the first rule that finds any."""
    rules = (
        _family,
        _compiled,
        _attention_and_packing,
        _of_transformers,
        _loss,
        _own_classes,
        _kernels,
        _gradients,
        _gpt_parts,
    )
    return next((problems for rule in rules if (problems := rule(given))), [])


def _family(given: Given) -> list[Problem]:
    """Problems of a trainer that does not train the architecture."""
    family, trainer = given.family, given.trainer
    if family in _TRAINS.get(trainer, (family,)) and not (family == "nanochat" != trainer):
        return []
    right = {"nanochat": "nanochat", "gpt2": "nanogpt"}.get(family, "hf")
    what = f"{trainer} has no nanochat"
    if trainer in _TRAINS:
        does = "is described with" if trainer in _DESCRIBED else "trains"
        what = f"{trainer} {does} {', '.join(_TRAINS[trainer])} only"
    of = given.said["model_type"].where.removeprefix("default").removeprefix(": ")
    found = f"model_type = {given.get('model_type')!r}" + (f" ({of})" if of else "")
    return [given.problem("trainer", what, found, f"trainer = {right!r}")]


def _compiled(given: Given) -> list[Problem]:
    """Problems of a program that is described only eagerly."""
    if not given.get("compile") or given.trainer not in EAGER:
        return []
    whose = {"trl": "SFTTrainer"}.get(given.trainer, given.trainer)
    what = f"{whose}'s compiled models are not described"
    return [given.problem("compile", what, f"trainer = {given.trainer!r}, compile = True", "compile = False")]


def _attention_and_packing(given: Given) -> list[Problem]:
    """Problems with attention kernels and packing that only some programs have."""
    trainer = given.trainer
    for key, own in (("attention", ("eager", "flash2")), ("packing", ("padding_free", "packed"))):
        if given.get(key) not in own:
            continue
        usual = "flash, efficient or math" if key == "attention" else "off"
        if trainer not in TRANSFORMERS or given.family not in LLAMAS:
            what = "only transformers' Llama and its relatives are planned so"
            found = f"trainer = {trainer!r}, model_type = {given.get('model_type')!r}"
            return [given.problem(key, what, found, f"{usual}, or trainer = 'hf' with {', '.join(LLAMAS)}")]
        if given.get("compile"):
            what = "compiled models are not described so"
            return [given.problem(key, what, "compile = True", f"compile = False, or {usual}")]
    if given.get("attention") == "flash3" and trainer != "nanochat":
        what = "only nanochat is planned with FlashAttention 3"
        return [given.problem("attention", what, f"trainer = {trainer!r}", "flash, efficient or math")]
    return []


def _of_transformers(given: Given) -> list[Problem]:
    """Problems with what only transformers' models have, and with what they have not."""
    trainer = given.trainer
    if trainer not in TRANSFORMERS:
        return [
            given.problem(key, what, f"trainer = {trainer!r}", "trainer = 'hf', 'trl' or 'torch'")
            for key, what in _OF_TRANSFORMERS.items()
            if given.get(key) not in (None, False, "off")
        ][:1]
    if problems := _unread(given):
        return problems
    if given.get("eval_only"):
        what = "an evaluation alone is nanoGPT's: these programs are planned as they train"
        return [given.problem("eval_only", what, f"trainer = {trainer!r}", "eval_only = False")]
    if (blocks := given.get("checkpoint_layers")) not in (None, 0, given.get("n_layer")):
        what, allowed = "transformers checkpoints all blocks or none", f"0 or all, which is {given.get('n_layer')}"
        return [given.problem("checkpoint_layers", what, str(blocks), allowed)]
    return []


def _loss(given: Given) -> list[Problem]:
    """Problems with a loss in chunks, or fused with the head."""
    trainer, chunk, fused = given.trainer, given.get("loss_chunk"), given.get("fused_loss")
    if chunk and trainer not in ("nanogpt", "oomph", "unsloth", *OWN_CLASSES):
        what = f"{trainer} computes its loss of all logits at once"
        return [given.problem("loss_chunk", what, str(chunk), "loss_chunk = 0, or trainer = 'oomph'")]
    if fused not in (None, "off") and given.get("compile"):
        what, allowed = "a fused loss in a compiled model is not described", "compile = False"
        return [given.problem("fused_loss", what, "compile = True", allowed)]
    for loss, whose in (("trl", "TRL's SFTTrainer"), ("unsloth", "Unsloth")):
        if fused == loss and trainer != loss:
            what, allowed = f"only {whose} has this loss", f"trainer = {loss!r}, or fused_loss = 'liger'"
            return [given.problem("fused_loss", what, f"trainer = {trainer!r}", allowed)]
    return []


def _kernels(given: Given) -> list[Problem]:
    """Problems with paged optimizers and with other libraries' kernels."""
    trainer, family = given.trainer, given.family
    if str(given.get("optimizer")).startswith(PAGED) and trainer not in (*TRANSFORMERS, *OWN_CLASSES):
        what, allowed = f"{trainer} is not planned with paged optimizers", "adamw8bit"
        return [given.problem("optimizer", what, f"trainer = {trainer!r}", allowed)]
    for key, whose in (("liger_kernel", "Liger's kernels"), ("fast_kernels", "fms-acceleration's kernels")):
        if given.get(key) and family not in LIGER_FAMILIES:
            what, allowed = f"{family} with {whose} is not described", ", ".join(LIGER_FAMILIES)
            return [given.problem(key, what, "True", f"model_type = {allowed}, or fused_loss = 'liger'")]
        if given.get(key) and given.get("compile"):
            what, allowed = f"{whose} in a compiled model are not described", "compile = False"
            return [given.problem(key, what, "compile = True", allowed)]
    return _unsloth(given) if trainer == "unsloth" else []


def _gradients(given: Given) -> list[Problem]:
    """Problems with the moment at which gradients go."""
    trainer = given.trainer
    if given.get("zero_grad") == "in_backward" and trainer not in OWN_CLASSES:
        return _in_backward(given)
    if given.get("zero_grad") == "before_backward" and (trainer != "torch" or given.get("compile")):
        what = "gradients are let go before backward in an eager plain loop alone"
        found = f"trainer = {trainer!r}, compile = {given.get('compile')}"
        return [given.problem("zero_grad", what, found, "trainer = 'torch' and compile = False, or after_step")]
    return []


# Settings that Unsloth is modelled with.
_WITH_UNSLOTH: dict[str, tuple[object, ...]] = {
    "method": ("lora", "qlora"), "quantization": (None, "off", "nf4"), "double_quantization": (None, True, False),
    "fused_loss": (None, "unsloth"), "liger_kernel": (False,), "fast_kernels": (False,),
    "world_size": (1,), "attention": ("flash", "efficient", "flash2"), "padding": (False,), "autocast": (True,),
    "upcast": (None, "off"), "deepspeed": ("off",),
}  # fmt: skip


def _unsloth(given: Given) -> list[Problem]:
    """Problems with settings that Unsloth is not modelled with."""
    return [
        given.problem(key, f"Unsloth is not described with this {key}", show(given.get(key)), shown(allowed))
        for key, allowed in _WITH_UNSLOTH.items()
        if key in given.valid and given.valid[key] not in allowed
    ]


def shown(allowed: Sequence[object]) -> str:
    """Allowed values in words."""
    return " or ".join(show(each) for each in allowed if each is not None)


# Keys that replace parts of oomph train's GPT by newer ones, with their defaults.
_GPT_PARTS = {
    "position_embedding_type": "absolute", "norm_type": "layernorm", "use_qk_norm": False, "is_gated_act": False,
}  # fmt: skip
GPT_ACTIVATIONS = ("gelu", "silu", "relu", "relu2")


def _gpt_parts(given: Given) -> list[Problem]:
    """Problems with the parts of oomph train's GPT, and with asking other trainers for them."""
    trainer = given.trainer
    if trainer not in ("nanogpt", "oomph"):
        return [
            given.problem(
                key, f"only oomph train's GPT has {key}", show(given.valid[key]), f"trainer = 'oomph', or {usual}"
            )
            for key, usual in _GPT_PARTS.items()
            if given.valid.get(key, usual) != usual
        ]
    found: list[Problem] = []
    if given.get("hidden_act") not in (None, *GPT_ACTIVATIONS):
        allowed = f"{', '.join(GPT_ACTIVATIONS)}, or trainer = 'hf'"
        found.append(
            given.problem("hidden_act", "oomph train has not this activation", show(given.valid["hidden_act"]), allowed)
        )
    width, heads = given.get("n_embd"), given.get("n_head")
    if not isinstance(width, int) or not isinstance(heads, int):
        return found
    size = given.get("head_dim") or width // heads
    if given.get("position_embedding_type") == "rotary" and isinstance(size, int) and size % 2:
        found.append(
            given.problem("n_head", "rotary positions turn pairs of numbers", f"heads of {size}", "an even size")
        )
    if trainer == "nanogpt" and given.get("head_dim") not in (None, width / heads):
        allowed = "none, or trainer = 'oomph'"
        found.append(given.problem("head_dim", "nanoGPT's heads share n_embd", show(given.valid["head_dim"]), allowed))
    inner = given.get("intermediate_size")
    if trainer == "nanogpt" and inner not in (None, 4 * width):
        what, allowed = "intermediate_size (n_inner) is not 4 × n_embd", f"{4 * width}, or trainer = 'oomph'"
        found.append(given.problem("intermediate_size", what, str(inner), allowed))
    return found


def _own_classes(given: Given) -> list[Problem]:
    """Problems with a program that has its own model classes: what it lacks, and what is not modelled."""
    trainer = given.trainer
    if trainer not in OWN_CLASSES:
        return []
    if given.get("world_size") not in (None, 1):
        what = f"{trainer} is planned on one device"
        return [given.problem("world_size", what, str(given.valid["world_size"]), "world_size = 1")]
    blocks, whole = given.get("checkpoint_layers"), given.get("n_layer")
    if blocks not in (None, 0, whole if trainer == "torchtune" else 0):
        allowed = f"0 or all, which is {whole}" if trainer == "torchtune" else "0"
        what = f"{trainer} checkpoints {'all blocks or none' if trainer == 'torchtune' else 'on several devices alone'}"
        return [given.problem("checkpoint_layers", what, str(blocks), allowed)]
    if given.get("zero_grad") == "in_backward" and (problems := _in_backward(given)):
        return problems
    if trainer == "torchtune" and given.get("dtype") == "float16":
        return [given.problem("dtype", "torchtune trains in bfloat16 or float32", "float16", "bfloat16 or float32")]
    if trainer == "torchtune" and given.get("autocast"):
        return [given.problem("autocast", "torchtune does not autocast", "True", "False")]
    return []


def _in_backward(given: Given) -> list[Problem]:
    """Problems with torchtune's optimizer_in_bwd."""
    if given.get("gradient_accumulation_steps") != 1:
        found, allowed = str(given.get("gradient_accumulation_steps")), "1"
        what = "an optimizer that steps in backward cannot wait for other micro-steps"
        return [given.problem("gradient_accumulation_steps", what, found, allowed)]
    if given.get("grad_clip") or given.get("method") != "full" or given.get("trainer") != "torchtune":
        what = "only torchtune's full fine-tuning without clipping steps in backward"
        found = ", ".join(f"{key} = {given.get(key)!r}" for key in ("trainer", "method", "grad_clip"))
        return [given.problem("zero_grad", what, found, "zero_grad = 'after_step'")]
    return []


def _unread(given: Given) -> list[Problem]:
    """Problems with keys that a family's class does not read. Values that follow from other keys are accepted."""
    family, heads, width = given.family, given.get("n_head"), given.get("n_embd")
    size = width // heads if isinstance(width, int) and isinstance(heads, int) else None
    follows = {"num_key_value_heads": heads, "head_dim": size}
    return [
        given.problem(key, f"{family} has no {key}", str(given.valid[key]), f"none, or {' or '.join(families)}")
        for key, families in READ_BY.items()
        if key != "num_experts" and family not in families and given.get(key) not in (None, follows.get(key))
    ]


def _experts(given: Given) -> list[Problem]:
    """Problems with a mixture of experts."""
    architecture, count, chosen = (given.get(key) for key in ("model_type", "num_experts", "num_experts_per_tok"))
    if not isinstance(count, int):
        return []
    if architecture not in MIXTURES:
        what, allowed = "only mixtures of experts have experts", f"model_type = {' or '.join(map(repr, MIXTURES))}"
        return [given.problem("num_experts", what, f"model_type = {architecture!r}", allowed)]
    if not isinstance(chosen, int) or chosen > count:
        what = "a token is computed by more experts than there are, or by none"
        return [given.problem("num_experts_per_tok", what, f"{chosen} of {count}", f"from 1 to num_experts = {count}")]
    version = str(given.get("transformers_version"))
    if given.get("compile") and experts_are_modules(str(architecture), version):
        what = f"compiled experts of transformers {version} are not described"
        return [given.problem("compile", what, "compile = True", "compile = False, or transformers 5")]
    return []


def _qwen(given: Given) -> list[Problem]:
    """Problems with the first Qwen models, whose class is not in transformers."""
    if given.get("model_type") != "qwen":
        return []
    found: list[Problem] = []
    for key, only in (("compile", False), ("fused_loss", "off"), ("tie_weights", False)):
        if given.get(key) not in (only, None):
            what = f"Qwen's first models are not described with this {key}"
            found.append(given.problem(key, what, show(given.valid[key]), show(only)))
    return found
