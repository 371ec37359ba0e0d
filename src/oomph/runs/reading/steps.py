"""Step lines of any program: pairs of a name and a number, in any order and format.

    iter 250: loss 4.9121, time 3905.11ms, mfu 12.90%
    step: 200  loss:  6.1384  memory: 49.66GiB(52.28%)  tps: 5,856  mfu: 34.29%
    {'loss': 1.4596, 'grad_norm': nan, 'learning_rate': 4.55e-06, 'epoch': 0.66}
     iteration  122/ 250000 | elapsed time per iteration (ms): 865.2 | lm loss: 2.504220E+00 |
     10%|█   | 100/1000 [00:10<01:30, 10.0it/s, loss=2.31]

A line is taken apart once (`read`). If it is a plain step, the lines that follow in the same shape are read many at a
time (`patterns`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oomph.runs.reading.builder import Builder, Record
from oomph.runs.reading.names import BACK_REFERENCES, MIB, PER_CARD, quantity, scale
from oomph.runs.reading.patterns import Columns, LinePattern, chosen_pairs, numbers_out, tokens
from oomph.runs.run import STEP_COLUMNS

_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?!,\d{3}\b|\.?\d)"
    r"|[-+]?(?:nan|inf(?:inity)?|null|none)(?![A-Za-z])"
)
_PAIR = re.compile(
    r"(?<![A-Za-z0-9_.])([A-Za-z][A-Za-z0-9_/.()%-]*(?: [A-Za-z(][A-Za-z0-9_/.()%-]*){0,6})[\"']?\s*[:=]?\s*"
    rf"(?:[\"'(\[]{{0,2}}|tensor\(|np\.float\d\d\()\s*({_NUMBER})(?:\s*/\s*(\d+)(?![\d:]))?\s*"
    r"((?:ms|µs|us|min|sec|seconds|s|GiB|GB|MiB|MB|G|%|K|M|B|m)(?![A-Za-z/]))?",
    re.I,
)
# "2345.23 ms | 59.3% bf16 MFU | 223,522 tok/s": the name after its number.
_NAME_AFTER = re.compile(  # not of "9100/8700 tok/s", which are two rates
    r"(?<![\w.:=/-])(-?\d[\d,.]*)\s*(ms\b|% (?:\w{2,5} )?MFU|tok(?:en)?s?/s(?:ec)?\b|TFLOPS?\b)", re.I
)
_AFTER = {"ms": "ms", "tok": "tokens_per_s", "tfl": "tflops", "% ": "mfu_percent"}
_BAR = re.compile(
    r"(?P<about>[^|]{0,120}?)\s*\d{1,3}%\|?[^|]{0,300}\|\s*(?P<step>\d+)/(?P<of>\d+)\s*\[(?P<took>[\d:]+)<[^,\]]{0,20},\s*"
    r"(?P<rate>[\d.]+|\?)\s?(?P<unit>s/it|it/s)[^,\]]{0,8}(?:,\s*(?P<rest>[^\]]*))?\]"
)
_BAR_NUMBERS = (
    r"\s*\d{1,3}%\|?[^|\r\n]{0,300}\|\s*(\d+)/(\d+)\s*\[[\d:]+<[^,\]\r\n]{0,20},\s*((?=[\d.]*[1-9])[\d.]+)\s?"
)
_ABOUT_TRAINING = re.compile(
    r"^[\s>]*(?:r\d+ |\(\w+ pid=\d+\) ?)?(?:(?:epoch|train|training|steps?|iter|\[|\(|\d)[\w\s:/\[\],.()-]*)?$", re.I
)
_BAR_EPOCH = re.compile(r"epoch\D{0,3}(\d+)", re.I)
_TORCHTUNE = re.compile(r"(\d{1,9})\|(\d{1,12})\|$")  # "epoch|step|Loss: …" before its bar
_VALIDATING = re.compile(r"\b(?:valid|validation|validating|evaluating|eval)\b", re.I)
_LEADING = re.compile(r"^\W{0,3}(\d{1,12}) *\| ")  # "490 | loss 5.75 | lr …"
_PROGRESS = re.compile(r"(?<![\w.:/])(\d+) ?/ ?(\d+)(?![\w.:/%]| \d\d:\d\d)")  # no date
_BEFORE_PROGRESS = re.compile(r"\[(\d{1,9})(?:/\d+)?\]\[\s*$")  # the epoch in "[2/20][4084/7614]"
_OBJECT = re.compile(r"\{[^{}]*\}")
_LOG_FILE = re.compile(r"^(\d{1,15}) (train|val) ([\d.]{1,20}|nan|inf)\s*$")  # build-nanogpt's log.txt
_BEFORE_ITS_STEP = re.compile(r"^(?:validation|val) loss: (\d+(?:\.\d+)?|nan|inf)\s*$")  # build-nanogpt's
_ENDS_EARLY = re.compile(r"[,:=|{(]\s*$|(?<![a-z/_])(?!ms|s|min|m|nan|inf|mib|gib|mfu|it|tok)[a-z_]+\s*$", re.I)
_JSON_FIELD = re.compile(rf'^\s*"([\w/ .()-]{{1,60}})":\s*({_NUMBER}),?\s*$', re.I)
_EVENT = re.compile(r'"event": ?"(\w{1,40})"')
_BARE_STEP = re.compile(r"\b(?:iter|step|iteration)[\s:#]{1,3}\d+\b.{0,60}?\bloss\b", re.I)
_WORDS = ("loss", "norm", "bpb", "xent", "trl:", "tel:", "maxmemallocated")
_ELAPSED = re.compile(
    r"[\"']elapsed_time[\"']: ?[\"'](?:(\d+)(?: days?,|d) )?(?:(\d+)[:h] ?)?(?:(\d+)[:m] ?)?(\d+)s?[\"']"
)
_NULLS = ("null", "none")
LONGEST = 1 << 14  # characters; longer lines are parsed only if they contain objects


class Pair(NamedTuple):
    """A quantity in a line, and the position of its digits."""

    what: str
    rank: int
    name: str
    value: float  # in the column's unit
    factor: float
    of: int | None  # "step 10/200"
    span: tuple[int, int]


def read(builder: Builder, line: str) -> bool:
    """Read a line that may be one or more steps or evaluations; False if it has none."""
    if builder.cut and line[-1].isdigit():
        line = line.rstrip("0123456789.,")  # the log is cut off here, perhaps in the middle of a number
    lower = line.lower()
    if "|" in line and (bar := _BAR.search(line)) is not None:
        return _bar(builder, line, bar)
    if (" val " in line or " train " in line) and (match := _LOG_FILE.match(line)) is not None:
        builder.program("build-nanogpt")
        builder.record({"step": float(match[1]), "val_loss" if match[2] == "val" else "loss": float(match[3])})
        return True
    if not any(word in lower for word in _WORDS):
        return _field(builder, line)
    if (match := _BEFORE_ITS_STEP.match(line)) is not None:
        builder.pending_val_loss = float(match[1])
        return True
    if "{" in line and "}" in line and (found := _objects(builder, line)):
        return found > 0
    if _field(builder, line):
        return True
    if len(line) > LONGEST:
        return False
    pairs = list(_pairs(line, spelled=False))
    return _lines_records(builder, line, pairs)


def may_be_read_later(line: str) -> bool:
    """Whether a line that is not a step by itself may be one in context: the end of an object, a loss after a bar."""
    lower = line.lower()
    return "}" in line or any(word in lower for word in _WORDS)


def read_pairs(builder: Builder, texts: Sequence[str]) -> bool:
    """Read a step whose figures are printed one by one, each as "name=value"."""
    pairs = [pair for text in texts for pair in _pairs(text, spelled=True)]
    record = _record(builder, pairs)
    return record is not None and builder.record(record) is not None


def _lines_records(builder: Builder, line: str, pairs: Sequence[Pair]) -> bool:
    """The records on one line; a step after a loss begins a new one."""
    groups: list[list[Pair]] = [[]]
    for pair in pairs:
        told = {each.what for each in groups[-1]}
        if pair.what == "step" in told and told & {"loss", "val_loss"}:
            groups.append([])
        groups[-1].append(pair)
    ends_in_its_last_number = builder.cut and builder.shape is not None and tokens(f"{line}0") == builder.shape.text
    if (builder.shape is not None and builder.shape.is_cut(line) and not ends_in_its_last_number) or (
        builder.cut and pairs and builder.shape is None and _ENDS_EARLY.search(line)
    ):
        builder.cannot_read("an incomplete step line", line)
        return True
    taken = False
    for group in groups:
        record = _record(builder, group, line)
        row = builder.record(record) if record is not None else None
        taken |= row is not None
        if row and len(groups) == 1 and "{" not in line[:1] and builder.run.step_unit != "iteration":
            builder.learn(LinePattern.of(line, group, row))
    if not taken and _BARE_STEP.search(line) is not None:
        builder.cannot_read("a step line without a number that can be read", line)
        return True
    return taken


def _pairs(text: str, spelled: bool) -> Iterator[Pair]:
    named = [(match, found) for match in _PAIR.finditer(text) if (found := _quantity(match)) is not None]
    # A single null is a NaN, which JSON does not have; several are missing values.
    leaves_out = sum(match[2].lower() in _NULLS for match, _ in named) > 1
    for match, (what, rank, name, in_name) in named:
        if leaves_out and match[2].lower() in _NULLS:
            continue
        value = _float(match[2])
        factor = scale(name, what, match[4] or in_name, value, spelled)
        if what in ("tokens", "tokens_per_s") and match[4]:
            factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(match[4].upper(), 1.0)
        if factor is not None:
            of = int(match[3]) if match[3] and len(match[3]) < 16 else None
            yield Pair(what, rank, name, value * factor, factor, of, match.span(2))
    if not spelled and ("ms" in text or "/s" in text):
        for match in _NAME_AFTER.finditer(text):
            what = next(column for start, column in _AFTER.items() if match[2].lower().startswith(start))
            yield Pair(what, 99, match[2], _float(match[1].rstrip(",.")), 1.0, None, match.span(1))


def _moved(pair: Pair, by: int) -> Pair:
    return pair._replace(span=(pair.span[0] + by, pair.span[1] + by))


def _quantity(match: re.Match[str]) -> tuple[str, int, str, str] | None:
    """The quantity that a pair's name means; in "words step=7" the last word is the name."""
    found = quantity(match[1])
    if found is None and match.string[match.end(1) : match.end(1) + 1] == "=":
        found = quantity(match[1].rpartition(" ")[2])
        return found if found is not None and found[0] == "step" else None
    return found


def _float(text: str) -> float:
    lower = text.lower().lstrip("+-")
    if lower in _NULLS:
        return math.nan
    return float(text.replace(",", ""))


def _record(builder: Builder, pairs: Sequence[Pair], line: str = "") -> Record | None:
    """The quantities of one step or evaluation; None if its step is unknown."""
    best: dict[str, Pair] = {}
    for pair in pairs:
        held = best.get(pair.what)
        if held is None or pair.rank < held.rank:
            best[pair.what] = pair
    names = {pair.name for pair in pairs}
    if "loss" in best and best["loss"].name == "lm_loss" and "lm_loss_value" in names:
        del best["loss"]
    if "step" in best and best["step"].name == "batch":
        begin, end = best["step"].span
        if "epoch" not in best or "." in line[begin:end]:
            del best["step"]  # a size, or a time
    record: Record = {what: pair.value for what, pair in best.items()}
    if {"iter", "step"} <= names or {"iteration", "step"} <= names:  # litgpt: its times are of iterations
        record["step"] = next(pair.value for pair in pairs if pair.name in ("iter", "iteration"))
        builder.run.step_unit = "iteration"
        builder.iteration(record["step"], best["step"].value)
    if "step" in best and best["step"].of is not None:
        record["steps_planned"] = float(best["step"].of or 0)
    if "step" not in record and line and (leading := _LEADING.match(line)):
        record["step"] = float(leading[1])
    elif "step" not in record and line and (found := _progress(line, best.get("epoch"))) and len(found[-1][2]) < 10:
        progress = found[1] if len(found) > 1 and line[found[0].end() : found[1].start()] == "][" else found[0]
        if before := _BEFORE_PROGRESS.search(line[: progress.start()]):
            record["epoch"] = float(before[1])
        record |= {"step": float(progress[1]), "epoch_steps": float(progress[2])}
    if "steps_per_s" in best and best["steps_per_s"].value > 0:
        record.setdefault("ms", 1e3 / best["steps_per_s"].value)
    if "tokens_per_s" in best:
        rate = best["tokens_per_s"].name  # "tps" is of one card in torchtitan, of all in others
        builder.run.printed.rate_per_card = rate in PER_CARD or (rate == "tps" and "titan" in line)
    if "memory_mib" in best:
        exact = re.search("alloc|active|mib", best["memory_mib"].name)
        builder.run.printed.memory_word = "tensors" if exact else "memory"
        builder.run.printed.memory_in_gb = best["memory_mib"].factor == MIB["gb"]
    if line and "loss" in record and "val_loss" not in record and _VALIDATING.search(line):
        return None  # a validation in progress
    if "val_loss" in best and best["val_loss"].name in BACK_REFERENCES and "loss" not in record:
        del record["val_loss"]
    if "loss" in best and best["loss"].name.startswith("train"):
        record["train_loss"] = best["loss"].value
    last = "step" in record and record["step"] == record.get("steps_planned")
    return record if last or record.keys() & {"loss", "val_loss", "val_bpb", "grad_norm", "memory_mib"} else None


def _progress(line: str, epoch: Pair | None) -> list[re.Match[str]]:
    """Each "10/90" in the line that is not the epoch's own."""
    own = epoch.span[0] if epoch is not None else -1
    return [match for match in _PROGRESS.finditer(line) if match.start() != own]


# --- objects and bars ------------------------------------------------------------------------------


def _objects(builder: Builder, line: str) -> int:
    """Read the Python dicts or JSON objects on a line; returns how many were records."""
    found = list(_OBJECT.finditer(line))
    texts = [match[0] for match in found]
    taken = 0
    whole = len(texts) == 1 and line.count("{") > 1
    for place, text in enumerate([line] if whole else texts):
        begin = 0 if whole else found[place].start()
        pairs = [_moved(pair, begin) for pair in _pairs(text, spelled=True)]
        record = _record(builder, pairs)
        if record is None:
            continue
        if elapsed := _ELAPSED.search(text):
            days, hours, minutes, seconds = (int(part or 0) for part in elapsed.groups())
            record["elapsed_s"] = ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
        if "step_ms" in text or '"tokens":' in text:
            builder.program("oomph")
        if event := _EVENT.search(text):
            builder.event(event[1], line)
        row = builder.record(record)
        taken += row is not None
        if row and len(texts) == 1 and not whole and "elapsed_s" not in record and "event" not in text:
            builder.learn(LinePattern.of(line, pairs, row))
    if not taken and texts and '"step":' in line and '"loss":' in line:
        builder.cannot_read("an object of metrics", line)
    if taken and "'epoch'" in line:
        builder.program("transformers")
    return taken


def _field(builder: Builder, line: str) -> bool:
    """One line of a JSON object that spans several; kept until the closing brace."""
    if builder.fields and line.strip() in ("}", "},", "}],", "}]"):
        fields, builder.fields = builder.fields, []
        record = _record(builder, fields)
        return record is not None and builder.record(record) is not None
    if '": ' not in line and '":' not in line:
        return False
    match = _JSON_FIELD.match(line)
    if match is None:
        return False
    found = quantity(match[1])
    if found is not None:
        what, rank, name, in_name = found
        value = _float(match[2])
        factor = scale(name, what, in_name, value, spelled=True)
        if factor is not None and len(builder.fields) < 64:
            builder.fields.append(Pair(what, rank, name, value * factor, factor, None, (0, 0)))
        return True
    return False


def _bar(builder: Builder, line: str, bar: re.Match[str]) -> bool:
    """A progress bar: its step and speed, and the loss in it or after it."""
    described = list(_pairs(bar["about"], spelled=False)) if "oss" in bar["about"] else []
    if not described and _ABOUT_TRAINING.match(bar["about"]) is None:
        builder.event("bar", bar["about"])
        return True
    step, of = int(bar["step"]), int(bar["of"])
    epoch = _BAR_EPOCH.search(bar["about"])
    own = next((pair for pair in described if pair.what == "step"), None)
    same = own is None or own.of == of  # else the bar counts something else
    counted = _TORCHTUNE.search(line[: bar.start("about")])
    if counted is not None:
        epoch, step = counted, int(counted[2])
    ms = None
    if same and bar["rate"] not in ("?", "") and (rate := float(bar["rate"].rstrip(".") or 0)) > 0:
        ms = rate * 1e3 if bar["unit"] == "s/it" else 1e3 / rate
    if same:
        builder.bar(step, of, ms)
    if own is not None:
        step, of = int(own.value), own.of or of
    if not same:
        builder.bar(step, of, ms)
    begin, end = bar.span("rest")
    inside = [_moved(pair, begin) for pair in _pairs(line[begin:end], spelled=False)] if begin >= 0 else []
    pairs = [pair for pair in (*described, *inside) if pair.what not in ("step", "ms")]
    record = _record(builder, pairs)
    shown = record if record is not None and "loss" in record else {}
    if shown:
        shown = dict(shown)
        shown["step"] = float(step)
        if ms is not None:
            shown["ms"] = ms
        if epoch is not None:
            shown["epoch"] = float(epoch[1])
        if counted is not None:
            pass  # torchtune's bar is of an epoch, its step is not
        elif "epoch" in shown:
            shown["epoch_steps"] = float(of)
        else:
            shown["steps_planned"] = float(of)
        builder.record(shown)
    after = line[bar.end() :]
    if not after.strip() and not described and counted is None and ms is not None:
        _learn_bar(builder, line, bar, pairs, shown)
    return read(builder, after) or True if "loss" in after and "|" not in after else True


def _learn_bar(builder: Builder, line: str, bar: re.Match[str], pairs: Sequence[Pair], shown: Record) -> None:
    """Read the bars that follow many at a time, if they differ in their numbers alone."""
    chosen = chosen_pairs(pairs, shown, (*STEP_COLUMNS, "val_loss"))
    counts = shown.keys() & {"epoch", "epoch_steps", "steps_planned"}
    if shown.keys() - {pair.what for pair in chosen} - counts - {"step", "ms", "train_loss"}:
        return
    of_name = "epoch_steps" if "epoch" in shown else "steps_planned"

    def rows(found: Columns) -> None:
        of, rates = found.pop("of"), found.pop("rate")
        ms = [1e3 * rate for rate in rates] if bar["unit"] == "s/it" else [1e3 / rate for rate in rates]
        builder.bar(int(found["step"][0]), int(of[0]), ms[0])
        if shown:
            epochs = {"epoch": [shown["epoch"]] * len(of)} if "epoch" in shown else {}
            builder.rows({**found, "ms": ms, of_name: of, **epochs})
        builder.bar(int(found["step"][-1]), int(of[-1]), ms[-1])

    about, end = line[: bar.end("about")], bar.end("unit")
    rest, columns = numbers_out(line[end:], [_moved(pair, -end) for pair in chosen])
    columns = (("step", 1.0), ("of", 1.0), ("rate", 1.0), *columns)
    pattern = f"{re.escape(about)}{_BAR_NUMBERS}{bar['unit']}{rest}"
    text = f"bar: {tokens(about)} {tokens(rest)}"
    builder.learn(LinePattern(text, pattern, columns, None, rows, builder.line_end))
