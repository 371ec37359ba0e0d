"""Ranks that are killed or hang, and the job that is started again: nothing is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_helpers import SMALL, losses, write_data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # many runs in one fixture
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo", "OOMPH_MEASURE": "0"}
STEPS = 60


def arguments(data: Path, out: Path) -> list[str]:
    keys = SMALL | {"dataset": data, "out_dir": out, "dropout": 0.1, "parallel": "fsdp"}
    keys |= {"max_iters": STEPS, "eval_interval": 3, "eval_iters": 1}
    return [*(f"--{key}={value}" for key, value in keys.items()), "--quiet", "--overwrite"]


# Does what torchrun does, but forks its ranks, which spares importing torch for each; a life ends by SIGKILL of one
# rank, some steps later than the last and a random moment after.
AGENT = """
import os, random, signal, socket, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import oomph.training.ranks.parts, torch.distributed.fsdp
from oomph.cli.train import run
random.seed(2)

def begin(argv, attempt, name):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}}
            os.environ |= {{"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": name}}
            os.environ |= {{"TORCHELASTIC_RESTART_COUNT": str(attempt)}}
            os._exit(run(argv))
        children.append(child)
    return children

def logged(folder):
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b'"loss"')
    except OSError:
        return 0

def end(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

whole, killed = {whole}, {killed}
assert end(begin(whole, 0, "whole")) == [0, 0]
folder, kills = Path({folder!r}), 0
while kills < 10:
    target = logged(folder) + random.randint(0, 4)
    children, victim = begin(killed, kills, "killed"), random.randrange(2)
    while logged(folder) < target:
        time.sleep(0.002)
    time.sleep(random.random() * (0.05 if target else 1.0))
    os.kill(children[victim], signal.SIGKILL)
    os.kill(children[1 - victim], signal.SIGTERM)
    later = threading.Timer(20, os.kill, (children[1 - victim], signal.SIGKILL))  # as torchrun does after a while
    later.start()
    codes = end(children)
    later.cancel()
    print("codes", codes[victim], logged(folder), flush=True)
    kills += 1
print("last", end(begin(killed, kills, "killed")))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("killed")
    data = write_data(folder / "tokens")
    program = AGENT.format(
        whole=arguments(data, folder / "whole"),
        killed=arguments(data, folder / "killed"),
        folder=str(folder / "killed"),
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return folder, done.stdout


def test_a_rank_killed_at_ten_moments_costs_nothing(killed: tuple[Path, str]) -> None:
    folder, told = killed
    assert told.count("codes -9") == 10
    assert "last [0, 0]" in told
    assert losses(folder / "killed") == losses(folder / "whole")
    assert len(losses(folder / "whole")) == STEPS


# The first life of rank 1 is killed, its second stops to answer.
TROUBLED = """
import os, signal, sys
from datetime import timedelta
from oomph.training import trainer
from oomph.training.ranks import group
group.STEP_TIMEOUT = timedelta(seconds=8)
step = trainer.Trainer.train_step
def troubled(self):
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if self.ranks.rank == 1 and (self.step, life) in ((7, "0"), (20, "1")):
        os.kill(os.getpid(), signal.SIGKILL if life == "0" else signal.SIGSTOP)
    return step(self)
trainer.Trainer.train_step = troubled
from oomph.cli.train import run
sys.exit(run(sys.argv[1:]))
"""


def test_torchrun_starts_a_job_again_that_lost_a_rank(killed: tuple[Path, str]) -> None:
    folder, _ = killed
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    launcher += ["--max-restarts=2", "--shutdown-timeout=3", "--no-python", sys.executable, "-c", TROUBLED]
    done = subprocess.run(
        [*launcher, *arguments(folder / "tokens", folder / "torchrun")],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(r"ERROR: (rank \d) \(\S+\) is gone or hangs.*last good checkpoint is \S+step_(\d+)", done.stderr)
    assert told == [("rank 1", "00000006"), ("rank 1", "00000018")]
    assert losses(folder / "torchrun") == losses(folder / "whole")
