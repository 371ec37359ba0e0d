"""The plainest program on a described architecture, and its op list held against another: byte for byte.

steps = described(config_of(model, precision="autocast"), cuda=True)
assert changes_of(steps) == changes_of(model.traced(cuda=True, precision="autocast"))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hf_models import Hf
from msgspec.structs import replace
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.config.load import LoadedConfig, from_dict
from oomph.config.reading import hugging_face
from oomph.config.schema import TrainConfig
from oomph.config.settle import settle
from oomph.devices import find
from oomph.step import models
from oomph.step.ops import Kind, Op, Phase, Section, Step
from oomph.step.precision import precision as precision_of
from oomph.step.tensor.autograd import run_backward
from oomph.step.tensor.tape import Module, Tape
from oomph.step.tensor.tensor import Tensor
from oomph.step.trace.eager.program import recording
from oomph.step.trace.fakes import on_fakes

PRECISIONS = {
    "float32": {"dtype": "float32"},
    "autocast": {"dtype": "bfloat16", "base_dtype": "float32"},
    "loaded": {"dtype": "bfloat16", "base_dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16", "autocast": False},
    "float16": {"dtype": "float16", "autocast": False},
}


def config_of(model: Hf, precision: str = "float32", **keys: Any) -> TrainConfig:
    """A settled config of a Hugging Face model, read from the config.json that transformers writes of it."""
    layer = hugging_face.read(model.config.to_dict(), "config.json")
    assert not layer.problems, layer.problems
    said = {name: value.value for name, value in layer.values.items() if value.value is not None}
    said |= {"checkpoint_layers": model.layers if model.checkpoint else 0}
    said |= {"use_cache": bool(model.more.get("use_cache"))}
    said |= {"trainer": "hf", "compile": False, "batch_size": model.batch, "block_size": model.tokens}
    if model.lora:
        said |= {"method": "dora" if model.lora.get("use_dora") else "lora", "lora_rank": model.lora["r"]}
        said |= {"lora_dropout": model.lora.get("lora_dropout", 0.0)}
        wanted = model.lora["target_modules"]
        said |= {"lora_targets": wanted if isinstance(wanted, str) else ",".join(wanted)}
        if model.half_adapters:
            said |= {"adapter_dtype": PRECISIONS[precision].get("base_dtype") or PRECISIONS[precision]["dtype"]}
    return settled(from_dict({**said, **PRECISIONS[precision], **keys}))


def settled(loaded: LoadedConfig) -> TrainConfig:
    """The config with every decision taken; the attention kernel is the one that was asked for."""
    config = settle(loaded, find("A100 80GB")).config
    return replace(config, attention=loaded.config.attention)


def nanochat_config(**keys: Any) -> TrainConfig:
    """A small settled config of nanochat's, with PyTorch's own attention unless it says otherwise."""
    small = {
        "trainer": "nanochat", "compile": False, "n_layer": 4, "n_head": 2, "n_embd": 64, "num_key_value_heads": 2,
        "vocab_size": 128, "block_size": 64, "batch_size": 2, "dtype": "float32", "attention": "flash",
    }  # fmt: skip
    return settled(from_dict({**small, **keys}))


def traced(make: Callable[[], nn.Module], config: TrainConfig, *, cuda: bool = True, micro_steps: int = 1) -> Step:
    """A module's own list of the same program, where its forward returns the loss, or logits and the loss."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = on_fakes(make, mode)
        batch = [torch.zeros(config.batch_size, config.block_size, dtype=torch.long) for _ in range(2)]
        with recording(model, cuda=cuda, attention=config.attention) as recorder:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                recorder.adopt(tensor, Kind.PARAMETERS, name)
            for tensor in batch:
                recorder.adopt(tensor, Kind.INPUTS, "batch")
            sections = []
            for index in range(micro_steps):
                recorder.phase = Phase.FORWARD
                out = model(*batch)
                recorder.phase = Phase.BACKWARD
                (out[1] if isinstance(out, tuple) else out).backward()
                sections.append(recorder.section(f"micro-step {index + 1}"))
    return Step((), tuple(sections))


def described(config: TrainConfig, *, cuda: bool = True, micro_steps: int = 1) -> Step:
    """The plainest program: a forward, a backward, and what the forward returned held until the next is there."""
    dtypes = precision_of(config, cuda)
    weights = models.weights(config, dtypes)
    tape = Tape(weights, cuda=cuda, threads=torch.get_num_threads(), layers=range(config.n_layer))
    size = 8 * config.batch_size * config.block_size
    batch = [
        tape.tensor(tape.ledger.hold(name, size, Kind.INPUTS), (config.batch_size, config.block_size), "int64")
        for name in ("input_ids", "labels")
    ]
    sections: list[Section] = []
    held: Any = None
    for index in range(micro_steps):
        tape.autocast, tape.casts = dtypes.autocast, {}
        tape.kind, tape.scope, tape.ledger.phase = Kind.ACTIVATIONS, "", Phase.FORWARD
        out = models.forward(config)(Module(tape, config), *batch)
        held = [out, *tape.cache]  # with their graph: what backward does not visit stays saved
        tape.cache, tape.kept_inputs = [], []
        loss = out[1]
        del out
        tape.autocast, tape.casts = None, {}
        tape.ledger.phase, tape.scope = Phase.BACKWARD, "loss"
        _backward(tape, loss)
        del loss
        sections.append(Section(f"micro-step {index + 1}", tape.ledger.ops()))
    del held
    return Step((), tuple(sections))


def _backward(tape: Tape, loss: Tensor) -> None:
    grad = tape.made("grad", (), loss.dtype)
    tape.grad_enabled = False
    run_backward((loss, grad.detach()))
    tape.grad_enabled = True


Change = tuple[tuple[int, ...], tuple[int, ...]]


def changes_of(step: Step) -> list[list[Change]]:
    """By section, what is allocated and then what is freed until the next allocation: sizes in bytes, sorted.

    Allocations with nothing freed between them stand together: kernels that return several tensors make them at once.
    """
    return [_changes(section.ops) for section in step.sections]


def _changes(ops: tuple[Op, ...]) -> list[Change]:
    result: list[tuple[list[int], list[int]]] = [([], [])]
    for op in ops:
        made, freed = ([b.bytes for b in buffers if b.bytes] for buffers in (op.allocates, op.frees))
        if made and result[-1][1]:
            result.append(([], []))
        result[-1][0].extend(made)
        result[-1][1].extend(freed)
    return [(tuple(sorted(made)), tuple(sorted(freed))) for made, freed in result]


def first_difference(ours: Step, theirs: Step) -> str:
    """Where two op lists part, for a message; empty where they do not."""
    for name, mine, other in zip(ours.sections, changes_of(ours), changes_of(theirs), strict=True):
        for index, (left, right) in enumerate(zip([*mine, None], [*other, None], strict=False)):
            if left != right:
                return f"{name.name}, change {index}: {left} described, {right} seen"
        if len(mine) != len(other):
            return f"{name.name}: {len(mine)} changes described, {len(other)} seen"
    return ""
