"""Numbers as people write and read them."""

from __future__ import annotations

import re

MIB = 2**20
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"([+-]?)([0-9_]{1,30})(?:\.([0-9]{1,30}))? ?([kKmMbBtT])")


def mib(size_bytes: float) -> float:
    """Bytes as MiB."""
    return size_bytes / MIB


def memory_size(size_mib: float) -> str:
    """MiB, and GiB beside them: 12,648 MiB (12.4 GiB); below a GiB the MiB alone."""
    return f"{size_mib:,.0f} MiB" + (f" ({size_mib / 1024:,.1f} GiB)" if size_mib >= 1024 else "")


def count(number: float) -> str:
    """A count in three or four digits: 124.34 M, 10.486 B, 524,288."""
    if number < 1e6:
        return f"{number:,.0f}"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.{3 if scaled < 100 and letter != 'M' else 2}f} {letter}"
    raise AssertionError(number)


def counted(number: int, thing: str) -> str:
    """How many of a thing there are: "1 head", "12 heads"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def parse_count(text: str) -> int | float | None:
    """The number that "3.68B", "10M" or "5k" means; None if the text is not such a number."""
    match = _COUNT.fullmatch(text)
    if match is None or not match[2].strip("_"):
        return None
    sign, whole, fraction, suffix = match.groups(default="")
    scale: int = 10 ** len(fraction)
    scaled: int = int(sign + whole.replace("_", "") + fraction) * _SUFFIXES[suffix.lower()]
    return scaled // scale if scaled % scale == 0 else scaled / scale


def figure(number: float) -> str:
    """A number without decimals from 10 on, below it with two significant digits: 1,234, 20, 0.014."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def scientific(number: float) -> str:
    """3.15 × 10¹⁸."""
    mantissa, exponent = f"{number:.2e}".split("e")
    digits = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa} × 10{digits}"


def duration(seconds: float) -> str:
    """A duration in a suitable unit: 140 ms, 3.91 s, 42 min, 21.7 h, 3.4 days."""
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
    """An amount with two decimals: 1,234.50 USD."""
    return f"{amount:,.2f} {currency}"


def tflops(rate: float) -> str:
    """A rate in TFLOPS in a suitable unit: 48.0 TFLOPS, 8.3 GFLOPS."""
    return f"{rate:.1f} TFLOPS" if rate >= 1 else f"{1e3 * rate:.1f} GFLOPS"
