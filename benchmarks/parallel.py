"""`oomph train` on 1 and 2 gloo ranks of this CPU against nanoGPT's loop under torch's DDP: tokens a second.

    python benchmarks/parallel.py [--rounds 3] [--parallel ddp] [--steps 12]

The other side is nanoGPT's loop as its train.py has it, written out here: the same model with all logits at once,
DistributedDataParallel, gradients synchronised in the last micro-step, clipping, AdamW. Both have one thread a rank,
the same shapes and tokens, and alternate; ratios are the middle ones of the rounds'. Processor time is the ranks'
sum, which other programs do not change; the clock is what a user waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128, "batch_size": 8, "vocab_size": 8192}
WARM_UP = 3  # steps left out: first touches of memory, DDP's buckets
MICRO_STEPS = 2  # of a rank

PEER = """
import json, sys, time
import numpy as np, torch, torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from oomph.config import TrainConfig
from oomph.training.model import GPT
shape, steps, micro_steps, data = json.loads(sys.argv[1])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(1337)

class Model(GPT):
    def forward(self, tokens, targets):
        logits = self.lm_head(self.trunk(tokens))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

raw = Model(TrainConfig(**shape, dropout=0.0, bias=False))
model = DistributedDataParallel(raw) if size > 1 else raw
matrices = [p for p in raw.parameters() if p.dim() >= 2]
vectors = [p for p in raw.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
tokens = np.memmap(data, dtype="<u2", mode="r")
block, rows = shape["block_size"], shape["batch_size"]

def batch():
    starts = torch.randint(len(tokens) - block, (rows,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block].astype(np.int64)) for i in starts])
    return x, y

X, Y = batch()
marks = []
for step in range(steps):
    marks.append((time.perf_counter(), time.process_time()))
    for micro_step in range(micro_steps):
        if size > 1:
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        logits, loss = model(X, Y)
        loss = loss / micro_steps
        X, Y = batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
marks.append((time.perf_counter(), time.process_time()))
every = [None] * size
dist.all_gather_object(every, marks)
if rank == 0:
    print(json.dumps(every))
dist.destroy_process_group()
"""
OURS = """
import json, sys, time
import torch
torch.set_num_threads(1)
from oomph.training import trainer
marks = []
step, stop = trainer.Trainer.train_step, None
def marked(self):
    marks.append((time.perf_counter(), time.process_time()))
    result = step(self)
    if self.step == self.config.max_iters:
        marks.append((time.perf_counter(), time.process_time()))
        every = self.ranks.gather(marks)
        if self.ranks.first:
            print(json.dumps(every), flush=True)
    return result
trainer.Trainer.train_step = marked
from oomph.cli.train import run
sys.exit(run(sys.argv[1:]))
"""


class Measured(NamedTuple):
    """One run: milliseconds of a step."""

    clock_ms: float
    used_ms: float  # of all ranks together


def start(program: str, arguments: list[str], ranks: int) -> Measured:
    """Run a program on so many ranks, and take the middle step."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OOMPH_MEASURE": "0", "PYTHONWARNINGS": "ignore"}
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    done = subprocess.run(
        [*launcher, "--no-python", sys.executable, "-c", program, *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    every = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    clocks, used = [], []
    for at in range(WARM_UP, len(every[0]) - 1):
        clocks.append(max(marks[at + 1][0] - marks[at][0] for marks in every))
        used.append(sum(marks[at + 1][1] - marks[at][1] for marks in every))
    return Measured(statistics.median(clocks) * 1e3, statistics.median(used) * 1e3)


def ours(ranks: int, parallel: str, steps: int, data: Path, out: Path) -> Measured:
    keys = SHAPE | {"dataset": data, "out_dir": out, "max_iters": steps, "eval_interval": 10**6, "eval_iters": 1}
    keys |= {"gradient_accumulation_steps": ranks * MICRO_STEPS, "dropout": 0.0, "bias": False, "device": "cpu"}
    keys |= {"parallel": parallel} if ranks > 1 else {}
    return start(OURS, [*(f"--{key}={value}" for key, value in keys.items()), "--quiet", "--overwrite"], ranks)


def peer(ranks: int, steps: int, data: Path) -> Measured:
    return start(PEER, [json.dumps([SHAPE, steps, MICRO_STEPS, str(data / "train.bin")])], ranks)


def write_tokens(folder: Path) -> Path:
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 2**20).astype("<u2")
    tokens.tofile(folder / "train.bin")
    tokens[: 2**16].tofile(folder / "val.bin")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="of oomph train")
    options = parser.parse_args()
    print(f"{SHAPE}, {MICRO_STEPS} micro-steps a rank, float32; oomph train's {options.parallel} on several")
    with tempfile.TemporaryDirectory() as scratch:
        data = write_tokens(Path(scratch, "tokens"))
        for ranks in (1, 2):
            tokens = SHAPE["batch_size"] * SHAPE["block_size"] * MICRO_STEPS * ranks
            used, clocks = [], []
            for number in range(options.rounds):
                if number % 2:
                    mine = ours(ranks, options.parallel, options.steps, data, Path(scratch, "run"))
                theirs = peer(ranks, options.steps, data)
                if number % 2 == 0:
                    mine = ours(ranks, options.parallel, options.steps, data, Path(scratch, "run"))
                used.append(theirs.used_ms / mine.used_ms)
                clocks.append(theirs.clock_ms / mine.clock_ms)
                print(
                    f"  {ranks} rank{'s' if ranks > 1 else ''}, round {number + 1}: nanoGPT's loop "
                    f"{tokens / theirs.clock_ms * 1e3:,.0f} tokens/s ({theirs.used_ms:,.0f} ms of processors), "
                    f"oomph train {tokens / mine.clock_ms * 1e3:,.0f} ({mine.used_ms:,.0f} ms)",
                    flush=True,
                )
            verdict = "not slower" if statistics.median(used) >= 1 else "SLOWER"
            print(
                f"{ranks} rank{'s' if ranks > 1 else ''}: {statistics.median(used):.2f} × by processor time "
                f"({min(used):.2f} to {max(used):.2f}), {statistics.median(clocks):.2f} × on the clock: {verdict}"
            )


if __name__ == "__main__":
    main()
