"""What torch.compile really takes on this CPU."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from trace_gpt import Gpt

from oomph.config import TrainConfig


def measured_rise(settings: TrainConfig) -> int:
    """By how much the memory rises in three micro-steps of torch.compile on this CPU, from the profiler's events."""
    torch._dynamo.reset()
    model = Gpt(settings)
    network = torch.compile(model)
    held: dict[str, Any] = {}

    def fetch() -> tuple[Tensor, Tensor]:
        size = (settings.batch_size, settings.block_size)
        return torch.randint(settings.vocab_size, size), torch.randint(settings.vocab_size, size)

    def run(micro_steps: int) -> None:
        for _ in range(micro_steps):
            if settings.return_logits:
                held["logits"], held["loss"] = network(*held["batch"])
            else:
                held["loss"] = network(*held["batch"])
            held["loss"] = held["loss"] / micro_steps
            held["batch"] = fetch()
            held["loss"].backward()

    held["batch"] = fetch()
    run(2)  # compiles
    held.clear()  # the profiler does not see what is freed that it has not seen allocated
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held["batch"] = fetch()
        run(3)
    results = recorded.profiler.kineto_results.events()
    events = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(results) if e.name() == "[memory]")
    live = most = 0
    for _, _, size in events:
        live += size
        most = max(most, live)
    return most
