"""`oomph gpus [NAME]`: the catalogue, or one card with the source of its figures."""

from __future__ import annotations

from oomph import devices
from oomph.cli.arguments import VerbParser
from oomph.cli.output import emit, emit_json
from oomph.devices import Device

UNKNOWN = "–"


def run(argv: list[str]) -> int:
    """Print the table of cards, or one card."""
    parser = VerbParser("gpus", "The cards oomph knows, with what a process can use of each.")
    parser.add_argument("name", nargs="*", metavar="NAME", help="a card, as people or nvidia-smi write it")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    name = " ".join(options.name)
    chosen = [devices.find(name)] if name else list(devices.all_devices())
    if options.json:
        emit_json(chosen[0] if name else chosen)
    else:
        emit(_one(chosen[0]) if name else _table(chosen))
    return 0


HEADINGS = ("MiB", "usable", "GB/s", "bf16", "fp16", "fp32", "GEMM", "W", "$/h")
WIDTHS = (7, 7, 6, 7, 7, 6, 11, 5, 11)
LEGEND = """
bf16, fp16, fp32: dense peak TFLOPS, fp32 accumulation. GEMM: measured with PyTorch, half precision.
usable: by one process on Linux. oomph gpus NAME shows the source of a card's figures."""


def _table(cards: list[Device]) -> str:
    """One line per card: plain text, so that grep and sort work on it."""
    longest = max(len(card.name) for card in cards)
    lines = [_line("card", longest, HEADINGS)]
    for card in cards:
        figures = (
            str(card.memory_mib),
            str(card.usable_mib),
            _figure(card.bandwidth_gbs),
            _figure(card.tflops_bf16 if card.has_bf16 else None),  # emulated bfloat16 has no peak
            _figure(card.tflops_fp16),
            _figure(card.tflops_fp32),
            _span(card.gemm_tflops_low, card.gemm_tflops_high, ".0f"),
            _figure(card.watts),
            _span(card.usd_per_hour_low, card.usd_per_hour_high, ".2f"),
        )
        lines.append(_line(card.name, longest, figures))
    return "\n".join([*lines, LEGEND, ""])


def _line(name: str, longest: int, figures: tuple[str, ...]) -> str:
    return " ".join([f"{name:<{longest}}", *(f"{text:>{width}}" for text, width in zip(figures, WIDTHS, strict=True))])


def _one(card: Device) -> str:
    gemm = _span(card.gemm_tflops_low, card.gemm_tflops_high, "g")
    chip = f"compute capability {_figure(card.compute_capability)}, {_figure(card.sm_count)} SM"
    rows = [
        ("memory", f"{card.memory_mib} MiB in all, of which a process can use {card.usable_mib} (Linux, no desktop)"),
        ("context", f"{card.context_mib} MiB, before the first tensor"),
        ("bandwidth", f"{_figure(card.bandwidth_gbs)} GB/s"),
        ("peak", _peaks(card)),
        ("measured", f"{gemm} TFLOPS in large half-precision products"),
        ("chip", f"{card.arch}, {chip} at {_figure(card.boost_mhz)} MHz"),
        ("power", f"{_figure(card.watts)} W"),
        ("rent", f"{_span(card.usd_per_hour_low, card.usd_per_hour_high, '.2f')} USD an hour"),
        ("source", card.source),
        *(("note", note) for note in card.notes),
    ]
    known = [f"  {name:<10} {text}" for name, text in rows if text and UNKNOWN not in text]
    return "\n".join([card.name, *known, ""])


def _peaks(card: Device) -> str:
    peaks = {"bf16": card.tflops_bf16, "fp16": card.tflops_fp16, "tf32": card.tflops_tf32, "fp32": card.tflops_fp32}
    return ", ".join(f"{name} {value:g}" for name, value in peaks.items() if value is not None) + " TFLOPS, dense"


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}"


def _span(low: float | None, high: float | None, style: str) -> str:
    if low is None or high is None:
        return UNKNOWN
    return f"{low:{style}}" if low == high else f"{low:{style}}-{high:{style}}"
