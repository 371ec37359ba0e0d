"""Answers that several tests look at, worked out once."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.fitting.fit import fit
from oomph.fitting.result import Fit

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "fineweb_124m.py"


@pytest.fixture(scope="session")
def example() -> Path:
    """The setting that many people first try on a 12 GB card: 12 layers × 768, 16 × 32 × 1024 tokens."""
    return EXAMPLE


@pytest.fixture(scope="session")
def run_d() -> Fit:
    """That setting, on an RTX 4070: out of memory."""
    return fit(EXAMPLE, "RTX 4070")
