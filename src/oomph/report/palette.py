"""One colour and one pattern for each thing that fills memory, the same in every picture."""

from __future__ import annotations

# (colour, terminal glyph): the glyph tells parts apart where there is no colour.
PARTS: dict[str, tuple[str, str]] = {
    "parameters": ("#4e79a7", "█"),
    "gradients": ("#76b7b2", "▓"),
    "optimizer state": ("#59a14f", "▒"),
    "half copies of weights": ("#9c755f", "▚"),
    "activations": ("#f28e2b", "█"),
    "attention": ("#edc948", "▓"),
    "logits and loss": ("#e15759", "▒"),
    "temporaries": ("#b07aa1", "▞"),
    "workspaces": ("#ff9da7", "░"),
    "inputs": ("#86bcb6", "░"),
}
OTHER = ("#9aa0a6", "░")  # rounding, cache, context


def look(part: str) -> tuple[str, str]:
    """The colour and the glyph of a part."""
    return PARTS.get(part, OTHER)


def segments(parts: tuple[tuple[str, float], ...], full_mib: float, cells: int) -> list[tuple[str, int]]:
    """Parts as whole cells of a bar `cells` wide that stands for `full_mib`: rounded so that they add up."""
    result: list[tuple[str, int]] = []
    filled_mib, filled = 0.0, 0
    for name, size_mib in parts:
        filled_mib += size_mib
        end = round(filled_mib / full_mib * cells) if full_mib else 0
        if end > filled:
            result.append((name, end - filled))
            filled = end
    return result
