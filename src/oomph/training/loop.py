"""The run around the steps: evaluations, checkpoints, figures, and the orderly end."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, cast

import torch

from oomph.config import LoadedConfig
from oomph.planner import Plan, tokens_per_step
from oomph.training import checkpoint
from oomph.training.failure import TrainingError
from oomph.training.memory import MemoryMeter
from oomph.training.metrics import Metrics
from oomph.training.options import Habits
from oomph.training.progress import Log, step_line
from oomph.training.result import Held, Result, hold_memory
from oomph.training.signals import StopAsked
from oomph.training.state import Standing, pack
from oomph.training.trainer import Interrupted, NotFiniteError, Shrunk, StepResult, Trainer

_PAUSES_S = (1.0, 4.0)  # before the last checkpoint is tried again
_WARM_UP_STEPS = 2  # left out of the measured step time: compiling, first touches of memory


class Loop:
    """Steps until all are done or somebody asks to stop."""

    def __init__(
        self,
        trainer: Trainer,
        loaded: LoadedConfig,
        plan: Plan,
        data: Path,
        folder: Path | None,  # None on all ranks but the first: they write nothing
        standing: Standing,
        log: Log,
        metrics: Metrics | None,
        meter: MemoryMeter,
        habits: Habits,
    ) -> None:
        self.trainer, self.loaded, self.plan, self.data, self.folder = trainer, loaded, plan, data, folder
        self.standing, self.log, self.metrics, self.meter, self.habits = standing, log, metrics, meter, habits
        self.config = trainer.config
        self.tokens_per_step = tokens_per_step(self.config)
        self.stop = StopAsked()
        self.shrunk = 0
        self.saved_at = -1
        self.warned = ""  # the last warning
        self.saved_time = time.monotonic()
        self.durations_s: list[float] = []  # of steps since the last logged one
        self.warm_steps, self.warm_s, self.done_here = 0, 0.0, 0
        peak = plan.device.peak_tflops(self.config.dtype or "float32", self.config.allow_tf32)
        self.peak_flops = peak * 1e12 * self.config.world_size if peak else None
        trainer.on_shrink = self._note_shrink
        trainer.stop_asked = self.stop.asked
        # Where an older checkpoint was named, those after it are of a continuation that was given up.
        held = checkpoint.saved(folder) if folder is not None else []
        self.abandoned = [path for path in held if checkpoint.step_of(path) > trainer.step]

    def run(self) -> Result:
        """Train to the end. Whatever ends it, the newest state is in a checkpoint."""
        with self.stop:
            try:
                return self._run()
            except NotFiniteError as error:
                self._event("not finite", reason=str(error))
                raise TrainingError(f"{error}. {self._last_good()}") from None

    def _run(self) -> Result:
        try:
            return self._steps()
        except Interrupted:
            return self._leave()

    def _steps(self) -> Result:
        trainer = self.trainer
        while True:
            if self._evaluation_due():
                self._evaluate()
            if self.config.eval_only:
                return self._result("evaluated", True)
            if trainer.step >= self.config.max_iters:
                self._save_surely("all steps are done")
                return self._result("all steps done", True)
            stopping, saving = self._agree()
            if stopping:
                return self._leave()
            if saving:
                self._save()
            began = time.perf_counter()
            result = trainer.train_step()
            self._note(result, time.perf_counter() - began)

    def _leave(self) -> Result:
        reason = f"stopped by {self.stop.by or 'another rank'}"
        if not self.config.eval_only:
            self._save_surely(reason)
        return self._result(reason, False)

    def _agree(self) -> tuple[bool, bool]:
        """Whether to stop, and whether to save: the same answer on all ranks."""
        due = time.monotonic() - self.saved_time >= self.habits.save_minutes * 60
        stopping, saving = self.trainer.ranks.any([self.stop.asked(), due], self.trainer.device)
        return stopping, saving

    def _evaluation_due(self) -> bool:
        step = self.trainer.step
        if self.config.eval_only:
            return True
        due = step % self.config.eval_interval == 0 or step >= self.config.max_iters
        return due and self.standing.evaluated_at != step

    def _evaluate(self) -> None:
        """Both splits, then a checkpoint; the best one so far gets a second name."""
        train_loss, val_loss = (self.trainer.evaluate(self.data, split) for split in ("train", "val"))
        step, standing = self.trainer.step, self.standing
        self._write(step, tokens=self._tokens(), train_loss=train_loss, val_loss=val_loss)
        if not (math.isfinite(train_loss) and math.isfinite(val_loss)):
            found = f"the evaluation's train loss is {train_loss}, its val loss {val_loss}"
            raise NotFiniteError(step, f"{found}; stopped, and no checkpoint of this was written")
        standing.evaluated_at, standing.val_loss = step, val_loss
        saving = step > 0 and not self.config.eval_only
        better = saving and standing.is_better(step)
        self.log.line(
            f"step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{', the best' if better else ''}"
        )
        if saving and (better or self.config.always_save_checkpoint):
            self._save()

    def _save_surely(self, reason: str) -> None:
        """The last checkpoint of this process: tried again, and never claimed where it is not there."""
        for pause_s in (*_PAUSES_S, None):
            if self._save():
                return
            if pause_s is not None:
                time.sleep(pause_s)
        raise TrainingError(f"{reason}, but the checkpoint of step {self.trainer.step} is not: {self._last_good()}")

    def _save(self) -> bool:
        """A checkpoint of this very moment, on every rank at once; whether it is there.

        A full disk costs this one only: the last good one stands. Where this moment was evaluated and is the best so
        far, best.pt becomes it; it counts as the best only where that was written.
        """
        step, standing = self.trainer.step, self.standing
        self.saved_time = time.monotonic()
        better = standing.is_better(step)
        if self.saved_at == step and not better:
            return True
        if not self.trainer.weights_are_finite():
            raise NotFiniteError(step, "a weight is not finite; stopped, and no checkpoint of this was written")
        if self.metrics is not None:
            standing.metrics_bytes = self.metrics.position()
        before = standing.best_val_loss
        standing.best_val_loss = cast(float, standing.val_loss) if better else before
        content = pack(self.trainer, self.loaded, standing, self.habits, self.data)
        written, marked = self._write_checkpoint(content, better) if self.folder is not None else (True, True)
        failed, unmarked = self.trainer.ranks.any([not written, not marked], self.trainer.device)
        if unmarked:
            standing.best_val_loss = before
        if not failed:
            self.saved_at = step
        return not failed

    def _write_checkpoint(self, content: dict[str, Any], best: bool) -> tuple[bool, bool]:
        """Whether it was written, and whether it is the best where it should be."""
        folder = cast(Path, self.folder)
        path = checkpoint.path_of(folder, self.trainer.step)
        try:
            checkpoint.save(content, path)
        except TrainingError as error:
            self._warn(error, self._last_good())
            return False, False
        marked = True
        if best:
            try:
                checkpoint.mark_best(folder, path)
            except TrainingError as error:
                self._warn(error, "The best so far stays.")
                marked = False
        checkpoint.remove(old for old in self.abandoned if old != path)
        self.abandoned = []
        checkpoint.keep_last(folder, self.habits.keep)
        return True, marked

    def _warn(self, error: TrainingError, what_stands: str) -> None:
        """Say what was not saved: once, however often it is tried again."""
        text = f"WARNING: {error} {what_stands}"
        if text != self.warned:
            self.warned = text
            self._event("not saved", reason=str(error))
            self.log.line(text)

    def _last_good(self) -> str:
        held = checkpoint.saved(self.folder) if self.folder is not None else []
        return f"The last good checkpoint is {held[-1]}." if held else "No checkpoint was written before."

    def _note(self, result: StepResult, seconds: float) -> None:
        """Count the step, and log it where one is due."""
        self.standing.loss = result.loss
        self.standing.seconds += seconds
        self.done_here += 1
        if self.done_here > _WARM_UP_STEPS:
            self.warm_steps += 1
            self.warm_s += seconds
        self.durations_s.append(seconds)
        if result.skipped:
            reason, scale = "a gradient overflowed in float16; the step was skipped", self.trainer.scaler.get_scale()
            self._event("scale lowered", reason=reason, scale=scale)
            self.log.line(f"step {result.step}: {reason}, and the loss's scale is {scale:g} now")
        if result.step % self.config.log_interval == 0:
            self._log_step(result)

    def _tokens(self) -> int:
        """Tokens read by finished steps, whatever a step was before."""
        return self.trainer.feed.position * self.config.block_size

    def _log_step(self, result: StepResult) -> None:
        step_s = sum(self.durations_s) / len(self.durations_s)
        self.durations_s.clear()
        rate = self.tokens_per_step / step_s
        mfu = self.plan.compute.flops_per_step / step_s / self.peak_flops if self.peak_flops else None
        memory_mib = self.meter.peak_mib()
        self._write(
            result.step,
            tokens=self._tokens(),
            loss=result.loss,
            lr=result.rate,
            grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
            step_ms=step_s * 1e3,
            tokens_per_s=rate,
            mfu=mfu,
            memory_mib=memory_mib,
        )
        pace_s = self.warm_s / self.warm_steps if self.warm_steps else step_s
        left_s = (self.config.max_iters - result.step - 1) * pace_s
        planned_ms = self.plan.time.step_ms if self.plan.time else None
        steps, ms = self.config.max_iters, step_s * 1e3
        self.log.step(step_line(result.step, steps, result.loss, ms, rate, mfu, memory_mib, left_s, planned_ms))

    def _note_shrink(self, shrunk: Shrunk) -> None:
        self.shrunk += 1
        size, steps = shrunk.batch_size, shrunk.micro_steps * self.trainer.ranks.size
        self._event(
            "out of memory",
            during=shrunk.during,
            batch_size=size,
            gradient_accumulation_steps=steps,
            reason=shrunk.reason,
        )
        self.log.line(
            f"step {shrunk.step}: out of memory in {shrunk.during}; it is done again, and the run goes on, with "
            f"{size} sequences × {steps} micro-steps: the same tokens a step"
        )

    def _event(self, event: str, **more: object) -> None:
        self._write(self.trainer.step, event=event, **more)

    def _write(self, step: int, **figures: object) -> None:
        if self.metrics is not None:
            self.metrics.write(step, **figures)

    def _result(self, reason: str, finished: bool) -> Result:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        step_ms = self.warm_s / self.warm_steps * 1e3 if self.warm_steps else None
        planned_ms = self.plan.time.step_ms if self.plan.time else None
        memory, reserved = hold_memory(self.plan, self.meter)
        best = self.standing.best_val_loss
        return Result(
            out_dir=self.config.out_dir,
            steps=self.trainer.step,
            finished=finished,
            reason=reason,
            loss=self.standing.loss,
            val_loss=self.standing.val_loss,
            best_val_loss=best if math.isfinite(best) else None,
            tokens=self._tokens(),
            seconds=self.standing.seconds,
            memory_mib=memory,
            step_ms=Held(planned_ms, step_ms),
            shrunk=self.shrunk,
            batch_size=self.trainer.batch_size,
            interrupted=not finished,
            reserved_mib=reserved,
        )
