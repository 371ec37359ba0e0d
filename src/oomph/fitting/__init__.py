"""Which setting fits, which is the fastest, and by how much: the search behind `oomph fit`."""

from oomph.fitting.answer import fit
from oomph.fitting.result import Fit, Option

__all__ = ["Fit", "Option", "fit"]
