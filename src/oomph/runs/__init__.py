"""Training runs as their logs tell them: reading, working out what a log does not say, explaining, comparing."""

from oomph.runs.compare import Comparison, compare
from oomph.runs.explain import Explanation, explain
from oomph.runs.findings import Finding
from oomph.runs.infer import Inference, infer
from oomph.runs.measured import Measured, measure
from oomph.runs.model import Run
from oomph.runs.pace import Pace, pace
from oomph.runs.reader import read, read_text

__all__ = [
    "Comparison",
    "Explanation",
    "Finding",
    "Inference",
    "Measured",
    "Pace",
    "Run",
    "compare",
    "explain",
    "infer",
    "measure",
    "pace",
    "read",
    "read_text",
]
