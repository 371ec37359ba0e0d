"""Methods of fine-tuning: which layers get adapters and which dtypes there are by default, and what is refused."""

from __future__ import annotations

from oomph.config.programs import MIXTURES, OWN_CLASSES, TRANSFORMERS, experts_are_modules, release
from oomph.config.schema import METHODS, TrainConfig
from oomph.config.values import Given, show
from oomph.errors import Problem

Decision = tuple[str | int | float | bool, str]  # a value and its reason
BITSANDBYTES = ("nf4", "fp4", "int8")  # what transformers calls "loaded in 4 or 8 bits"
# peft's own targets by family (0.21, utils/constants.py); the other families have none there.
_ATTENTION = "q_proj,k_proj,v_proj,o_proj"
PEFT_TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value"} | dict.fromkeys(
    ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "opt"), "q_proj,v_proj"
)
UNSLOTH_TARGETS = f"{_ATTENTION},gate_proj,up_proj,down_proj"
# Default targets in the programs' own names: of torchtune's LoRA configs, and of litgpt's finetune_lora.
OWN_TARGETS = {"torchtune": "q_proj,v_proj,output_proj,w1,w2,w3", "litgpt": "query,value"}
TRL_UNPREPARED_SINCE = (1, 0)  # of TRL: SFTTrainer leaves a quantized model as it was loaded; before, peft prepared it
_OF_EXPERTS = ("all-linear", "experts", "gate", "gate_up_proj", "down_proj", "up_proj", "gate_proj")
# How programs with their own model classes quantize a base, and their methods of fine-tuning.
_OWN_QUANTIZATIONS = {"torchtune": ("off", "nf4"), "litgpt": ("off", "nf4", "fp4", "int8"), "oomph": ("off",)}
_OWN_METHODS = {"torchtune": METHODS, "litgpt": ("full", "lora", "qlora"), "oomph": ("full", "lora")}
_OOMPH_TARGETS = {"all-linear", "c_attn", "c_proj", "c_fc", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
# What oomph train's adapters go with.
_OOMPH_ADAPTERS: dict[str, tuple[object, ...]] = {
    "optimizer": ("sgd", "adafactor", "adamw8bit", "adamw"), "adapter_dtype": (None, "float32"),
    "modules_to_save": (None,), "upcast": (None, "off"), "parallel": (None, "auto", "none", "ddp"),
}  # fmt: skip


def is_target(module: str, targets: str | None) -> bool:
    """Whether a module's name ends with one of these, as peft compares them."""
    return any(module == name or module.endswith(f".{name}") for name in listed(targets))


def listed(text: str | None) -> list[str]:
    """The names in a comma-separated text."""
    return [name for part in (text or "").split(",") if (name := part.strip())]


def adapter_rules(config: TrainConfig, dtype: str) -> dict[str, Decision]:
    """The defaults of a method of fine-tuning for unset keys."""
    if config.method == "full":
        return {}
    if config.trainer in OWN_CLASSES:
        return _own_adapter_rules(config, dtype)
    family, qlora = config.model_type, config.method == "qlora"
    assumed = _ATTENTION if family in MIXTURES else "all-linear"
    targets: Decision = (assumed, f"assumed: peft has no targets of its own for {family}")
    if family in PEFT_TARGETS:
        targets = (PEFT_TARGETS[family], f"peft's own for {family}")
    own: dict[str, Decision] = {}
    if config.trainer == "unsloth":
        targets = (UNSLOTH_TARGETS, "get_peft_model's own")
    if config.trainer == "oomph":
        own["base_dtype"] = (dtype, "frozen weights need no more precision than the products they are in")
    if config.trainer == "trl":
        own["base_dtype"] = (
            "float32",
            "SFTTrainer loads a model that it is given by name so, unless it is told a dtype",
        )
    return own | {
        "lora_targets": targets,
        "adapter_dtype": _adapter_dtype(config),
        "quantization": ("nf4", "QLoRA's") if qlora else ("off", "the base is not quantized"),
        "upcast": _upcast(config),
        "double_quantization": (qlora, "QLoRA's" if qlora else "off unless told, as in bitsandbytes"),
    }


def _own_adapter_rules(config: TrainConfig, dtype: str) -> dict[str, Decision]:
    """The same for a program with its own adapters: they have the weights' dtype."""
    qlora, torchtune = config.method == "qlora", config.trainer == "torchtune"
    weights = "float32" if config.autocast else dtype
    how = "torchtune's NF4Tensor is quantized twice" if torchtune else "litgpt's bnb.nf4-dq"
    return {
        "lora_targets": (OWN_TARGETS[config.trainer], f"{config.trainer}'s own"),
        "adapter_dtype": (weights, f"{config.trainer} keeps adapters in the weights' dtype"),
        "base_dtype": (weights, f"{config.trainer} loads the model in it"),
        "quantization": ("nf4", "QLoRA's") if qlora else ("off", "the base is not quantized"),
        "upcast": ("off", f"{config.trainer} casts no frozen weights"),
        "double_quantization": (qlora, how if qlora else "off unless told"),
    }


def quantization_of(config: TrainConfig) -> str:
    """The quantization of the base: the set one, else the method's."""
    return config.quantization or ("nf4" if config.method == "qlora" else "off")


def _adapter_dtype(config: TrainConfig) -> Decision:
    if config.trainer == "trl" and quantization_of(config) in BITSANDBYTES:
        return "bfloat16", "SFTTrainer casts adapters on a quantized model to bfloat16"
    if config.trainer == "unsloth":
        return "float32", "Unsloth brings adapters to float32"
    if config.deepspeed != "off" and config.dtype is not None:
        return config.dtype, "DeepSpeed brings the whole model to dtype"
    return "float32", "peft keeps adapters in float32, whatever the base is"


def _upcast(config: TrainConfig) -> Decision:
    """Which layers of a quantized base, besides its linear ones, are cast to float32."""
    quantization = quantization_of(config)
    if config.trainer == "unsloth":
        return "off", "Unsloth casts no frozen weights"
    if config.parallel == "fsdp1":
        return "off", "FSDP1 joins a block's weights in one tensor of one dtype"
    if quantization in ("off", "gptq"):
        return "off", "peft casts weights beside quantized ones alone, and none beside GPTQ's"
    if config.fast_kernels:
        return "off", "fms-acceleration leaves a quantized model as it was loaded"
    if config.trainer == "trl" and release(config.trl_version) >= TRL_UNPREPARED_SINCE:
        return "off", "SFTTrainer leaves a quantized model as it was loaded"
    if config.trainer == "trl" and quantization != "int8":
        return "norms", "peft's prepare_model_for_kbit_training casts all, and SFTTrainer all but norms back"
    return "all", "peft's prepare_model_for_kbit_training casts all"


def adapter_problems(given: Given) -> list[Problem]:
    """Problems with a method of fine-tuning, and with its keys when no method is set."""
    method, quantization = given.get("method"), given.get("quantization")
    if method == "full":
        if quantization not in (None, "off"):
            what, allowed = "quantized weights cannot be trained themselves", "method = 'qlora' or 'lora'"
            return [given.problem("quantization", what, f"method = 'full', quantization = {quantization!r}", allowed)]
        if given.get("modules_to_save"):
            what, allowed = "all modules are trained whole", "method = 'lora', or no modules_to_save"
            return [given.problem("modules_to_save", what, "method = 'full'", allowed)]
        return []
    if given.get("trainer") not in (*TRANSFORMERS, *OWN_CLASSES, "oomph"):
        allowed = "trainer = 'oomph', 'hf', 'trl', 'torch', 'torchtune' or 'litgpt'"
        what = "this program is not planned with adapters"
        return [given.problem("method", what, f"trainer = {given.get('trainer')!r}", allowed)]
    if problems := _own_problems(given):
        return problems
    if given.get("compile") and (given.trainer != "oomph" or not given.said["compile"].where.startswith("default")):
        what, allowed = "compiled models with adapters are not described", "compile = False"
        return [given.problem("compile", what, f"method = {method!r}", allowed)]
    if given.get("model_type") in MIXTURES and quantization in ("gptq", "awq"):
        what, allowed = "experts in this layout are not described", "quantization = 'nf4', 'fp4' or 'int8'"
        return [given.problem("quantization", what, f"{quantization!r} with {given.get('model_type')}", allowed)]
    if method == "qlora" and quantization == "off":
        what, allowed = "qlora quantizes its base", "quantization = 'nf4', or method = 'lora'"
        return [given.problem("quantization", what, "off", allowed)]
    if method == "dora" and quantization not in (None, "off"):
        what, allowed = "DoRA on a quantized base is not described", "method = 'qlora', or quantization = 'off'"
        return [given.problem("quantization", what, str(quantization), allowed)]
    if method == "dora" and given.get("model_type") == "gpt2":
        what, allowed = "DoRA on GPT-2's Conv1D layers is not described", "method = 'lora'"
        return [given.problem("method", what, "model_type = 'gpt2'", allowed)]
    if given.get("modules_to_save") and given.get("tie_weights"):
        what, allowed = "modules trained whole are not described for models with a tied head", "tie_weights = False"
        return [given.problem("modules_to_save", what, show(given.valid["modules_to_save"]), allowed)]
    targets = given.get("lora_targets")
    if given.get("fast_kernels") and targets == "all-linear" and (method == "qlora" or quantization in ("nf4", "fp4")):
        what = "fms-acceleration's fused LoRA of an MLP is not described"
        return [given.problem("lora_targets", what, show(targets), "such as q_proj,k_proj,v_proj,o_proj")]
    names = [part.strip() for part in targets.split(",")] if isinstance(targets, str) else []
    family, version = given.get("model_type"), str(given.get("transformers_version"))
    grouped = family in MIXTURES and not experts_are_modules(str(family), version)
    if grouped and not set(names).isdisjoint(_OF_EXPERTS):
        what = f"adapters of experts are not described for transformers {version}"
        allowed = "such as q_proj,k_proj,v_proj,o_proj; or transformers_version = '4.57', whose experts are modules"
        return [given.problem("lora_targets", what, show(targets), allowed)]
    return []


def _own_problems(given: Given) -> list[Problem]:
    """Problems with adapters in programs that have their own."""
    trainer, method, quantization = given.trainer, given.get("method"), given.get("quantization")
    if method not in _OWN_METHODS.get(trainer, (method,)):
        return [given.problem("method", f"{trainer} has no {method}", str(method), ", ".join(_OWN_METHODS[trainer]))]
    if quantization is not None and quantization not in _OWN_QUANTIZATIONS.get(trainer, (quantization,)):
        allowed = ", ".join(_OWN_QUANTIZATIONS[trainer])
        return [given.problem("quantization", f"{trainer} does not quantize so", str(quantization), allowed)]
    if trainer in OWN_CLASSES and given.get("upcast") not in (None, "off"):
        return [given.problem("upcast", f"{trainer} casts no frozen weights", str(given.valid["upcast"]), "off")]
    targets = given.get("lora_targets")
    if trainer == "oomph" and isinstance(targets, str) and not set(listed(targets)) <= _OOMPH_TARGETS:
        what, allowed = "oomph train has adapters of the blocks' layers alone", ", ".join(sorted(_OOMPH_TARGETS))
        return [given.problem("lora_targets", what, show(targets), allowed)]
    if trainer == "oomph":
        return [
            given.problem(key, f"oomph train has no adapters with this {key}", show(given.get(key)), show(allowed[-1]))
            for key, allowed in _OOMPH_ADAPTERS.items()
            if given.get(key) not in allowed
        ]
    return []
