"""What a rank of `oomph train` allocates on this CPU, by torch's profiler: one process of a job that several do.

peaks = measure({"sharded": {"ranks": 2, "parallel": "fsdp", ...}}, folder)   # bytes, by job, by rank
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rank_jobs

STEPS = 6
_THREAD_S = 0.01  # many times what a thread of gloo's takes to return, on a busy machine
MODEL: dict[str, Any] = {
    "vocab_size": 1000, "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 32, "batch_size": 4, "bias": True,
    "dropout": 0.0, "device": "cpu", "loss_chunk": 64, "dataset_tokens": 5000,
}  # fmt: skip


def measure(jobs: dict[str, dict[str, Any]], data: Path) -> dict[str, list[list[int]]]:
    """By job and rank, the peak of each warm step."""
    told = [{"keys": MODEL | keys, "data": str(data), "port": rank_jobs.free_port()} for keys in jobs.values()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(told), str(rank)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(max(keys["world_size"] for keys in jobs.values()))
    ]
    answers = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    sizes = [keys["world_size"] for keys in jobs.values()]
    return {name: [found[rank][at] for rank in range(sizes[at])] for at, name in enumerate(jobs)}


def _peaks(job: dict[str, Any], rank: int) -> list[int]:
    import gc

    import torch
    from torch.profiler import ProfilerActivity, profile

    from oomph import config as configs
    from oomph.training.ranks.group import ranks_from_environment
    from oomph.training.run import build
    from oomph.training.setup import agreed, set_up
    from oomph.training.start import Options, find_start

    size = job["keys"]["world_size"]
    if rank >= size:
        return []
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    ranks = ranks_from_environment()
    start = find_start(configs.as_loaded(job["keys"] | {"dataset": job["data"]}), Options())
    setup = set_up(start.loaded, ranks, measure=False)
    ranks.start(setup.backend, setup.device)
    setup = agreed(setup, ranks)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = build(setup, Path(job["data"]), ranks, start)
        for _ in range(STEPS):
            with torch.profiler.record_function("step begins"):
                pass
            trainer.train_step()
    held = 0
    highest: list[int] = []
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "step begins":
            highest.append(held)
        if event.name() == "[memory]":
            held += event.nbytes()
            highest[-1:] = [max(highest[-1], held)] if highest else []
    ranks.stop()
    return highest[2:]


def _wait_for_threads() -> None:
    """A wait for a collective lasts until gloo's thread has let go of its tensors too."""
    from torch._C._distributed_c10d import Work

    def wait(work: Work, *arguments: object) -> object:
        done = finish(work, *arguments)
        time.sleep(_THREAD_S)
        return done

    finish, Work.wait = Work.wait, wait  # type: ignore[method-assign]


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    _wait_for_threads()
    print(json.dumps([_peaks(job, int(sys.argv[2])) for job in json.loads(sys.argv[1])]))
