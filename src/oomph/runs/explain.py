"""`explain`: what happened in a run, why, and what would be better."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from oomph.config import Override
from oomph.display import Displayed
from oomph.fitting.fit import fit
from oomph.fitting.result import Fit
from oomph.planning.plan import Plan
from oomph.runs.causes import Fix, cause_of, general_fixes
from oomph.runs.figures import Evidence, Measured, measure, predict
from oomph.runs.findings import SEVERITIES, Finding, adapters, broken, log, memory, oom, screen, time, training
from oomph.runs.reading.reader import Readable, read
from oomph.runs.run import LoggedRun

TOPICS = ("memory", "model", "card", "time", "loss", "rate", "batch", "data", "log")
_FINDERS = (oom, memory, adapters, screen, time, broken, training, log)


class Explanation(Displayed, msgspec.Struct, frozen=True, kw_only=True):
    """The result. `to_dict` is the JSON contract."""

    measured: Measured
    plan: Plan | None  # None if the log does not give enough, or the card is unknown
    findings: tuple[Finding, ...]  # worst first, then by topic
    fit: Fit | None  # the settings that fit, given what else is on the card
    fixes: tuple[Fix, ...] = ()  # for the cause of an out-of-memory error, for any model

    @property
    def run(self) -> LoggedRun:
        return self.measured.run

    def finding(self, name: str) -> Finding | None:
        """The finding with that id, or None."""
        return next((finding for finding in self.findings if finding.id == name), None)

    def __repr__(self) -> str:
        first = f": {self.findings[0].title}" if self.findings else ""
        return f"<Explanation of {self.run.name}, {len(self.findings)} findings{first}>"

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
            "general_fixes": msgspec.to_builtins(self.fixes),
        }
        return {name: value for name, value in result.items() if value is not None}


def explain(
    source: LoggedRun | Readable | Sequence[Readable],
    gpu: str | None = None,
    *,
    overrides: Sequence[Override] = (),
    with_fixes: bool = True,
) -> Explanation:
    """What happened in a run.

    `source` is a `LoggedRun`, a file or folder, or several that describe one run together; `gpu` names the card.
    `with_fixes` also searches for better settings, which takes a second or two. Raises `InputError`.
    """
    run = source if isinstance(source, LoggedRun) else read(*_several(source), overrides=overrides)
    measured = measure(run, gpu)
    predicted = predict(measured)
    evidence = Evidence(measured, predicted)
    found = [finding for finder in _FINDERS for finding in finder.findings(evidence)]
    found.sort(key=lambda finding: (SEVERITIES.index(finding.severity), TOPICS.index(finding.topic)))
    fixes = None
    if with_fixes and predicted is not None and measured.inference.config is not None:
        beyond = max(0.0, evidence.memory_ratio - 1) * predicted.memory.total_mib  # what the run took beyond its plan
        fixes = fit(measured.inference.config, predicted.device, reserve_mib=(evidence.others_mib or 0.0) + beyond)
    general: tuple[Fix, ...] = ()
    if evidence.oom is not None and evidence.holding is not None:
        general = general_fixes(
            cause_of(evidence.oom, evidence.holding),
            evidence.oom,
            evidence.holding,
            recomputes=evidence.recomputes,
            has_adapters=evidence.has_adapters,
        )
    return Explanation(measured=measured, plan=predicted, findings=tuple(found), fit=fixes, fixes=general)


def _several(source: Readable | Sequence[Readable]) -> Sequence[Readable]:
    if isinstance(source, str | os.PathLike) or not isinstance(source, Sequence):
        return (source,)
    return source
