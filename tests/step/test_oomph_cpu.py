"""The planned step of oomph train on a CPU is what PyTorch really allocates in it, as its profiler sees it."""

from __future__ import annotations

import gc

import pytest
import torch

from oomph import config as configs
from oomph.checking.assemble import make_program
from oomph.checking.child import peak_allocated_bytes
from oomph.checking.launch import Job
from oomph.config import TrainConfig
from oomph.devices import Device
from oomph.predict.memory import find_peak
from oomph.step import build as steps
from oomph.step.parameters import parameters

SCALAR_BYTES = 4  # the loss summed up over micro-steps: a number that the list leaves out
SCALE_BYTES = 16  # autograd keeps an adapted layer's scale as a tensor of 8 bytes; the list leaves out one or two
CPU = Device(
    name="CPU", kind="cpu", vendor="", arch="", memory_mib=8000, usable_mib=8000, context_mib=0, has_bf16=False
)

CASES = [
    {},
    {"dropout": 0.1},
    {"dropout": 0.1, "checkpoint_layers": 2},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "n_layer": 1, "block_size": 300, "n_head": 3},
    {"dtype": "bfloat16", "dropout": 0.1, "bias": True},
    {"dtype": "bfloat16", "loss_chunk": 0, "tie_weights": False},
    {"dtype": "bfloat16", "dropout": 0.1, "checkpoint_layers": 1, "loss_chunk": 50},
    {"dtype": "bfloat16", "attention": "math"},
    {"dtype": "bfloat16", "autocast": False},
    {"dtype": "float16"},
    {"dtype": "float16", "loss_chunk": 0, "checkpoint_layers": 2},
    {"recipe": "modern"},
    {"recipe": "modern", "dtype": "bfloat16", "num_key_value_heads": 1},
    {"recipe": "modern", "dtype": "bfloat16", "is_gated_act": False, "hidden_act": "relu2", "checkpoint_layers": 1},
    {"recipe": "modern", "dtype": "bfloat16", "autocast": False, "optimizer": "adamw", "tie_weights": False},
    {"recipe": "modern", "dropout": 0.1, "head_dim": 32, "intermediate_size": 100, "loss_chunk": 0},
    {"position_embedding_type": "rotary"},
    {"norm_type": "rmsnorm", "bias": True},
    {"use_qk_norm": True, "dtype": "float16"},
    {"is_gated_act": True, "num_key_value_heads": 1},
    {"hidden_act": "relu2", "n_layer": 1},
    {"method": "lora"},
    {"method": "lora", "lora_targets": "all-linear", "lora_rank": 5, "bias": True, "gradient_accumulation_steps": 1},
    {"method": "lora", "lora_targets": "all-linear", "lora_dropout": 0.1, "checkpoint_layers": 1, "loss_chunk": 50},
    {"method": "lora", "dtype": "bfloat16"},
    {"method": "lora", "dtype": "bfloat16", "lora_targets": "c_attn,c_fc", "base_dtype": "float32", "loss_chunk": 0},
    {"method": "lora", "dtype": "float16", "checkpoint_layers": 2, "lora_targets": "all-linear"},
    {"method": "lora", "dtype": "bfloat16", "autocast": False, "lora_targets": "c_proj"},
    {"method": "lora", "recipe": "modern", "optimizer": "adamw", "lora_targets": "all-linear"},
    {"method": "lora", "recipe": "modern", "optimizer": "adamw", "dtype": "bfloat16", "tie_weights": False},
]


def settled(keys: dict[str, object]) -> TrainConfig:
    tiny = {
        "trainer": "oomph", "device": "cpu", "compile": False, "n_layer": 2, "n_head": 2, "n_embd": 48,
        "block_size": 70, "batch_size": 3, "vocab_size": 311, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    return configs.settle(configs.as_loaded({**tiny, **keys}), CPU).config


def real_peak_bytes(config: TrainConfig) -> int:
    """The fullest moment of two optimizer steps of the trainer itself."""

    def train() -> None:
        program = make_program(Job(config, "cpu", 1, config.gradient_accumulation_steps, True, None))
        program.run(2, lambda _: None)

    gc.disable()
    try:
        return peak_allocated_bytes(train)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keys", CASES, ids=str)
def test_the_planned_peak_is_what_the_profiler_sees(keys: dict[str, object]) -> None:
    config = settled(keys)
    threads = torch.get_num_threads()
    built = [steps.build(config, cuda=False, first=first, threads=threads) for first in (True, False)]
    planned = find_peak(built, rounding_bytes=1).allocated_bytes
    adapted = sum(p.name.endswith(".lora_A.weight") for p in parameters(config))
    assert abs(real_peak_bytes(config) - planned) <= SCALAR_BYTES + SCALE_BYTES * adapted


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["nanogpt", "modern"])
def test_a_compiled_step_in_half_precision_takes_what_is_planned(recipe: str) -> None:
    shape = {"n_embd": 128, "n_layer": 1, "vocab_size": 2000}
    config = settled({"compile": True, "dtype": "bfloat16", "recipe": recipe, **shape})
    built = [steps.build(config, cuda=False, first=first, threads=torch.get_num_threads()) for first in (True, False)]
    planned = find_peak(built, rounding_bytes=1).allocated_bytes
    assert planned == pytest.approx(real_peak_bytes(config), rel=0.01)


def test_autocast_on_a_cpu_needs_less_than_float32() -> None:
    peaks = [
        find_peak(steps.build(settled({"dtype": dtype, "n_embd": 96}), cuda=False), 1).allocated_bytes
        for dtype in ("bfloat16", "float32")
    ]
    assert peaks[0] < peaks[1]
