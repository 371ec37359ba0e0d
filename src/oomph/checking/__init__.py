"""A prediction held against a real minute: the config really runs for a few steps, and what it took is measured."""

from oomph.checking.result import Check
from oomph.checking.run import DoesNotFitError, check

__all__ = ["Check", "DoesNotFitError", "check"]
