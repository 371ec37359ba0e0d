"""Training runs as their logs tell them: reading, working out what a log does not say, comparing, forecasting."""

from oomph.runs.compare import Comparison, compare
from oomph.runs.infer import Inference, infer
from oomph.runs.measured import Measured, measure
from oomph.runs.model import Run
from oomph.runs.pace import Pace, pace
from oomph.runs.reader import read, read_text

__all__ = [
    "Comparison",
    "Inference",
    "Measured",
    "Pace",
    "Run",
    "compare",
    "infer",
    "measure",
    "pace",
    "read",
    "read_text",
]
