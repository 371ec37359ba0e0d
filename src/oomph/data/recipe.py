"""The recipe of a set. The same recipe makes the same bytes; an unfinished set refuses any other recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oomph.data.sources import DocumentSource, ReadOptions
from oomph.errors import InputError, Problem

HASH, TAIL = "hash", "tail"
VAL_FRACTION = {HASH: 0.005, TAIL: 0.1}  # nanoGPT: 0.0005 of OpenWebText's 8 million documents, 0.1 of Shakespeare


@dataclass(frozen=True)
class Splitting:
    """How the validation text is chosen, and why."""

    by: str
    val_fraction: float
    reason: str


def choose_splitting(by: str | None, val_fraction: float | None, single: bool) -> Splitting:
    """Split by a hash of each document, or at the end of a single text: as requested, else decided here."""
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise InputError(
            Problem("--val_fraction", "out of range", found=str(val_fraction), allowed="from 0 to below 1")
        )
    if by == TAIL and not single:
        raise InputError(
            Problem("--split tail", "needs exactly one plain text file", allowed="--split hash for documents")
        )
    chosen = by or (TAIL if single else HASH)
    reason = (
        "asked for"
        if by
        else "a single text is split at its end, as nanoGPT does"
        if single
        else "documents are split by their hash"
    )
    return Splitting(chosen, VAL_FRACTION[chosen] if val_fraction is None else val_fraction, reason)


def make_recipe(
    sources: Sequence[DocumentSource],
    reading: ReadOptions,
    splitting: Splitting,
    tokenizer: dict[str, Any],
    take: int | None,
) -> dict[str, Any]:
    """The recipe, as plain values for meta.json."""
    return {
        "tokenizer": tokenizer,
        "split": {"by": splitting.by, "val_fraction": splitting.val_fraction},
        "documents": {"separator": reading.separator, "text_key": reading.text_key, "format": reading.format},
        "take": take,
        "sources": [{"name": source.name, **source.identity} for source in sources],
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two recipes, one line each."""
    keys = [key for key in sorted({*before, *now} - {"sources"}) if before.get(key) != now.get(key)]
    lines = [f"{key} was {_brief(before.get(key))}, is now {_brief(now.get(key))}" for key in keys]
    old = {source["name"]: source for source in before.get("sources", [])}
    new = {source["name"]: source for source in now.get("sources", [])}
    lines += [f"source {name} is no longer there" for name in old if name not in new]
    lines += [f"source {name} is new" for name in new if name not in old]
    for name, source in new.items():
        changed = [key for key in source if name in old and old[name].get(key) != source[key]]
        lines += [f"source {name} has changed: {_change(key, old[name].get(key), source[key])}" for key in changed]
    if not lines and before.get("sources") != now.get("sources"):
        lines.append("the sources are in a different order")
    return lines


def refuse(out: str, state: str, lines: Sequence[str]) -> InputError:
    """One error that lists every difference."""
    what, cure = (
        f"holds {state} with a different recipe",
        "the same command, another --out, or --overwrite to start over",
    )
    problems = [Problem(f"--out {out}", what, found=line, allowed=cure) for line in lines[:20]]
    if len(lines) > 20:
        problems.append(Problem(f"--out {out}", f"and {len(lines) - 20} more differences"))
    return InputError(problems)


def _change(key: str, before: Any, now: Any) -> str:
    """How one value of a source changed."""
    if key == "size_bytes" and isinstance(before, int):
        return f"{before:,} bytes before, {now:,} now"
    if key == "modified_ns" and isinstance(before, int):
        return f"modified {_moment(before)} before, {_moment(now)} now"
    return f"{key} was {_brief(before)}, is now {_brief(now)}"


def _moment(modified_ns: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(modified_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return "unset" if value is None else str(value)
