"""Fine-tuning configs of common programs: transformers' and TRL's arguments, axolotl's and LLaMA-Factory's YAML,
peft's `adapter_config.json`. They name the same things differently; only what memory and time depend on is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from oomph.config.layer import EACH_DEVICES, Layer, SourcedValue
from oomph.config.programs import LIGER_FAMILIES, LLAMAS
from oomph.config.reading import hugging_face
from oomph.config.schema import ALL_BLOCKS, DTYPES
from oomph.errors import InputError, Problem

# Suffixes that copies and tuned models add to the name of their base.
_COPY = re.compile(
    r"(-unsloth|-bnb-4bit|-instruct|-chat|-it|-base|-gptq|-awq|-fp16|-bf16|-int4|-int8|-[0-9]{4})+$", re.IGNORECASE
)
_OWNER = re.compile(r"^meta-", re.IGNORECASE)  # prefix of Llama's names before 3.1
_LIGER = ("use_liger_kernel", "enable_liger_kernel")  # all of Liger's kernels for a family
_LIGER_PARTS = ("liger_rope", "liger_rms_norm", "liger_glu_activation")  # axolotl's, beside the keys of its losses
_MODEL = ("base_model", "model_name_or_path", "base_model_name_or_path", "model_name")
# Our keys and other programs' names for them; the values mean the same.
_NAMES: dict[str, tuple[str, ...]] = {
    "batch_size": ("per_device_train_batch_size", "micro_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "block_size": ("sequence_len", "cutoff_len", "max_length", "max_seq_length"),
    "max_iters": ("max_steps",),
    "num_train_epochs": ("num_train_epochs", "num_epochs"),
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
# Arguments that only TRL's SFTTrainer has.
_OF_TRL = {
    "use_peft", "dataset_text_field", "completion_only_loss", "assistant_only_loss", "padding_free", "packing_strategy",
    "max_seq_length",
}  # fmt: skip
_OF_UNSLOTH = {"use_gradient_checkpointing", "fast_inference", "max_lora_rank"}  # FastLanguageModel's arguments
_OF_AXOLOTL = ("sequence_len", "micro_batch_size")
_OF_OTHERS = {"adapter", "sequence_len", "finetuning_type", "cutoff_len"}  # axolotl's and LLaMA-Factory's
_PROOF = {"adapter", "finetuning_type", "peft_type", "use_peft", *_MODEL, *_NAMES["batch_size"], *_OF_UNSLOTH}
# Keys and values that choose attention, and the kernel that they mean.
_ATTENTIONS = {
    "flash_attention_2": "flash2", "fa2": "flash2", "kernels-community/flash-attn2": "flash2",
    "kernels-community/flash-attn": "flash2", "sdpa": "flash", "eager": "eager", "disabled": "eager",
}  # fmt: skip
_ATTENTION_SWITCHES = {"flash_attention": "flash2", "sdp_attention": "flash", "eager_attention": "eager"}  # axolotl's
_SUPERVISED = ("sft", "pt", "pretrain")  # LLaMA-Factory's stages that are described
_OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "paged_adamw8bit",
    "paged_adamw_32bit": "paged_adamw", "paged_adamw": "paged_adamw", "adafactor": "adafactor",
    "sgd": "sgd", "muon": "muon",
}  # fmt: skip
_METHODS = {"true": "lora", "false": "full", "lora": "lora", "qlora": "qlora", "full": "full"}
_LOOPS = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}
# Prefixes of keys that change memory or time and are not modelled.
_NOT_COUNTED = {
    "liger_layer_norm": "Liger's layer norm", "liger_cross_entropy": "Liger's loss of all logits",
    "unsloth": "Unsloth's kernels", "deepspeed": "DeepSpeed (unless its JSON file is given beside this one)",
    "lora_mlp_kernel": "axolotl's fused adapters", "lora_qkv_kernel": "axolotl's fused adapters",
    "lora_o_kernel": "axolotl's fused adapters", "xformers_attention": "xformers' attention",
    "flex_attention": "flex attention", "group_by_length": "batches of samples of like length; the peak is the longest",
    "relora": "ReLoRA", "use_pissa": "PiSSA's start", "pissa": "PiSSA's start", "freeze_": "frozen layers",
    "unfrozen_parameters": "frozen parameters", "context_parallel_size": "context parallelism",
    "sequence_parallel_degree": "sequence parallelism", "tensor_parallel_size": "tensor parallelism",
    "quantize_moe_experts": "quantized experts", "torch_empty_cache_steps": "emptied caches",
    "use_galore": "GaLore", "use_apollo": "APOLLO", "use_muon": "Muon", "use_adam_mini": "Adam-mini",
    "mixture_of_depths": "mixture of depths", "fp8": "float8", "qat": "quantization-aware training",
    "use_badam": "BAdam", "neftune": "noise on the embeddings",
    "activation_offloading": "activations on the host",
    "optim_target_modules": "optimizers of some modules alone",
}  # fmt: skip


def is_config(content: Mapping[str, object]) -> bool:
    """Whether a mapping is a fine-tuning config."""
    return not _PROOF.isdisjoint(content)


Found = tuple[str, Mapping[str, object]]  # where a model's config was found, and the config


def read(
    content: Mapping[str, Any], place: Callable[[str], str], find: Callable[[str], Found | None], model_known: bool
) -> Layer:
    """The layer of a fine-tuning config. `place` gives the location of a name; `find` looks for a model by its name;
    `model_known`: another file has set the model."""
    reader = _Reader({str(name): value for name, value in content.items()}, place)
    reader.model(find, model_known)
    for key, names in _NAMES.items():
        reader.copy(key, names)
    reader.adapters()
    reader.base()
    reader.precision()
    reader.rows()
    reader.program()
    return reader.layer


def base_name(model: str) -> str:
    """The last part of a model's name, without the suffixes of copies and tuned models."""
    return _COPY.sub("", model.rpartition("/")[2])


class _Reader:
    """A config being read."""

    def __init__(self, content: dict[str, Any], place: Callable[[str], str]) -> None:
        given = content.get("model_init_kwargs")  # TRL's, for from_pretrained
        content = {**(given if isinstance(given, dict) else {}), **content}
        self.content, self.place = content, place
        trl = not _OF_TRL.isdisjoint(content) and _OF_OTHERS.isdisjoint(content)
        unsloth = not _OF_UNSLOTH.isdisjoint(content) or content.get("use_unsloth") is True
        self.layer = Layer(program="unsloth" if unsloth else "trl" if trl else "hf")

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of these names that has a value, and the value; ("", None) if none has."""
        return next(((name, self.content[name]) for name in names if self.content.get(name) is not None), ("", None))

    def put(self, key: str, value: object, name: str) -> None:
        self.layer.values[key] = SourcedValue(value, self.place(name))

    def copy(self, key: str, names: tuple[str, ...]) -> None:
        name, value = self.first(*names)
        if name and value != "auto" and not (key == "max_iters" and value in (-1, 0)):  # epochs decide then
            self.put(key, _number(value), name)
            if key == "gradient_accumulation_steps":
                said = self.layer.values[key]
                self.layer.values[key] = said._replace(where=f"{said.where}{EACH_DEVICES}")

    def model(self, find: Callable[[str], Found | None], known: bool) -> None:
        """Set the named model. Raises `InputError` if it is unknown and no other file has set a model."""
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
        """The config of a model, or of the base that it was copied or tuned from, judging by its name."""
        if (found := find(value)) is not None:
            return found
        base = base_name(value)
        for each in dict.fromkeys((base, _OWNER.sub("", base), f"{base}-hf")):
            if (found := find(each)) is not None:
                self.layer.notes.append(f"{self.place(name)}: {value} is taken to have the shape of {each}")
                return found
        return None

    def adapters(self) -> None:
        """Set the method, and which modules get adapters."""
        name, value = self.first("adapter", "finetuning_type", "peft_type", "use_peft")
        method = _METHODS.get(str(value).lower(), "") if name else "full"
        if not method:
            allowed = "lora, qlora or full"
            self.layer.problems.append(
                Problem(self.place(name), "a method that is not described", repr(value), allowed)
            )
            return
        if not name and self.layer.program == "unsloth" and self.content.get("full_finetuning") is not True:
            name = next((each for each in ("load_in_4bit", "r", *_OF_UNSLOTH) if each in self.content), "")
            method = "lora" if self.content.get("load_in_4bit") is False else "qlora"
        if method == "full":
            if self.layer.program == "unsloth":
                self.put("method", "full", "full_finetuning")
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
        name, value = self.first("lora_modules_to_save", "modules_to_save", "additional_target")
        if value:
            self.put("modules_to_save", ",".join(map(str, value)) if isinstance(value, list) else value, name)

    def base(self) -> None:
        """Set how the base is stored."""
        name, bits = self.first("quantization_bit")
        for each, count in (("load_in_4bit", 4), ("load_in_8bit", 8)):
            if self.content.get(each) is True:
                name, bits = each, count
        model, value = self.first(*_MODEL)
        if not bits and "bnb-4bit" in str(value).lower():  # stored quantized, whichever program loads it
            name, bits = model, 4
            self.put("double_quantization", True, name)
        if bits == 8:
            self.put("quantization", "int8", name)
        elif bits == 4:
            kind, value = self.first("bnb_4bit_quant_type", "quantization_type")
            self.put("quantization", value if isinstance(value, str) else "nf4", kind or name)
        if self.content.get("gptq") is True or "-gptq" in str(self.first(*_MODEL)[1]).lower():
            self.put("quantization", "gptq", "gptq" if "gptq" in self.content else self.first(*_MODEL)[0])
        double, value = self.first("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization")
        if double:
            self.put("double_quantization", value, double)
        own = next((each for each in ("adapter", "finetuning_type") if each in self.content), "")
        if own and bits:
            # axolotl (0.19, loaders/model.py) and LLaMA-Factory (0.9.5, model_args.py) quantize scales unless set
            # otherwise; both leave embedding, head and norms in the base's dtype, axolotl by casting them back.
            if not double:
                self.put("double_quantization", True, own)
            norms = "norms" if self.content.get("upcast_layernorm") is True else "off"
            self.put("upcast", norms, "upcast_layernorm" if norms == "norms" else own)

    def precision(self) -> None:
        """Set the dtypes of computing and of loaded weights. axolotl (0.19, utils/config) loads them in `bf16`'s; a
        fully trained model is then all of that dtype, as it is if torch_dtype says so."""
        self._computed()
        name, value = self.first("torch_dtype", "dtype", "model_dtype")
        loaded = str(value).rpartition(".")[2] if name else ""
        computed = self.layer.values.get("dtype")
        own = next((each for each in _OF_AXOLOTL if each in self.content), "")
        if own and not loaded and computed is not None:
            name, loaded = own, str(computed.value)
        if loaded not in DTYPES:
            return
        if "method" in self.layer.values:
            self.put("base_dtype", loaded, name)
        elif loaded != "float32" and computed is not None and computed.value == loaded:
            self.put("autocast", False, name)

    def _computed(self) -> None:
        for name, dtype in (
            ("bf16", "bfloat16"),
            ("bfloat16", "bfloat16"),
            ("fp16", "float16"),
            ("pure_bf16", "bfloat16"),
            ("float16", "float16"),
        ):
            if self.content.get(name) in (True, "auto", "full"):
                self.put("dtype", dtype, name)
                if name in ("bfloat16", "pure_bf16", "float16"):
                    self.put("autocast", False, name)
                return
        if self.content.get("bf16") is False or self.content.get("fp16") is False:
            self.put("dtype", "float32", "bf16" if "bf16" in self.content else "fp16")

    def rows(self) -> None:
        """Set how attention is computed, and which samples share a row."""
        family = self.layer.values.get("model_type")
        described = family is None or family.value in LLAMAS
        name, value = self.first("attn_implementation", "flash_attn")
        kernel = _ATTENTIONS.get(str(value), "")
        if not kernel:
            on = next((each for each in _ATTENTION_SWITCHES if self.content.get(each) is True), "")
            name, kernel = on or name, _ATTENTION_SWITCHES.get(on, "")
        if name and not kernel and value not in (None, False, "auto"):
            self.layer.notes.append(f"{self.place(name)}: {name} = {value!r} is not described: planned with sdpa")
        wanted = ("flash2",) if self.layer.program == "unsloth" else ("flash", "flash2", "eager")
        if kernel in wanted and (described or kernel == "flash"):
            self.put("attention", kernel, name)
        self._packing(described)

    def _packing(self, described: bool) -> None:
        """Set how samples are packed. In LLaMA-Factory's rows, unless "neat", and in TRL's "wrapped" ones samples
        attend to each other: rows like any other."""
        packs = ("sample_packing", "neat_packing", "packing")
        name = next((each for each in packs if self.content.get(each) is True), "")
        free = "padding_free" if self.content.get("padding_free") is True else ""
        mixed = name == "packing" and "finetuning_type" in self.content
        if name and (mixed or self.content.get("packing_strategy") == "wrapped"):
            self.layer.notes.append(
                f"{self.place(name)}: samples in a row see each other: planned as rows of one length, all full"
            )
        elif (name or free) and described:
            self.put("packing", "packed" if name else "padding_free", name or free)
        elif name or free:
            self.layer.notes.append(f"{self.place(name or free)}: {name or free} is not in the figures for this model")
        elif "finetuning_type" in self.content and self.layer.program == "unsloth":
            self.put("packing", "off", "finetuning_type")  # LLaMA-Factory has a trainer of its own

    def kernels(self) -> None:
        """Set Liger's kernels, and fused losses."""
        family = self.layer.values.get("model_type")
        described = family is None or family.value in LIGER_FAMILIES
        parts = [name for name in _LIGER_PARTS if self.content.get(name) is True]
        name = next((name for name in _LIGER if self.content.get(name) is True), parts[0] if parts else "")
        whole = name in _LIGER or len(parts) == len(_LIGER_PARTS)
        if whole and described:
            self.put("liger_kernel", True, name)
        elif name:
            self.layer.notes.append(
                f"{self.place(name)}: {name} is not in the figures: Liger's kernels but for its loss"
            )
        losses = {"liger_fused_linear_cross_entropy": "liger", "cut_cross_entropy": "cce"}
        fused = next((each for each in losses if self.content.get(each) is True), "")
        plugged = any(str(each).endswith("CutCrossEntropyPlugin") for each in self.content.get("plugins") or ())
        if fused:
            self.put("fused_loss", losses[fused], fused)
        elif plugged and self.content.get("cut_cross_entropy") is not False:  # on by default in axolotl's plugin
            self.put("fused_loss", "cce", "plugins")
        elif name in _LIGER and not described and self.layer.program != "trl":
            self.put("fused_loss", "liger", name)
        elif parts:
            self.put("fused_loss", "off", parts[0])  # axolotl's has a key of its own

    def _sharding(self) -> None:
        """Set FSDP: version 1 unless the file says otherwise."""
        name = next((each for each in ("fsdp", "fsdp_config", "fsdp_version") if self.content.get(each)), "")
        if not name or self.layer.program == "unsloth":
            return
        inner = self.content.get("fsdp_config")
        own = inner if isinstance(inner, dict) else {}
        version = self.content.get("fsdp_version") or own.get("fsdp_version") or own.get("version") or 1
        self.put("parallel", "fsdp" if str(version) == "2" else "fsdp1", name)
        told = str(self.content.get("fsdp"))
        if "offload" in told or own.get("fsdp_offload_params") is True or own.get("offload_params") is True:
            self.put("cpu_offload", "all", name)
        told += str(own.get("fsdp_sharding_strategy", "")) + str(own.get("sharding_strategy", ""))
        if "shard_grad_op" in told.lower():
            self.put("reshard_after_forward", "false", name)
        if "hybrid" in told.lower():
            self.layer.notes.append(
                f"{self.place(name)}: hybrid sharding is planned as full_shard; --shard_size tells a copy's cards"
            )

    def _purpose(self) -> None:
        """Refuse anything but supervised training: preference learning and reward models have other steps."""
        name, value = self.first("rl", "stage", "rlhf_type")
        if name and value not in _SUPERVISED:
            what, allowed = f"training by {str(value)[:30]} is not described", "supervised fine-tuning alone"
            self.layer.problems.append(Problem(self.place(name), what, allowed=allowed))

    def program(self) -> None:
        """Set the optimizer and checkpointing, and note what is not modelled."""
        self._purpose()
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
        self.kernels()
        self._sharding()
        by_default = (
            "finetuning_type" in self.content and self.content.get("disable_gradient_checkpointing") is not True
        )
        name, value = self.first("gradient_checkpointing", "use_gradient_checkpointing")
        if value in ("unsloth", "offload", "offload_disk") and self.layer.program != "unsloth":
            self.layer.notes.append(f"{self.place(name)}: {name} = {value}: planned with inputs of blocks on the card")
        if value or (not name and by_default):  # on by default in LLaMA-Factory
            self.put("checkpoint_layers", ALL_BLOCKS, name or "finetuning_type")
        elif name:
            self.put("checkpoint_layers", 0, name)
        for key, given in self.content.items():
            what = next((each for start, each in _NOT_COUNTED.items() if key.startswith(start)), "")
            if what and given not in (None, False, "", [], {}):
                self.layer.notes.append(f"{self.place(key)}: {key} is not in the figures: {what}")


def _number(value: object) -> object:
    """The value, as a number if YAML read one as text: 2e-5."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
