"""torchtune's recipe configs (0.6.1) and litgpt's config_hub (0.5.13), read as data: nothing in them is imported.

Only what memory and time depend on is read; a note names what changes them and is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oomph.config.layer import Layer, SourcedValue
from oomph.config.reading import hugging_face
from oomph.config.reading.fine_tuning import Found, base_name
from oomph.config.schema import ALL_BLOCKS
from oomph.errors import InputError, Problem, nearest

# torchtune's builders: the model of that shape, and the positions in its rotary cache.
TORCHTUNE_MODELS: dict[str, tuple[str, int]] = {
    "llama2_7b": ("meta-llama/Llama-2-7b-hf", 4096),
    "llama2_13b": ("meta-llama/Llama-2-13b-hf", 4096),
    "llama2_70b": ("meta-llama/Llama-2-70b-hf", 4096),
    "llama3_8b": ("meta-llama/Meta-Llama-3-8B", 8192),
    "llama3_70b": ("meta-llama/Llama-3.1-70B", 8192),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B", 131072),
    "llama3_1_70b": ("meta-llama/Llama-3.1-70B", 131072),
    "llama3_2_1b": ("meta-llama/Llama-3.2-1B", 131072),
    "llama3_2_3b": ("meta-llama/Llama-3.2-3B", 131072),
    "llama3_3_70b": ("meta-llama/Llama-3.1-70B", 131072),
    "mistral_7b": ("mistralai/Mistral-7B-v0.1", 32768),
    "qwen2_5_0_5b": ("Qwen/Qwen2.5-0.5B", 32768),
    "qwen2_5_1_5b_base": ("Qwen/Qwen2.5-1.5B", 32768),
    "qwen2_5_1_5b_instruct": ("Qwen/Qwen2.5-1.5B", 32768),
    "qwen2_5_3b": ("Qwen/Qwen2.5-3B", 32768),
    "qwen2_5_7b_base": ("Qwen/Qwen2.5-7B", 32768),
    "qwen2_5_7b_instruct": ("Qwen/Qwen2.5-7B", 32768),
    "phi3_mini": ("microsoft/Phi-3-mini-4k-instruct", 4096),
}
_OPTIMIZERS = {
    "AdamW": "adamw", "PagedAdamW": "paged_adamw", "AdamW8bit": "adamw8bit", "PagedAdamW8bit": "paged_adamw8bit",
    "SGD": "sgd", "Adafactor": "adafactor",
}  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_MLP = ("w1", "w2", "w3")
_LITGPT_TARGETS = ("query", "key", "value", "projection", "mlp", "head")
_NOT_COUNTED = {
    "enable_activation_offloading": "activations on the host",
    "packed": "the masks and kernels of packed samples (flex attention)",
}
Locate = Callable[[str], str]
Find = Callable[[str], Found | None]


def read(content: Mapping[str, Any], place: Locate, find: Find, model_known: bool) -> Layer | None:
    """The layer of a torchtune or litgpt config; None if it is neither. `place` gives the location of a name;
    `find` looks for a model by its name; `model_known`: another file has set the model."""
    model, train = content.get("model"), content.get("train")
    if isinstance(model, dict) and "_component_" in model:
        return _Torchtune(content, place, "torchtune").read(model, find, model_known)
    if isinstance(train, dict) and "checkpoint_dir" in content:
        return _Litgpt(content, place, "litgpt").read(train, find, model_known)
    return None


def preset(name: str) -> Layer | None:
    """A model by torchtune's name for it, such as llama3_1_8b or lora_llama3_1_8b; None for any other name."""
    method, model = _method_and_model(name)
    if model not in TORCHTUNE_MODELS or (found := hugging_face.find_known(TORCHTUNE_MODELS[model][0])) is None:
        return None
    recipe = _Recipe({}, lambda _: f"preset {name}", "torchtune")
    recipe.take_model("model", found)
    recipe.put("max_position_embeddings", TORCHTUNE_MODELS[model][1], "model")
    recipe.put("method", method, "model")
    recipe.layer.is_model = True
    return recipe.layer


def _method_and_model(component: str) -> tuple[str, str]:
    """The method of fine-tuning in a builder's name, and the rest of the name."""
    method = next((each for each in ("qlora", "lora") if component.startswith(f"{each}_")), "full")
    return method, component.removeprefix(f"{method}_")


class _Recipe:
    """A config being read."""

    def __init__(self, content: Mapping[str, Any], place: Locate, program: str) -> None:
        self.content, self.place = content, place
        self.layer = Layer(program=program)

    def put(self, key: str, value: object, name: str) -> None:
        """Set a key, unless the file leaves the name empty."""
        if value is not None:
            self.layer.values[key] = SourcedValue(value, self.place(name))

    def inner(self, name: str) -> Mapping[str, Any]:
        """The mapping under a name; empty if it is not a mapping."""
        found = self.content.get(name)
        return found if isinstance(found, dict) else {}

    def refuse(self, name: str, what: str, found: object, allowed: str, near: str | None = None) -> None:
        self.layer.problems.append(Problem(self.place(name), what, repr(found)[:60], allowed, nearest=near))

    def take_model(self, name: str, found: Found) -> None:
        where, content = found
        read = hugging_face.read(content, f"{self.place(name)}: {where}")
        self.layer.values |= read.values
        self.layer.notes += read.notes
        self.layer.problems += read.problems

    def optimizer(self, component: object, given: Mapping[str, Any]) -> None:
        """Set the optimizer from the last part of its class's path, and its arguments."""
        name = str(component).rpartition(".")[2]
        if name not in _OPTIMIZERS:
            self.refuse("optimizer", "an optimizer that is not described", component, ", ".join(_OPTIMIZERS))
            return
        self.put("optimizer", _OPTIMIZERS[name], "optimizer")
        if isinstance(given.get("fused"), bool):
            self.put("optimizer_loop", "fused" if given["fused"] else "foreach", "fused")
        self.put("learning_rate", _number(given.get("lr")), "lr")
        self.put("weight_decay", _number(given.get("weight_decay")), "weight_decay")


class _Torchtune(_Recipe):
    """torchtune's YAML for full_finetune_single_device and lora_finetune_single_device."""

    def read(self, model: Mapping[str, Any], find: Find, known: bool) -> Layer:
        component = str(model["_component_"]).rpartition(".")[2]
        method, name = _method_and_model(component)
        if name in TORCHTUNE_MODELS and (found := find(TORCHTUNE_MODELS[name][0])) is not None:
            self.take_model("model", found)
            self.put("max_position_embeddings", TORCHTUNE_MODELS[name][1], "model")
        elif not known:
            allowed = f"one of {', '.join(TORCHTUNE_MODELS)}; or the model's config.json before this file"
            what, near = "a model of torchtune's that is not described", nearest(name, list(TORCHTUNE_MODELS))
            raise InputError(Problem(self.place("model"), what, repr(component)[:60], allowed, nearest=near))
        if method != "full":
            self._adapters(model, method)
        self._run()
        return self.layer

    def _adapters(self, model: Mapping[str, Any], method: str) -> None:
        method = "qlora" if model.get("quantize_base") else "dora" if model.get("use_dora") else method
        self.put("method", method, "model")
        self.put("lora_rank", model.get("lora_rank"), "lora_rank")
        self.put("lora_alpha", model.get("lora_alpha"), "lora_alpha")
        self.put("lora_dropout", model.get("lora_dropout"), "lora_dropout")
        attention = model.get("lora_attn_modules")
        targets = [str(each) for each in attention] if isinstance(attention, list) else []
        targets += _MLP if model.get("apply_lora_to_mlp") else ()
        targets += ["output"] if model.get("apply_lora_to_output") else []
        self.put("lora_targets", ",".join(targets) or None, "lora_attn_modules")

    def _run(self) -> None:
        content = self.content
        for key in ("batch_size", "gradient_accumulation_steps", "compile", "seed"):
            self.put(key, content.get(key), key)
        self.put("max_iters", content.get("max_steps_per_epoch"), "max_steps_per_epoch")
        self.put("num_train_epochs", content.get("epochs"), "epochs")
        self.put("grad_clip", content.get("clip_grad_norm"), "clip_grad_norm")
        self.put("block_size", self.inner("tokenizer").get("max_seq_len"), "max_seq_len")
        if "block_size" not in self.layer.values:
            note = "max_seq_len is not set: the longest sample sets the peak (--block_size=)"
            self.layer.notes.append(f"{self.place('tokenizer')}: {note}")
        if (dtype := content.get("dtype")) is not None:
            self.put("dtype", _DTYPES.get(str(dtype), dtype), "dtype")
        checkpointing = "enable_activation_checkpointing"
        self.put("checkpoint_layers", ALL_BLOCKS if content.get(checkpointing) else 0, checkpointing)
        if (optimizer := self.inner("optimizer")).get("_component_") is not None:
            self.optimizer(optimizer["_component_"], optimizer)
        if content.get("optimizer_in_bwd"):
            self.put("zero_grad", "in_backward", "optimizer_in_bwd")
        loss = str(self.inner("loss").get("_component_", "")).rpartition(".")[2]
        if loss == "CrossEntropyLoss":
            self.put("loss_chunk", 0, "loss")
        elif loss == "LinearCrossEntropyLoss":  # newer than 0.6.1
            self.layer.notes.append(
                f"{self.place('loss')}: {loss} is planned as CEWithChunkedOutputLoss, which makes all logits at once"
            )
        elif loss not in ("", "CEWithChunkedOutputLoss"):
            allowed = "torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss"
            self.refuse("loss", "a loss that is not described", loss, allowed)
        for name, what in _NOT_COUNTED.items():
            if content.get(name) or self.inner("dataset").get(name):
                self.layer.notes.append(f"{self.place(name)}: {name} is not in the figures: {what}")


class _Litgpt(_Recipe):
    """litgpt's YAML for finetune_lora and finetune_full."""

    def read(self, train: Mapping[str, Any], find: Find, known: bool) -> Layer:
        name = "/".join(str(self.content["checkpoint_dir"]).rstrip("/").split("/")[-2:])
        base = base_name(name)
        if (found := find(name) or find(base)) is not None:
            self.take_model("checkpoint_dir", found)
        elif not known:
            allowed = "the model's config.json, its folder or its name before this file"
            near = hugging_face.nearest_name(name)
            raise InputError(
                Problem(self.place("checkpoint_dir"), "the model is not known here", name[:60], allowed, near)
            )
        if self.content.get("lora_r"):
            self._adapters()
        self._precision()
        self._train(train)
        return self.layer

    def _adapters(self) -> None:
        quantize = self.content.get("quantize")
        self.put("method", "qlora" if quantize else "lora", "quantize" if quantize else "lora_r")
        if quantize:
            kind = str(quantize).removeprefix("bnb.")
            self.put("quantization", kind.removesuffix("-dq").removesuffix("-training"), "quantize")
            self.put("double_quantization", kind.endswith("-dq"), "quantize")
        self.put("lora_rank", self.content["lora_r"], "lora_r")
        self.put("lora_alpha", self.content.get("lora_alpha"), "lora_alpha")
        self.put("lora_dropout", self.content.get("lora_dropout"), "lora_dropout")
        targets = [each for each in _LITGPT_TARGETS if self.content.get(f"lora_{each}")]
        self.put("lora_targets", ",".join(targets) or None, "lora_query")

    def _precision(self) -> None:
        precision = self.content.get("precision")
        if precision is None:
            return
        kind, _, how = str(precision).partition("-")
        self.put("dtype", {"bf16": "bfloat16", "16": "float16", "32": "float32"}.get(kind, kind), "precision")
        self.put("autocast", how == "mixed", "precision")

    def _train(self, train: Mapping[str, Any]) -> None:
        micro, whole = train.get("micro_batch_size"), train.get("global_batch_size")
        self.put("batch_size", micro, "micro_batch_size")
        if isinstance(micro, int) and isinstance(whole, int) and micro > 0:
            self.put("gradient_accumulation_steps", max(1, whole // micro), "global_batch_size")
        self.put("block_size", train.get("max_seq_length"), "max_seq_length")
        self.put("max_iters", train.get("max_steps"), "max_steps")
        self.put("num_train_epochs", train.get("epochs"), "epochs")
        self.put("warmup_iters", train.get("lr_warmup_steps"), "lr_warmup_steps")
        self.put("eval_interval", self.inner("eval").get("interval"), "interval")
        if (devices := self.content.get("devices")) not in (None, 1, "1"):
            self.put("world_size", devices, "devices")
        if (optimizer := self.inner("optimizer")).get("class_path") is not None:
            arguments = optimizer.get("init_args")
            self.optimizer(optimizer["class_path"], arguments if isinstance(arguments, dict) else {})


def _number(value: object) -> object:
    """The value, as a number if YAML read one as text: 3e-4."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
