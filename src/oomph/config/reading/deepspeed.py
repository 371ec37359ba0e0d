"""DeepSpeed's JSON config, as passed to transformers' Trainer: the ZeRO stage, its buckets, what "auto" becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oomph.config.layer import EACH_DEVICES, Layer, SourcedValue
from oomph.errors import Problem

STAGES = {1: "zero1", 2: "zero2", 3: "zero3"}
_NUMBERS = (
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance",
)  # fmt: skip
# What transformers makes of "auto", by the model's width (integrations/deepspeed.py); it knows no "auto" of the others.
_AUTO: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
_COUNTED = {"train_micro_batch_size_per_gpu": "batch_size", "gradient_clipping": "grad_clip"}


def is_config(content: Mapping[str, object]) -> bool:
    """Whether a mapping is a DeepSpeed config."""
    return isinstance(content.get("zero_optimization"), dict)


def read(content: Mapping[str, Any], place: Callable[[str], str], width: object) -> Layer:
    """The layer of a DeepSpeed config. `place` gives the location of a name; `width` is the model's, if another file
    has set it: transformers sizes what is "auto" by it.
    """
    layer = Layer(program="hf")
    zero = content["zero_optimization"]

    def put(key: str, value: object, name: str) -> None:
        layer.values[key] = SourcedValue(value, place(name), name=name)

    stage = zero.get("stage", 0)
    if stage in STAGES:
        put("deepspeed", STAGES[stage], "stage")
    else:
        allowed = "stage 1, 2 or 3, or another way to share the work: --parallel=ddp, fsdp, fsdp1"
        layer.problems.append(Problem(place("stage"), "this stage of ZeRO is not planned", repr(stage), allowed))
    _read_offloads(zero, place, layer)
    for name in _NUMBERS:
        number = zero.get(name)
        if number == "auto" and isinstance(width, int) and name in _AUTO:
            put(name, _AUTO[name](width), name)
        elif isinstance(number, int | float) and not isinstance(number, bool):
            put(name, int(number), name)
    put(
        "overlap_comm",
        bool(zero.get("overlap_comm", stage == 3)),
        "overlap_comm" if "overlap_comm" in zero else "stage",
    )
    if zero.get("contiguous_gradients") is False:
        layer.notes.append(f"{place('contiguous_gradients')}: gradients are planned as contiguous all the same")
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if isinstance(content.get(name), dict) and content[name].get("enabled") is True:
            put("dtype", dtype, name)
    for name, key in _COUNTED.items():
        if isinstance(content.get(name), int | float):
            put(key, content[name], name)
    each = content.get("gradient_accumulation_steps")
    if isinstance(each, int):
        where = place("gradient_accumulation_steps") + EACH_DEVICES
        layer.values["gradient_accumulation_steps"] = SourcedValue(each, where)
    return layer


def _read_offloads(zero: Mapping[str, Any], place: Callable[[str], str], layer: Layer) -> None:
    """Read what is kept on the host."""
    found = {name: zero[name] for name in ("offload_optimizer", "offload_param") if isinstance(zero.get(name), dict)}
    on = {name: each["device"] for name, each in found.items() if each.get("device", "none") != "none"}
    for name, device in on.items():
        if device != "cpu":
            what = "what DeepSpeed keeps elsewhere than in the host's memory is not planned"
            layer.problems.append(Problem(place(name), what, repr(device), '"device": "cpu" or "none"'))
    if "offload_param" in on and "offload_optimizer" not in on:
        what, allowed = "parameters on the host beside a state on the card are not planned", "offload_optimizer too"
        layer.problems.append(Problem(place("offload_param"), what, repr(on["offload_param"]), allowed))
    elif on:
        name = "offload_param" if "offload_param" in on else "offload_optimizer"
        layer.values["cpu_offload"] = SourcedValue("all" if name == "offload_param" else "optimizer", place(name))
