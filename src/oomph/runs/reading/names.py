"""The names that each quantity of a training step goes by, and the units it is printed in."""

from __future__ import annotations

import re
from functools import cache, lru_cache

# Quantity: the names that programs print it under, in lower case with "_" between words, the most exact first.
NAMES: dict[str, tuple[str, ...]] = {
    "step": (
        *("step", "steps", "global_step", "current_steps", "iteration", "iterations", "training_iteration", "iter"),
        *("iters", "it", "num_updates", "update", "s", "validation_loss_at_iteration", "train_step", "training_step"),
        *("trainer/global_step", "opt_step", "optimizer_step", "global_step/max_steps", "training/global_step"),
        *("loss/iter", "training/iter", "timing/iter", "batch"),  # a batch: where its epoch stands beside it
    ),
    "epoch_steps": (),  # steps of one epoch, if a program restarts its count in each
    "steps_planned": ("total_steps", "max_steps", "num_training_steps", "total_optimization_steps", "train_iters"),
    "epoch": ("epoch", "ep", "train/epoch", "current_epoch", "training_epoch"),
    "loss": (
        *("loss", "step_loss", "lm_loss", "train_loss_step", "train/loss", "train_loss", "training_loss", "loss_train"),
        *("trl", "loss/train", "train_lm_loss", "loss_step", "ce_loss", "cross_entropy_loss", "nll_loss"),
        *("average_loss", "avg_loss", "running_loss", "loss_metrics/global_avg_loss", "train/ce_loss", "loss_ce"),
        *("total_loss", "lm_loss_reduced", "running_train_loss", "curr_loss", "batch_loss", "actor_loss"),
        *("avg_epoch_loss", "epoch_loss", "train/crossentropyloss", "actor/loss", "actor/pg_loss", "training/loss"),
        *("loss/train/total", "avr_loss", "xent"),
    ),
    "val_loss": (
        *("val_loss", "validation_loss", "eval_loss", "valid_loss", "val/loss", "eval/loss", "validation/loss", "tel"),
        *("loss_val", "loss/val", "loss_validation", "val", "lm_loss_value", "test_loss", "dev_loss", "loss/eval"),
        *("val_loss_epoch", "valid/loss", "loss_eval", "validation_metrics/loss"),
    ),
    "val_bpb": ("validation_bpb", "val_bpb", "val/bpb"),
    "ms": (
        *("time", "dt", "iter_time", "step_time", "elapsed_time_per_iteration", "step_ms", "time_per_step", "time_ms"),
        *("iteration_time", "batch_time", "step_avg", "time_per_iteration", "dt_ms", "time_metrics/end_to_end", "ms"),
        *("time/step", "perf/step_time", "ms_per_step", "s/step", "sec/step", "avg_step_time", "iter_dt"),
        *("time_per_iter", "train/step_time", "timing_s/step", "seconds"),
    ),
    "steps_per_s": ("it/sec", "it/s", "steps/sec", "steps_per_sec", "iters/sec"),
    "mfu_percent": ("mfu", "bf16_mfu", "mfu_percent", "train/mfu", "train_mfu", "perf/mfu"),
    "tokens_per_s": (
        *("tokens_per_s", "tokens_per_second", "tokens/sec", "tok/sec", "tok/s", "tokens/s", "tokens_per_sec"),
        *("toks/s", "train_tokens_per_second", "tokens/second", "tok_per_sec", "wps", "tps", "tgs", "tokens/gpu/sec"),
        *("tokens_per_gpu_per_second", "toks/s/device", "throughput(tps)", "tok/s/gpu", "tokens_per_second_per_gpu"),
        *("tok_s", "train/tokens_per_sec", "train/tok_per_sec", "tokens/sec/gpu", "tokens/s/device"),
        *("step_tokens_per_second", "avg_tokens_per_second", "throughput/device/tokens_per_second"),
        *("throughput/device/tps", "perf/throughput", "timing/tokens_per_sec"),
        *("throughput/device/tokens_per_sec", "throughput/tokens_per_sec"),
    ),
    "tflops": (
        *("tflops", "throughput_per_gpu", "tflops_per_gpu", "tflop/s", "tflops/gpu", "tflop/s/gpu", "tflops/s/gpu"),
        *("tflop/s_per_gpu", "tflop/s/device"),
    ),
    "lr": (
        *("lr", "learning_rate", "train/learning_rate", "train/lr", "lr-adamw", "lr/group_0", "lr_0", "optim/lr"),
        *("actor/lr", "optim/learning_rate_group0", "training/lr"),
    ),
    "grad_norm": (
        *("grad_norm", "gnorm", "gradient_norm", "train/grad_norm", "norm", "total_norm", "optim/grad_norm"),
        *("grad-norm", "grad_norm_before_clip", "gradnorm", "optim/total_grad_norm", "actor/grad_norm"),
    ),
    "tokens": (
        *("tokens", "total_tokens", "consumed_tokens", "tokens_seen", "n_tokens", "num_tokens", "ntokens"),
        *("num_input_tokens_seen", "tokens_processed", "n_tokens_seen", "trained_tokens", "train/total_tokens"),
        *("throughput/total_tokens",),
    ),
    "memory_mib": (
        *("memory", "mem", "max_memory", "memory_mib", "peak_memory", "max_mem", "peak_mem", "vram", "gpu_mem"),
        *("memory/max_allocated", "memory/max_alloc", "memory/max_active", "memory/max_mem_active", "maxmemallocated"),
        *("max_memory_allocated", "memory_used", "peak_memory_usage", "mem_alloc", "gpu_memory", "peak_memory_active"),
        *("memory/max_mem_allocated", "max_memory_active", "peak_vram", "max_vram", "memalloc", "memory/allocated"),
        *("peak_gpu_memory", "max_gpu_memory"),
        *("mem-max-allocated-bytes", "total_peak_memory_allocated_mb", "step_peak_memory_allocated_mb"),
        *("system/peak_gpu_memory", "perf/max_memory_allocated_gb", "actor/perf/max_memory_allocated_gb"),
    ),
    "elapsed_s": ("elapsed_time", "elapsed", "train_wall", "train/elapsed"),
    "finished": ("train_runtime",),  # a Trainer's last line, whose train_loss is the mean of the whole run
}  # fmt: skip
# Rates that by their name are one card's; all others are those of all cards together.
PER_CARD = frozenset(
    (
        *("tgs", "tokens/gpu/sec", "tokens_per_gpu_per_second", "toks/s/device", "throughput(tps)", "tok/s/gpu"),
        *("tokens/sec/gpu", "tokens_per_second_per_gpu", "tokens/s/device", "throughput/device/tps"),
        *("throughput/device/tokens_per_second", "perf/throughput", "throughput/device/tokens_per_sec"),
    )
)
# Names on a validation line that belong to the step printed before it.
BACK_REFERENCES = frozenset(("val", "loss_val"))

_FILLERS = frozenset(
    (
        *("info", "root", "train", "training", "current", "curr", "cur", "avg", "average", "mean", "batch", "global"),
        *("at", "[titan]", "epoch", "model", "eval", "evaluation", "test", "the", "final", "new", "on", "in", "with"),
        *("completed",),
    )
)
_PARENTHESES = re.compile(r"\([^()]*\)")
_UNIT_IN_NAME = re.compile(r"\((ms|s|sec|seconds|gib|gb|mib|mb|bytes|%)\)|_(ms|mib|mb|gib|gb)$|-(bytes)$", re.I)

MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "secs": 1e3, "seconds": 1e3, "min": 6e4, "m": 6e4, "us": 1e-3, "µs": 1e-3}
# GB is 10⁹ bytes; programs that divide by 2**30 and write "GB" are 7 % off.
MIB = {"mib": 1.0, "mb": 1.0, "gib": 1024.0, "gb": 1e9 / 2**20, "g": 1024.0, "bytes": 2.0**-20, "b": 2.0**-20}


@cache
def _quantities() -> dict[str, tuple[str, int]]:
    """Name to (quantity, rank): of two names in one line, the lower rank is read."""
    return {name: (quantity, rank) for quantity, names in NAMES.items() for rank, name in enumerate(names)}


@lru_cache(4096)
def quantity(printed: str) -> tuple[str, int, str, str] | None:
    """(quantity, rank, name, unit in the name) of a name as it was printed; None if it names no quantity.

    Labels before the name do not matter ("INFO step" is "step"); other words do: an "aux loss" is not the loss.
    """
    text = printed.strip().strip("\"'")
    unit = _UNIT_IN_NAME.search(text)
    in_name = next((group for group in unit.groups() if group), "") if unit else ""
    words = _PARENTHESES.sub("", text).replace(" - ", " ").replace("(", "").split()
    known = _quantities()
    for start in range(len(words)):
        name = "_".join(words[start:]).lower()
        for candidate in (name, name.rpartition(".")[2], name.replace("-", "_")):
            if candidate in known:
                found, rank = known[candidate]
                return found, rank, candidate, in_name
        if not (words[start].isupper() or words[start].lower() in _FILLERS):
            return None
    return None


def scale(name: str, what: str, unit: str, value: float, spelled: bool) -> float | None:
    """The factor from a value's unit to the column's; None if its unit cannot be known.

    `spelled`: from a file of values (JSON, CSV) rather than from a line for people.
    """
    unit = unit.lower()
    if what == "elapsed_s":
        return 1.0 if unit in ("", "s") else None
    if what == "ms" and name in ("seconds", "timing_s/step"):
        return 1e3
    if what == "ms":
        return MS.get(unit) or (1.0 if name in ("step_ms", "time_ms", "dt_ms", "ms_per_step", "ms") else None)
    if what == "memory_mib":
        if unit == "gb" and (name in ("memallocated", "maxmemallocated") or "perf/max_memory" in name):
            return 1024.0  # DeepSpeed's and verl's GB are GiB
        if name == "peak_memory_active" and not unit:
            return 1024.0  # torchtune's, in GiB
        return MIB.get(unit) or (1.0 if name == "memory_mib" or value >= 256 else None)
    if what == "mfu_percent":
        return 100.0 if unit != "%" and spelled and name != "mfu_percent" and abs(value) <= 1 else 1.0
    return 1.0
