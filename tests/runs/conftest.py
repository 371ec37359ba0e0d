"""The measured runs A to D, explained once a worker."""

from __future__ import annotations

import pytest
import simulate
from explaining import explained

from oomph.runs import Explanation


@pytest.fixture(scope="session")
def a() -> Explanation:
    return explained(simulate.run_a(), "A", None)


@pytest.fixture(scope="session")
def b() -> Explanation:
    return explained(simulate.run_b(), "B", dataset_tokens="3.68B")


@pytest.fixture(scope="session")
def c() -> Explanation:
    return explained(simulate.run_c(), "C")


@pytest.fixture(scope="session")
def d() -> Explanation:
    return explained(simulate.run_d(), "D", with_fixes=True)
