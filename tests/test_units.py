"""Numbers as people read them."""

import pytest

from oomph.units import count, duration, scientific


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (524_288, "524,288"),
        (40_560_000, "40.56 M"),
        (123_587_328, "123.59 M"),
        (10_485_760_000, "10.486 B"),
        (3.68e9, "3.680 B"),
        (1.5e12, "1.500 T"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0143, "14.3 ms"),
        (3.905, "3.9 s"),
        (150.0, "2 min"),
        (78100.0, "21.7 h"),
        (86400.0 * 5, "5.0 days"),
        (1e11, "3,168.8 years"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_scientific_notation_as_it_is_printed() -> None:
    assert scientific(3.147e18) == "3.15 × 10¹⁸"
