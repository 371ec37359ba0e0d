"""A whole config judged at once: every value against its key, and the values against each other."""

from __future__ import annotations

from collections.abc import Mapping

from oomph.config.keys import keys
from oomph.config.schema import TrainConfig
from oomph.config.values import Said, Unreadable, Value, coerce
from oomph.errors import Problem


def validate(config: TrainConfig, sources: Mapping[str, str] | None = None) -> list[Problem]:
    """Every problem of a config, where `sources` may say where each value came from. An empty list: it is sound."""
    said = {name: Said(getattr(config, name), (sources or {}).get(name, "default")) for name in keys()}
    return check(said)[1]


def check(values: Mapping[str, Said]) -> tuple[dict[str, Value], list[Problem]]:
    """The values made the right type, and every problem. A value with a problem is left out of the first."""
    sound: dict[str, Value] = {}
    problems: list[Problem] = []
    for name, key in keys().items():
        said = values[name]
        if isinstance(said.value, Unreadable):
            advice = f"say --{name}=VALUE; {key.allowed}"
            problems.append(Problem(where=said.where, what=f"{name}: {said.value.reason}", allowed=advice))
            continue
        result = coerce(key, said.value, _place(name, said))
        if isinstance(result, Problem):
            problems.append(result)
        else:
            sound[name] = result
    return sound, problems + _together(sound, values)


def _together(sound: Mapping[str, Value], values: Mapping[str, Said]) -> list[Problem]:
    """What only several values together can get wrong; one that has a problem of its own is not judged again."""
    problems: list[Problem] = []

    def numbers(*names: str) -> list[int] | None:
        found = [value for name in names if isinstance(value := sound.get(name), int)]
        return found if len(found) == len(names) else None

    if (pair := numbers("n_embd", "n_head")) and pair[0] % pair[1]:
        width, heads = pair
        near = f"{width // heads * heads or heads} or {(width // heads + 1) * heads}"
        what = "n_embd is no multiple of n_head"
        problems.append(_problem("n_embd", values, what, f"{width} over {heads} heads", f"such as {near}"))
    if (pair := numbers("gradient_accumulation_steps", "world_size")) and pair[0] % pair[1]:
        what = "gradient_accumulation_steps is no multiple of world_size"
        allowed = f"a multiple of {pair[1]}: the micro-steps are shared out among the devices"
        problems.append(_problem("gradient_accumulation_steps", values, what, f"{pair[0]} over {pair[1]}", allowed))
    if (pair := numbers("checkpoint_layers", "n_layer")) and pair[0] > pair[1]:
        what = "checkpoint_layers is more than the model has"
        problems.append(_problem("checkpoint_layers", values, what, str(pair[0]), f"from 0 to n_layer = {pair[1]}"))
    if sound.get("return_logits") and sound.get("loss_chunk"):
        what = "a loss in chunks never holds the logits that return_logits asks for"
        allowed = "loss_chunk = 0, or return_logits = False"
        problems.append(_problem("loss_chunk", values, what, f"loss_chunk = {sound['loss_chunk']}", allowed))
    return problems


def _problem(name: str, values: Mapping[str, Said], what: str, found: str, allowed: str) -> Problem:
    return Problem(where=_place(name, values[name]), what=what, found=found, allowed=allowed)


def _place(name: str, said: Said) -> str:
    return name if said.where == "default" else said.where
