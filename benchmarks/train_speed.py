"""nanoGPT and `oomph train` alternately on this CPU: tokens a second, by processor time and by the clock, and memory.

    python benchmarks/train_speed.py --peer PATH/TO/nanoGPT [--case words] [--rounds 3] [--threads 1]

Both are run as they are, in processes of their own, on the same random tokens, pinned to the same cores. A round is
one process of each, nanoGPT first in every other one; ratios are the middle ones of the rounds', so that a busy moment
of the machine does not decide. Goals are of processor time, which other programs do not change, from the end of one
step to the end of the next; memory is the peak of the whole process, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

TOKENS = 2**20
WARM_UP = 2  # steps left out: first touches of memory
SHARED: dict[str, object] = {
    "eval_interval": 10**6,
    "eval_iters": 1,
    "log_interval": 1,
    "gradient_accumulation_steps": 1,
}
SHARED |= {"device": "cpu", "dropout": 0.0, "compile": False}


class Case(NamedTuple):
    """One setting, and what is aimed at in it."""

    what: str
    keys: dict[str, int]
    steps: int
    speed_goal: float  # at least
    memory_goal: float  # at most


CASES = {
    "words": Case(
        "vocabulary 50304, 4 layers × 256, block 256, batch 8",
        {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 8, "vocab_size": 50304},
        8,
        1.2,
        0.3,
    ),
    "124m": Case(
        "124 M, block 256, batch 4",
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 256, "batch_size": 4, "vocab_size": 50304},
        5,
        1.15,
        0.75,
    ),
    "characters": Case(
        "characters, 4 layers × 128, block 64, batch 12 (nanoGPT's CPU example)",
        {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "vocab_size": 65},
        150,
        1.2,
        0.75,
    ),
}

# Runs a program in this very process; tells its peak, and the processor time of a step: `marks` has it after each.
WRAPPER = """
import runpy, statistics, sys, time
marks = []
def figure(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":")) / 1024
def marking(function):
    def marked(*arguments):
        result = function(*arguments)
        marks.append(time.process_time())
        return result
    return marked
try:
    {work}
finally:
    steps = [after - before for before, after in zip(marks, marks[1:])][{warm_up}:]
    print(f"peak_mib {{figure('VmHWM'):.1f}} used_ms {{statistics.median(steps) * 1e3:.3f}}", file=sys.stderr)
"""
PEER = WRAPPER.format(  # nanoGPT looks at the clock once a step, and once before the first
    work="sys.path.insert(0, '.'); time.time = marking(time.time); sys.argv = ['train.py', *sys.argv[1:]]; "
    "runpy.run_path('train.py', run_name='__main__')",
    warm_up=WARM_UP,
)
OURS = WRAPPER.format(
    work="from oomph.training.trainer import Trainer; Trainer.train_step = marking(Trainer.train_step); "
    "from oomph.cli.train import run; status = run(sys.argv[1:]); assert status == 0, status",
    warm_up=WARM_UP - 1,
)


class Measured(NamedTuple):
    """One process."""

    step_ms: float  # on the clock
    used_ms: float  # of processor time
    peak_mib: float
    last_loss: float


def start(program: str, folder: Path, arguments: list[str], threads: int) -> subprocess.CompletedProcess[str]:
    """Run a program on the first cores only."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OOMPH_MEASURE": "0", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        sys.exit(f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done


def measured(done: subprocess.CompletedProcess[str], step_ms: float, last_loss: float) -> Measured:
    peak_mib, used_ms = re.findall(r"peak_mib ([\d.]+) used_ms ([\d.]+)", done.stderr)[-1]
    return Measured(step_ms, float(used_ms), float(peak_mib), last_loss)


def flags(keys: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in keys.items()]


def run_peer(case: Case, data: Path, out: Path, peer: Path, threads: int) -> Measured:
    shape = {key: value for key, value in case.keys.items() if key != "vocab_size"}  # nanoGPT has no such key
    keys = SHARED | shape | {"max_iters": case.steps - 1, "dataset": data, "out_dir": out}
    done = start(PEER, peer, flags(keys), threads)
    found = re.findall(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms", done.stdout)
    return measured(done, statistics.median(float(ms) for _, ms in found[WARM_UP:]), float(found[-1][0]))


def run_ours(case: Case, data: Path, out: Path, threads: int) -> Measured:
    keys = SHARED | case.keys | {"max_iters": case.steps, "dataset": data, "out_dir": out}
    done = start(OURS, Path.cwd(), [*flags(keys), "--quiet", "--overwrite"], threads)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return measured(done, statistics.median(line["step_ms"] for line in steps[WARM_UP:]), steps[-1]["loss"])


def write_tokens(folder: Path, vocab_size: int) -> Path:
    """The same random tokens for both; nanoGPT learns a small vocabulary from meta.pkl."""
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, vocab_size, TOKENS).astype("<u2")
    tokens.tofile(folder / "train.bin")
    tokens[: TOKENS // 10].tofile(folder / "val.bin")
    if vocab_size < 50304:
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    return folder


def compare(name: str, case: Case, peer: Path, rounds: int, threads: int) -> None:
    """Alternate, and print the middle ratio with its spread."""
    print(f"\n{name}: {case.what}; {threads} thread{'s' if threads > 1 else ''}")
    speeds, clocks, memories = [], [], []
    tokens = case.keys["batch_size"] * case.keys["block_size"]
    with tempfile.TemporaryDirectory() as scratch:
        data = write_tokens(Path(scratch, "tokens"), case.keys["vocab_size"])
        for number in range(rounds):
            if number % 2:
                ours = run_ours(case, data, Path(scratch, "ours"), threads)
            theirs = run_peer(case, data, Path(scratch, "peer"), peer, threads)
            if number % 2 == 0:
                ours = run_ours(case, data, Path(scratch, "ours"), threads)
            speeds.append(theirs.used_ms / ours.used_ms)
            clocks.append(theirs.step_ms / ours.step_ms)
            memories.append(ours.peak_mib / theirs.peak_mib)
            print(
                f"  round {number + 1}: nanoGPT {tokens / theirs.used_ms * 1e3:,.0f} tokens/s, {theirs.peak_mib:,.0f} "
                f"MiB; oomph {tokens / ours.used_ms * 1e3:,.0f} tokens/s, {ours.peak_mib:,.0f} MiB; "
                f"{speeds[-1]:.2f} × ({clocks[-1]:.2f} on the clock) and {memories[-1]:.2f} ×"
            )
    speed, memory = statistics.median(speeds), statistics.median(memories)
    verdict = "reached" if speed >= case.speed_goal else "missed"
    spread = f"({min(speeds):.2f} to {max(speeds):.2f})"
    print(f"  tokens/s {speed:.2f} × {spread}, goal at least {case.speed_goal:.2f}: {verdict}")
    print(f"  on the clock {statistics.median(clocks):.2f} ×")
    verdict = "reached" if memory <= case.memory_goal else "missed"
    print(f"  memory of the process {memory:.2f} ×, goal at most {case.memory_goal:.2f}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--case", choices=CASES, action="append", help="one of them; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for name in options.case or CASES:
        compare(name, CASES[name], options.peer.resolve(), options.rounds, options.threads)


if __name__ == "__main__":
    main()
