"""Training runs from their logs: read, infer what a log does not state, explain, compare."""

from oomph.runs.compare import Comparison, compare
from oomph.runs.explain import Explanation, explain
from oomph.runs.findings import Finding
from oomph.runs.reading.reader import read, read_text
from oomph.runs.run import LoggedRun

__all__ = ["Comparison", "Explanation", "Finding", "LoggedRun", "compare", "explain", "read", "read_text"]
