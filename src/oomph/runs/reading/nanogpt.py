"""What nanoGPT's train.py prints."""

from __future__ import annotations

import math
import re

from oomph.config.schema import GPT2_SHAPES
from oomph.runs.reading.builder import Builder
from oomph.runs.run import STEADY, WARMING_UP

_NUMBER = r"(-?(?:\d[\d.]*(?:e[+-]?\d+)?|nan|inf))"
_STEP = re.compile(
    rf"iter (\d{{1,15}}): loss {_NUMBER}, time ([\d.]{{1,20}})ms(?:, mfu (-?[\d.]{{1,20}})%)?", re.ASCII | re.I
)
_STEP_BEGINS = re.compile(r"\biter \d+: ")
_EVAL = re.compile(rf"step (\d{{1,15}}): train loss {_NUMBER}, val loss {_NUMBER}", re.ASCII | re.I)
_EVAL_BEGINS = re.compile(r"\bstep \d+: train loss")
_PARAMS = re.compile(r"([nN])umber of parameters: (\d[\d.,]{0,20})( ?M)?")
_TENSORS = re.compile(r"num (non-)?decayed parameter tensors: ([\d,]{1,12}), with ([\d,]{1,24}) parameters")
_TOKENS = re.compile(r"tokens per iteration will be: ([\d,]{1,24})")
_VOCAB = re.compile(r"found vocab_size = (\d{1,10})|defaulting to vocab_size of GPT-2 to (\d{1,10})")
_FORCED = re.compile(r"forcing vocab_size=(\d{1,10}), block_size=(\d{1,10}), bias=(True|False)")
_FUSED = re.compile(r"using fused AdamW: (True|False)")
_FROM_GPT2 = re.compile(r"Initializing from OpenAI GPT-2 weights: (gpt2(?:-medium|-large|-xl)?)\b")


def steps(builder: Builder, line: str) -> None:
    """ "iter 250: loss 4.9121, time 3905.11ms, mfu 12.90%", one or more of them anywhere in the line."""
    found = 0
    for match in _STEP.finditer(line):
        found += 1
        _step(builder, match)
    if found < len(_STEP_BEGINS.findall(line)):
        builder.cannot_read("an incomplete nanoGPT step", line)


def _step(builder: Builder, match: re.Match[str]) -> None:
    step, mfu = int(match[1]), match[4]
    try:
        row = {"loss": float(match[2]), "ms": float(match[3])}
        if mfu is not None:
            row["mfu_percent"] = float(mfu)
    except ValueError:
        builder.cannot_read("a nanoGPT step with malformed numbers", match[0])
        return
    builder.program("nanogpt")
    kind = builder.step_kind(step)
    if kind == STEADY and row.get("mfu_percent", 0.0) < 0:  # nanoGPT prints an MFU of -100 % while it warms up
        kind = WARMING_UP
    builder.run.steps.append(step=step, kind=kind, **row)


def evaluations(builder: Builder, line: str) -> None:
    """ "step 500: train loss 5.5012, val loss 5.5328"."""
    found = False
    for match in _EVAL.finditer(line):
        try:
            losses = {"train_loss": float(match[2]), "val_loss": float(match[3])}
        except ValueError:
            continue
        found = True
        builder.program("nanogpt")
        builder.evaluation(int(match[1]), True, **losses)
    if not found and _EVAL_BEGINS.search(line):
        builder.cannot_read("an incomplete nanoGPT evaluation", line)


def parameters(builder: Builder, line: str) -> None:
    """ "number of parameters: 29.94M"; nanochat's "Number of parameters: 560,988,160"."""
    match = _PARAMS.search(line)
    try:
        number = float(match[2].replace(",", "")) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or math.isnan(number):
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
    """ "num decayed parameter tensors: 26, with 30,130,176 parameters", and the same for "non-decayed"."""
    match = _TENSORS.search(line)
    if match is None:
        builder.cannot_read("a count of decayed tensors", line)
        return
    count, numbers = (int(text.replace(",", "") or 0) for text in (match[2], match[3]))
    printed = builder.run.printed
    if match[1]:
        printed.no_decay_tensors, printed.no_decay_params = count, numbers
    else:
        printed.decay_tensors, printed.decay_params = count, numbers


def tokens(builder: Builder, line: str) -> None:
    """ "tokens per iteration will be: 524,288"."""
    match = _TOKENS.search(line)
    number = int(match[1].replace(",", "") or 0) if match else 0
    if not number:
        builder.cannot_read("tokens per iteration", line)
        return
    builder.program("nanogpt")
    builder.run.printed.tokens_per_step = number


def vocabulary(builder: Builder, line: str) -> None:
    """The vocabulary size, as found in the data, defaulted, or forced by GPT-2's weights."""
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


def from_scratch(builder: Builder, _: str) -> None:
    builder.setting("init_from", "scratch")


def from_gpt2(builder: Builder, line: str) -> None:
    if match := _FROM_GPT2.search(line):
        builder.setting("init_from", match[1])
        for key, value in GPT2_SHAPES[match[1]].items():
            builder.setting(key, value)


def resuming(builder: Builder, line: str) -> None:
    builder.setting("init_from", "resume")
    builder.event("resume", line)


def compiling(builder: Builder, line: str) -> None:
    builder.setting("compile", True)
    builder.event("compile", line)


def checkpoint(builder: Builder, line: str) -> None:
    builder.event("checkpoint", line)


def grad_scaler(builder: Builder, line: str) -> None:
    """nanoGPT builds a GradScaler for every dtype, so torch's deprecation warning does not mean float16."""
    if "is enabled, but CUDA is not available" in line or "GradScaler enabled for fp16" in line:
        builder.setting("dtype", "float16")
    builder.event("grad_scaler", line)


READERS = (
    (": loss", steps),
    (": train loss", evaluations),
    ("umber of parameters:", parameters),
    ("decayed parameter tensors:", tensors),
    ("tokens per iteration will be", tokens),
    ("vocab_size", vocabulary),
    ("using fused AdamW:", fused),
    ("Initializing a new model from scratch", from_scratch),
    ("Initializing from OpenAI GPT-2 weights:", from_gpt2),
    ("Resuming training from", resuming),
    ("compiling the model...", compiling),
    ("saving checkpoint to ", checkpoint),
    ("GradScaler", grad_scaler),
)
