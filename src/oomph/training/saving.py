"""Saving a run: one checkpoint at a time, the best so far marked, older ones deleted for room on a full disk.

The first rank writes a file; ranks that share a model write a folder together (`parts`), on a GPU in the background.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from oomph.config import LoadedConfig
from oomph.training import checkpoint
from oomph.training.errors import DiskFullError, LostRankError, TrainingError
from oomph.training.log import Log, Metrics
from oomph.training.state import RunProgress, pack
from oomph.training.trainer import NotFiniteError, Trainer

_RETRY_PAUSES_S = (1.0, 4.0)  # before the last checkpoint is tried again


class Saver:
    """Writes the checkpoints of one process's work on a run."""

    def __init__(
        self,
        trainer: Trainer,
        loaded: LoadedConfig,
        data: Path,
        folder: Path | None,  # None on all ranks but the first
        progress: RunProgress,
        log: Log,
        metrics: Metrics | None,
        options: Mapping[str, Any],
        keep: int,
    ) -> None:
        self.trainer, self.loaded, self.data, self.folder = trainer, loaded, data, folder
        self.progress, self.log, self.metrics = progress, log, metrics
        self.options, self.keep = options, keep
        self.saved_at = -1  # the step of the last checkpoint
        self.saved_time = time.monotonic()
        self.in_background = trainer.sharing.in_lockstep and trainer.device.type == "cuda"
        self._under_way: tuple[int, float, Future[Any]] | None = None
        self._failed = False  # to write the last one: the next is written at once, and may make room on the disk
        self._marked = True
        self._warned = ""  # the last warning
        # Resuming from an older checkpoint abandons the newer ones.
        saved = checkpoint.saved(folder) if folder is not None else []
        self.abandoned = [path for path in saved if checkpoint.step_of(path) > trainer.step]

    def save_or_fail(self, reason: str) -> None:
        """Save the last checkpoint of this process: retried, and an error if it cannot be written."""
        for pause_s in (*_RETRY_PAUSES_S, None):
            self.save()
            if self.finish() and self.saved_at == self.trainer.step:
                return
            if pause_s is not None:
                time.sleep(pause_s)
        raise TrainingError(f"{reason}, but step {self.trainer.step} could not be saved. {self.last_good()}")

    def save(self) -> bool:
        """Save a checkpoint of the current step; called on every rank. Returns whether it was written, or begun.

        If it cannot be written, the last good one stays. If this step was evaluated and is the best so far, it
        becomes best.pt; it counts as the best only if that was written.
        """
        step, progress = self.trainer.step, self.progress
        self.finish()
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
        if self.trainer.sharing.in_lockstep:
            return self._save_parts(better, before)
        content = pack(self.trainer, self.loaded, progress, self.options, self.data)
        written = self._write(content, better) if self.folder is not None else True
        return self._agree(step, written, before)

    def finish(self) -> bool:
        """Wait for a checkpoint that is being written. Returns whether the last one was."""
        if self._under_way is None:
            return True
        step, before, written = self._under_way
        self._under_way = None
        error = written.result()
        if error is not None:
            self._warn(error, self.last_good())
        return self._agree(step, error is None, before)

    def _agree(self, step: int, written: bool, best_before: float) -> bool:
        failed, unmarked = self.trainer.ranks.any([not written, not (written and self._marked)], self.trainer.device)
        if unmarked:
            self.progress.best_val_loss = best_before
        # best.pt may have been deleted
        self.progress.best_val_loss = self.trainer.ranks.gather(self.progress.best_val_loss)[0]
        self._failed = failed
        if not failed:
            self.saved_at = step
        return not failed

    def save_alone(self, lost: LostRankError) -> LostRankError:
        """Handle a lost rank: if this process has all weights, the first rank saves, without the others' state."""
        step = self.trainer.step
        if self.folder is None or self.trainer.config.eval_only:
            return lost
        if self.trainer.sharing.in_lockstep:
            return LostRankError(f"{lost}. {self.last_good()} Go on with --resume", lost.tells)
        if not step or self.saved_at == step:
            return lost
        if self.metrics is not None:
            self.progress.metrics_bytes = self.metrics.position()
        content = pack(self.trainer, self.loaded, self.progress, self.options, self.data, alone=True)
        kept = f"step {step} is saved" if self._write(content, False) else self.last_good()
        return LostRankError(f"{lost}. {kept}; go on with --resume", lost.tells)

    # --- a file ---------------------------------------------------------------------------------------

    def _write(self, content: dict[str, Any], best: bool) -> bool:
        """Whether the checkpoint's file was written."""
        path = checkpoint.path_of(cast(Path, self.folder), self.trainer.step)
        try:
            self._in_room(lambda: checkpoint.save(content, path), path)
        except TrainingError as error:
            self._warn(error, self.last_good())
            return False
        self._written(path, best)
        return True

    def _written(self, path: Path, best: bool) -> None:
        """Mark the best, and delete what is no longer kept."""
        folder = cast(Path, self.folder)
        self._marked = True
        if best:
            try:
                checkpoint.mark_best(folder, path)
            except TrainingError as error:
                self._warn(error, "The older best.pt stays.")
                self._marked = False
        checkpoint.remove(old for old in self.abandoned if old != path)
        self.abandoned = []
        checkpoint.keep_last(folder, self.keep)

    def _in_room(self, write: Callable[[], None], path: Path) -> None:
        """Write; on a full disk, delete older checkpoints until there is room."""
        spare = checkpoint.make_room(self.folder) if self.folder is not None else iter(())
        while True:
            try:
                write()
                return
            except DiskFullError as error:
                given_up = self.trainer.ranks.gather(next(spare, None))[0] if self._shares else next(spare, None)
                if given_up is None:
                    raise
                self._event("disk full", reason=str(error), given_up=given_up)
                self.log.line(f"WARNING: the disk is full: {given_up} was deleted to make room for {path.name}")
                if given_up == checkpoint.BEST:
                    self.progress.best_val_loss = math.inf  # the next evaluated checkpoint becomes the best

    @property
    def _shares(self) -> bool:
        return self.trainer.sharing.in_lockstep

    # --- a folder -------------------------------------------------------------------------------------

    def _save_parts(self, best: bool, best_before: float) -> bool:
        """Every rank writes its parts of this step, at once or in the background."""
        from oomph.training.ranks import parts

        step = self.trainer.step
        path = checkpoint.path_of(Path(self.trainer.config.out_dir), step)
        if self.folder is not None:
            parts.prepare(path)
        rest = pack(self.trainer, self.loaded, self.progress, self.options, self.data)
        tensors, group = parts.tensors_of(self.trainer), self.trainer.ranks.saving
        arguments = (tensors, rest, path, group, lambda: self._written(path, best))
        if self.in_background and not self._failed:
            self._under_way = step, best_before, parts.save_later(*arguments)
            return True
        try:
            self._in_room(lambda: parts.save(*arguments), path)
        except TrainingError as error:
            self._warn(error, self.last_good())
            return self._agree(step, False, best_before)
        return self._agree(step, True, best_before)

    # --- reporting ------------------------------------------------------------------------------------

    def _event(self, event: str, **more: object) -> None:
        if self.metrics is not None:
            self.metrics.write(self.trainer.step, event=event, **more)

    def _warn(self, error: TrainingError, what_stands: str) -> None:
        """Report what was not saved, once however often it is retried."""
        text = f"WARNING: {error} {what_stands}"
        if text != self._warned:
            self._warned = text
            self._event("not saved", reason=str(error))
            self.log.line(text)

    def last_good(self) -> str:
        """The last good checkpoint, in words."""
        saved = checkpoint.saved(self.folder) if self.folder is not None else []
        return f"The last good checkpoint is {saved[-1]}." if saved else "There is no earlier checkpoint."
