"""Values checked against their keys, one by one and then together: each as the right type, or a `Problem`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from oomph.config.layer import SourcedValue, UnknownValue
from oomph.config.schema import MIXTURES, READ_BY, TRANSFORMERS, Key, TrainConfig, keys
from oomph.errors import Problem, nearest
from oomph.units import parse_count

ConfigValue = int | float | str | bool | None
MAX_TEXT = 4096  # characters of one text value


def coerce(key: Key, value: object, where: str) -> ConfigValue | Problem:
    """`value` as the key's type, or the problem with it. Only lossless conversions are made."""
    if value is None and key.optional:
        return None
    made = _as_kind(key, value)
    if made is None or not _within(key, made):
        near = nearest(value, key.choices) if key.choices and isinstance(value, str) else None
        return Problem(
            where=where, what=f"{key.name} is not valid", found=show(value), allowed=key.allowed, nearest=near
        )
    return made


def show(value: object) -> str:
    """A value as a message shows it, in few characters whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"  # printing it could take minutes, or be refused by Python
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def _as_kind(key: Key, value: object) -> ConfigValue:
    """The value as the key's type, or None where the conversion would lose or guess something."""
    if key.kind is bool:
        return bool(value) if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)) else None
    if key.kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if key.kind is float:
        return _as_float(value)
    if isinstance(value, str):
        value = parse_count(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) else None


def _as_float(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def _within(key: Key, value: ConfigValue) -> bool:
    if isinstance(value, str):
        if key.choices:
            return value in key.choices
        if key.pattern is not None:
            return re.fullmatch(key.pattern, value) is not None
        return len(value) <= MAX_TEXT and not any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in value)
    if value is None or isinstance(value, bool):
        return True
    return (
        (key.ge is None or value >= key.ge)
        and (key.gt is None or value > key.gt)
        and (key.le is None or value <= key.le)
        and (key.lt is None or value < key.lt)
    )


def validate(config: TrainConfig, sources: Mapping[str, str] | None = None) -> list[Problem]:
    """Every problem of a config; none where it is valid. `sources` says where each value came from."""
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
        result = coerce(key, said.value, _place(name, said))
        if isinstance(result, Problem):
            problems.append(result)
        else:
            valid[name] = result
    return valid, problems + _together(valid, values)


def _together(valid: Mapping[str, ConfigValue], values: Mapping[str, SourcedValue]) -> list[Problem]:
    """Problems of several valid values together."""
    problems: list[Problem] = []

    def numbers(*names: str) -> list[int] | None:
        found = [value for name in names if isinstance(value := valid.get(name), int)]
        return found if len(found) == len(names) else None

    if (pair := numbers("n_embd", "n_head")) and pair[0] % pair[1] and valid.get("head_dim") is None:
        width, heads = pair
        near = f"{width // heads * heads or heads} or {(width // heads + 1) * heads}"
        what = "n_embd is not a multiple of n_head"
        problems.append(_problem("n_embd", values, what, f"{width} over {heads} heads", f"such as {near}"))
    if (pair := numbers("gradient_accumulation_steps", "world_size")) and pair[0] % pair[1]:
        what = "gradient_accumulation_steps is not a multiple of world_size"
        allowed = f"a multiple of {pair[1]}: the micro-steps are divided among the devices"
        problems.append(_problem("gradient_accumulation_steps", values, what, f"{pair[0]} over {pair[1]}", allowed))
    if (pair := numbers("checkpoint_layers", "n_layer")) and pair[0] > pair[1]:
        what = "checkpoint_layers is more than the model's layers"
        problems.append(_problem("checkpoint_layers", values, what, str(pair[0]), f"from 0 to n_layer = {pair[1]}"))
    if (pair := numbers("n_head", "num_key_value_heads")) and pair[0] % pair[1]:
        what = "n_head is not a multiple of num_key_value_heads"
        problems.append(
            _problem("num_key_value_heads", values, what, f"{pair[0]} over {pair[1]}", "a divisor of n_head")
        )
    problems += _program(valid, values) + _experts(valid, values) + _adapters(valid, values)
    if valid.get("return_logits") and valid.get("loss_chunk"):
        what = "a loss in chunks never holds the logits that return_logits asks for"
        allowed = "loss_chunk = 0, or return_logits = False"
        problems.append(_problem("loss_chunk", values, what, f"loss_chunk = {valid['loss_chunk']}", allowed))
    return problems


_TRAINS = {"nanogpt": ("gpt2",), "oomph": ("gpt2",), "nanochat": ("nanochat",)}  # any other trains all but nanochat's


_OF_TRANSFORMERS = {
    "fused_loss": "only transformers' models are planned with Liger's loss",
    "use_cache": "only transformers' models keep keys and values",
    "padding": "only transformers' models take padded batches",
}


def _program(valid: Mapping[str, ConfigValue], values: Mapping[str, SourcedValue]) -> list[Problem]:
    """Problems of an architecture under a trainer."""
    architecture, trainer = valid.get("model_type"), str(valid.get("trainer"))
    if architecture not in _TRAINS.get(trainer, (architecture,)) or (architecture == "nanochat" != trainer):
        right = "nanochat" if architecture == "nanochat" else "hf"
        what = (
            f"{trainer} trains {', '.join(_TRAINS[trainer])} only"
            if trainer in _TRAINS
            else f"{trainer} has no nanochat"
        )
        return [_problem("trainer", values, what, f"model_type = {architecture!r}", f"trainer = {right!r}")]
    if valid.get("attention") == "flash3" and trainer != "nanochat":
        what = "only nanochat is planned with FlashAttention 3"
        return [_problem("attention", values, what, f"trainer = {trainer!r}", "flash, efficient or math")]
    for key, what in _OF_TRANSFORMERS.items():
        if valid.get(key) not in (None, False, "off") and trainer not in TRANSFORMERS:
            return [_problem(key, values, what, f"trainer = {trainer!r}", "trainer = 'torch' or 'hf'")]
    if trainer in TRANSFORMERS and (problems := _unread(valid, values, str(architecture))):
        return problems
    if valid.get("loss_chunk") and trainer not in ("nanogpt", "oomph"):
        what = f"{trainer} computes its loss of all logits at once"
        return [_problem("loss_chunk", values, what, str(valid["loss_chunk"]), "loss_chunk = 0, or trainer = 'oomph'")]
    if valid.get("fused_loss") == "liger" and valid.get("compile"):
        what, allowed = "Liger's loss in a compiled model is not described", "compile = False"
        return [_problem("fused_loss", values, what, "compile = True", allowed)]
    if valid.get("zero_grad") == "before_backward" and (trainer != "torch" or valid.get("compile")):
        what = "gradients are let go before backward in an eager plain loop alone"
        found = f"trainer = {trainer!r}, compile = {valid.get('compile')}"
        return [_problem("zero_grad", values, what, found, "trainer = 'torch' and compile = False, or after_step")]
    inner, width = valid.get("intermediate_size"), valid.get("n_embd")
    if trainer in ("nanogpt", "oomph") and isinstance(width, int) and inner not in (None, 4 * width):
        what = "intermediate_size (n_inner) is not 4 × n_embd"
        allowed = f"{4 * width}, or trainer = 'hf'"
        return [_problem("intermediate_size", values, what, str(inner), allowed)]
    return []


def _unread(valid: Mapping[str, ConfigValue], values: Mapping[str, SourcedValue], family: str) -> list[Problem]:
    """Problems of keys that a family's class does not read. What follows from its other keys is no matter."""
    heads, width = valid.get("n_head"), valid.get("n_embd")
    size = width // heads if isinstance(width, int) and isinstance(heads, int) else None
    follows = {"num_key_value_heads": heads, "head_dim": size}
    return [
        _problem(key, values, f"{family} has no {key}", str(valid[key]), f"none, or {' or '.join(families)}")
        for key, families in READ_BY.items()
        if key != "num_experts" and family not in families and valid.get(key) not in (None, follows.get(key))
    ]


def _experts(valid: Mapping[str, ConfigValue], values: Mapping[str, SourcedValue]) -> list[Problem]:
    """Problems of a mixture of experts."""
    architecture, count, chosen = (valid.get(key) for key in ("model_type", "num_experts", "num_experts_per_tok"))
    if not isinstance(count, int):
        return []
    if architecture not in MIXTURES:
        what, allowed = "only mixtures of experts have experts", f"model_type = {' or '.join(map(repr, MIXTURES))}"
        return [_problem("num_experts", values, what, f"model_type = {architecture!r}", allowed)]
    if not isinstance(chosen, int) or chosen > count:
        what = "a token is computed by more experts than there are, or by none"
        return [
            _problem("num_experts_per_tok", values, what, f"{chosen} of {count}", f"from 1 to num_experts = {count}")
        ]
    return []


_OF_EXPERTS = ("all-linear", "experts", "gate", "gate_up_proj", "down_proj", "up_proj", "gate_proj")


def _adapters(valid: Mapping[str, ConfigValue], values: Mapping[str, SourcedValue]) -> list[Problem]:
    """Problems of a method of fine-tuning, and of its keys without it."""
    method, quantization = valid.get("method"), valid.get("quantization")
    if method == "full":
        if quantization not in (None, "off"):
            what, allowed = "quantized weights cannot be trained themselves", "method = 'qlora' or 'lora'"
            return [
                _problem("quantization", values, what, f"method = 'full', quantization = {quantization!r}", allowed)
            ]
        return []
    if valid.get("trainer") not in TRANSFORMERS:
        what = "only transformers' models are planned with adapters"
        return [_problem("method", values, what, f"trainer = {valid.get('trainer')!r}", "trainer = 'hf' or 'torch'")]
    if valid.get("compile"):
        what, allowed = "compiled models with adapters are not described", "compile = False"
        return [_problem("compile", values, what, f"method = {method!r}", allowed)]
    if valid.get("model_type") in MIXTURES and (quantization not in (None, "off") or method == "qlora"):
        what, allowed = "quantized experts are not described", "method = 'lora' with quantization = 'off'"
        return [_problem("quantization", values, what, f"model_type = {valid.get('model_type')!r}", allowed)]
    if method == "qlora" and quantization == "off":
        what, allowed = "qlora quantizes its base", "quantization = 'nf4', or method = 'lora'"
        return [_problem("quantization", values, what, "off", allowed)]
    if method == "dora" and quantization not in (None, "off"):
        what, allowed = "DoRA on a quantized base is not described", "method = 'qlora', or quantization = 'off'"
        return [_problem("quantization", values, what, str(quantization), allowed)]
    if method == "dora" and valid.get("model_type") == "gpt2":
        what, allowed = "DoRA on GPT-2's Conv1D layers is not described", "method = 'lora'"
        return [_problem("method", values, what, "model_type = 'gpt2'", allowed)]
    targets = valid.get("lora_targets")
    names = [part.strip() for part in targets.split(",")] if isinstance(targets, str) else []
    if valid.get("model_type") in MIXTURES and not set(names).isdisjoint(_OF_EXPERTS):
        what, allowed = "adapters of experts are not described", "such as q_proj,k_proj,v_proj,o_proj"
        return [_problem("lora_targets", values, what, show(targets), allowed)]
    return []


def _problem(name: str, values: Mapping[str, SourcedValue], what: str, found: str, allowed: str) -> Problem:
    return Problem(where=_place(name, values[name]), what=what, found=found, allowed=allowed)


def _place(name: str, said: SourcedValue) -> str:
    return name if said.where == "default" else said.where
