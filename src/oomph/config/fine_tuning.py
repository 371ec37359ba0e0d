"""Configs of fine-tuning as people have them: transformers' and TRL's arguments, axolotl's and LLaMA-Factory's YAML,
peft's `adapter_config.json`. They name the same things differently; read is what memory and time depend on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from oomph.config import hugging_face
from oomph.config.layer import Layer, SourcedValue
from oomph.config.schema import ALL_BLOCKS
from oomph.errors import InputError, Problem

# What names of copies and of tuned models end in, where their base's does not.
_COPY = re.compile(r"(-unsloth|-bnb-4bit|-instruct|-chat|-it)+$", re.IGNORECASE)
_LIGER = ("use_liger_kernel", "enable_liger_kernel", "liger_fused_linear_cross_entropy")
_MODEL = ("base_model", "model_name_or_path", "base_model_name_or_path")
# Our keys and the names they go by, with values that mean the same.
_NAMES: dict[str, tuple[str, ...]] = {
    "batch_size": ("per_device_train_batch_size", "micro_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "block_size": ("sequence_len", "cutoff_len", "max_length", "max_seq_length"),
    "max_iters": ("max_steps",),
    "learning_rate": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "grad_clip": ("max_grad_norm",),
    "warmup_iters": ("warmup_steps",),
    "lora_rank": ("lora_r", "lora_rank", "r"),
    "lora_alpha": ("lora_alpha",),
    "lora_dropout": ("lora_dropout",),
    "compile": ("torch_compile",),
    "allow_tf32": ("tf32",),
    "seed": ("seed",),
}
_PROOF = {"adapter", "finetuning_type", "peft_type", "use_peft", *_MODEL, *_NAMES["batch_size"]}
_OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit",
    "paged_adamw_32bit": "adamw", "adafactor": "adafactor", "sgd": "sgd", "muon": "muon",
}  # fmt: skip
_METHODS = {"true": "lora", "false": "full", "lora": "lora", "qlora": "qlora", "full": "full"}
_LOOPS = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}
# What changes memory or time and is not described, by how a key begins.
_NOT_COUNTED = {
    "liger": "Liger's kernels but for its loss", "use_liger": "Liger's kernels but for its loss",
    "enable_liger": "Liger's kernels but for its loss",
    "unsloth": "Unsloth's kernels", "use_unsloth": "Unsloth's kernels", "deepspeed": "DeepSpeed", "fsdp": "FSDP",
    "lora_modules_to_save": "modules that are trained whole", "modules_to_save": "modules that are trained whole",
    "additional_target": "modules that are trained whole", "use_galore": "GaLore", "use_apollo": "APOLLO",
    "use_badam": "BAdam", "neftune": "noise on the embeddings", "activation_offloading": "activations on the host",
    "optim_target_modules": "optimizers of some modules alone", "cut_cross_entropy": "a fused loss",
}  # fmt: skip


def is_config(content: Mapping[str, object]) -> bool:
    """Whether a mapping is a config of fine-tuning."""
    return not _PROOF.isdisjoint(content)


Found = tuple[str, Mapping[str, object]]  # where a model's config was found, and the config


def read(
    content: Mapping[str, Any], place: Callable[[str], str], find: Callable[[str], Found | None], model_known: bool
) -> Layer:
    """The layer of a config of fine-tuning. `place` says where a name stands; `find` looks for a model by its name;
    `model_known`: another file has told it."""
    reader = _Reader({str(name): value for name, value in content.items()}, place)
    reader.model(find, model_known)
    for key, names in _NAMES.items():
        reader.copy(key, names)
    reader.adapters()
    reader.base()
    reader.precision()
    reader.program()
    return reader.layer


class _Reader:
    """A config being read."""

    def __init__(self, content: dict[str, Any], place: Callable[[str], str]) -> None:
        self.content, self.place = content, place
        self.layer = Layer(program="hf")

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of these names that has a value, and the value; ("", None) where none has."""
        return next(((name, self.content[name]) for name in names if self.content.get(name) is not None), ("", None))

    def put(self, key: str, value: object, name: str) -> None:
        self.layer.values[key] = SourcedValue(value, self.place(name))

    def copy(self, key: str, names: tuple[str, ...]) -> None:
        name, value = self.first(*names)
        if name and value != "auto" and not (key == "max_iters" and value in (-1, 0)):  # epochs count then
            self.put(key, _number(value), name)

    def model(self, find: Callable[[str], Found | None], known: bool) -> None:
        """The model that is named. Raises `InputError` where it is not known and no other file has told it."""
        name, value = self.first(*_MODEL)
        found = self._found(name, value, find) if isinstance(value, str) else None
        if found is not None:
            where, content = found
            read = hugging_face.read(content, f"{self.place(name)}: {where}")
            self.layer.values |= read.values
            self.layer.notes += read.notes
            self.layer.problems += read.problems
        elif not known:
            what = "the model is not known here" if name else "no model is named"
            near = hugging_face.nearest_name(value) if isinstance(value, str) else None
            allowed = "the model's config.json, its folder or its name before this file"
            shown = repr(value)[:60] if name else None
            raise InputError(Problem(self.place(name or _MODEL[0]), what, shown, allowed, nearest=near))

    def _found(self, name: str, value: str, find: Callable[[str], Found | None]) -> Found | None:
        """The config of a model, or of the one that it is a copy of or was tuned from, as its name tells."""
        if (found := find(value)) is not None:
            return found
        base = _COPY.sub("", value.rpartition("/")[2])
        if (found := find(base)) is not None:
            self.layer.notes.append(f"{self.place(name)}: {value} is taken to have the shape of {base}")
        return found

    def adapters(self) -> None:
        """The method, and which modules get adapters."""
        name, value = self.first("adapter", "finetuning_type", "peft_type", "use_peft")
        method = _METHODS.get(str(value).lower(), "") if name else "full"
        if not method:
            allowed = "lora, qlora or full"
            self.layer.problems.append(
                Problem(self.place(name), "a method that is not described", repr(value), allowed)
            )
            return
        if method == "full":
            return
        if any(self.content.get(each) is True for each in ("use_dora", "peft_use_dora", "lora_use_dora")):
            method = "dora"
        self.put("method", method, name)
        name, value = self.first("lora_target_modules", "lora_target", "target_modules", "lora_target_linear")
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if value in (True, "all", "all-linear"):
            value = "all-linear"
        if isinstance(value, str):
            self.put("lora_targets", value, name)

    def base(self) -> None:
        """How the base is stored."""
        name, bits = self.first("quantization_bit")
        for each, count in (("load_in_4bit", 4), ("load_in_8bit", 8)):
            if self.content.get(each) is True:
                name, bits = each, count
        if bits == 8:
            self.put("quantization", "int8", name)
        elif bits == 4:
            kind, value = self.first("bnb_4bit_quant_type", "quantization_type")
            self.put("quantization", value if isinstance(value, str) else "nf4", kind or name)
        double, value = self.first("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization")
        if double:
            self.put("double_quantization", value, double)

    def precision(self) -> None:
        for name, dtype in (
            ("bf16", "bfloat16"),
            ("bfloat16", "bfloat16"),
            ("fp16", "float16"),
            ("pure_bf16", "bfloat16"),
        ):
            if self.content.get(name) in (True, "auto", "full"):
                self.put("dtype", dtype, name)
                if name in ("bfloat16", "pure_bf16"):
                    self.put("autocast", False, name)
                return
        if self.content.get("bf16") is False or self.content.get("fp16") is False:
            self.put("dtype", "float32", "bf16" if "bf16" in self.content else "fp16")

    def program(self) -> None:
        """The optimizer, checkpointing, and what is not counted."""
        name, value = self.first("optim", "optimizer")
        if isinstance(value, str):
            if value in _OPTIMIZERS:
                self.put("optimizer", _OPTIMIZERS[value], name)
                if value in _LOOPS:
                    self.put("optimizer_loop", _LOOPS[value], name)
            else:
                allowed = ", ".join(_OPTIMIZERS)
                problem = Problem(self.place(name), "an optimizer that is not described", repr(value)[:60], allowed)
                self.layer.problems.append(problem)
        name, value = self.first(*_LIGER)
        if value is True:
            self.put("fused_loss", "liger", name)
        by_default = (
            "finetuning_type" in self.content and self.content.get("disable_gradient_checkpointing") is not True
        )
        name, value = self.first("gradient_checkpointing")
        if value or (not name and by_default):  # LLaMA-Factory has it on
            self.put("checkpoint_layers", ALL_BLOCKS, name or "finetuning_type")
        for key, given in self.content.items():
            what = next((each for start, each in _NOT_COUNTED.items() if key.startswith(start)), "")
            if what and given not in (None, False, "", [], {}):
                self.layer.notes.append(f"{self.place(key)}: {key} is not in the figures: {what}")


def _number(value: object) -> object:
    """The value, as a number where YAML took one for text: 2e-5."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
