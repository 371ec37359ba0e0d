"""The lines of nanochat and build-nanogpt: "step … | loss: … | dt: …ms | tok/sec: …", and what stands around them."""

from __future__ import annotations

import re

from oomph.runs.builder import Builder
from oomph.runs.columns import Spans
from oomph.runs.model import STEADY, WARMING_UP

_STEP = re.compile(
    r"\bstep +(\d{1,15})(?:/(\d{1,15}) \([\d.]{1,10}%\))?(?: \||,) loss: (-?[\d.einfa+-]{1,24})([^\r\n]*)", re.ASCII
)
_STEP_BEGINS = re.compile(r"\bstep +\d+(?:/\d+ \([\d.]+%\))?(?: \||,) loss: ")
_FIELD = re.compile(r"(grad norm|norm|lrm|lr|dt|tok/sec|bf16_mfu|mfu):? ([\d.,e+-]{1,24}|-?nan|-?inf)(ms)?")
_BPB = re.compile(r"Step (\d{1,15}) \| Validation bpb: ([\d.]{1,20})")
_VAL = re.compile(r"^(?:validation|val) loss: ([\d.]{1,20}|nan|inf)\s*$")
_LOG_FILE = re.compile(r"^(\d{1,15}) (train|val) ([\d.]{1,20}|nan|inf)\s*$")

_COLUMNS = {
    "grad norm": "grad_norm",
    "norm": "grad_norm",
    "lr": "lr",
    "dt": "ms",
    "tok/sec": "tokens_per_s",
    "bf16_mfu": "mfu_percent",
    "mfu": "mfu_percent",
}


def step_line(builder: Builder, line: str) -> None:
    """One step; nanochat's loss is a running mean, debiased, which its `lrm` field gives away."""
    match = _STEP.search(line)
    if match is None:
        if _STEP_BEGINS.search(line):
            builder.cannot_read("a step line that is not whole", line)
        return
    step = int(match[1])
    try:
        row = {"loss": float(match[3])}
        fields = {name: float(value.replace(",", "")) for name, value, _ in _FIELD.findall(match[4])}
    except ValueError:
        builder.cannot_read("a step line with numbers that are none", line)
        return
    builder.program("nanochat" if "lrm" in fields or match[2] else "build-nanogpt")
    if match[2]:
        builder.run.printed.steps_planned = int(match[2])
    row |= {_COLUMNS[name]: value for name, value in fields.items() if name in _COLUMNS}
    if builder.pending_val_loss is not None:
        builder.evaluation(step, True, val_loss=builder.pending_val_loss)
        builder.pending_val_loss = None
    kind = builder.step_kind(step)
    if kind == STEADY and not builder.run.steps.count:
        kind = WARMING_UP  # the first step compiles
    builder.run.steps.append(step=step, kind=kind, **row)
    _tokens(builder, row)


def step_spans(line: str) -> Spans | None:
    """Where the values of a step line stand."""
    match = _STEP.search(line)
    if match is None or len(_STEP_BEGINS.findall(line)) != 1:
        return None
    spans = {"step": match.span(1), "loss": match.span(3)}
    begin = match.start(4)
    for field in _FIELD.finditer(match[4]):
        if field[1] in _COLUMNS:
            spans[_COLUMNS[field[1]]] = (begin + field.start(2), begin + field.end(2))
    return spans


def take_steps(builder: Builder, columns: dict[str, list[float]]) -> None:
    """Steps read together."""
    columns["kind"] = [STEADY] * len(columns["step"])
    builder.run.steps.extend(columns)


def _tokens(builder: Builder, row: dict[str, float]) -> None:
    """Tokens a step from the printed rate, where nothing else tells them: rounded, but a multiple of 1024."""
    printed = builder.run.printed
    ms, rate = row.get("ms"), row.get("tokens_per_s")
    if printed.tokens_per_step is None and ms and rate and rate > 0:
        tokens = rate * ms / 1e3
        whole = round(tokens / 1024) * 1024
        if whole and abs(whole - tokens) < 1e-3 * tokens:
            printed.tokens_per_step = whole


def validation(builder: Builder, line: str) -> None:
    if match := _BPB.search(line):
        builder.program("nanochat")
        try:
            builder.evaluation(int(match[1]), False, val_bpb=float(match[2]))
        except ValueError:
            builder.cannot_read("a validation line", line)
    elif match := _VAL.search(line):
        try:
            builder.pending_val_loss = float(match[1])
        except ValueError:
            builder.cannot_read("a validation line", line)
    elif "Validation bpb: " in line and "Minimum" not in line:
        builder.cannot_read("a validation line that is not whole", line)


def log_file(builder: Builder, line: str) -> None:
    """build-nanogpt's log.txt: "250 val 3.1234", "0 train 10.954"."""
    match = _LOG_FILE.match(line)
    if match is None:
        return
    try:
        value = float(match[3])
    except ValueError:
        builder.cannot_read("a line of build-nanogpt's log.txt", line)
        return
    builder.program("build-nanogpt")
    if match[2] == "val":
        builder.evaluation(int(match[1]), False, val_loss=value)
    else:
        builder.run.steps.append(step=int(match[1]), loss=value, kind=STEADY)


# --- what nanochat and build-nanogpt print once --------------------------------------------------

# A pattern and the config keys that its groups are.
_SETTINGS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"Vocab size: ([\d,]{1,16})"), ("vocab_size",)),
    (re.compile(r"Tokens / micro-batch / rank: (\d{1,9}) x (\d{1,9}) = "), ("batch_size", "block_size")),
    (re.compile(r"=> (?:calculated )?gradient accumulation steps: (\d{1,9})"), ("gradient_accumulation_steps",)),
    (re.compile(r"number of iterations[^:]{0,60}(?::param ratio)?: ([\d,]{1,20})"), ("max_iters",)),
    (re.compile(r"COMPUTE_DTYPE: torch\.(bfloat16|float16|float32)"), ("dtype",)),
)
# A pattern and the printed figure that its group is.
_FIGURES: tuple[tuple[re.Pattern[str], str, type[int] | type[float]], ...] = (
    (re.compile(r"(?:Total batch size|total desired batch size:) ([\d,]{1,20})"), "tokens_per_step", int),
    (re.compile(r"number of iterations[^:]{0,60}(?::param ratio)?: ([\d,]{1,20})"), "steps_planned", int),
    (re.compile(r"Estimated FLOPs per token: ([\d.]{1,20}e\+?\d{1,3})"), "flops_per_token", float),
    (re.compile(r"[Pp]eak memory usage: ([\d.,]{1,16}) ?MiB"), "peak_allocated_mib", float),
)
_CARD = re.compile(r"GPU: (.{2,60}?) \| Peak FLOPS")
_WIDTHS = {"num_layers": "n_layer", "model_dim": "n_embd", "num_heads": "n_head"}
_OLD_SHAPE = re.compile(r"^(num_layers|model_dim|num_heads): (\d{1,9})\s*$")
_JSON_SHAPE = re.compile(r'^\s*"(sequence_len|vocab_size|n_layer|n_head|n_kv_head|n_embd)": (\d{1,10}),?\s*$')


def once(builder: Builder, line: str) -> None:
    """A line of the preamble or of the end."""
    for pattern, names in _SETTINGS:
        if match := pattern.search(line):
            for name, text in zip(names, match.groups(), strict=True):
                bare = text.replace(",", "")
                builder.setting(name, int(bare) if bare.isdecimal() else text)
    for pattern, figure, kind in _FIGURES:
        if match := pattern.search(line):
            try:
                setattr(builder.run.printed, figure, kind(match[1].replace(",", "")))
            except ValueError:
                builder.cannot_read("a number", line)
    if match := _CARD.search(line):
        builder.gpu(0).name = match[1]


def shape(builder: Builder, line: str) -> None:
    """nanochat's model config: a line a key, older versions in words of their own."""
    if match := _OLD_SHAPE.match(line):
        builder.setting(_WIDTHS[match[1]], int(match[2]))
    elif match := _JSON_SHAPE.match(line):
        builder.setting("block_size" if match[1] == "sequence_len" else match[1], int(match[2]))


WORDS = {
    "loss:": (step_line, validation),
    "bpb:": (validation,),
    "val": (log_file,),
    "train": (log_file,),
    "size:": (once,),
    "size": (once,),
    "/": (once,),
    "accumulation": (once,),
    "iterations": (once,),
    "iterations:": (once,),
    "FLOPs": (once,),
    "usage:": (once,),
    "COMPUTE_DTYPE:": (once,),
    "FLOPS": (once,),
    "num_layers:": (shape,),
    "model_dim:": (shape,),
    "num_heads:": (shape,),
    '"sequence_len":': (shape,),
    '"vocab_size":': (shape,),
    '"n_layer":': (shape,),
    '"n_head":': (shape,),
    '"n_embd":': (shape,),
}
