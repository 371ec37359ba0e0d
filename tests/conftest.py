"""For all rooms: property tests take the time they need, and draw the same examples in every run of CI."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

import oomph
from oomph.fitting.result import Fit

EXAMPLE = Path(__file__).parent.parent / "examples" / "fineweb_124m.py"

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# A shell that starts the tests in the background has Ctrl-C ignored, and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["OOMPH_MEASURE"] = "0"  # measuring this CPU takes seconds; the tests of it allow it themselves

gc.disable()  # while the tests are imported, nearly nothing is garbage: collecting took a third of that time


def pytest_collection_finish() -> None:
    """Leave what was imported out of later collections: torch alone is half a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def example() -> Path:
    """The setting that many people first try on a 12 GB card: 12 layers × 768, 16 × 32 × 1024 tokens."""
    return EXAMPLE


@pytest.fixture(scope="session")
def run_d() -> Fit:
    """That setting, on an RTX 4070: out of memory."""
    return oomph.fit(EXAMPLE, "RTX 4070")


@pytest.fixture(scope="session")
def largest() -> Fit:
    """The largest models in its place."""
    return oomph.fit(EXAMPLE, "RTX 4070", largest=True)
