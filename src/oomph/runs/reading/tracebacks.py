"""Tracebacks: in which phase of the run they end, and errors other than out of memory."""

from __future__ import annotations

import re
from collections.abc import Callable

from oomph.errors import OUT_OF_MEMORY
from oomph.runs.causes import FIRST_TRY
from oomph.runs.reading.builder import Builder
from oomph.runs.run import Crash, Oom, OomPhase

_FRAME = re.compile(r'File "([^"]{1,300})", line (\d{1,7}), in (\S{1,100})')
_AT = re.compile(r"^\s+(\S[^()]{0,300})\((\d{1,7})\): ?(\S{0,100})")  # pybind11's frame
_LIBRARY = re.compile(r"site-packages|dist-packages|/torch/|<frozen|<string>|/lib/python\d|\\Lib\\|torchinductor")
_ERROR = re.compile(  # behind a rank or a host's name
    r"^(?:\[rank\d+\]: ?|\w{2,8}\d*: |[a-z][\w.-]{0,40}\d[\w.-]{0,40}: )?"
    r"((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.{0,300})"
)
_CRASH = re.compile(
    r"Segmentation fault|Bus error|core dumped|Aborted|Watchdog caught collective operation timeout|"
    r"[Ll]oss is (?:nan|inf)\b.{0,9}stopping|Model diverged with loss = NaN|"
    r"GPU has fallen off the bus|Unable to determine the device handle for GPU|HW Exception by GPU|"
    r"CUDA error: device-side assert triggered|no kernel image is available for execution|"
    r"\bsm_\d+ is not compatible with the current PyTorch installation|"
    r"^\S{1,80}: error: (?:argument |unrecognized arguments|the following arguments|ambiguous option)|"  # argparse
    r"\*\*\* (?:JOB|STEP) \S{1,40} ON \S{1,60} CANCELLED|"
    r"DataLoader worker \(pid\S{0,2} [\d, ]+\) (?:(?:is|was) killed by signal: \w[\w ]*|exited unexpectedly)"
)
_BARE_ERROR = re.compile(r"^((?:[A-Za-z_][\w.]*\.)?(?:[A-Z]\w*Error|Exception): \S.{5,300})")
_NCCL = re.compile(r"NCCL WARN (?=.{0,300}(?:[Ff]ailed|timed out|refused|unreachable|in use))(\S.{4,180})")
_CHECKPOINTING = re.compile(
    r"torch/utils/checkpoint\.py|activation_checkpointing/|checkpoint_activations\.py|checkpoint_wrapper\.py"
)
_CHECKPOINTING_CODE = re.compile(r"checkpoint(?:ing_func)?\(|CheckpointF")
_EMPTY = re.compile(r"\b(?:empty|empty_strided|zeros|empty_strided_cuda|empty_strided_cpu)\(\(([\d, ]{1,80})\)")
_EMPTY_DTYPE = re.compile(r"torch\.(float32|float16|bfloat16|int64|float64)|dtype=torch\.(\w+)")
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8}
CUT_OFF = "an error that the text does not show"
NCCL_WARNED = "NCCL's warning: "
INNERMOST = 16  # lines of code of a traceback that tell what was computed


def traceback(builder: Builder, _: str) -> None:
    """The first line of a traceback."""
    builder.frames, builder.frame_code = [], []
    builder.in_traceback = builder.where


def attention(builder: Builder, line: str) -> None:
    """A line of code with PyTorch's fused attention, where a text shows it without its frame."""
    builder.frame_code = [*builder.frame_code[-63:], line.strip()[:300]]


def cut_traceback(builder: Builder) -> None:
    """Called at the end of a text: record a traceback cut off before its error, or a bare error."""
    run = builder.run
    if run.steps.count:  # TensorFlow continued with less memory
        run.ooms[:] = [oom for oom in run.ooms if oom.after_step is not None or not FIRST_TRY.search(oom.message)]
    for oom in run.ooms:
        oom.serving = "serving" in run.event_counts and not run.steps.count
    if builder.bare_error is not None and run.crash is None and builder.bare_error[1] == run.steps.count:
        run.crash = builder.bare_error[0]
    above = run.ooms[-1] if run.ooms else None
    logged = above is not None and not above.lines and "Error: " not in above.message  # by a logger, not raised
    if builder.in_traceback and above is not None and logged and above.after_step == run.last_step:
        raised_at(builder, above)  # the traceback below is its own; its last line is cut off
    elif builder.in_traceback and run.crash is None and above is None:
        run.crash = Crash(CUT_OFF, builder.in_traceback, _own_code(builder.frames))


def frame(builder: Builder, line: str) -> None:
    """A frame of a traceback; its line of code follows."""
    match = _FRAME.search(line)
    if match is None:
        return
    builder.frames = [*builder.frames[-63:], f"{match[1]}:{match[2]} in {match[3]}"]
    builder.frame_code = [*builder.frame_code[-63:], ""]

    def code(below: str) -> bool:
        if builder.next_lines is code:
            builder.next_lines = None
        if 'File "' not in below and OUT_OF_MEMORY.search(below) is None and builder.frame_code:
            builder.frame_code[-1] = below.strip()[:300]
        return False

    if builder.next_lines is None:
        builder.next_lines = code


_LAUNCHER = re.compile(
    r"failed \(exitcode: (-(?!9\b)\d+|\d+)\) local_rank: (\d+)|^\s*exitcode +: (-(?!9\b)\d+|[1-9]\d*) \(pid: \d+\)"
)


def launcher(builder: Builder, line: str) -> None:
    """torchrun's report of the process that failed first. That process's own error, if logged, has the reason."""
    if (match := _LAUNCHER.search(line)) and builder.run.crash is None:
        rank = f", local rank {match[2]}" if match[2] else ""
        what = f"a process of the launcher with exit code {match[1] or match[3]}{rank}"
        builder.run.crash = Crash(what, builder.where)
        builder.event("crash", line)


def error(builder: Builder, line: str) -> None:
    """The last line of a traceback that is not about memory, or a signal that ends a program."""
    found = _CRASH.search(line)
    named = _ERROR.match(line) if builder.frames else None
    if OUT_OF_MEMORY.search(line):
        return
    if found is None and named is None:
        if bare := _BARE_ERROR.match(line):  # counts only if nothing follows it
            builder.bare_error = (Crash(bare[1][:300], builder.where), builder.run.steps.count)
        return
    if found is not None and "is not compatible with" in found[0]:  # a warning; counts only if nothing follows it
        builder.bare_error = (Crash(found[0], builder.where), builder.run.steps.count)
        return
    if "ChildFailedError" in line and builder.run.crash is not None:
        return  # a launcher's error, caused by a rank's
    what = named[1] if named is not None else line[found.start() if found is not None else 0 :].strip()
    builder.run.crash = Crash(what[:300], builder.where, _own_code(builder.frames))
    builder.in_traceback = ""
    builder.event("crash", line)
    builder.frames, builder.frame_code = [], []


def collective(builder: Builder, line: str) -> None:
    """NCCL's warning that something failed, which an error after it does not repeat."""
    if (match := _NCCL.search(line)) is not None:
        builder.event("nccl", match[1])
        builder.bare_error = (Crash(f"{NCCL_WARNED}{match[1]}", builder.where), builder.run.steps.count)


def _own_code(frames: list[str]) -> str | None:
    own = [frame for frame in frames if not _LIBRARY.search(frame)]
    return own[-1].replace("\\", "/").rpartition("/")[2] if own else None


_EVALUATION = (
    "estimate_loss",
    "evaluate",
    "validate",
    "evaluate_bpb",
    "evaluation_loop",
    "evaluate_fn",
    "validation_step",
    "prediction_loop",
    "nested_concat",
)
_LOADING = ("to", "cuda", "_load_pretrained_model", "load_state_dict", "from_pretrained", "load_checkpoint", "_apply")
_LOADING_CODE = re.compile(
    r"\.to\(\s*(?:device|self\.device|[\"']cuda|args\.device|torch\.device|local_rank|rank)|\.cuda\(|from_pretrained\(|"
    r"torch\.load\(|load_state_dict\(|set_module_tensor_to_device\("
)
_BACKWARD_CODE = re.compile(r"\.backward\(|autograd\.grad\(")


def phase(frames: list[str], code: list[str]) -> OomPhase:
    """The phase of the run in which the traceback ends; "unknown" if its frames do not show it."""
    names = [each.rpartition(" in ")[2] for each in frames]
    paths = [each.replace("\\", "/") for each in frames]
    if any(name in _EVALUATION for name in names):
        return "evaluation"
    if "load_state_dict" in names:
        return "loading"
    if any(name in ("backward", "_engine_run_backward") for name in names) or any(map(_BACKWARD_CODE.search, code)):
        return "backward"
    if any("/optim/" in path or "/optimizers/" in path or "optimizer.py:" in path for path in paths):
        return "optimizer"
    if any("optimizer.step(" in text or "scaler.step(" in text for text in code):
        return "optimizer"
    forward = any(name in ("forward", "_call_impl", "compute_loss", "training_step") for name in names)
    if not forward and (any(name in _LOADING for name in names) or any(map(_LOADING_CODE.search, code))):
        return "loading"
    return "forward" if forward else "unknown"


def _shape(code: list[str]) -> tuple[tuple[int, ...], int | None]:
    """The tensor that the innermost line of code asks for, as inductor's code states it."""
    for text in reversed(code[-3:]):
        if (match := _EMPTY.search(text)) is not None:
            dtype = _EMPTY_DTYPE.search(text)
            name = (dtype[1] or dtype[2]) if dtype else ""
            return tuple(int(size) for size in match[1].replace(" ", "").strip(",").split(",")), _DTYPE_BYTES.get(name)
    return (), None


def raised_at(builder: Builder, oom: Oom) -> None:
    """Record what the frames of the traceback tell about the error, and forget them."""
    frames, code = builder.frames, builder.frame_code
    late = "CUDA error: out of memory" in oom.message  # reported at an unrelated line
    oom.phase, oom.code = "unknown" if late else phase(frames, code), _own_code(frames)
    oom.checkpointed = any(_CHECKPOINTING.search(each.replace("\\", "/")) for each in frames) or any(
        map(_CHECKPOINTING_CODE.search, code[-INNERMOST:])
    )
    if not oom.shape:
        oom.shape, oom.number_bytes = _shape(code)
    oom.lines = tuple(code[-INNERMOST:])
    builder.frames, builder.frame_code = [], []


def frames_below(builder: Builder, line: str) -> None:
    """ "At:" and the frames that pybind11 prints below an error that went through C++."""
    if line.strip() != "At:" or not builder.run.ooms:
        return
    oom = builder.run.ooms[-1]

    def take(below: str) -> bool:
        match = _AT.match(below)
        if match is None:
            builder.next_lines = None
            return False
        oom.checkpointed |= _CHECKPOINTING.search(match[1].replace("\\", "/")) is not None
        return True

    builder.next_lines = take


READERS: tuple[tuple[str, Callable[[Builder, str], None]], ...] = (
    ("Traceback (most recent call last)", traceback),
    ('File "', frame),
    ("At:", frames_below),
    ("scaled_dot_product_attention", attention),
    ("exitcode", launcher),
    ("NCCL WARN", collective),
    ("rror", error),
    ("xception", error),
    ("nterrupt", error),
    ("fault", error),
    ("core dumped", error),
    ("Aborted", error),
    ("Watchdog", error),
    ("CANCELLED", error),
    ("off the bus", error),
    ("device handle", error),
    ("kernel image", error),
    ("not compatible with", error),
    ("stopping", error),
    ("diverged with", error),
    ("DataLoader worker", error),
)
