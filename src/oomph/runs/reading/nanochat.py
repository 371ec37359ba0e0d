"""What nanochat and build-nanogpt print: "step … | loss: … | dt: …ms | tok/sec: …", and the lines around the steps."""

from __future__ import annotations

import re

from oomph.runs.reading.builder import Builder
from oomph.runs.run import STEADY, WARMING_UP

_STEP = re.compile(
    r"\bstep +(\d{1,15})(?:/(\d{1,15}) \([\d.]{1,10}%\))?(?: \||,) loss: (-?[\d.einfa+-]{1,24})([^\r\n]*)", re.ASCII
)
_STEP_BEGINS = re.compile(r"\bstep +\d+(?:/\d+ \([\d.]+%\))?(?: \||,) loss: ")
_FIELD = re.compile(r"(grad norm|norm|lrm|lr|dt|tok/sec|bf16_mfu|mfu):? ([\d.,e+-]{1,24}|-?nan|-?inf)(?:ms)?")
_COLUMNS = {
    "grad norm": "grad_norm",
    "norm": "grad_norm",
    "lr": "lr",
    "dt": "ms",
    "tok/sec": "tokens_per_s",
    "bf16_mfu": "mfu_percent",
    "mfu": "mfu_percent",
}
_BPB = re.compile(r"Step (\d{1,15}) \| Validation bpb: ([\d.]{1,20})")
_VAL = re.compile(r"^(?:validation|val) loss: ([\d.]{1,20}|nan|inf)\s*$")
_LOG_FILE = re.compile(r"^(\d{1,15}) (train|val) ([\d.]{1,20}|nan|inf)\s*$")


def step(builder: Builder, line: str) -> None:
    """One step of either program; only nanochat prints `lrm` or the planned steps."""
    match = _STEP.search(line)
    if match is None:
        if _STEP_BEGINS.search(line):
            builder.cannot_read("an incomplete step line", line)
        return
    number = int(match[1])
    try:
        row = {"loss": float(match[3])}
        fields = {name: float(value.replace(",", "")) for name, value in _FIELD.findall(match[4])}
    except ValueError:
        builder.cannot_read("a step line with malformed numbers", line)
        return
    builder.program("nanochat" if "lrm" in fields or match[2] else "build-nanogpt")
    if match[2]:
        builder.run.printed.steps_planned = int(match[2])
    row |= {_COLUMNS[name]: value for name, value in fields.items() if name in _COLUMNS}
    if builder.pending_val_loss is not None:
        builder.evaluation(number, True, val_loss=builder.pending_val_loss)
        builder.pending_val_loss = None
    kind = builder.step_kind(number)
    if kind == STEADY and not builder.run.steps.count:
        kind = WARMING_UP  # the first step compiles
    builder.run.steps.append(step=number, kind=kind, **row)
    _tokens(builder, row)


def _tokens(builder: Builder, row: dict[str, float]) -> None:
    """Tokens per step from the printed rate, if nothing else gives them: rounded, but a multiple of 1024."""
    printed = builder.run.printed
    ms, rate = row.get("ms"), row.get("tokens_per_s")
    if printed.tokens_per_step is None and ms and rate and rate > 0:
        tokens = rate * ms / 1e3
        whole = round(tokens / 1024) * 1024
        if whole and abs(whole - tokens) < 1e-3 * tokens:
            printed.tokens_per_step = whole


def validation_bpb(builder: Builder, line: str) -> None:
    """nanochat's "Step 00250 | Validation bpb: 1.0123"."""
    match = _BPB.search(line)
    try:
        if match is not None:
            builder.program("nanochat")
            builder.evaluation(int(match[1]), False, val_bpb=float(match[2]))
        elif "Minimum" not in line:
            builder.cannot_read("an incomplete validation line", line)
    except ValueError:
        builder.cannot_read("a validation line", line)


def validation_loss(builder: Builder, line: str) -> None:
    """build-nanogpt's "validation loss: 3.1234", printed just before its step."""
    if match := _VAL.search(line):
        try:
            builder.pending_val_loss = float(match[1])
        except ValueError:
            builder.cannot_read("a validation line", line)


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


# --- lines printed once ----------------------------------------------------------------------------

# A pattern, and the config keys of its groups.
_SETTINGS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"Vocab size: ([\d,]{1,16})"), ("vocab_size",)),
    (re.compile(r"Tokens / micro-batch / rank: (\d{1,9}) x (\d{1,9}) = "), ("batch_size", "block_size")),
    (re.compile(r"=> (?:calculated )?gradient accumulation steps: (\d{1,9})"), ("gradient_accumulation_steps",)),
    (re.compile(r"number of iterations[^:]{0,60}(?::param ratio)?: ([\d,]{1,20})"), ("max_iters",)),
    (re.compile(r"COMPUTE_DTYPE: torch\.(bfloat16|float16|float32)"), ("dtype",)),
)
# A pattern, and the printed count of its group.
_COUNTS: tuple[tuple[re.Pattern[str], str, type[int] | type[float]], ...] = (
    (re.compile(r"(?:Total batch size|total desired batch size:) ([\d,]{1,20})"), "tokens_per_step", int),
    (re.compile(r"number of iterations[^:]{0,60}(?::param ratio)?: ([\d,]{1,20})"), "steps_planned", int),
    (re.compile(r"Estimated FLOPs per token: ([\d.]{1,20}e\+?\d{1,3})"), "flops_per_token", float),
    (re.compile(r"[Pp]eak memory usage: ([\d.,]{1,16}) ?MiB"), "peak_allocated_mib", float),
)
_CARD = re.compile(r"GPU: (.{2,60}?) \| Peak FLOPS")
_OLD_KEYS = {"num_layers": "n_layer", "model_dim": "n_embd", "num_heads": "n_head"}
_OLD_SHAPE = re.compile(r"^(num_layers|model_dim|num_heads): (\d{1,9})\s*$")
_JSON_SHAPE = re.compile(r'^\s*"(sequence_len|vocab_size|n_layer|n_head|n_kv_head|n_embd)": (\d{1,10}),?\s*$')


def once(builder: Builder, line: str) -> None:
    """A setting or a count printed at the start or the end."""
    for pattern, names in _SETTINGS:
        if match := pattern.search(line):
            for name, text in zip(names, match.groups(), strict=True):
                bare = text.replace(",", "")
                builder.setting(name, int(bare) if bare.isdecimal() else text)
    for pattern, count, kind in _COUNTS:
        if match := pattern.search(line):
            try:
                setattr(builder.run.printed, count, kind(match[1].replace(",", "")))
            except ValueError:
                builder.cannot_read("a number", line)


def card(builder: Builder, line: str) -> None:
    """ "GPU: NVIDIA H100 80GB HBM3 | Peak FLOPS (BF16): 9.89e+14"."""
    if match := _CARD.search(line):
        builder.gpu(0).name = match[1]


def shape(builder: Builder, line: str) -> None:
    """A key of nanochat's model config, in JSON or in the words of older versions."""
    if match := _OLD_SHAPE.match(line):
        builder.setting(_OLD_KEYS[match[1]], int(match[2]))
    elif match := _JSON_SHAPE.match(line):
        builder.setting("block_size" if match[1] == "sequence_len" else match[1], int(match[2]))


READERS = (
    (" loss: ", step),
    ("Validation bpb: ", validation_bpb),
    ("loss: ", validation_loss),
    (" train ", log_file),
    (" val ", log_file),
    ("batch size", once),
    ("Vocab size: ", once),
    ("Tokens / micro-batch / rank: ", once),
    ("=> calculated gradient accumulation steps: ", once),
    ("number of iterations", once),
    ("COMPUTE_DTYPE: ", once),
    ("FLOPs per token: ", once),
    ("eak memory usage: ", once),
    ("| Peak FLOPS", card),
    ("num_", shape),
    ("model_dim: ", shape),
    ('": ', shape),
)
