"""What nanoGPT's train.py prints."""

from __future__ import annotations

import math
import re

from oomph.config.presets import GPT2_SHAPES
from oomph.runs.builder import Builder
from oomph.runs.columns import Spans
from oomph.runs.model import STEADY, WARMING_UP

_NUMBER = r"(-?(?:\d[\d.]*(?:e[+-]?\d+)?|nan|inf))"
_STEP = re.compile(
    rf"iter (\d{{1,15}}): loss {_NUMBER}, time ([\d.]{{1,20}})ms(?:, mfu (-?[\d.]{{1,20}})%)?", re.ASCII | re.I
)
_STEP_BEGINS = re.compile(r"\biter \d+: ")
_EVAL = re.compile(rf"step (\d{{1,15}}): train loss {_NUMBER}, val loss {_NUMBER}", re.ASCII | re.I)
_PARAMS = re.compile(r"([nN])umber of parameters: (\d[\d.,]{0,20})( ?M)?")
_TENSORS = re.compile(r"num (non-)?decayed parameter tensors: ([\d,]{1,12}), with ([\d,]{1,24}) parameters")
_TOKENS = re.compile(r"tokens per iteration will be: ([\d,]{1,24})")
_VOCAB = re.compile(r"found vocab_size = (\d{1,10})|defaulting to vocab_size of GPT-2 to (\d{1,10})")
_FORCED = re.compile(r"forcing vocab_size=(\d{1,10}), block_size=(\d{1,10}), bias=(True|False)")
_FUSED = re.compile(r"using fused AdamW: (True|False)")
_FROM_GPT2 = re.compile(r"Initializing from OpenAI GPT-2 weights: (gpt2(?:-medium|-large|-xl)?)\b")


def step_spans(line: str) -> Spans | None:
    """Where the values of a plain step line stand."""
    match = _STEP.search(line)
    if match is None or len(_STEP_BEGINS.findall(line)) != 1:
        return None
    names = ("step", "loss", "ms", "mfu_percent")
    return {name: match.span(group) for group, name in enumerate(names, 1) if match[group] is not None}


def take_steps(builder: Builder, columns: dict[str, list[float]]) -> None:
    """Steps read together. nanoGPT prints an MFU of -100 % for the steps of its warm-up."""
    builder.evaluated_step = None
    mfus = columns.get("mfu_percent")
    if mfus is not None and min(mfus) < 0:
        columns["kind"] = [WARMING_UP if mfu < 0 else STEADY for mfu in mfus]
    else:
        columns["kind"] = [STEADY] * len(columns["step"])
    builder.run.steps.extend(columns)


def step_line(builder: Builder, line: str) -> None:
    """A line with one or more step records anywhere in it: prefixed, run together, cut."""
    found = 0
    for match in _STEP.finditer(line):
        found += 1
        _take_step(builder, match)
    if found < len(_STEP_BEGINS.findall(line)):
        builder.cannot_read("a nanoGPT step that is not whole", line)


def _take_step(builder: Builder, match: re.Match[str]) -> None:
    step, mfu = int(match[1]), match[4]
    try:
        loss, ms = float(match[2]), float(match[3])
        row = {} if mfu is None else {"mfu_percent": float(mfu)}
    except ValueError:
        builder.cannot_read("a nanoGPT step with numbers that are none", match[0])
        return
    builder.program("nanogpt")
    kind = builder.step_kind(step)
    if kind == STEADY and mfu is not None and row["mfu_percent"] < 0:
        kind = WARMING_UP
    builder.run.steps.append(step=step, loss=loss, ms=ms, kind=kind, **row)


def evaluation(builder: Builder, line: str) -> None:
    found = False
    for match in _EVAL.finditer(line):
        found = True
        try:
            losses = {"train_loss": float(match[2]), "val_loss": float(match[3])}
        except ValueError:
            found = False
            continue
        builder.program("nanogpt")
        builder.evaluation(int(match[1]), True, **losses)
    if not found and re.search(r"\bstep \d+: train loss", line):
        builder.cannot_read("a nanoGPT evaluation that is not whole", line)


def parameters(builder: Builder, line: str) -> None:
    match = _PARAMS.search(line)
    if match is None:
        if "number of parameters:" in line:
            builder.cannot_read("a parameter count", line)
        return
    try:
        number = float(match[2].replace(",", ""))
    except ValueError:
        builder.cannot_read("a parameter count", line)
        return
    printed = builder.run.printed
    if match[1] == "N":  # nanochat counts everything
        printed.params_total = round(number)
    elif match[3]:  # "29.94M"
        decimals = len(match[2].partition(".")[2])
        printed.params = round(number * 1e6)
        printed.params_slack = math.ceil(0.5e6 * 10**-decimals)
    else:
        printed.params, printed.params_slack = round(number), 0


def tensors(builder: Builder, line: str) -> None:
    match = _TENSORS.search(line)
    if match is None:
        if "decayed parameter tensors:" in line:
            builder.cannot_read("a count of decayed tensors", line)
        return
    count, numbers = (int(text.replace(",", "") or 0) for text in (match[2], match[3]))
    printed = builder.run.printed
    if match[1]:
        printed.no_decay_tensors, printed.no_decay_params = count, numbers
    else:
        printed.decay_tensors, printed.decay_params = count, numbers


def tokens(builder: Builder, line: str) -> None:
    match = _TOKENS.search(line)
    number = int(match[1].replace(",", "") or 0) if match else 0
    if number:
        builder.program("nanogpt")
        builder.run.printed.tokens_per_step = number
    elif "tokens per iteration will be" in line:
        builder.cannot_read("tokens per iteration", line)


def vocabulary(builder: Builder, line: str) -> None:
    if match := _VOCAB.search(line):
        builder.program("nanogpt")
        builder.setting("vocab_size", int(match[1] or match[2]))
    elif match := _FORCED.search(line):
        builder.setting("vocab_size", int(match[1]))
        builder.setting("bias", match[3] == "True")


def fused(builder: Builder, line: str) -> None:
    if match := _FUSED.search(line):
        builder.event("optimizer", match[0])
        builder.setting("optimizer_loop", "fused" if match[1] == "True" else None)


def start(builder: Builder, line: str) -> None:
    """How the model came to be, and whether it is compiled."""
    if "Initializing a new model from scratch" in line:
        builder.setting("init_from", "scratch")
    elif match := _FROM_GPT2.search(line):
        builder.setting("init_from", match[1])
        for key, value in GPT2_SHAPES[match[1]].items():
            builder.setting(key, value)
    elif "Resuming training from" in line:
        builder.setting("init_from", "resume")
        builder.event("resume", line)


def compiling(builder: Builder, line: str) -> None:
    if "compiling the model..." not in line:
        return
    builder.setting("compile", True)
    builder.event("compile", line)


def checkpoint(builder: Builder, line: str) -> None:
    if "saving checkpoint to " in line:
        builder.event("checkpoint", line)


def grad_scaler(builder: Builder, line: str) -> None:
    """nanoGPT builds a GradScaler whatever the dtype, so torch's deprecation warning does not tell float16."""
    if "GradScaler" not in line:
        return
    if "is enabled, but CUDA is not available" in line or "GradScaler enabled for fp16" in line:
        builder.setting("dtype", "float16")
    builder.event("grad_scaler", line)


# The words that call a handler: whole words of a line, in which digits, points and hyphens are left out.
WORDS = {
    "loss": (step_line, evaluation),
    "parameters:": (parameters,),
    "tensors:": (tensors,),
    "iteration": (tokens,),
    "vocab_size": (vocabulary,),
    "vocab_size=,": (vocabulary,),
    "fused": (fused,),
    "Initializing": (start,),
    "Resuming": (start,),
    "compiling": (compiling,),
    "checkpoint": (checkpoint,),
    "FutureWarning:": (grad_scaler,),
    "UserWarning:": (grad_scaler,),
    "GradScaler": (grad_scaler,),
}
