"""Out-of-memory messages of every PyTorch version, and the traceback before them.

The wording changed in torch 1.4 ("cached" became "reserved in total by PyTorch"), 2.1 (sentences about the capacity,
free memory and the process; "capacty" until 2.2) and 2.4 (private pools of CUDA graphs).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from oomph.runs.reading.builder import OOMS, Builder
from oomph.runs.run import Oom, OomPhase

_SIZE = r"(\d{1,20}(?:\.\d{1,4})?) ?(bytes|B|[KMGT]i?B)"
_MIB = {"b": 2.0**-20, "bytes": 2.0**-20, "k": 2.0**-10, "m": 1.0, "g": 2.0**10, "t": 2.0**20}

_IS_OOM = re.compile(r"(?:CUDA|HIP|XPU|MPS backend)(?: error:)? out of memory|OutOfMemoryError", re.I)
_TRIED = re.compile(rf"(?:Tried|tried) to allocate {_SIZE}")
_FIRST = re.compile(
    rf"\(GPU (\d+); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; (?:{_SIZE} allowed; )?"
    rf"{_SIZE} (cached|reserved in total by PyTorch)"
)
_CARD = re.compile(rf"GPU (\d+) has a total capaci?ty of {_SIZE} of which {_SIZE} is free")
_OURS = re.compile(rf"this process has {_SIZE} memory in use")
_THEIRS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_POOLS = re.compile(rf"with {_SIZE} allocated in private pools")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_MPS = re.compile(rf"MPS allocated: {_SIZE}, other allocations: {_SIZE}, max allowed: {_SIZE}")

_FRAME = re.compile(r'File "([^"]{1,300})", line (\d{1,7}), in (\S{1,100})')
_END = re.compile(
    r"_ALLOC_CONF|See documentation|but unallocated|in total by PyTorch\)|cached\)|may cause system failure"
)
_LIBRARY = re.compile(r"site-packages|dist-packages|/torch/|<frozen|/lib/python\d|\\Lib\\")
_READ_FROM_MESSAGE = (
    "generation",
    "gpu",
    "tried_mib",
    "tried_slack_mib",
    "total_mib",
    "free_mib",
    "process_mib",
    "others_mib",
    "allocated_mib",
    "reserved_mib",
    "private_pools_mib",
    "allowed_mib",
    "message",
)
_WRAPPED_LINES = 8  # a terminal or chat window may break one message into so many


def traceback(builder: Builder, _: str) -> None:
    """The first line of a traceback."""
    builder.frames = []


def frame(builder: Builder, line: str) -> None:
    """A frame of a traceback."""
    if match := _FRAME.search(line):
        builder.frames = [*builder.frames[-63:], f"{match[1]}:{match[2]} in {match[3]}"]


def message(builder: Builder, line: str) -> None:
    """The message. If it is wrapped over several lines, the following lines are joined to it."""
    if _IS_OOM.search(line) is None:
        return
    if len(builder.run.ooms) >= OOMS:
        builder.event("oom", line)
        return
    oom = parse(line, builder.where)
    oom.phase, oom.code = _phase(builder.frames)
    oom.after_step = builder.run.last_step
    builder.frames = []
    builder.run.ooms.append(oom)
    builder.event("oom", line)
    if not _END.search(line) and oom.generation != "mps":
        builder.next_lines = _continuation(builder, oom, line)


def _continuation(builder: Builder, oom: Oom, text: str) -> Callable[[str], bool]:
    """A function that takes a following line as part of the message if the message then gives more figures."""
    lines = [text]

    def take(line: str) -> bool:
        lines.append(line)
        # A chat window breaks between words, a terminal anywhere: keep the joining that gives more figures.
        fuller = max((parse(glue.join(lines), oom.where) for glue in ("", " ")), key=_figures)
        gained = _figures(fuller) > _figures(oom)
        if gained:
            for name in _READ_FROM_MESSAGE:
                setattr(oom, name, getattr(fuller, name))
        if len(lines) > _WRAPPED_LINES or _END.search(line):
            builder.next_lines = None
        return gained

    return take


def _figures(oom: Oom) -> int:
    found = (oom.tried_mib, oom.total_mib, oom.free_mib, oom.process_mib, oom.allocated_mib, oom.reserved_mib)
    return sum(figure is not None for figure in found)


def parse(text: str, where: str = "") -> Oom:
    """The figures in one message."""
    oom = Oom(where=where, generation="bare", message=text.strip()[:1000])
    if match := _TRIED.search(text):
        oom.tried_mib = _mib(match[1], match[2])
        decimals = len(match[1].partition(".")[2])
        oom.tried_slack_mib = 0.0 if match[2] == "bytes" else _mib(str(0.5 * 10.0**-decimals), match[2])
    if match := _FIRST.search(text):
        oom.gpu, oom.total_mib = int(match[1]), _mib(match[2], match[3])
        oom.allocated_mib, oom.free_mib = _mib(match[4], match[5]), _mib(match[6], match[7])
        if match[8] is not None:
            oom.allowed_mib = _mib(match[8], match[9])
        rest = _mib(match[10], match[11])
        oom.generation = "cached" if match[12] == "cached" else "reserved"
        # Before 1.4 the message gave the cached memory without the allocated memory.
        oom.reserved_mib = rest + oom.allocated_mib if oom.generation == "cached" else rest
    elif match := _CARD.search(text):
        oom.generation = "process"
        oom.gpu, oom.total_mib, oom.free_mib = int(match[1]), _mib(match[2], match[3]), _mib(match[4], match[5])
        _in_sentences(oom, text)
    elif match := _MPS.search(text):
        oom.generation = "mps"
        oom.allocated_mib = _mib(match[1], match[2])
        oom.others_mib, oom.allowed_mib = _mib(match[3], match[4]), _mib(match[5], match[6])
    return oom


def _in_sentences(oom: Oom, text: str) -> None:
    theirs = [_mib(number, unit) for number, unit in _THEIRS.findall(text)]
    if match := _OURS.search(text):
        oom.process_mib = _mib(match[1], match[2])
    elif theirs:  # in a container the process does not know its own pid: ours is the largest
        oom.process_mib = max(theirs)
        theirs.remove(oom.process_mib)
    if theirs:
        oom.others_mib = sum(theirs)
    if match := _ALLOWED.search(text):
        oom.allowed_mib = _mib(match[1], match[2])
    if match := _ALLOCATED.search(text):
        oom.allocated_mib = _mib(match[1], match[2])
    if match := _POOLS.search(text):
        oom.private_pools_mib = _mib(match[1], match[2])
    if (match := _UNALLOCATED.search(text)) and oom.allocated_mib is not None:
        oom.reserved_mib = oom.allocated_mib + _mib(match[1], match[2])


def _mib(number: str, unit: str) -> float:
    return float(number) * _MIB[unit.lower() if unit == "bytes" else unit[0].lower()]


def _phase(frames: list[str]) -> tuple[OomPhase, str | None]:
    """The part of a step in which the traceback ends, and the innermost frame of the user's own code."""
    own = [frame for frame in frames if not _LIBRARY.search(frame)]
    code = own[-1].replace("\\", "/").rpartition("/")[2] if own else None
    names = [frame.rpartition(" in ")[2] for frame in frames]
    if any(name in ("estimate_loss", "evaluate", "validate", "evaluate_bpb") for name in names):
        return "evaluation", code
    if any(name in ("backward", "_engine_run_backward") for name in names):
        return "backward", code
    if any("/optim/" in frame.replace("\\", "/") for frame in frames):
        return "optimizer", code
    return ("forward" if frames else "unknown"), code


READERS = (
    ("Traceback (most recent call last)", traceback),
    ('File "', frame),
    ("memory", message),
)
