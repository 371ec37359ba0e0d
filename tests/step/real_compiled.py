"""What torch.compile plans for a small GPT, and what it really takes on this CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from trace_gpt import Gpt

from oomph.config import TrainConfig
from oomph.predict.memory import rounded
from oomph.step.ops import Buffer, Step
from oomph.step.trace.inductor.program import compiled


def config(**keys: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "return_logits": True,
        "loss_chunk": 0,
        "optimizer_loop": "fused",
        "gradient_accumulation_steps": 3,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "vocab_size": 512,
        "block_size": 64,
        "batch_size": 4,
    }
    return TrainConfig(**(given | keys))


def planned(settings: TrainConfig, cuda: bool = True, first: bool = False, evaluation: bool = True) -> Step:
    """Inductor's plan."""
    batch = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.long)
    return compiled(
        lambda: Gpt(settings),
        (batch, batch.clone()),
        dtype=str(settings.dtype),
        autocast=settings.autocast,
        cuda=cuda,
        attention=settings.attention,
        optimizer=settings.optimizer,
        optimizer_loop=str(settings.optimizer_loop),
        accumulation=settings.gradient_accumulation_steps,
        first=first,
        torch_version=settings.torch_version,
        evaluation=evaluation,
    )


def peaks(step: Step, rounding_bytes: int = 512) -> dict[str, int]:
    """The fullest moment of each training section."""

    def size(buffers: Iterable[Buffer]) -> int:
        return sum(rounded(buffer.bytes, rounding_bytes) for buffer in buffers)

    found: dict[str, int] = {}
    live = size(step.resident)
    for section in step.sections:
        for op in section.ops:
            live += size(op.allocates)
            found[section.name] = max(found.get(section.name, 0), live)
            live -= size(op.frees)
    return {name: most for name, most in found.items() if not name.startswith("evaluation")}


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
