"""`explain`: what happened in a run, why, and what would be better."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from oomph.fitting import Fit, fit
from oomph.planner import Plan
from oomph.runs import about_log, about_memory, about_oom, about_snapshot, about_time, about_training
from oomph.runs.case import Case, predict
from oomph.runs.findings import SEVERITIES, Finding
from oomph.runs.measured import Measured, measure
from oomph.runs.model import Run
from oomph.runs.reader import Override, Readable, read

TOPICS = ("memory", "model", "card", "time", "loss", "rate", "batch", "data", "log")
_FINDERS = (about_oom, about_memory, about_snapshot, about_time, about_training, about_log)


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. `to_dict` is the JSON contract."""

    measured: Measured
    plan: Plan | None  # None where the log does not tell enough, or the card is not known
    findings: tuple[Finding, ...]  # the worst first, then topic by topic
    fit: Fit | None  # the settings that fit beside what else is on the card

    @property
    def run(self) -> Run:
        return self.measured.run

    def finding(self, name: str) -> Finding | None:
        """The finding of that id."""
        return next((finding for finding in self.findings if finding.id == name), None)

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON object."""
        inference = self.measured.inference
        card = inference.card
        gpu = {
            "name": card.device.name if card.device is not None else None,
            "how": card.how,
            "where": card.where,
            "candidates": list(card.candidates),
        }
        config = {key: msgspec.to_builtins(setting) for key, setting in inference.settings.items()}
        run = self.run.to_dict() | {"config": config, "gpu": gpu}
        result = {
            "run": run | {"tokens_per_step": self.measured.tokens_per_step, "missing": inference.missing},
            "plan": self.plan.to_dict() if self.plan is not None else None,
            "findings": msgspec.to_builtins(self.findings),
            "fixes": [option.to_dict() for option in self.fit.options] if self.fit is not None else [],
        }
        return {name: value for name, value in result.items() if value is not None}


def explain(
    source: Run | Readable | Sequence[Readable],
    gpu: str | None = None,
    *,
    overrides: Sequence[Override] = (),
    with_fixes: bool = True,
) -> Explanation:
    """What happened in a run.

    `source` is a `Run`, a file or folder, or several that tell of one run together; `gpu` the user's word for the card.
    `with_fixes` looks for better settings too, which takes a second or two. Raises `InputError`.
    """
    run = source if isinstance(source, Run) else read(*_several(source), overrides=overrides)
    measured = measure(run, gpu)
    predicted = predict(measured)
    case = Case(measured, predicted)
    found = [finding for finder in _FINDERS for finding in finder.findings(case)]
    found.sort(key=lambda finding: (SEVERITIES.index(finding.severity), TOPICS.index(finding.topic)))
    fixes = None
    if with_fixes and predicted is not None and measured.inference.config is not None:
        fixes = fit(measured.inference.config, predicted.device, reserve_mib=case.others_mib or 0.0)
    return Explanation(measured=measured, plan=predicted, findings=tuple(found), fit=fixes)


def _several(source: Readable | Sequence[Readable]) -> Sequence[Readable]:
    if isinstance(source, str | os.PathLike) or not isinstance(source, Sequence):
        return (source,)
    return source
