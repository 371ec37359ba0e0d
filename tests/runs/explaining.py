"""What the tests of explanations share: a log explained, and a finding's numbers."""

from __future__ import annotations

import re

from oomph.runs import Explanation, Finding, explain, read_text
from oomph.runs.reading.builder import Builder
from oomph.runs.reading.reader import override

CARD = "RTX 4070"


def explained(text: str, name: str, gpu: str | None = CARD, with_fixes: bool = False, **given_keys: str) -> Explanation:
    builder = Builder(name)
    builder.run = read_text(text, name)
    override(builder, [(key, value, f"--{key}={value}") for key, value in given_keys.items()])
    return explain(builder.run, gpu, with_fixes=with_fixes)


def get(explanation: Explanation, name: str) -> Finding:
    found = explanation.finding(name)
    assert found is not None, [finding.id for finding in explanation.findings]
    return found


def number(finding: Finding, name: str) -> float:
    value = finding.numbers[name]
    assert isinstance(value, int | float)
    return float(value)


def figures(text: str) -> set[float]:
    """The numbers in a text: what tests check of a sentence, so that its words may change."""
    return {float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
