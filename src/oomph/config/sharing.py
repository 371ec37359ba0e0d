"""How several devices share a run: problems with such settings, and which of them make it one without a time."""

from __future__ import annotations

from oomph.config.schema import TrainConfig
from oomph.config.values import Given, show
from oomph.errors import Problem

SHARDED_OPTIMIZERS = ("adamw", "sgd")  # oomph train's that update each element by itself, and so a part of a parameter
# Keys whose waits are not modelled, and the value without them: with another one no time is given.
_UNTIMED: dict[str, object] = {"tensor_parallel_degree": 1, "cpu_offload": "off"}


def trains_parts(config: TrainConfig) -> bool:
    """Whether oomph train can train a part of each parameter on each device, as FSDP2 has it."""
    return config.optimizer in SHARDED_OPTIMIZERS and config.method == "full"


def untimed_keys(config: TrainConfig) -> tuple[str, ...]:
    """The keys that make a run one of memory and FLOPs alone."""
    return tuple(key for key, usual in _UNTIMED.items() if getattr(config, key) != usual)


_SPLIT = ("n_head", "num_key_value_heads", "intermediate_size", "vocab_size", "block_size")


def tensor_parallel(given: Given) -> list[Problem]:
    """Problems of layers that are split among devices."""
    key = "tensor_parallel_degree"
    degree = given.get(key)
    if not isinstance(degree, int) or degree == 1:
        return []
    if given.get("trainer") != "torchtitan":
        what, found = "tensor_parallel_degree is planned with torchtitan alone", f"trainer = {given.get('trainer')!r}"
        return [given.problem(key, what, found, "1, or trainer = 'torchtitan'")]
    if given.get("compile"):
        what = "tensor_parallel_degree in a compiled model is not described"
        return [given.problem(key, what, "compile = True", "compile = False, or 1")]
    if given.get("parallel") not in (None, "auto", "fsdp"):
        what, found = (
            "tensor_parallel_degree is described beside FSDP2 alone",
            f"parallel = {given.valid['parallel']!r}",
        )
        return [given.problem(key, what, found, "parallel = 'fsdp', or 1")]
    return [
        given.problem(key, f"{name} is not a multiple of {key}", f"{size} over {degree}", f"a divisor of {size}")
        for name in (*_SPLIT, *(["world_size"] if given.said["world_size"].firm else []))
        if isinstance(size := given.get(name), int) and size % degree
    ]


# Settings that DeepSpeed is modelled with.
_WITH_DEEPSPEED: dict[str, tuple[object, ...]] = {
    "trainer": ("hf",), "compile": (False,), "optimizer": ("adamw",), "parallel": (None, "none"),
    "dtype": ("bfloat16", "float16", None), "zero_grad": ("after_step",),
}  # fmt: skip


def deepspeed(given: Given) -> list[Problem]:
    """Problems with settings that DeepSpeed is not modelled with."""
    if given.get("deepspeed") in (None, "off"):
        return []
    quantized = given.get("quantization") not in (None, "off") or given.get("method") == "qlora"
    if given.get("deepspeed") == "zero3" and quantized:
        what, allowed = "ZeRO-3 of quantized weights is not described", "deepspeed = 'zero2', or quantization = 'off'"
        return [given.problem("quantization", what, "deepspeed = 'zero3'", allowed)]
    return [
        given.problem(key, f"DeepSpeed is not described with this {key}", show(given.get(key)), show(allowed[0]))
        for key, allowed in _WITH_DEEPSPEED.items()
        if given.get(key) not in allowed
    ]


# What may be kept on the host, by what shares the work: FSDP's parts go there with their gradients and state.
_OFFLOADED = {
    "zero1": ("off", "optimizer"), "zero2": ("off", "optimizer"), "zero3": ("off", "optimizer", "all"),
    "fsdp": ("off", "all"), "hsdp": ("off", "all"), "fsdp1": ("off", "all"),
}  # fmt: skip


def cpu_offload(given: Given) -> list[Problem]:
    """Problems with what is kept on the host."""
    kept = given.get("cpu_offload")
    shared = given.get("deepspeed") if given.get("deepspeed") not in (None, "off") else given.get("parallel")
    allowed = _OFFLOADED.get(str(shared), ("off",))
    if kept is None or kept in allowed:
        return []
    if len(allowed) == 1:
        what = "only DeepSpeed's ZeRO and FSDP are planned so"
        return [given.problem("cpu_offload", what, show(kept), "deepspeed = 'zero2', parallel = 'fsdp', ... with it")]
    return [given.problem("cpu_offload", f"{shared} keeps other things on the host", show(kept), " or ".join(allowed))]
