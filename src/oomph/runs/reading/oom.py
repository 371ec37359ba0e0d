"""Out-of-memory messages of every PyTorch, of other libraries and of the system.

PyTorch's wording changed in 1.4 ("cached" became "reserved in total by PyTorch"), 2.1 (sentences about the capacity,
free memory and the process; "capacty" until 2.2) and 2.4 (private pools of CUDA graphs). HIP's is the same, Ascend's is
that of 1.4 with one more figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from oomph.errors import OUT_OF_MEMORY
from oomph.runs.reading.builder import OOMS, Builder
from oomph.runs.reading.tracebacks import raised_at
from oomph.runs.run import EXABYTE_MIB, Backend, Crash, Oom, OomMemory

_SIZE = r"(\d{1,20}(?:\.\d{1,4})?) ?(bytes|B\b|[KMGT]i?B|[KMGT]\b)"
_MIB = {"b": 2.0**-20, "bytes": 2.0**-20, "k": 2.0**-10, "m": 1.0, "g": 2.0**10, "t": 2.0**20}
_TRIED = re.compile(
    r"(?:[Tt]ried to allocate|trying to allocate|Unable to allocate|[Aa]ttempting to (?:allocate|reserve)|allocating|"
    r"[Ff]ailed to allocate(?: request for)?) " + _SIZE
)
_XLA_FREE = re.compile(rf"There (?:are|is) {_SIZE} free")
_XLA_LIMIT = re.compile(rf"(?:Used|used) {_SIZE} of {_SIZE} (?:hbm|vmem)")
_PARENTHESES = re.compile(
    rf"(?:GPU|NPU) (\d+); {_SIZE} total capacity; {_SIZE} already allocated; (?:{_SIZE} current active; )?"
    rf"{_SIZE} free; (?:{_SIZE} allowed; )?{_SIZE} (cached|reserved)"
)
_SHORT = re.compile(rf"\((?:GPU|NPU) (\d+); {_SIZE} total capacity; {_SIZE} already allocated\)")
_CARD = re.compile(rf"(?:GPU|NPU) (\d+) has a total capaci?ty of {_SIZE}(?: of which {_SIZE} is free)?")
_OURS = re.compile(rf"this process has {_SIZE} memory in use")
_THEIRS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_POOLS = re.compile(rf"with {_SIZE} allocated in private pools")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_PADDLE_SIZE = r"(\d{1,9}\.\d{1,9})([KMGT]?B)"  # its GB are GiB; "allocated" is what everybody has of the card
_PADDLE = re.compile(
    rf"Cannot allocate {_PADDLE_SIZE} memory on GPU (\d+), (?:{_PADDLE_SIZE} memory has been allocated and )?"
    rf"available memory is only {_PADDLE_SIZE}"
)
_MPS = re.compile(rf"MPS allocated: {_SIZE}, other allocations: {_SIZE}, max allowed: {_SIZE}")
_TF_SHAPE = re.compile(r"OOM when allocating tensor with shape ?\[([\d,]{1,80})\](?: and type (\w+))?")
_TF_BYTES = {"float": 4, "half": 2, "bfloat16": 2, "double": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}

# Who reports it and whose memory it is, by the message's text; the first match counts.
_SOURCES: tuple[tuple[str, str, OomMemory], ...] = (
    (r"MPS backend out of memory", "torch", "mps"),
    (r"Out of memory error on GPU \d+\. Cannot allocate", "Paddle", "card"),
    (r"NPU out of memory|NPU \d+;|GE module", "torch", "npu"),
    (r"TPU|hbm|HBM", "XLA", "tpu"),
    (r"CUBLAS|HIPBLAS|ROCBLAS", "cuBLAS", "card"),
    (r"CUDNN", "cuDNN", "card"),
    (r"Cuda failure|NCCL", "NCCL", "card"),
    (r"OOM when allocating tensor.*device:CPU|device:CPU.*OOM when", "TensorFlow", "machine"),
    (r"OOM when allocating tensor.*GPU|GPU.*OOM when", "TensorFlow", "card"),
    (r"OOM when allocating tensor", "TensorFlow", "open"),
    (
        r"RESOURCE_EXHAUSTED|Resource exhausted|XlaRuntimeError|Out of memory (?:while trying to allocat|allocating)",
        "XLA",
        "card",
    ),
    (r"can't allocate memory|not enough memory|DefaultCPUAllocator", "torch", "machine"),
    (r"std::bad_alloc|(?<!OutOf)MemoryError|Unable to allocate|memory object|primitive", "the program", "machine"),
)
_BACKENDS: tuple[tuple[str, Backend], ...] = (
    (r"HIP out of memory|HIP error|_HIP_|hipError|ROCBLAS|HIPBLAS", "hip"),
    (r"NPU", "npu"),
    (r"XPU", "xpu"),
    (r"MPS", "mps"),
)
_KILLED = re.compile(
    r"Out of memory: Kill(?:ed)? process \d+ \([^)]{1,40}\)(?:.*?anon-rss:(?P<rss>[\d,]+)kB)?"
    r"|Memory cgroup out of memory: Kill(?:ed)? process \d+"
    r"|oom[-_]kill event|Exceeded job memory limit|OOM Killed|OOMKilled|task \d+: Out Of Memory|invoked oom-killer"
    r"|^\W*Killed\W*$|: line \d+: +\d+ Killed  |exit code:? -9\b|exitcode *: -9\b|Signal 9 \(SIGKILL\)|return code -9\b"
    r"|signal 9: SIGKILL|exit(?:ed with)? (?:code|status):? 137\b"
)

_END = re.compile(
    r"_ALLOC_CONF|See documentation|but unallocated|in total by PyTorch\)|cached\)|may cause system failure"
)
_FROM_MESSAGE = (
    *("library", "memory", "gpu", "tried_mib", "tried_slack_mib", "slack_mib", "total_mib", "free_mib", "process_mib"),
    *("processes", "allocated_mib", "reserved_mib", "unused_mib", "private_pools_mib", "allowed_mib", "outside_mib"),
    *("old", "message", "backend"),
)
_WRAPPED_LINES = 8  # at most, into which a terminal or chat window breaks a message


# --- messages ----------------------------------------------------------------------------------------


def message(builder: Builder, line: str) -> None:
    """The message. If it is wrapped over several lines, the following lines are joined to it."""
    if OUT_OF_MEMORY.search(line) is None:
        return
    builder.event("oom", line)
    builder.in_traceback = ""
    oom = parse(line, builder.where)
    if _repeats(builder, oom) or len(builder.run.ooms) >= OOMS:
        return
    raised_at(builder, oom)
    oom.after_step = builder.run.last_step
    builder.run.ooms.append(oom)
    if not _END.search(line) and oom.memory == "card":
        builder.next_lines = _continuation(builder, oom, line)


def _repeats(builder: Builder, oom: Oom) -> bool:
    """Whether it repeats the message before: loggers print what a traceback printed, with or without figures."""
    if not builder.run.ooms:
        return False
    last = builder.run.ooms[-1]
    return (
        oom.tried_mib == last.tried_mib and (figures(oom) == 0 or oom.free_mib == last.free_mib) and not builder.frames
    )


def _continuation(builder: Builder, oom: Oom, text: str) -> Callable[[str], bool]:
    """A function that takes a following line as part of the message if the message then gives more figures."""
    lines = [text]

    def take(line: str) -> bool:
        lines.append(line)
        # A chat window breaks between words, a terminal anywhere: keep the joining that gives more figures.
        fuller = max((parse(glue.join(lines), oom.where) for glue in ("", " ")), key=figures)
        gained = figures(fuller) > figures(oom)
        if gained:
            for name in _FROM_MESSAGE:
                setattr(oom, name, getattr(fuller, name))
        if len(lines) > _WRAPPED_LINES or _END.search(line):
            builder.next_lines = None
        return gained

    return take


def figures(oom: Oom) -> int:
    """How many figures the message gave."""
    found = (oom.tried_mib, oom.total_mib, oom.free_mib, oom.process_mib, oom.allocated_mib, oom.reserved_mib)
    return sum(figure is not None for figure in found) + bool(oom.processes)


def parse(text: str, where: str = "") -> Oom:
    """The figures in one message."""
    library, memory = next(
        ((name, whose) for pattern, name, whose in _SOURCES if re.search(pattern, text)), ("torch", "card")
    )
    oom = Oom(where=where, library=library, memory=memory, message=text.strip()[:1000])
    oom.backend = next((backend for pattern, backend in _BACKENDS if re.search(pattern, text)), "cuda")
    if match := _TRIED.search(text):
        oom.tried_mib, oom.tried_slack_mib = _mib(match[1], match[2]), _slack(match[1], match[2])
    elif "more than 1EB" in text:  # torch, of a size that no machine has
        oom.tried_mib = EXABYTE_MIB
    if match := _TF_SHAPE.search(text):
        oom.shape = tuple(int(size) for size in match[1].strip(",").split(",") if size)
        oom.number_bytes = _TF_BYTES.get(match[2] or "")
    if match := _PARENTHESES.search(text):
        groups = match.groups()
        pairs = [(groups[n], groups[n + 1]) for n in (1, 3, 7, 9, 11)]
        sizes = [None if number is None else _mib(number, unit) for number, unit in pairs]
        oom.gpu, oom.old = int(match[1]), True
        oom.total_mib, oom.allocated_mib, oom.free_mib, oom.allowed_mib, rest = sizes
        # Before 1.4 the message gave the cached memory without the allocated memory.
        oom.reserved_mib = (rest or 0.0) + (oom.allocated_mib or 0.0) if groups[13] == "cached" else rest
        oom.unused_mib = max(0.0, (oom.reserved_mib or 0.0) - (oom.allocated_mib or 0.0))
        oom.slack_mib = max(_slack(number, unit) for number, unit in pairs if number is not None)
    elif match := _CARD.search(text):
        oom.gpu, oom.total_mib = int(match[1]), _mib(match[2], match[3])
        oom.free_mib = _mib(match[4], match[5]) if match[4] else None
        oom.slack_mib = _slack(match[2], match[3])
        _in_sentences(oom, text)
    elif match := _SHORT.search(text):
        oom.gpu, oom.total_mib, oom.allocated_mib = int(match[1]), _mib(match[2], match[3]), _mib(match[4], match[5])
        oom.slack_mib, oom.old = _slack(match[2], match[3]), True
    elif match := _XLA_FREE.search(text):
        oom.free_mib, oom.slack_mib = _mib(match[1], match[2]), _slack(match[1], match[2])
    elif match := _XLA_LIMIT.search(text):
        oom.allocated_mib, oom.total_mib = _mib(match[1], match[2]), _mib(match[3], match[4])
    elif match := _PADDLE.search(text):
        oom.gpu, oom.tried_mib, oom.free_mib = int(match[3]), _mib(match[1], match[2]), _mib(match[6], match[7])
        oom.total_mib = _mib(match[4], match[5]) + oom.free_mib if match[4] else None
    elif match := _MPS.search(text):
        oom.allocated_mib = _mib(match[1], match[2])
        oom.outside_mib, oom.allowed_mib = _mib(match[3], match[4]), _mib(match[5], match[6])
    return oom


def _in_sentences(oom: Oom, text: str) -> None:
    oom.processes = {int(pid): _mib(number, unit) for pid, number, unit in _THEIRS.findall(text)}
    if match := _OURS.search(text):
        oom.process_mib = _mib(match[1], match[2])
    if match := _ALLOWED.search(text):
        oom.allowed_mib = _mib(match[1], match[2])
    if match := _ALLOCATED.search(text):
        oom.allocated_mib = _mib(match[1], match[2])
    if match := _POOLS.search(text):
        oom.private_pools_mib = _mib(match[1], match[2])
    if (match := _UNALLOCATED.search(text)) and oom.allocated_mib is not None:
        oom.unused_mib = _mib(match[1], match[2])
        oom.reserved_mib = oom.allocated_mib + oom.unused_mib


def _mib(number: str, unit: str) -> float:
    return float(number) * _MIB[unit.lower() if unit == "bytes" else unit[0].lower()]


def _slack(number: str, unit: str) -> float:
    """Half of the last printed digit, MiB."""
    return 0.0 if unit in ("bytes", "B") else 0.5 * 10.0 ** -len(number.partition(".")[2]) * _mib("1", unit)


_TF_DEVICE = re.compile(r"_device=\\?\"[^\"]{0,120}?\b([cg]pu):\d", re.I)


def device(builder: Builder, line: str) -> None:
    """TensorFlow's node line, which names the device that the message before it did not."""
    match = _TF_DEVICE.search(line)
    if match is not None and builder.run.ooms and builder.run.ooms[-1].memory == "open":
        builder.run.ooms[-1].memory = "machine" if match[1].lower() == "cpu" else "card"


# --- the system's killer -----------------------------------------------------------------------------


def killed(builder: Builder, line: str) -> None:
    """Linux, Slurm or a container killed the process. A bare "Killed" or exit code -9 does not say why."""
    match = _KILLED.search(line)
    if match is None or len(builder.run.ooms) >= OOMS:
        return
    sure = "emory" in line or "oom" in line.lower()
    if not sure:
        builder.event("killed", line)
        builder.run.crash = builder.run.crash or Crash("killed by SIGKILL", builder.where)
        return
    if any(oom.library == "the kernel" for oom in builder.run.ooms):
        return
    oom = Oom(where=builder.where, library="the kernel", memory="machine", message=line.strip()[:1000])
    oom.after_step = builder.run.last_step
    if match["rss"] is not None:
        oom.process_mib = int(match["rss"].replace(",", "")) / 1024
    builder.event("oom", line)
    builder.run.ooms.append(oom)


READERS: tuple[tuple[str, Callable[[Builder, str], None]], ...] = (
    ("emory", message),
    ("MEMORY", message),
    ("ALLOC_FAILED", message),
    ("OOM when", message),
    ("_device=", device),
    ("bad_alloc", message),
    ("nable to allocate", message),
    ("could not create", message),
    ("EXHAUSTED", message),
    ("exhausted: ", message),
    ("bytes) from device", message),
    ("ried to allocate", message),
    ("ill", killed),
    ("OOM", killed),
    ("exit", killed),
    ("return code", killed),
    ("SIGKILL", killed),
    ("oom", killed),
    ("Out Of Memory", killed),
)
