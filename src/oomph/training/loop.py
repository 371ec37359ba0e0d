"""The training loop around the steps: evaluations, checkpoints, figures, and an orderly stop on a signal."""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from oomph.config import LoadedConfig
from oomph.data.tokenizer import tokenizer_of
from oomph.devices.cpu_rates import processor_s
from oomph.errors import InputError
from oomph.files import write_whole
from oomph.planning.plan import Plan, tokens_per_step
from oomph.training.alarms import Alarms
from oomph.training.errors import LostRankError, OtherRankError, TrainingError, is_out_of_memory
from oomph.training.log import Log, Metrics, step_line
from oomph.training.memory import MemoryMeter
from oomph.training.model import GPT
from oomph.training.ranks import jobs
from oomph.training.result import PredictedVsActual, Result, StepTimes, compare_memory
from oomph.training.sample import sample_text
from oomph.training.saving import Saver
from oomph.training.start import SettledOptions
from oomph.training.state import RunProgress
from oomph.training.trainer import BrokenStepError, Interrupted, NotFiniteError, SmallerBatch, StepResult, Trainer

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _NAMES |= {signal.SIGHUP: "SIGHUP", signal.SIGUSR1: "SIGUSR1"}


class StopSignal:
    """A context in which Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 ask the run to stop; a second Ctrl-C stops it at once."""

    def __init__(self) -> None:
        self.by: str | None = None  # one of _NAMES' values
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
        kept = (options.to_dict(), options.keep)
        self.saver = Saver(trainer, loaded, data, folder, progress, log, metrics, *kept)
        self.durations_s: list[float] = []  # of steps since the last logged one
        self.warm_steps, self.warm_s, self.done_here = 0, 0.0, 0
        self.step_times = StepTimes(trainer.device)
        self.alarms = Alarms(progress.alarms)
        self.began = time.monotonic()
        peak = plan.device.peak_tflops(self.config.dtype or "float32", self.config.allow_tf32)
        self.peak_flops = peak * 1e12 * self.config.world_size if peak else None
        trainer.on_shrink = self._log_smaller_batch
        trainer.stop_asked = self.stop.asked

    def run(self) -> Result:
        """Train to the end. However it ends, the newest state is in a checkpoint."""
        with self.stop:
            try:
                return self._run()
            except BrokenStepError as error:
                self._event(error.event, reason=str(error))
                raise TrainingError(f"{error}. {self.saver.last_good()}") from None
            except (TrainingError, InputError) as error:
                self._event("failed", reason=str(error))
                raise

    def _run(self) -> Result:
        try:
            return self._steps()
        except Interrupted:
            return self._stop_early()
        except LostRankError as error:
            raise self.saver.save_alone(error) from None
        except (InputError, OtherRankError):  # data that cannot be read, on this rank or another
            if self.trainer.step and not self.config.eval_only:
                self.saver.save()
            raise

    def _steps(self) -> Result:
        trainer = self.trainer
        while True:
            if self._evaluation_due():
                self._evaluate()
            if self.config.eval_only:
                return self._result("evaluated", True)
            if reason := self._done():
                self.saver.save_or_fail(reason)
                return self._result(reason, True)
            stopping, saving, out_of_time = self._agree()
            if stopping:
                return self._stop_early()
            if out_of_time:
                reason = f"time_limit of {self.config.time_limit:g} minutes reached"
                self.saver.save_or_fail(reason)
                return self._result(reason, False, interrupted=False)
            if saving:
                self.saver.save()
            began, used = time.perf_counter(), processor_s()
            result = trainer.train_step()
            self._note(result, time.perf_counter() - began, processor_s() - used)

    def _done(self) -> str | None:
        """Why the run is finished; None if it is not."""
        if self.trainer.step >= self.config.max_iters:
            return "all steps done"
        val_loss, wanted = self.progress.val_loss, self.config.until_loss
        evaluated = self.progress.evaluated_at == self.trainer.step
        if wanted is not None and evaluated and val_loss is not None and val_loss <= wanted:
            return f"validation loss {val_loss:.4f} reached, {wanted:g} wanted"
        return None

    def _stop_early(self) -> Result:
        by = next((each for each in self.trainer.ranks.gather(self.stop.by) if each), "another rank")
        reason = f"stopped by {by}"
        if not self.config.eval_only:
            self.saver.save_or_fail(reason)
        if self.folder is not None and (told := jobs.requeue(by)):
            self.log.line(told)
        return self._result(reason, False, again=jobs.asks_for_restart(by))

    def _agree(self) -> tuple[bool, bool, bool]:
        """Whether to stop, whether to save, whether time is up: the same answer on all ranks."""
        now, limit = time.monotonic(), self.config.time_limit
        due = now - self.saver.saved_time >= self.options.save_minutes * 60
        late = limit is not None and now - self.began >= limit * 60
        stopping, saving, out_of_time = self.trainer.ranks.any([self.stop.asked(), due, late], self.trainer.device)
        return stopping, saving, out_of_time

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
        if self.config.sample_tokens:
            self._write_sample()
        if saving and (better or self.config.always_save_checkpoint):
            self.saver.save()

    def _write_sample(self) -> None:
        """Write a sample of the model's text; every rank must call it. A failure here does not stop the run."""
        with self.trainer.averaged():
            model = self.trainer.sharing.alone()
            if self.folder is not None:
                self._sample(model, self.folder)

    def _sample(self, model: GPT, folder: Path) -> None:
        try:
            tokenizer = tokenizer_of(self.data, None, self.config.vocab_size)
            model.eval()
            text = sample_text(model, tokenizer, "\n", self.config.sample_tokens)
            (folder / "samples").mkdir(exist_ok=True)
            write_whole(folder / "samples" / f"step-{self.trainer.step}.txt", text.encode(errors="replace"))
        except Exception as error:
            if not isinstance(error, InputError | OSError) and not is_out_of_memory(error):
                raise
            self.log.line(f"WARNING: no sample was written: {str(error).splitlines()[0][:200]}")
        finally:
            model.train()

    def _note(self, result: StepResult, seconds: float, used_s: float) -> None:
        """Count the step, and log it if due."""
        self.progress.loss = result.loss
        self.progress.seconds += seconds
        self.done_here += 1
        if self.done_here > _WARM_UP_STEPS:
            self.warm_steps += 1
            self.warm_s += seconds
            self.step_times.add(seconds, used_s)
        self.durations_s.append(seconds)
        if result.skipped:
            reason, scale = "a float16 gradient overflowed; the step was skipped", self.trainer.scaler.get_scale()
            self._event("scale lowered", reason=reason, scale=scale)
            self.log.line(f"step {result.step}: {reason}, and the loss scale is now {scale:g}")
        for alarm in self.alarms.check(result.loss, result.grad_norm):
            self._write(result.step, event="spike", reason=alarm)
            self.log.line(f"WARNING: step {result.step}: {alarm}")
        self.progress.alarms = self.alarms.state()
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

    def _result(self, reason: str, finished: bool, interrupted: bool | None = None, again: bool = False) -> Result:
        """The result so far; `interrupted` defaults to not finished."""
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        step_ms, waited = self.step_times.usual_ms()
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
            interrupted=not finished if interrupted is None else interrupted,
            reserved_mib=reserved,
            waited=waited,
            again=again,
            ranks_mib=self._memory_of_ranks(memory),
        )

    def _memory_of_ranks(self, mine: PredictedVsActual) -> tuple[PredictedVsActual, ...]:
        """Every rank's memory, if there are several ranks."""
        return tuple(self.trainer.ranks.gather(mine)) if self.trainer.ranks.size > 1 else ()
