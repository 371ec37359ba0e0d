"""What a report of a fit says, before anyone decides how it looks: sections of options, each with its figures."""

from __future__ import annotations

import msgspec

from oomph.config import TrainConfig
from oomph.fitting.cards import CardOption, Cards
from oomph.fitting.patch import PATCH, WHY_SAFE
from oomph.fitting.result import Fit, Option
from oomph.report.summary import summarise

SECTIONS = {
    "nanogpt": "the same training, nanoGPT as it is",
    "patched": "the same training, nanoGPT with a two-line patch",
    "oomph": "the same training, oomph train",
    "nearly": "nearly the same training",
    "different": "another training: the last resort",
}
HEADINGS = ("", "option", "batch", "MiB", "saved", "tokens/s", "hours", "advice")
CARD_HEADINGS = ("card", "MiB", "as", "needs", "tokens/s", "hours", "rent, USD")
UNKNOWN = "–"


class Line(msgspec.Struct, frozen=True):
    """One option as a row."""

    number: int  # counted from 1, as `--option` takes it
    option: str
    batch: str
    total: str
    saved: str
    tokens_per_s: str
    hours: str
    advice: str
    fits: bool
    best: bool
    safest: bool

    def cells(self) -> tuple[str, ...]:
        """The row, with its mark."""
        mark = "★" if self.best else "✓" if self.fits else "✗"
        figures = (self.option, self.batch, self.total, self.saved, self.tokens_per_s, self.hours, self.advice)
        return (f"{mark} {self.number}", *figures)


class Section(msgspec.Struct, frozen=True):
    """Options of one kind."""

    title: str
    lines: tuple[Line, ...]


class FitSummary(msgspec.Struct, frozen=True):
    """A report in words and numbers."""

    verdict: str
    good: bool
    title: str
    setting: str
    device: str
    sections: tuple[Section, ...]
    why: tuple[str, ...]
    effects: tuple[str, ...]
    patch: tuple[str, str] | None  # the lines, and why they are safe
    evaluated: str
    notes: tuple[str, ...]


def summarise_fit(fit: Fit) -> FitSummary:
    """The report of a fit."""
    plan = summarise([fit.now])
    lines = [(_section(option), _line(fit, index, option)) for index, option in enumerate(fit.options)]
    sections = [
        Section(title, tuple(line for key, line in lines if key == name))
        for name, title in _titles(fit).items()
        if any(key == name for key, _ in lines)
    ]
    return FitSummary(
        verdict=fit.verdict,
        good=is_yes(fit),
        title=plan.title,
        setting=plan.setting,
        device=plan.device,
        sections=tuple(sections),
        why=fit.why,
        effects=tuple(_effects(fit)),
        patch=(PATCH, WHY_SAFE) if any(option.patched and option.fits for option in fit.options) else None,
        evaluated=f"{fit.evaluated:,} settings weighed; every one shown is simulated in full on this card",
        notes=fit.now.notes,
    )


def is_yes(fit: Fit) -> bool:
    """Whether something fits that is what was asked for: the same training, or a model that was to be found; in time."""
    chosen = fit.chosen
    if chosen is None:
        return False
    in_time = fit.hours_limit is None or (chosen.hours is not None and chosen.hours <= fit.hours_limit)
    return in_time and (chosen.kind == "same" or fit.seeks_a_model)


def describe(option: Option, asked: TrainConfig) -> str:
    """An option in few words: the batch, and what else is new."""
    config = option.plan.config
    words = [f"{config.batch_size} × {config.gradient_accumulation_steps}"]
    words += [_WORDS[key](config) for key in option.changes if key in _WORDS]
    if config.checkpoint_layers and config.checkpoint_layers != asked.checkpoint_layers:
        words.append(f"{config.checkpoint_layers} blocks checkpointed")
    if config.loss_chunk and config.loss_chunk != asked.loss_chunk:
        words.append(f"loss by {config.loss_chunk}")
    return ", ".join(words)


_WORDS = {
    "n_layer": lambda config: f"{config.n_layer} layers",
    "n_embd": lambda config: f"width {config.n_embd}",
    "block_size": lambda config: f"block {config.block_size}",
    "compile": lambda config: "compiled" if config.compile else "not compiled",
    "expandable_segments": lambda config: "expandable segments",
    "optimizer": lambda config: config.optimizer,
    "optimizer_loop": lambda config: f"{config.optimizer_loop} optimizer",
    "dtype": lambda config: config.dtype,
    "autocast": lambda config: "autocast" if config.autocast else "bfloat16 throughout",
}


def _titles(fit: Fit) -> dict[str, str]:
    if fit.seeks_a_model:
        return {"different": "models that fit" if not fit.proposed else "models"}
    if fit.now.config.trainer == "oomph":
        order = ("oomph", "nanogpt", "patched", "nearly", "different")
        return {key: SECTIONS[key] for key in order}
    return SECTIONS


def _section(option: Option) -> str:
    if option.kind != "same":
        return option.kind
    return "patched" if option.patched else option.trainer


def _line(fit: Fit, index: int, option: Option) -> Line:
    return Line(
        number=index + 1,
        option=describe(option, fit.now.config),
        batch=f"{option.sequences:,}",
        total=f"{option.plan.memory.total_mib:,.0f}",
        saved=f"{option.saved_mib:,.0f}" if not fit.proposed else UNKNOWN,
        tokens_per_s=UNKNOWN if option.tokens_per_s is None else f"{option.tokens_per_s:,.0f}",
        hours=UNKNOWN if option.hours is None else f"{option.hours:,.1f}",
        advice=option.reason,
        fits=option.fits,
        best=index == fit.best,
        safest=index == fit.safest,
    )


def _effects(fit: Fit) -> list[str]:
    """What options that are not the same do to the training; rounding alone needs no line each."""
    lines = []
    for index, option in enumerate(fit.options):
        if option.kind != "same":
            lines.append(f"{index + 1}: {option.effect}")
    return lines


def card_rows(cards: Cards, every: bool = False) -> list[tuple[str, ...]]:
    """Cards that would do: of each memory the fastest, or all of them."""
    shown: list[CardOption] = []
    for card in cards.fitting:
        if every or not any(card.device.memory_mib == other.device.memory_mib for other in shown):
            shown.append(card)
    return [_card_row(card) for card in shown]


def _card_row(card: CardOption) -> tuple[str, ...]:
    plan, time, rent = card.plan, card.plan.time, card.rent
    return (
        card.device.name,
        f"{card.device.usable_mib:,}",
        f"{plan.config.batch_size} × {plan.config.gradient_accumulation_steps}",
        f"{plan.memory.total_mib:,.0f}",
        UNKNOWN if time is None else f"{time.tokens_per_s:,.0f}",
        UNKNOWN if time is None else f"{time.hours:,.1f}",
        UNKNOWN if rent is None else f"{rent[0]:,.0f} to {rent[1]:,.0f}",
    )
