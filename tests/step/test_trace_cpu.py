"""A trace on the CPU is what PyTorch really allocates there, as its profiler sees it."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from trace_gpt import Gpt, traced

from oomph.config.schema import TrainConfig
from oomph.step.ops import Section

WRAPPED_NUMBER_BYTES = 8  # PyTorch wraps a Python number in a tensor of up to 8 bytes, out of the dispatcher's sight

SHAPES = [
    {},
    {"bias": True, "tie_weights": False},
    {"n_layer": 3, "n_head": 1, "n_embd": 24, "block_size": 33, "batch_size": 1},
    {"n_head": 4, "n_embd": 64, "block_size": 200, "vocab_size": 1000},
    {"block_size": 800, "batch_size": 1, "return_logits": False},
    {"dropout": 0.1, "bias": True, "block_size": 70},
    {"dropout": 0.2, "n_head": 1, "batch_size": 3},
]


def config_of(**keys: object) -> TrainConfig:
    settled: dict[str, object] = {
        "compile": False, "dtype": "float32", "return_logits": True, "loss_chunk": 0, "optimizer_loop": "forloop",
        "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "batch_size": 2, "vocab_size": 512,
        "gradient_accumulation_steps": 3,
    }  # fmt: skip
    return TrainConfig(**{**settled, **keys})  # type: ignore[arg-type]


def turns(changes: list[int]) -> list[int]:
    """What is allocated between two frees and freed between two allocations: the turning points of memory."""
    turning: list[int] = []
    for change in changes:
        if abs(change) <= WRAPPED_NUMBER_BYTES:
            continue
        if turning and (turning[-1] > 0) == (change > 0):
            turning[-1] += change
        else:
            turning.append(change)
    return turning


def train_for_real(config: TrainConfig) -> dict[str, list[int]]:
    """nanoGPT's loop on real tensors: every allocation and free of a second optimizer step's later micro-steps."""
    model = Gpt(config)
    groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)

    def fetch() -> list[torch.Tensor]:
        return [torch.zeros(config.batch_size, config.block_size, dtype=torch.long) for _ in range(2)]

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        batch = fetch()
        kept = loss = None
        for step in range(2):
            for micro_step in range(config.gradient_accumulation_steps):
                with record_function(f"{step}, micro-step {micro_step + 1}"):
                    pass
                if config.return_logits:
                    kept, loss = model(*batch)
                else:
                    loss = model(*batch)
                loss = loss / config.gradient_accumulation_steps
                batch = fetch()
                loss.backward()
            with record_function(f"{step}, optimizer"):
                pass
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with record_function("1, after"):
            del kept
    found: dict[str, list[int]] = {}
    section: list[int] = []
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            section.append(event.nbytes())
        elif event.name()[:3] in ("0, ", "1, "):
            section = found.setdefault(event.name(), [])
    return found


def changes_of(section: Section) -> list[int]:
    changes: list[int] = []
    for op in section.ops:
        changes += [buffer.bytes for buffer in op.allocates]
        changes += [-buffer.bytes for buffer in op.frees]
    return changes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keys", SHAPES, ids=str)
def test_a_cpu_trace_is_what_the_profiler_sees(keys: dict[str, object]) -> None:
    config = config_of(**keys)
    real = train_for_real(config)
    seen = {section.name: changes_of(section) for section in traced(config, cuda=False).sections}
    for name in ("micro-step 1", "micro-step 2", "micro-step 3", "optimizer"):
        assert turns(seen[name]) == turns(real[f"1, {name}"]), name
