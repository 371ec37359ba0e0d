"""Small Hugging Face models of every family, traced and run for real.

    model = Hf("llama", layers=3, kv_heads=2)
    model.traced(cuda=True, precision="autocast")   # the Step of one micro-step on fake tensors
    model.profiled("float32")                       # what a real CPU run allocates and frees

The program is the plainest there is: `out = model(input_ids, labels=labels); out.loss.backward()`, with `out` held
until the next micro-step has its own, no optimizer, and no cache of keys and values (as the Trainer asks for none).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function

from oomph.step.ops import Kind, Phase, Step
from oomph.step.trace.eager.program import recording
from oomph.step.trace.fakes import on_fakes

logging.getLogger("transformers").setLevel(logging.ERROR)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

# What a family needs beside the common numbers; see `_config` for those.
_MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"pad_token_id": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "vit": {"image_size": 32, "patch_size": 4, "num_labels": 10},
}  # fmt: skip
_CLASSES = {
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}
_OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 56)
_DTYPE = "torch_dtype" if _OLD else "dtype"  # what from_config calls the weights' type
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Hf:
    """A model by its transformers `model_type` and a few numbers. `more` goes to the config as it is."""

    family: str
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # width / heads
    ffn: int = 128
    vocab: int = 256
    batch: int = 2
    tokens: int = 64
    tie: bool | None = None  # as the family does by default
    dropout: float = 0.0
    checkpoint: bool = False  # every block's activations are computed again
    attention: str | None = None  # transformers' own: "sdpa", "eager"; by default what the family takes
    lora: dict[str, Any] = field(default_factory=dict)  # of peft's LoraConfig; empty: without adapters
    half_adapters: bool = False  # adapters in the base's own half precision
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The transformers config."""
        keys: dict[str, Any] = {
            "hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "intermediate_size": self.ffn, "vocab_size": self.vocab, "max_position_embeddings": self.tokens,
            "num_key_value_heads": self.kv_heads or self.heads, "head_dim": self.head_dim or self.width // self.heads,
            "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        }  # fmt: skip
        if self.family == "deepseek_v3":
            del keys["head_dim"]  # there the part of it that turns
        if self.tie is not None:
            keys["tie_word_embeddings"] = self.tie
        if self.family == "opt":
            keys |= {"ffn_dim": self.ffn, "word_embed_proj_dim": self.width}
        if self.family == "gpt2":
            keys |= {"n_inner": self.ffn}
        if self.family == "t5":
            keys |= {"d_model": self.width, "d_kv": keys["head_dim"], "d_ff": self.ffn, "num_layers": self.layers}
            keys |= {"num_heads": self.heads, "decoder_start_token_id": 0}
        found = transformers.AutoConfig.for_model(self.family, **{**keys, **_MORE.get(self.family, {}), **self.more})
        for name in vars(found):
            if "drop" in name and isinstance(getattr(found, name), float):
                setattr(found, name, self.dropout if name != "layerdrop" else 0.0)
        if self.attention:
            found._attn_implementation = self.attention
        return found

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model, in training mode; with random weights, or on fake tensors where a fake mode is active.

        Its weights are of that type. As in a model that is loaded, what is computed in float32 stays so (`inv_freq`).
        """
        kind = getattr(transformers, _CLASSES.get(self.family, "AutoModelForCausalLM"))
        made: nn.Module = kind.from_config(self.config, **{_DTYPE: dtype})
        if self.checkpoint:
            made.gradient_checkpointing_enable()
        if self.lora:
            from peft import LoraConfig, get_peft_model

            made = get_peft_model(made, LoraConfig(**self.lora), autocast_adapter_dtype=not self.half_adapters)  # type: ignore[arg-type]
        return made.train()

    def inputs(self) -> dict[str, torch.Tensor]:
        """A batch, by the names the model gives it."""
        ids = torch.ones(self.batch, self.tokens, dtype=torch.long)
        if self.family == "vit":
            size = self.config.image_size
            return {"pixel_values": torch.zeros(self.batch, 3, size, size), "labels": ids[:, 0].clone()}
        return {"input_ids": ids, "labels": ids.clone()}

    def traced(
        self, *, cuda: bool = True, precision: str = "float32", micro_steps: int = 1, attention: str = "flash"
    ) -> Step:
        """The op list of so many micro-steps, a section each.

        `precision` is "float32", "bfloat16" or "float16" for weights of that type, "autocast" for bfloat16 autocast
        over float32 weights, "loaded" for the same over weights in bfloat16; `attention` what the card's kernels are
        asked for, as in a config of oomph.
        """
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model, batch = self._prepared(lambda dtype: on_fakes(partial(self.build, dtype), mode), precision)
            batch = {name: torch.zeros_like(tensor) for name, tensor in batch.items()}
            with recording(model, cuda=cuda, attention=attention) as recorder:
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    recorder.adopt(tensor, Kind.PARAMETERS, name)
                for name, tensor in batch.items():
                    recorder.adopt(tensor, Kind.INPUTS, name)
                resident = recorder.resident()
                sections = []
                for index in range(micro_steps):
                    recorder.phase = Phase.FORWARD
                    with _autocast(precision):
                        out = model(**batch)
                    recorder.phase = Phase.BACKWARD
                    out.loss.backward()
                    sections.append(recorder.section(f"micro-step {index + 1}"))
        return Step(resident, tuple(sections))

    def profiled(self, precision: str = "float32", micro_steps: int = 1) -> list[list[int]]:
        """The same program run for real on the CPU: bytes allocated (+) and freed (-), by micro-step."""
        model, batch = self._prepared(self.build, precision)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for index in range(micro_steps):
                with record_function(f"micro-step {index + 1}"):
                    pass
                with _autocast(precision):
                    out = model(**batch)
                out.loss.backward()
            with record_function("after"):
                pass
        del out
        found: dict[str, list[int]] = {}
        section: list[int] = []
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
            if event.name() == "[memory]":
                section.append(event.nbytes())
            elif event.name().startswith("micro-step ") or event.name() == "after":
                section = found.setdefault(event.name(), [])
        return [found[f"micro-step {index + 1}"] for index in range(micro_steps)]

    def _prepared(self, build: Any, precision: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        weights = torch.bfloat16 if precision == "loaded" else _HALVES.get(precision, torch.float32)
        model, batch = build(weights), self.inputs()
        if precision in _HALVES:
            batch = {n: t.to(_HALVES[precision]) if t.is_floating_point() else t for n, t in batch.items()}
        return model, batch


@contextlib.contextmanager
def _autocast(precision: str) -> Iterator[None]:
    if precision not in ("autocast", "loaded"):
        yield
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def changes(step: Step) -> list[list[int]]:
    """Bytes allocated (+) and freed (-), in order, by section: what `Hf.profiled` returns of a real run."""
    return [
        [size for op in section.ops for size in (*(b.bytes for b in op.allocates), *(-b.bytes for b in op.frees))]
        for section in step.sections
    ]


def peak(sections: list[list[int]]) -> int:
    """The most that is allocated above what there was at first, in bytes."""
    now = most = 0
    for change in (change for section in sections for change in section):
        now += change
        most = max(most, now)
    return most
