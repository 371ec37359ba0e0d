"""Real ranks on this CPU: a plain loop around a small transformers model, shared by gloo processes, and its memory.

    peaks = run(2, {"sharded": {"model": Hf("llama"), "parallel": "fsdp", "micro_steps": 2}})   # bytes

Each rank is a process that reads the jobs, runs their steps under torch's profiler, and prints their peaks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

THREAD_S = 0.003  # many times what a thread takes to return, on a busy machine
STEPS = 6  # the first makes the optimizer's state, the second rebuilds DDP's buckets


def run(ranks: int, jobs: dict[str, dict[str, Any]]) -> dict[str, int]:
    """By job, the peak of a rank in bytes. A job has a model, `parallel`, and what `_Rank` reads of it.

    Of all steps of all ranks the one that took least counts: a thread of gloo's may still let go late.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {name: {**job, "ranks": ranks, "model": asdict(job["model"])} for name, job in jobs.items()}
        orders = json.dumps({"meet": f"{folder}/meet", "ranks": ranks, "jobs": told})
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(orders)
            process.stdin.close()
        answers = [process.stdout.read() for process in processes if process.stdout is not None]
        assert [process.wait() for process in processes] == [0] * ranks
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return {name: min([peak for each in found for peak in each[name]]) for name in jobs}


class _Rank:
    """One rank, and one of its jobs."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from hf_models import Hf

        self.torch, self.job = torch, job
        self.model = Hf(**job["model"])

    def build(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.nn.parallel import DistributedDataParallel

        torch, job = self.torch, self.job
        torch.manual_seed(0)
        built: Any = self.model.build()
        if job.get("runs_again"):
            built.enable_input_require_grads()
        if job["parallel"] in ("ddp", "zero1"):
            for block in self.blocks(built) if job.get("runs_again") else ():
                block.forward = _checkpointed(block.forward)
            return DistributedDataParallel(built, gradient_as_bucket_view=job.get("views", False))
        if job["parallel"] == "fsdp1":
            return self.flat(built)
        dtypes = {name: getattr(torch, job[name]) for name in ("param_dtype", "reduce_dtype") if name in job}
        shape = (job["ranks"] // job["shard_size"], job["shard_size"]) if "shard_size" in job else (job["ranks"],)
        names = ("copies", "parts")[-len(shape) :]
        options = {
            "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(**dtypes),
        }
        reshard = {"reshard_after_forward": job["reshard"]} if "reshard" in job else {}
        for block in self.blocks(built):
            fully_shard(block, **options, **reshard)
        fully_shard(built, **options)
        return built

    def blocks(self, built: Any) -> Any:
        inner = built.base_model.model if self.model.lora else built
        trunk = inner.transformer if self.model.family == "gpt2" else inner.model
        return trunk.h if self.model.family == "gpt2" else trunk.layers

    def flat(self, built: Any) -> Any:
        """FSDP1 as accelerate and peft wrap a model: blocks, and modules that are trained beside frozen ones."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import CustomPolicy

        torch, job = self.torch, self.job
        blocks = set(self.blocks(built))

        def wraps(module: Any) -> bool:
            trained = getattr(getattr(module, "weight", None), "requires_grad", False)
            return module in blocks or bool(self.model.lora and trained and not list(module.children()))

        dtypes = {name: getattr(torch, job[name]) for name in ("param_dtype", "reduce_dtype") if name in job}
        strategy = ShardingStrategy.FULL_SHARD if job.get("reshard", True) else ShardingStrategy.SHARD_GRAD_OP
        mesh = None
        if "shard_size" in job:
            strategy = ShardingStrategy.HYBRID_SHARD
            mesh = init_device_mesh("cpu", (job["ranks"] // job["shard_size"], job["shard_size"]))
        wrapped = FullyShardedDataParallel(
            built,
            auto_wrap_policy=CustomPolicy(wraps),
            mixed_precision=MixedPrecision(**dtypes) if dtypes else None,
            sharding_strategy=strategy,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        for block in self.blocks(built) if job.get("runs_again") else ():
            block.forward = _checkpointed(block.forward)
        return wrapped

    def train(self) -> None:
        torch, job = self.torch, self.job
        built = self.build()
        trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
        if job["parallel"] == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer: Any = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, weight_decay=0.1, foreach=False)
        else:
            optimizer = torch.optim.AdamW(trained, weight_decay=0.1, foreach=False)
        count = job.get("micro_steps", 1)
        for _ in range(STEPS):
            with torch.profiler.record_function("step begins"):
                pass
            for index in range(count):
                last = index == count - 1
                whole = nullcontext()
                if job["parallel"] == "fsdp1":
                    whole = nullcontext() if last or job.get("each", True) else built.no_sync()
                elif job["parallel"] in ("fsdp", "hsdp"):
                    built.set_requires_gradient_sync(last or job.get("each", True))
                else:
                    built.require_backward_grad_sync = last
                with whole:
                    batch = self.model.inputs()
                    outputs = built(**batch)
                    outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def peaks_bytes(self) -> list[int]:
        import gc

        from torch.profiler import ProfilerActivity, profile

        gc.collect()  # an earlier job's circles would be freed in this one, unseen as they were made
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.train()
        held = 0
        highest: list[int] = []  # of each step
        events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "step begins":
                highest.append(held)
            if event.name() == "[memory]":
                held += event.nbytes()
                highest[-1:] = [max(highest[-1], held)] if highest else []
        return highest[2:]


def _checkpointed(forward: Any) -> Any:
    """A block's forward, FSDP's hooks included, as transformers before 4.53 checkpoints it."""
    from torch.utils.checkpoint import checkpoint

    def run(x: Any, **given: Any) -> Any:
        return checkpoint(partial(forward, **given), x, use_reentrant=True)

    return run


def _wait_for_threads() -> None:
    """Make a wait for a collective last until gloo's thread has let go of its tensors too, which it does a moment after
    it has told that they are there."""
    from torch._C._distributed_c10d import Work

    def wait(work: Work, *arguments: object) -> object:
        done = finish(work, *arguments)
        time.sleep(THREAD_S)
        return done

    finish, Work.wait = Work.wait, wait  # type: ignore[method-assign]


def main() -> None:
    """Run the jobs that standard input names, and print their peaks."""
    import torch.distributed as dist

    _wait_for_threads()

    orders = json.load(sys.stdin)
    meet = f"file://{orders['meet']}"
    dist.init_process_group("gloo", init_method=meet, rank=int(sys.argv[1]), world_size=orders["ranks"])
    peaks = {name: _Rank(job).peaks_bytes() for name, job in orders["jobs"].items()}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
