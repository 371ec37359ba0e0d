"""The training loop around the steps: evaluations, checkpoints, figures, and an orderly stop on a signal."""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch

from oomph.config import LoadedConfig
from oomph.planning.plan import Plan, tokens_per_step
from oomph.training import checkpoint
from oomph.training.errors import TrainingError
from oomph.training.log import Log, Metrics, step_line
from oomph.training.memory import MemoryMeter
from oomph.training.result import PredictedVsActual, Result, compare_memory
from oomph.training.start import SettledOptions
from oomph.training.state import RunProgress, pack
from oomph.training.trainer import Interrupted, NotFiniteError, SmallerBatch, StepResult, Trainer

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _NAMES[signal.SIGHUP] = "SIGHUP"


class StopSignal:
    """Inside its `with`, Ctrl-C, SIGTERM and SIGHUP ask the run to stop; a second Ctrl-C stops it at once."""

    def __init__(self) -> None:
        self.by: str | None = None  # "Ctrl-C", "SIGTERM" or "SIGHUP"
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        """Whether a stop was requested."""
        return self.by is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number, name in _NAMES.items():
                if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # respect nohup
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = self.by or _NAMES[signal.Signals(number)]


_RETRY_PAUSES_S = (1.0, 4.0)  # before the last checkpoint is tried again
_WARM_UP_STEPS = 2  # left out of the measured step time: compiling, first use of memory


class TrainLoop:
    """Trains until all steps are done or a stop is requested."""

    def __init__(
        self,
        trainer: Trainer,
        loaded: LoadedConfig,
        plan: Plan,
        data: Path,
        folder: Path | None,  # None on all ranks but the first, which write nothing
        progress: RunProgress,
        log: Log,
        metrics: Metrics | None,
        meter: MemoryMeter,
        options: SettledOptions,
    ) -> None:
        self.trainer, self.loaded, self.plan, self.data, self.folder = trainer, loaded, plan, data, folder
        self.progress, self.log, self.metrics, self.meter, self.options = progress, log, metrics, meter, options
        self.config = trainer.config
        self.tokens_per_step = tokens_per_step(self.config)
        self.stop = StopSignal()
        self.shrunk = 0
        self.saved_at = -1
        self.warned = ""  # the last warning
        self.saved_time = time.monotonic()
        self.durations_s: list[float] = []  # of steps since the last logged one
        self.warm_steps, self.warm_s, self.done_here = 0, 0.0, 0
        peak = plan.device.peak_tflops(self.config.dtype or "float32", self.config.allow_tf32)
        self.peak_flops = peak * 1e12 * self.config.world_size if peak else None
        trainer.on_shrink = self._log_smaller_batch
        trainer.stop_asked = self.stop.asked
        # Resuming from an older checkpoint abandons the newer ones.
        saved = checkpoint.saved(folder) if folder is not None else []
        self.abandoned = [path for path in saved if checkpoint.step_of(path) > trainer.step]

    def run(self) -> Result:
        """Train to the end. However it ends, the newest state is in a checkpoint."""
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
            return self._stop_early()

    def _steps(self) -> Result:
        trainer = self.trainer
        while True:
            if self._evaluation_due():
                self._evaluate()
            if self.config.eval_only:
                return self._result("evaluated", True)
            if trainer.step >= self.config.max_iters:
                self._save_or_fail("all steps done")
                return self._result("all steps done", True)
            stopping, saving = self._agree()
            if stopping:
                return self._stop_early()
            if saving:
                self._save()
            began = time.perf_counter()
            result = trainer.train_step()
            self._note(result, time.perf_counter() - began)

    def _stop_early(self) -> Result:
        reason = f"stopped by {self.stop.by or 'another rank'}"
        if not self.config.eval_only:
            self._save_or_fail(reason)
        return self._result(reason, False)

    def _agree(self) -> tuple[bool, bool]:
        """Whether to stop and whether to save: the same answer on all ranks."""
        due = time.monotonic() - self.saved_time >= self.options.save_minutes * 60
        stopping, saving = self.trainer.ranks.any([self.stop.asked(), due], self.trainer.device)
        return stopping, saving

    def _evaluation_due(self) -> bool:
        step = self.trainer.step
        if self.config.eval_only:
            return True
        due = step % self.config.eval_interval == 0 or step >= self.config.max_iters
        return due and self.progress.evaluated_at != step

    def _evaluate(self) -> None:
        """Evaluate both splits, then save a checkpoint; the best so far also becomes best.pt."""
        train_loss, val_loss = (self.trainer.evaluate(self.data, split) for split in ("train", "val"))
        step, progress = self.trainer.step, self.progress
        self._write(step, tokens=self._tokens(), train_loss=train_loss, val_loss=val_loss)
        if not (math.isfinite(train_loss) and math.isfinite(val_loss)):
            found = f"the evaluation's train loss is {train_loss}, val loss {val_loss}"
            raise NotFiniteError(step, f"{found}; stopped without a checkpoint of this step")
        progress.evaluated_at, progress.val_loss = step, val_loss
        saving = step > 0 and not self.config.eval_only
        better = saving and progress.is_better(step)
        self.log.line(
            f"step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{', best so far' if better else ''}"
        )
        if saving and (better or self.config.always_save_checkpoint):
            self._save()

    def _save_or_fail(self, reason: str) -> None:
        """Save the last checkpoint of this process: retried, and an error if it cannot be written."""
        for pause_s in (*_RETRY_PAUSES_S, None):
            if self._save():
                return
            if pause_s is not None:
                time.sleep(pause_s)
        raise TrainingError(f"{reason}, but step {self.trainer.step} could not be saved. {self._last_good()}")

    def _save(self) -> bool:
        """Save a checkpoint of the current step; called on every rank. Returns whether it was written.

        If it cannot be written, the last good one stays. If this step was evaluated and is the best so far, best.pt
        becomes it, and only if that was written does it count as the best.
        """
        step, progress = self.trainer.step, self.progress
        self.saved_time = time.monotonic()
        better = progress.is_better(step)
        if self.saved_at == step and not better:
            return True
        if not self.trainer.weights_are_finite():
            raise NotFiniteError(step, "a weight is not finite; stopped without a checkpoint of this step")
        if self.metrics is not None:
            progress.metrics_bytes = self.metrics.position()
        before = progress.best_val_loss
        progress.best_val_loss = cast(float, progress.val_loss) if better else before
        content = pack(self.trainer, self.loaded, progress, self.options.to_dict(), self.data)
        written, marked = self._write_checkpoint(content, better) if self.folder is not None else (True, True)
        failed, unmarked = self.trainer.ranks.any([not written, not marked], self.trainer.device)
        if unmarked:
            progress.best_val_loss = before
        if not failed:
            self.saved_at = step
        return not failed

    def _write_checkpoint(self, content: dict[str, Any], best: bool) -> tuple[bool, bool]:
        """Whether the checkpoint was written, and whether best.pt was, if it should be."""
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
                self._warn(error, "The older best.pt stays.")
                marked = False
        checkpoint.remove(old for old in self.abandoned if old != path)
        self.abandoned = []
        checkpoint.keep_last(folder, self.options.keep)
        return True, marked

    def _warn(self, error: TrainingError, what_stands: str) -> None:
        """Report what was not saved, once however often it is retried."""
        text = f"WARNING: {error} {what_stands}"
        if text != self.warned:
            self.warned = text
            self._event("not saved", reason=str(error))
            self.log.line(text)

    def _last_good(self) -> str:
        saved = checkpoint.saved(self.folder) if self.folder is not None else []
        return f"The last good checkpoint is {saved[-1]}." if saved else "There is no earlier checkpoint."

    def _note(self, result: StepResult, seconds: float) -> None:
        """Count the step, and log it if due."""
        self.progress.loss = result.loss
        self.progress.seconds += seconds
        self.done_here += 1
        if self.done_here > _WARM_UP_STEPS:
            self.warm_steps += 1
            self.warm_s += seconds
        self.durations_s.append(seconds)
        if result.skipped:
            reason, scale = "a float16 gradient overflowed; the step was skipped", self.trainer.scaler.get_scale()
            self._event("scale lowered", reason=reason, scale=scale)
            self.log.line(f"step {result.step}: {reason}, and the loss scale is now {scale:g}")
        if result.step % self.config.log_interval == 0:
            self._log_step(result)

    def _tokens(self) -> int:
        """Tokens read by finished steps, even if tokens per step have changed."""
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
            lr=result.learning_rate,
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

    def _log_smaller_batch(self, smaller: SmallerBatch) -> None:
        self.shrunk += 1
        size, steps = smaller.batch_size, smaller.micro_steps * self.trainer.ranks.size
        self._event(
            "out of memory",
            during=smaller.during,
            batch_size=size,
            gradient_accumulation_steps=steps,
            reason=smaller.reason,
        )
        self.log.line(
            f"step {smaller.step}: out of memory in {smaller.during}; repeating it and going on with "
            f"{size} sequences × {steps} micro-steps, the same tokens per step"
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
        memory, reserved = compare_memory(self.plan, self.meter)
        best = self.progress.best_val_loss
        return Result(
            out_dir=self.config.out_dir,
            steps=self.trainer.step,
            finished=finished,
            reason=reason,
            loss=self.progress.loss,
            val_loss=self.progress.val_loss,
            best_val_loss=best if math.isfinite(best) else None,
            tokens=self._tokens(),
            seconds=self.progress.seconds,
            memory_mib=memory,
            step_ms=PredictedVsActual(planned_ms, step_ms),
            shrunk=self.shrunk,
            batch_size=self.trainer.batch_size,
            interrupted=not finished,
            reserved_mib=reserved,
        )
