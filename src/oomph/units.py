"""Numbers as people write and read them."""

from __future__ import annotations

MIB = 2**20


def mib(size_bytes: float) -> float:
    """Bytes as MiB."""
    return size_bytes / MIB


def count(number: float) -> str:
    """A count in three or four digits: 124.34 M, 10.486 B, 524,288."""
    if number < 1e6:
        return f"{number:,.0f}"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.{3 if scaled < 100 and letter != 'M' else 2}f} {letter}"
    raise AssertionError(number)


def scientific(number: float) -> str:
    """3.15 × 10¹⁸."""
    mantissa, exponent = f"{number:.2e}".split("e")
    digits = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa} × 10{digits}"


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it: 140 ms, 3.91 s, 42 min, 21.7 h, 3.4 days."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return (
        f"{hours:.1f} h"
        if hours < 72
        else f"{hours / 24:.1f} days"
        if hours < 24 * 1000
        else f"{hours / 8766:,.1f} years"
    )


def money(amount: float, currency: str) -> str:
    """12.34 USD; more digits where the amount is small."""
    return f"{amount:,.2f} {currency}"
