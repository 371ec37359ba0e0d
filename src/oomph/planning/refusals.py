"""What `plan` refuses: options out of range, and settings that the model cannot have."""

from __future__ import annotations

from oomph.config import LoadedConfig
from oomph.config.programs import TRANSFORMERS, release
from oomph.config.settle import installed
from oomph.errors import InputError, Problem, nearest
from oomph.predict import cost
from oomph.step.models import unknown_modules, unknown_targets

# A step takes longer than a kernel's launch and less than a year; a board draws some power.
POSSIBLE = {"step_ms": (0.001, 3.2e10), "watts": (0.001, 1e6)}


def check_options(
    *, price_kwh: float | None = None, currency: str = cost.PRICE_CURRENCY, **numbers: float | None
) -> None:
    """Raises `InputError` for options of `plan` that are out of range, and for a currency without a price in it."""
    problems = []
    for name, value in {**numbers, "price_kwh": price_kwh}.items():
        least, most = POSSIBLE.get(name, (0.0, 1e12))
        if value is not None and not least <= value <= most:
            allowed = f"a number from {least:g} to {most:,.0f}"
            problems.append(Problem(name, "is out of range", found=str(value), allowed=allowed))
    if price_kwh is None and currency != cost.PRICE_CURRENCY:
        allowed = f"--price_kwh=PRICE in {currency}; the default price is in {cost.PRICE_CURRENCY}"
        problems.append(Problem("currency", "a price is needed with it", found=currency, allowed=allowed))
    if problems:
        raise InputError(problems)


def refuse(loaded: LoadedConfig) -> None:
    """Raise `InputError` for settings that the model cannot have, which its config alone does not show."""
    if loaded.model is None:
        _check_positions(loaded)
    if loaded.traces_transformers:
        _check_version(loaded)
    if loaded.config.method != "full":
        _check_targets(loaded)


def _check_version(loaded: LoadedConfig) -> None:
    """Refuse a traced model for another release of transformers than the installed one."""
    asked, there = loaded.config.transformers_version, installed("transformers")
    if there is not None and release(asked) != release(there):
        what, where = (
            "a model is traced with the transformers that is installed",
            loaded.sources["transformers_version"],
        )
        raise InputError(Problem(where, what, asked, there))


def _check_positions(loaded: LoadedConfig) -> None:
    """Refuse sequences longer than the model's table of positions, if it has one."""
    config = loaded.config
    rows = config.max_position_embeddings
    if config.trainer in TRANSFORMERS and config.model_type in ("gpt2", "opt") and rows and config.block_size > rows:
        what, where = "block_size is longer than the table of positions", loaded.sources["block_size"]
        allowed = f"at most max_position_embeddings = {rows}"
        raise InputError(Problem(where, what, f"{config.block_size}", allowed))


def _check_targets(loaded: LoadedConfig) -> None:
    """Refuse adapters on layers that the model does not have, and on a model that is traced."""
    if loaded.model is not None:
        what, allowed = "a traced model gets no adapters", "a model that brings them, or one that is described"
        raise InputError(Problem(loaded.sources["method"], what, f"method = {loaded.config.method!r}", allowed))
    unknown, known = unknown_targets(loaded.config)
    where, allowed = loaded.sources["lora_targets"], f"{', '.join(known)} or all-linear"
    what = "the model has no layer of this name"
    problems = [Problem(where, what, each[:60], allowed, nearest(each, known)) for each in unknown[:20]]
    unknown, known = unknown_modules(loaded.config)
    where, what = loaded.sources["modules_to_save"], "the model has no module of this name"
    problems += [Problem(where, what, each[:60], ", ".join(known), nearest(each, known)) for each in unknown[:20]]
    if problems:
        raise InputError(problems)
