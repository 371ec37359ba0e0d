"""`Builder`: the run being read. The readers write into it; every list in it is bounded."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oomph.config.keys import keys
from oomph.config.values import coerce
from oomph.errors import Problem
from oomph.runs.run import (
    EVALUATING,
    KIND,
    STEADY,
    STEP_COLUMNS,
    WARMING_UP,
    Crash,
    Gpu,
    KnownSetting,
    LogEvent,
    LoggedRun,
    LogSource,
    Process,
    Progress,
    Provenance,
    UnreadableLine,
)

if TYPE_CHECKING:
    from oomph.runs.reading.patterns import LinePattern, Shapes
    from oomph.runs.reading.steps import Pair

Record = dict[str, float]  # quantities of one step or evaluation, by their names in names.NAMES

# Kept at most; events, unreadable lines and out-of-memory errors are all counted.
EVENTS = 200
UNREADABLE = 32
PROCESSES = 256
GPUS = 64
OOMS = 32
EARLY = 100  # a log that begins at a later step lacks the run's start
SHAPES = 64  # learned from one source; a log with more shapes is read line by line
SCREENS = 16  # of them lines of screens, which are looked for at once
FORMS = 4096  # of lines, kept with what reads them, so that it is not looked for again
ANY_DIGIT = str.maketrans("123456789", "000000000")
# A line with one of these next to a loss is a step; with losses alone it is an evaluation.
_OF_A_STEP = frozenset(("ms", "tokens_per_s", "lr", "grad_norm", "mfu_percent", "tflops", "memory_mib"))
_HIGHEST = 1e15
EACH_ITS_OWN = 3  # step lines in a row with a new validation loss: each line has an evaluation of its own


class Builder:
    """A run being read, and the position in its sources."""

    def __init__(self, name: str) -> None:
        self.run = LoggedRun(name=name)
        # The readers of a line by its form, which is the line with 0 for every digit.
        self.forms: dict[str, tuple[Callable[[Builder, str], object], ...]] = {}
        self._random = random.Random(0)
        self.begin_unnamed()

    def begin_unnamed(self) -> None:
        """Forget the position in a source."""
        self.source = LogSource(self.run.name)
        self.line = 0
        self.next_lines: Callable[[str], bool] | None = None  # gets the following lines; False: not its own
        self.frames: list[str] = []  # of the traceback being read: 'train.py:219 in estimate_loss'
        self.bare_error: tuple[Crash, int] | None = None  # printed without a traceback, and the steps before it
        self.in_traceback = ""  # its first line, until its last line has come
        self.frame_code: list[str] = []  # and the line of code below each
        self.evaluated_step: float | None = None  # an evaluation was just printed; this step's time contains it
        self.pending_val_loss: float | None = None  # printed without its step, which is on the next line
        self.gpu_row: int | None = None  # nvidia-smi prints a card's number and name a line before its memory
        self.gpu_line = ""  # that line
        self.gpu_section = ""  # of nvidia-smi -q
        self.process_rows: dict[str, str] = {}  # of the process being read in nvidia-smi -q -x
        self.rank_tokens = 0  # nanochat's tokens of a micro-batch on one rank
        self.cut = False  # the current line is the last and has no newline
        self.fields: list[Pair] = []  # of a JSON object that is printed over several lines
        self.shape: LinePattern | None = None  # of the step lines being read
        self._screens: list[LinePattern] = []  # of the lines of screens between them
        self._blocks: tuple[Shapes | None, Shapes | None] = (None, None)  # of all shapes; of those of screens
        self.line_end = "\n"  # of the line being read: "\r" where it is drawn over
        self._shapes = 0
        self._bar: tuple[int, int, float | None] | None = None  # (step, of, ms) of the progress bar last seen
        self._bar_used = False
        self._epoch: float | None = None
        self._epoch_steps = 0.0  # as last printed
        self._place = ""  # of the record being added, where its step's number alone does not tell it
        self._raw_step = -math.inf
        self._offset = 0.0  # steps of earlier epochs, if a program restarts its count in each
        self._elapsed: tuple[float, float] | None = None  # (step, seconds)
        self._first_iteration: tuple[float, float] | None = None  # (micro-steps, optimizer steps)
        self._waiting: Record | None = None  # the first loss, for a progress bar
        self._val: float | None = None
        self._new_vals = 0  # step lines in a row with a new validation loss, up to EACH_ITS_OWN
        self._copies = 1

    @property
    def where(self) -> str:
        return f"{self.source.name}:{self.line}"

    def begin(self, source: LogSource) -> None:
        """Start another source."""
        self.begin_unnamed()
        self.source = source
        self.run.sources.append(source)

    def program(self, name: str) -> None:
        """Record which program wrote the log, from a line that only it writes."""
        if self.run.program is None:
            self.run.program = name

    def setting(self, key: str, value: object, how: Provenance = "read", where: str | None = None) -> bool:
        """Set a config key; False if the key is unknown or the value not allowed."""
        known = keys().get(key)
        if known is None:
            return False
        made = coerce(known, value, self.where)
        if isinstance(made, Problem):
            return False
        self.run.settings[key] = KnownSetting(made, how, where or self.where)
        return True

    def event(self, kind: str, text: str) -> None:
        """Count an event, and keep it while there is room."""
        counts = self.run.event_counts
        if kind not in counts and len(counts) >= EVENTS:
            return
        counts[kind] = counts.get(kind, 0) + 1
        if len(self.run.events) < EVENTS and counts[kind] <= EVENTS // 10:
            self.run.events.append(LogEvent(kind, self.where, text[:200], self.run.last_step))

    def cannot_read(self, what: str, text: str) -> None:
        """Count a line that looks like a known format but cannot be parsed; keep the first ones and a fair sample."""
        run = self.run
        run.unreadable_count += 1
        entry = UnreadableLine(self.source.name, self.line, what, text.strip()[:120])
        if len(run.unreadable) < UNREADABLE:
            run.unreadable.append(entry)
        elif (slot := self._random.randrange(run.unreadable_count)) < UNREADABLE // 2:
            run.unreadable[UNREADABLE // 2 + slot] = entry

    # --- the card --------------------------------------------------------------------------------

    def gpu(self, index: int) -> Gpu:
        """The card with that number, created when first seen."""
        gpus = self.run.gpus
        if index in gpus:
            return gpus[index]
        gpu = Gpu(index)
        if len(gpus) < GPUS:
            gpus[index] = gpu
        return gpu

    def process(self, pid: int, name: str, gpu: int, mib: float, kind: str = "C") -> None:
        """Record the memory of a process on a card; NaN if unknown."""
        processes = self.run.processes
        if pid in processes:
            held = processes[pid]
            held.mib = mib
            held.most_mib = max(mib, held.most_mib) if math.isfinite(held.most_mib) else mib
        elif len(processes) < PROCESSES:
            processes[pid] = Process(pid, name, gpu, mib, mib, self.where, kind)

    # --- steps and evaluations -------------------------------------------------------------------

    def bar(self, step: int, of: int, ms: float | None) -> None:
        """Record a training progress bar."""
        if self._bar is None or step != self._bar[0]:
            self._bar_used = False
        self._bar = (step, of, ms)
        self.flush()
        self.run.progress = Progress(step, of, ms)

    def record(self, record: Record) -> Record | None:
        """Add a step or an evaluation; the row of a plain step, {} for another one, None if it is neither."""
        if "finished" in record:
            self.run.printed.mean_loss = record.get("loss")
            self.run.printed.runtime_s = record["finished"]
            self.event("finished", "the Trainer's summary")
            return {}
        if self.waits_for_bar(record):
            return {}
        step = self._step(record)
        if step is None or not 0 <= step < _HIGHEST:
            return None
        if "steps_planned" in record and math.isfinite(record["steps_planned"]):
            self.run.printed.steps_planned = int(record["steps_planned"])
        val, bpb = record.get("val_loss"), record.get("val_bpb")
        alone = not record.keys() & _OF_A_STEP
        if (val is not None or bpb is not None) and ("loss" not in record or (alone and "train_loss" in record)):
            losses = {"train_loss": record.get("train_loss"), "val_loss": val, "val_bpb": bpb}
            if self.run.program == "modded-nanogpt" and record.get("ms", 0.0) > 0:
                self.run.printed.mean_step_ms = record["ms"]
            self.evaluation(step, **{name: value for name, value in losses.items() if value is not None})
            return {}
        if val is not None and math.isfinite(val) and self._evaluated(step, val):
            self.evaluation(step, val_loss=val)
        return self._add_step(step, record, plain=val is None)

    def _evaluated(self, step: float, val: float) -> bool:
        """Whether a step's line shows an evaluation of its own: many programs repeat the last one in every line."""
        new = val != self._val
        if self._new_vals < EACH_ITS_OWN:
            self._new_vals = self._new_vals + 1 if new else 0
        return new or (self._new_vals == EACH_ITS_OWN and step != self.run.evals.last_key)

    def waits_for_bar(self, record: Record) -> bool:
        """Whether to postpone the record: a loss without a step may precede the bar that has the step."""
        alone = "loss" in record and "step" not in record and record.keys() & {"epoch", "lr", "grad_norm"}
        later = self._bar_used if self._bar is not None else not self.run.steps.count
        if alone and later and self._waiting is None:
            self._waiting = record
            return True
        if self._waiting is not record:
            self.flush()
        return False

    def flush(self) -> None:
        """Add the record that waited for a progress bar."""
        if self._waiting is not None:
            self.record(self._waiting)
            self._waiting = None

    def _add_step(self, step: float, record: Record, plain: bool) -> Record | None:
        row = {name: record[name] for name in STEP_COLUMNS if name in record and name not in ("step", KIND)}
        if "loss" in record or "grad_norm" in record:
            pass
        elif "memory_mib" in row:
            self.memory(row["memory_mib"])
            return {}
        elif step == record.get("steps_planned") and self.run.steps.count:
            self.event("finished", "the last step")
            return {}
        else:
            return None
        if "ms" not in row and (ms := self._paced(step, record)) is not None:
            row["ms"], plain = ms, False
        if self.pending_val_loss is not None:
            self.evaluation(step, val_loss=self.pending_val_loss)
            self.pending_val_loss = None
        if self.run.steps.last_key == step and self.run.steps.count:
            self._copies += "loss" in record and record["loss"] == self.run.steps.totals["loss"].last
            return {}
        if self.run.steps.count > 1 or self.run.steps.totals["step"].low <= 1:  # else the log may start in the middle
            self.run.copies = max(self.run.copies, self._copies)
        self._copies = 1
        kind = self._kind(step)
        unknown = row.get("mfu_percent", 0.0) < 0  # nanoGPT prints -100 % while it warms up, llm.c for unknown cards
        first = not self.run.steps.count and step <= EARLY
        if kind == STEADY and ((unknown and self.run.program != "llm.c") or first):
            kind = WARMING_UP  # the first step compiles
        if unknown and self.run.program == "llm.c":
            del row["mfu_percent"]
        self.run.steps.append(step=step, kind=kind, **row)
        self.run.places["steps"] = self._place
        epoch = record.get("epoch", math.nan)
        counted = {"epoch": epoch} if epoch.is_integer() else {}  # step numbers may restart in each
        if not plain:
            return {}
        if "step" in record:
            return {"step": record["step"]} | row | counted
        return row if self.run.step_unit == "entry" and self._bar is None else {}

    def rows(self, columns: dict[str, Sequence[float]]) -> None:
        """Add many plain steps, given by column."""
        if "step" not in columns:  # entries without a number
            first = (self.run.steps.last_key or 0.0) + 1
            count = len(next(iter(columns.values())))
            self.run.steps.extend({**columns, "step": [first + n for n in range(count)], KIND: [STEADY] * count})
            return
        steps, names = columns["step"], list(columns)
        epochs, vals = columns.get("epoch", (0.0,)), columns.get("val_loss", (0.0,))
        apart = epochs[0] != epochs[-1] or sum(map(operator.eq, steps[1:], steps)) > 0 or min(vals) != max(vals)
        alone = len(steps) if apart else 1  # the first one may contain an evaluation, or be repeated
        for values in zip(*(column[:alone] for column in columns.values()), strict=True):
            self.record(dict(zip(names, values, strict=True)))
        if len(steps) > alone:
            self._raw_step = steps[-1]
            rest = {name: column[1:] for name, column in columns.items() if name in STEP_COLUMNS}
            if self._offset:
                rest["step"] = [step + self._offset for step in rest["step"]]
            self.run.steps.extend({**rest, KIND: [STEADY] * len(rest["step"])})
            self._locate({name: column[-1] for name, column in columns.items()})
            self.run.places["steps"] = self._place

    def learn(self, shape: LinePattern | None) -> None:
        """Use this shape for the following lines, unless every line has had a new one."""
        if shape is not None and self._shapes < SHAPES and (self.shape is None or shape.text != self.shape.text):
            self.shape = shape
            self._shapes += 1
            self._compile()

    def learn_screen(self, shape: LinePattern) -> None:
        """Read lines of a screen by this shape too, in whatever order they come."""
        if len(self._screens) < SCREENS and all(shape.text != known.text for known in self._screens):
            self._screens.append(shape)
            self._compile()

    def _compile(self) -> None:
        from oomph.runs.reading.patterns import Shapes

        above = self.shape is not None and self.shape.below is None  # else its lines are below a heading
        screens = Shapes(self._screens) if self._screens else None
        shapes = [] if self.shape is None else [self.shape]
        self._blocks = (Shapes([*shapes, *self._screens] if above else shapes) if shapes else screens, screens)

    @property
    def block(self) -> Shapes | None:
        """The shapes by which the lines that follow may be read many at a time."""
        if self.shape is not None and self.shape.below is self.next_lines:
            return self._blocks[0]
        return self._blocks[1] if self.next_lines is None else None

    def unread(self, text: str) -> bool:
        """Whether nothing reads these whole lines, as lines of their forms were seen before."""
        if self.next_lines is not None:
            return False
        form = text.translate(ANY_DIGIT)
        known = self.forms.get(form)
        if known is None:
            lines = form.replace("\r", "\n").split("\n")
            if any(line and self.forms.get(line) != () for line in lines):
                return False
            if len(self.forms) < FORMS:
                self.forms[form] = ()
        return not known

    def evaluation(self, step: float, **losses: float) -> None:
        """Add an evaluation. The next step printed with its number includes its time."""
        self.run.evals.append(step=step, **losses)
        self.run.places["evals"] = self._place
        self.evaluated_step = step
        self._val = losses.get("val_loss", self._val)

    def iteration(self, iteration: float, step: float) -> None:
        """Record a line with both micro-steps and optimizer steps."""
        first = self._first_iteration = self._first_iteration or (iteration, step)
        if step > first[1] and iteration > first[0]:
            self.run.printed.iterations_per_step = max(1, round((iteration - first[0]) / (step - first[1])))

    def memory(self, mib: float) -> None:
        """Record torch's peak memory, printed on a line of its own."""
        if math.isfinite(mib) and mib > 0:
            self.run.printed.peak_allocated_mib = max(mib, self.run.printed.peak_allocated_mib or 0.0)

    def _kind(self, step: float) -> int:
        contains = self.evaluated_step is not None and step == self.evaluated_step
        self.evaluated_step = None
        return EVALUATING if contains else STEADY

    def _step(self, record: Record) -> float | None:
        """The step of a record: printed, from the progress bar, or counted."""
        step, epoch = record.get("step"), record.get("epoch")
        self._locate(record)
        if step is not None and math.isfinite(step):
            if self._epoch is None and epoch is not None and epoch >= 2 and step <= record.get("epoch_steps", 0.0):
                self._offset = (epoch - 1) * record["epoch_steps"]  # the log begins in a later epoch
            anew = epoch is not None and self._epoch is not None and epoch > self._epoch and step <= self._raw_step
            ended = step == self._raw_step == record.get("epoch_steps")  # Keras draws the last step of every epoch
            anew |= ended and "loss" in record and record["loss"] != self.run.steps.totals["loss"].last
            if anew:  # the count restarted in a new epoch
                self._offset += max(self._raw_step, self._epoch_steps)
            self._epoch, self._raw_step = (epoch if epoch is not None else self._epoch), step
            if self._offset:
                record.pop("steps_planned", None)
            return step + self._offset
        is_eval = "val_loss" in record and "loss" not in record
        if self._bar is not None and (not self._bar_used or is_eval) and self.run.step_unit != "entry":
            self._bar_used = not is_eval
            if self._epoch is None:  # else the bar is of one epoch
                record.setdefault("steps_planned", float(self._bar[1]))
            return float(self._bar[0])
        last = self.run.steps.last_key
        if is_eval:
            return last if last is not None else epoch
        if "loss" not in record and "val_loss" not in record:
            return last if last is not None or "grad_norm" in record else 0.0  # memory, or a norm by itself
        if self.run.steps.count and self.run.step_unit == "step":
            return None  # a summary among steps that have numbers
        if epoch is not None and float(epoch).is_integer() and self.run.step_unit == "epoch":
            if epoch != last or record.get("loss") == self.run.steps.totals["loss"].last:
                return epoch
            self.run.step_unit = "entry"  # several losses of one epoch
        if epoch is None and "grad_norm" not in record and "lr" not in record:
            return None  # a loss without a step
        if epoch is not None and float(epoch).is_integer() and not self.run.steps.count and "lr" not in record:
            self.run.step_unit = "epoch"
            return epoch
        self.run.step_unit = "entry"
        return (last or 0.0) + 1.0

    def _locate(self, record: Record) -> None:
        """Note where a record is in the log's own words: a step that is counted anew in each epoch, or not printed."""
        step, epoch = record.get("step"), record.get("epoch")
        self._epoch_steps = record.get("epoch_steps", record.get("steps_planned", self._epoch_steps))
        self._place = ""
        if step is None and "val_loss" in record and "loss" not in record and self.run.steps.count:
            unit = "log entry" if self.run.step_unit == "entry" else self.run.step_unit
            self._place = f"after {self.run.places.get('steps') or f'{unit} {self.run.steps.last_key:,.0f}'}"
        elif (
            step is not None and epoch is not None and epoch.is_integer() and ("epoch_steps" in record or self._offset)
        ):
            of = f"/{self._epoch_steps:,.0f}" if self._epoch_steps >= step else ""
            self._place = f"{step:,.0f}{of} of epoch {epoch:,.0f}"

    def _paced(self, step: float, record: Record) -> float | None:
        """A step's time from the progress bar, or from the time since the previously logged step."""
        if "elapsed_s" in record:
            before, self._elapsed = self._elapsed, (step, record["elapsed_s"])
            if before is not None and step > before[0] and record["elapsed_s"] > before[1]:
                return 1e3 * (record["elapsed_s"] - before[1]) / (step - before[0])
            return None
        return self._bar[2] if self._bar is not None and self._bar_used else None
