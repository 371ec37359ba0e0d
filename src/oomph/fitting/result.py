"""The result of a fit: ranked options, each with a full plan, and which to take."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from oomph.config import LoadedConfig
from oomph.display import Displayed
from oomph.planning.plan import Plan

Fidelity = Literal["same", "nearly", "different"]
KINDS: tuple[Fidelity, ...] = ("same", "nearly", "different")
KeyValue = int | float | str | bool


def is_patched(plan: Plan) -> bool:
    """Whether nanoGPT needs our two-line patch for this plan."""
    return plan.config.trainer == "nanogpt" and plan.config.return_logits is False


class Option(msgspec.Struct, frozen=True):
    """One way to run, checked by the full simulation."""

    name: str  # "half the micro-batch"
    changes: dict[str, KeyValue]  # config keys that differ from the requested ones
    kind: Fidelity  # its effect on the mathematics: only rounding, a little, or another training
    plan: Plan
    saved_mib: float  # compared with the requested config, unchanged
    effect: str  # on the training
    reason: str  # why to take it, or not

    @property
    def trainer(self) -> str:
        """The program that runs it: nanogpt or oomph."""
        return self.plan.config.trainer

    @property
    def patched(self) -> bool:
        """Whether nanoGPT needs our two-line patch for it."""
        return is_patched(self.plan)

    @property
    def fits(self) -> bool:
        return bool(self.plan.memory.fits)

    @property
    def tokens_per_s(self) -> float | None:
        return self.plan.time.tokens_per_s if self.plan.time else None

    @property
    def hours(self) -> float | None:
        return self.plan.time.hours if self.plan.time else None

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step: the effective batch."""
        return self.plan.config.batch_size * self.plan.config.gradient_accumulation_steps

    def to_dict(self) -> dict[str, Any]:
        """The option as the documented JSON object, without figures that are not predicted."""
        memory = self.plan.memory
        result = {
            "name": self.name,
            "changes": self.changes,
            "trainer": self.trainer,
            "patched": self.patched,
            "kind": self.kind,
            "fits": self.fits,
            "total_mib": memory.total_mib,
            "high_mib": memory.high_mib,
            "headroom_mib": memory.headroom_mib,
            "saved_mib": self.saved_mib,
            "batch_size": self.plan.config.batch_size,
            "gradient_accumulation_steps": self.plan.config.gradient_accumulation_steps,
            "effective_batch": self.sequences,
            "tokens_per_s": self.tokens_per_s,
            "hours": self.hours,
            "effect": self.effect,
            "reason": self.reason,
        }
        return {name: value for name, value in result.items() if value is not None}


class Fit(Displayed, msgspec.Struct, frozen=True):
    """The answer: every option, the best and the safest of them, and the verdict on one line."""

    loaded: LoadedConfig  # as requested
    now: Plan  # the requested config, unchanged
    options: tuple[Option, ...]  # ranked: fits, then kind, then tokens/s
    best: int | None  # the option to take; None if nothing fits
    safest: int | None  # fits even if the prediction misses: the most room among those nearly as fast
    evaluated: int  # candidates considered; only the options were simulated in full
    verdict: str
    why: tuple[str, ...]  # what explains the verdict, a sentence each
    hours_limit: float | None = None
    seeks_a_model: bool = False  # the answer is a model, not a setting of the requested one
    proposed: bool = False  # there was no config: the best option is one

    @property
    def chosen(self) -> Option | None:
        """The best option."""
        return None if self.best is None else self.options[self.best]

    @property
    def is_yes(self) -> bool:
        """Whether what was requested fits in time: the same training, or a model to be found."""
        chosen = self.chosen
        if chosen is None:
            return False
        in_time = self.hours_limit is None or (chosen.hours is not None and chosen.hours <= self.hours_limit)
        return in_time and (chosen.kind == "same" or self.seeks_a_model)

    def __repr__(self) -> str:
        return f"<Fit: {self.verdict}; {len(self.options)} options>"

    def to_dict(self) -> dict[str, Any]:
        """The fit as the documented JSON object."""
        result = {
            "verdict": self.verdict,
            "now": self.now.to_dict(),
            "options": [option.to_dict() for option in self.options],
            "best": self.best,
            "safest": self.safest,
            "evaluated": self.evaluated,
            "why": list(self.why),
        }
        return {name: value for name, value in result.items() if value is not None}
