"""Training runs as their logs tell them: reading, working out what a log does not say, comparing, forecasting."""

from oomph.runs.infer import Inference, infer
from oomph.runs.model import Run
from oomph.runs.reader import read, read_text

__all__ = ["Inference", "Run", "infer", "read", "read_text"]
