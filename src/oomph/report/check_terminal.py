"""A check in the terminal: predicted, measured, error, a line each."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from oomph.checking.result import Check

ROWS = (
    ("allocated, MiB", "allocated_mib", "{:,.1f}"),
    ("reserved, MiB", "reserved_mib", "{:,.0f}"),
    ("the process, MiB", "process_mib", "{:,.0f}"),
    ("a step, ms", "step_ms", "{:,.1f}"),
    ("the first step, s", "first_step_s", "{:,.1f}"),
    ("the card, W", "watts", "{:,.0f}"),
)


def to_text(check: Check) -> str:
    """The check as text. Colour and width follow the terminal, NO_COLOR and COLUMNS."""
    console = Console(highlight=False)
    width = min(console.width, 110)
    with console.capture() as captured:
        console.print(_report(check), width=width)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _report(check: Check) -> Group:
    config = check.plan.config
    shape = f"{config.n_layer} layers × {config.n_embd}, block {config.block_size}, batch {config.batch_size}"
    how = f"vocabulary {config.vocab_size}, {'compiled' if config.compile else 'eager'}, {config.dtype}"
    title = f"{check.plan.program} on {check.plan.device.name}: {shape}, {how}"
    lines = [Text(title, style="bold"), Text()]
    if check.failure:
        what = "Memory ran out" if check.out_of_memory else "It failed"
        lines += [Text(f"✗ {what}: {check.failure}", style="bold red"), Text()]
    return Group(*lines, _table(check), Text(), _facts(check))


def _table(check: Check) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("predicted", "measured", "error"):
        table.add_column(heading, justify="right")
    error = check.error
    for name, field, form in ROWS:
        said, was, off = (getattr(figures, field) for figures in (check.predicted, check.measured, error))
        if said is not None or was is not None:
            off_text = "" if off is None else f"{100 * off:+.1f} %"
            table.add_row(name, *("" if value is None else form.format(value) for value in (said, was)), off_text)
    return table


def _facts(check: Check) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    said = [f"Tokens: {check.data}", f"Allocated memory is counted by {check.how}", *check.notes]
    if len(check.steps_ms) > 1:
        low, high = min(check.steps_ms), max(check.steps_ms)
        said.insert(0, f"The middle of {len(check.steps_ms)} steps, which took {low:,.1f} to {high:,.1f} ms")
    for sentence in said:
        grid.add_row("·", Text(sentence if sentence.endswith(".") else f"{sentence}."))
    return grid
