"""Figures that span several lines: OLMo's steps, W&B's run summary, YOLO's rows, torch's memory_summary()."""

from __future__ import annotations

import re
from collections.abc import Callable

from oomph.runs.reading import steps
from oomph.runs.reading.builder import Builder
from oomph.runs.reading.names import MIB
from oomph.runs.run import Oom

# --- OLMo and composer --------------------------------------------------------------------------------------------

_HEAD = re.compile(r"\[(step|batch)=(\d{1,12})/(\d{1,12})(?:,epoch=\d{1,6})?\]")
_ROW = re.compile(r"^\s+(?:Train )?(\S[\w/ ().-]{1,80}[=:]\s*\S.{0,40})$")


def step(builder: Builder, line: str) -> None:
    """The first line of a step, "[step=1/739328]" or "[batch=1/100]"; indented lines below have its figures."""
    match = _HEAD.search(line)
    if match is None:
        return
    rows = [f"step={match[2]}/{match[3]}"]

    def take(below: str) -> bool:
        row = _ROW.match(below)
        if row is not None:
            rows.append(row[1])
            return True
        builder.next_lines = None
        builder.program("OLMo" if match[1] == "step" else "composer")
        steps.read_pairs(builder, rows)
        return False

    builder.next_lines = take


# --- W&B ---------------------------------------------------------------------------------------------

_SUMMARY_ROW = re.compile(r"wandb:\s+(\S.{0,60}?)\s+([-+]?\d[\d.e+-]*|nan|inf)\s*$", re.I)
SUMMARY_CHARACTERS = 200  # of an event


def summary(builder: Builder, _: str) -> None:
    """ "wandb: Run summary:": the last figure of everything that was logged."""
    rows: list[tuple[str, str]] = []

    def take(below: str) -> bool:
        row = _SUMMARY_ROW.search(below)
        if row is not None:
            rows.append((row[1], row[2]))
            return True
        if "..." in below:  # "+9 ...": the rest is not shown
            return True
        builder.next_lines = None
        if rows:
            shown = [f"{name} {value}" for name, value in rows]
            while len(", ".join(shown)) > SUMMARY_CHARACTERS:
                shown.pop()
            builder.event("summary", ", ".join(shown))
            if not builder.run.steps.count:
                steps.read_pairs(builder, [f"{name}={value}" for name, value in rows])
        return False

    builder.next_lines = take


# --- transformers' metrics at the end ----------------------------------------------------------------

_METRIC = re.compile(r"^\s+(\w{1,60})\s+=\s+(\S{1,40})\s*$")
_CLOCK = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)$")


def metrics(builder: Builder, line: str) -> None:
    """ "***** train metrics *****": one figure in each indented line below, times as h:mm:ss."""
    if line.count("*****") != 2:
        return
    rows: list[str] = []

    def take(below: str) -> bool:
        if (row := _METRIC.match(below)) is not None:
            clock = _CLOCK.match(row[2])
            seconds = 0.0
            for part, factor in zip(clock.groups() if clock else (), (86400, 3600, 60, 1), strict=False):
                seconds += float(part or 0) * factor
            rows.append(f"{row[1]}={seconds if clock else row[2]}")
            return True
        builder.next_lines = None
        builder.program("transformers")
        steps.read_pairs(builder, rows)
        return False

    builder.next_lines = take


# --- YOLO --------------------------------------------------------------------------------------------

_EPOCH_ROW = re.compile(r"^\s*(\d{1,6})/\d{1,6}\s+(\d{1,6}(?:\.\d+)?)G\s+(\S.*)$")


def epoch_rows(builder: Builder, line: str) -> None:
    """The names above YOLO's row of an epoch: its reserved memory, parts of the loss, sizes. The row ends in a bar."""
    names = line.split()
    if [name.lower() for name in names[:2]] != ["epoch", "gpu_mem"]:
        return

    def take(below: str) -> bool:
        match = _EPOCH_ROW.match(below)
        if match is None:
            builder.next_lines = None
            return False
        printed, mib = builder.run.printed, float(match[2]) * MIB["gb"]
        printed.peak_reserved_mib = max(mib, printed.peak_reserved_mib or 0.0)
        nan = [name for name, cell in zip(names[2:], match[3].split(), strict=False) if cell.lower() in ("nan", "inf")]
        if nan and "nan" not in builder.run.event_counts:
            builder.event("nan", f"{match[1]}: {', '.join(nan)}")
        return False  # the bar is read too

    builder.next_lines = take


# --- skipped steps -----------------------------------------------------------------------------------

_SKIPPED = re.compile(r"\bstep=(\d{1,12}), skipped=(\d{1,12}),")


def skipped(builder: Builder, line: str) -> None:
    """DeepSpeed's line of a step: its number, and how many steps the loss scaler skipped."""
    if match := _SKIPPED.search(line):
        builder.program("DeepSpeed")
        builder.run.printed.skipped_steps = int(match[2])
        builder.run.printed.counted_steps = int(match[1])


_LOWEST = re.compile(r"loss scale: ([\d.]+), reducing to \1(?:\.0)?(?![\d.])")


def overflow(builder: Builder, line: str) -> None:
    """A loss scaler's message that it skips a step."""
    if "Skipping step" in line or "overflow detected" in line:
        builder.event("overflow", line)
        if _LOWEST.search(line):
            builder.event("lowest scale", line)


# --- torch.cuda.memory_summary() ---------------------------------------------------------------------

_SUMMARY_CELLS = re.compile(r"\|\s*(Allocated|GPU reserved) memory\s*\|[^|]*\|\s*(\d{1,12}) ([KMGT]?i?B)\s*\|")
_OOMS = re.compile(r"\| +CUDA OOMs: (\d{1,9}) +\|")
_MOST = re.compile(r"(?i)(?:max cuda memory (?P<of>allocated|reserved) was|\bMax_MA) (\d{1,9}(?:\.\d+)?) ?([KMGT]i?B)")


def out_of_memory(builder: Builder, line: str) -> None:
    """ "CUDA OOMs: 1" in the head of the summary."""
    match = _OOMS.search(line)
    if match is not None and int(match[1]) and not builder.run.ooms:
        message = Oom(where=builder.where, memory="card", library="torch", message=line.strip())
        builder.run.ooms.append(message)


def memory_summary(builder: Builder, line: str) -> None:
    """The peaks of allocated and reserved memory. PyTorch's MB are MiB."""
    match = _SUMMARY_CELLS.search(line) or _MOST.search(line)
    if match is None:
        return
    of, unit = (match[1] or "allocated").lower(), match[3][0].lower()
    mib = float(match[2]) * {"k": 2.0**-10, "m": 1.0, "g": MIB["gib"], "t": 2.0**20}.get(unit, 2.0**-20)
    if of == "allocated":
        builder.memory(mib)
    else:
        printed = builder.run.printed
        printed.peak_reserved_mib = max(mib, printed.peak_reserved_mib or 0.0)


_LITGPT = re.compile(r"^\W*Memory used: (\d{1,6}(?:\.\d+)?) GB")


def litgpts_end(builder: Builder, line: str) -> None:
    """litgpt's last lines: how long it trained, and the peak of allocated memory in 10⁹ bytes."""
    if builder.run.program != "litgpt":
        return
    if match := _LITGPT.search(line):
        builder.memory(float(match[1]) * MIB["gb"])
    builder.event("finished", line)


READERS: tuple[tuple[str, Callable[[Builder, str], None]], ...] = (
    ("[step=", step),
    ("[batch=", step),
    ("skipped=", skipped),
    ("verflow", overflow),
    ("OVERFLOW", overflow),
    ("wandb: Run summary", summary),
    ("***** train metrics", metrics),
    ("***** eval metrics", metrics),
    ("gpu_mem", epoch_rows),
    ("GPU_mem", epoch_rows),
    (" memory ", memory_summary),
    ("Max_MA", memory_summary),
    ("Memory used: ", litgpts_end),
    ("Training time: ", litgpts_end),
    ("CUDA OOMs", out_of_memory),
)
