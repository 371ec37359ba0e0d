"""A watched run in the terminal: what it is, once its log has told; then a line for each thing that turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import IO

from oomph.config import Override
from oomph.report.explain_terminal import MARKS
from oomph.runs.explain import Explanation, explain
from oomph.runs.follow import EVERY_S, Follower
from oomph.runs.reader import give

SAID_ONCE = ("time.step", "time.left", "time.mfu", "memory.predicted", "memory.headroom")
LEAST_STEPS = 10  # by then the pace is known


def follow(
    follower: Follower,
    gpu: str | None = None,
    overrides: Sequence[Override] = (),
    every_s: float = EVERY_S,
    file: IO[str] | None = None,
) -> None:
    """Print what turns until the run is over."""
    out = file or sys.stdout
    give(follower.builder, overrides)
    introduced = False
    _say(out, "info", f"watching {follower.run.name}; Ctrl-C leaves it alone")
    if not follower.exists:
        _say(out, "warning", f"{follower.path} does not exist yet: waiting for it")
    while True:
        for turn in follower.look():
            _say(out, turn.severity, turn.text)
        if not introduced and (follower.run.steps.count >= LEAST_STEPS or follower.ended is not None):
            introduced = True
            _introduce(out, follower, gpu, overrides)
        if follower.ended is not None:
            _say(out, "error" if follower.run.ooms else "info", follower.ended)
            return
        follower.clock.sleep(every_s)


def _introduce(out: IO[str], follower: Follower, gpu: str | None, overrides: Sequence[Override]) -> None:
    """The run's figures once there are enough of them, and everything that is wrong."""
    give(follower.builder, overrides)  # once more: the log has had its say since
    found: Explanation = explain(follower.run, gpu, with_fixes=False)
    for finding in found.findings:
        if finding.severity != "info" or finding.id in SAID_ONCE:
            _say(
                out,
                finding.severity,
                f"{finding.title}. {finding.text}" if finding.severity != "info" else finding.title,
            )


def _say(out: IO[str], severity: str, text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {MARKS[severity][0]} {text}", file=out, flush=True)
