"""Runs on several ranks without torchrun: four processes import torch once, and do one job after another.

    outcomes = run(folder, [{"ranks": 2, "keys": {...}, "options": {...}, "patch": "short_of_memory"}, ...])

A job is a call of `oomph.training.run.train` on its first so many processes; what it raised on each rank, or None, is
its outcome. `patch` names a function of this module that is called before it and returns how to undo it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from training_helpers import SMALL, losses, write_data


def run(folder: Path, jobs: list[dict[str, Any]], timeout_s: int = 850) -> list[list[str | None]]:
    """Each job's outcome by rank."""
    orders = folder / "jobs.json"
    ports = [free_port() for _ in jobs]
    orders.write_text(json.dumps([{**job, "port": port} for job, port in zip(jobs, ports, strict=True)]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    size = max(job["ranks"] for job in jobs)
    with ExitStack() as opened:
        files = [opened.enter_context((folder / f"rank{rank}.err").open("w")) for rank in range(size)]
        processes = [
            opened.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, str(orders), str(rank), str(size)],
                    env=environment, stdout=subprocess.PIPE, stderr=file, text=True,
                )
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        try:
            answers = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    errors = [(folder / f"rank{rank}.err").read_text() for rank in range(size)]
    assert all(process.returncode == 0 for process in processes), "\n".join(error[-2000:] for error in errors)
    told = [json.loads(out.splitlines()[-1]) for out in answers]
    return [[told[rank][index] for rank in range(job["ranks"])] for index, job in enumerate(jobs)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Runs:
    """Jobs to be done together, and what they left."""

    def __init__(self, folder: Path, usual: dict[str, Any] | None = None) -> None:
        self.usual = usual or {"max_iters": 20, "eval_interval": 10}
        self.folder, self.data = folder, write_data(folder / "tokens")
        self.jobs: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.outcomes: dict[str, list[list[str | None]]] = {}

    def add(self, name: str, ranks: int, options: dict[str, Any] | None = None, patch: str = "", **keys: Any) -> None:
        config = SMALL | {"gradient_accumulation_steps": 4} | self.usual
        config |= {"dataset": str(self.data), "out_dir": str(self.folder / name)} | keys
        self.jobs.append(
            {"ranks": ranks, "keys": config, "options": options or {}} | ({"patch": patch} if patch else {})
        )
        self.names.append(name)

    def do(self) -> None:
        for name, outcome in zip(self.names, run(self.folder, self.jobs), strict=True):
            self.outcomes.setdefault(name, []).append(outcome)

    def losses(self, name: str) -> list[float]:
        assert all(each is None for outcome in self.outcomes[name] for each in outcome), self.outcomes[name]
        return [loss for _, loss in losses(self.folder / name)]


# --- in a rank's process -------------------------------------------------------------------------------


def short_of_memory(at: int = 4) -> Callable[[], None]:
    """On rank 1 memory runs out in this forward, by default the second step's second."""
    import torch

    from oomph.training import model
    from oomph.training.ranks import group

    head, count, usual = model.head_loss, [0], group.STEP_TIMEOUT
    group.STEP_TIMEOUT = timedelta(seconds=10)

    def faulty(*arguments: Any) -> Any:
        count[0] += torch.is_grad_enabled()
        if os.environ["RANK"] == "1" and count[0] == at:
            raise torch.OutOfMemoryError("injected")
        return head(*arguments)

    def undo() -> None:
        model.head_loss, group.STEP_TIMEOUT = head, usual

    model.head_loss = faulty
    return undo


def short_of_memory_later() -> Callable[[], None]:
    """The same in the fourth step: in the first ones ranks that compile wait for each other for minutes."""
    return short_of_memory(8)


def overflowing() -> Callable[[], None]:
    """In the second step a gradient overflows, in rank 1's part alone."""
    from oomph.training.ranks.sharing import Sharded

    reduce, count = Sharded.reduced, [0]

    def reduced(self: Any, loss: Any) -> Any:
        gradients, count[0] = reduce(self, loss), count[0] + 1
        if os.environ["RANK"] == "1" and count[0] == 2:
            gradients[0].fill_(float("inf"))
        return gradients

    Sharded.reduced = reduced  # type: ignore[method-assign]
    return lambda: setattr(Sharded, "reduced", reduce)


def one_small_device() -> Callable[[], None]:
    """Rank 1's device is too small for a whole model, by the plan."""
    from types import SimpleNamespace

    from oomph.training import setup

    real = setup.plan

    def judged(loaded: Any, _: Any) -> Any:
        fits = os.environ["RANK"] == "0" or loaded.config.parallel == "fsdp"
        return SimpleNamespace(memory=SimpleNamespace(fits=fits))

    setup.plan = judged
    return lambda: setattr(setup, "plan", real)


def in_background() -> Callable[[], None]:
    """Checkpoints are written by a thread, as on a GPU."""
    from oomph.training.saving import Saver

    make = Saver.__init__

    def begin(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self.in_background = True

    Saver.__init__ = begin  # type: ignore[method-assign]
    return lambda: setattr(Saver, "__init__", make)


def full_disk() -> Callable[[], None]:
    """The disk has room for two files of rank 1, and for a third when another is gone."""
    import errno

    from oomph.training.ranks import parts

    write, count = parts._Writer.write_data, [0]

    def full(self: Any, plan: Any, planner: Any) -> Any:
        count[0] += 1
        if os.environ["RANK"] == "1" and count[0] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, plan, planner)

    parts._Writer.write_data = full  # type: ignore[method-assign]
    return lambda: setattr(parts._Writer, "write_data", write)


def _do(job: dict[str, Any], rank: int) -> str | None:
    from oomph.training.run import Options, train

    if rank >= job["ranks"]:
        return None
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    print("job", job["keys"]["out_dir"], job["ranks"], file=sys.stderr, flush=True)
    undo = globals()[job["patch"]]() if job.get("patch") else lambda: None
    try:
        train(job["keys"], Options(**({"quiet": True, "measure": False} | job.get("options", {}))))
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        undo()
    return None


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    rank, folder = int(sys.argv[2]), Path(sys.argv[1]).parent
    found = []
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        found.append(_do(job, rank))
        (folder / f"done.{number}.{rank}").touch()
        while len(list(folder.glob(f"done.{number}.*"))) < int(sys.argv[3]):  # a later job may resume this one's run
            time.sleep(0.02)
    print(json.dumps(found))
