"""What takes longer: kills at random moments, and several processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_helpers import SMALL, losses, write_data

from oomph.training.run import train

pytestmark = pytest.mark.slow
PROGRAM = "import sys; from oomph.cli.train import run; sys.exit(run(sys.argv[1:]))"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def arguments(data: Path, out: Path, **keys: object) -> list[str]:
    fields = SMALL | {"dataset": data, "out_dir": out, "dropout": 0.1} | keys
    return [*(f"--{key}={value}" for key, value in fields.items()), "--quiet"]


def test_killed_at_twenty_moments_the_losses_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """A process that forks for each life spares importing torch twenty times; SIGKILL takes the child alone."""
    data = write_data(tmp_path / "tokens")
    keys = {"max_iters": 200, "eval_interval": 3, "eval_iters": 1, "recipe": "modern"}  # its state has the most parts
    program = KILLER.format(
        whole=arguments(data, tmp_path / "whole", **keys),
        killed=arguments(data, tmp_path / "killed", **keys),
        folder=str(tmp_path / "killed"),
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, met = map(int, re.findall(r"kills (\d+) checkpoints (\d+)", done.stdout)[0])
    assert kills >= 20 and met >= 8
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 200


# A life ends when the run has logged so many steps more than ever before, and a random moment after: how quick the
# machine is does not matter. A draw of none ends it while it gets ready.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from oomph.cli.train import run
random.seed(1)
folder = Path({folder!r})

def begin(argv):
    child = os.fork()
    if child == 0:
        os._exit(run(argv))
    return child

def logged():
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b'"loss"')
    except OSError:
        return 0

def newest():
    return max((path.name for path in folder.glob("checkpoints/step_*.pt")), default=None)

def how():
    return "--resume" if newest() and not finished else "--overwrite"

def live(argv, steps):
    "Whether it was killed; what it ended with otherwise."
    child, target = begin(argv), logged() + steps
    pause = random.random() * (0.02 if steps else 0.5)
    while logged() < target:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return False, status
        time.sleep(0.001)
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), status

assert os.waitpid(begin({whole}), 0)[1] == 0
kills, met, finished = 0, set(), False
while kills < 20 or len(met) < 8:
    killed, status = live({killed} + [how()], random.randint(0, 12))
    if not killed and status != 0:
        sys.exit(f"it ended with {{status}} after {{kills}} kills")
    finished = not killed  # before its time had come: it begins anew
    kills += killed
    met |= {{newest()}} - {{None}} if killed else set()
print("kills", kills, "checkpoints", len(met))
assert os.waitpid(begin({killed} + [how()]), 0)[1] == 0
"""


def torchrun(
    ranks: int, argv: list[str], timeout: int = 100, program: str = PROGRAM
) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    wrapper = ["--no-python", sys.executable, "-c", program]
    return subprocess.run(
        [*launcher, *wrapper, *argv],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_data(folder / "tokens")
    keys = SMALL | {
        "dataset": str(folder / "tokens"),
        "out_dir": str(folder / "one"),
        "max_iters": 20,
        "eval_interval": 10,
        "recipe": "modern",
    }
    train(keys, quiet=True, measure=False)
    return folder


def test_two_ranks_have_the_losses_of_one_and_resume_exactly(shared: Path) -> None:
    keys = {"dropout": 0.0, "eval_interval": 10, "recipe": "modern"}
    done = torchrun(2, arguments(shared / "tokens", shared / "two", max_iters=20, **keys))
    assert done.returncode == 0, done.stderr
    one, two = losses(shared / "one"), losses(shared / "two")
    assert [step for step, _ in two] == [step for step, _ in one]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], abs=1e-5)

    for limit, more in ((7, []), (20, ["--resume"])):
        argv = arguments(shared / "tokens", shared / "parts", max_iters=limit, **keys)
        done = torchrun(2, [*argv, *more])
        assert done.returncode == 0, done.stderr
    assert losses(shared / "parts") == two


def test_a_dead_rank_ends_the_job_with_a_message(shared: Path) -> None:
    dying = """
import os, sys
from oomph.training import trainer
step = trainer.Trainer.train_step
def die(self):
    if self.step == 3 and self.ranks.rank == 1:
        os._exit(9)
    return step(self)
trainer.Trainer.train_step = die
from oomph.cli.train import run
sys.exit(run(sys.argv[1:]))
"""
    begun = time.monotonic()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*launcher, "--no-python", sys.executable, "-c", dying, *arguments(shared / "tokens", shared / "dead")],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert re.search(r"ERROR: rank 1 \(\S+\) is gone or hangs", done.stderr)
    assert "step 3 is saved" in done.stderr
    assert time.monotonic() - begun < 90
    done = torchrun(2, [*arguments(shared / "tokens", shared / "dead", max_iters=20, dropout=0.0), "--resume"])
    assert done.returncode == 0, done.stderr
    assert losses(shared / "dead")[-1][0] == 19


def test_a_mistake_seen_by_the_first_rank_is_reported_once(shared: Path) -> None:
    program = "import sys; from oomph.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = ["train", *arguments(shared / "tokens", shared / "one")]  # this folder holds a run
    done = torchrun(2, argv, program=program)
    assert done.returncode != 0
    assert done.stderr.count("--overwrite") == 1
    assert "lost contact" not in done.stderr


def test_memory_that_runs_out_on_one_rank_shrinks_all(shared: Path) -> None:
    failing = """
import sys, torch
from oomph.training import model
head, count = model.head_loss, [0]
import os
def faulty(*arguments):
    count[0] += 1
    if os.environ["RANK"] == "1" and count[0] == 6:
        raise torch.OutOfMemoryError("injected")
    return head(*arguments)
model.head_loss = faulty
from oomph.cli.train import run
sys.exit(run(sys.argv[1:]))
"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    keys = {"max_iters": 20, "dropout": 0.0, "eval_interval": 10}
    plain = SMALL | keys | {"dataset": str(shared / "tokens"), "out_dir": str(shared / "plain")}
    train(plain, quiet=True, measure=False)  # without Muon, which rounds gradients to bfloat16
    argv = arguments(shared / "tokens", shared / "hurt", **keys)
    done = subprocess.run(
        [*launcher, "--no-python", sys.executable, "-c", failing, *argv],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"event":"out of memory"' in (shared / "hurt" / "metrics.jsonl").read_text()
    one, hurt = losses(shared / "plain"), losses(shared / "hurt")
    assert [loss for _, loss in hurt] == pytest.approx([loss for _, loss in one], abs=1e-5)


def test_the_memory_of_a_run_on_this_cpu_is_what_the_plan_said(tmp_path: Path) -> None:
    data = write_data(tmp_path / "tokens")
    keys = {"vocab_size": 50304, "n_layer": 3, "n_embd": 192, "block_size": 128, "batch_size": 8, "max_iters": 3}
    argv = [*arguments(data, tmp_path / "run", dropout=0.0, gradient_accumulation_steps=1, **keys), "--json"]
    environment = os.environ | ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path)}  # no figures of an earlier measurement
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv], env=environment, capture_output=True, text=True, check=True
    )
    memory = json.loads(done.stdout)["memory_mib"]
    tensors_mib = json.loads((tmp_path / "run" / "plan.json").read_text())["memory"]["allocated_mib"]
    assert tensors_mib > 250
    assert memory["predicted"] > tensors_mib + 100  # Python and torch are part of the process
    assert memory["actual"] == pytest.approx(memory["predicted"], abs=0.1 * tensors_mib)
