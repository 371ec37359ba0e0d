"""Why memory ran out: the cause that a message shows, and general fixes for it, best first."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from oomph.predict.allocator.blocks import segment_bytes
from oomph.runs.holding import Holding
from oomph.runs.run import EXABYTE_MIB, Oom
from oomph.units import MIB

Cause = Literal[
    "size",  # an impossible size
    "request",  # one tensor larger than the card, or than half of it and all other tensors
    "others",  # other processes fill the card
    "beside",  # more is held outside PyTorch than a context takes
    "limit",  # PyTorch was told to use only a part
    "fragments",  # PyTorch has the memory, in pieces
    "refused",  # although there was room
    "spilled",  # Windows: the card and the main memory it spills into
    "machine",  # main memory
    "mps",
    "library",  # cuBLAS and the like, without figures
    "loading",
    "optimizer",
    "evaluation",
    "activations",
]
# By backend: the tool that shows the cards, and the variables that choose one and configure the allocator.
TOOLS = {
    "cuda": ("nvidia-smi", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF"),
    "hip": ("rocm-smi", "HIP_VISIBLE_DEVICES", "PYTORCH_HIP_ALLOC_CONF"),
    "npu": ("npu-smi info", "ASCEND_RT_VISIBLE_DEVICES", "PYTORCH_NPU_ALLOC_CONF"),
    "xpu": ("xpu-smi ps", "ZE_AFFINITY_MASK", "PYTORCH_ALLOC_CONF"),
    "mps": ("Activity Monitor", "", ""),
    "cpu": ("free -h", "", ""),
}
FIRST_TRY = re.compile(r"failed to allocate \S+ \(\d+ bytes\) from device")  # TensorFlow's, of nearly the whole card
_READS_CHECKPOINT = re.compile(r"\bload_state_dict\(|torch\.load\(")
PIECE_MIB = 2.0**12  # 4 GiB in main memory at once: more than a loader's batches
HUGE_MIB = 2.0**18  # 256 GiB: no loader asks for that in one tensor
LARGE = 0.5  # share of the card that makes one tensor the cause
MUCH = 0.10  # share of the card: less, held by others, is a desktop
PIECES = 0.05  # share of what PyTorch reserved: less is usually unused


class Fix(msgspec.Struct, frozen=True):
    """One thing to do. `lines` can be typed or pasted into a file."""

    title: str
    lines: tuple[str, ...] = ()


def cause_of(oom: Oom, held: Holding) -> Cause:
    """The cause; the most certain ones are tested first."""
    if oom.memory == "machine":
        return "machine"
    if oom.memory == "mps":
        return "mps"
    tried, slack = oom.tried_mib, held.slack_mib
    if tried is not None and tried >= EXABYTE_MIB:
        return "size"
    if held.spilled_mib is not None:
        return "spilled"
    if tried is not None and held.total_mib is not None and tried > held.total_mib + slack:
        return "request"
    limited = oom.allowed_mib is not None and held.total_mib and oom.allowed_mib < held.total_mib - slack
    if oom.allocated_mib == 0 and not oom.reserved_mib and oom.free_mib is None:
        return "refused"  # the first tensor
    room = None if oom.free_mib is None or limited else oom.free_mib - slack
    if tried is not None and room is not None and room > segment_bytes(int(tried * MIB)) / MIB:
        return "refused"  # whoever holds the rest
    lacking = max(0.0, (tried or 0.0) - (oom.free_mib or 0.0))
    for share, name in ((held.others_mib, "others"), (held.others_at_least_mib, "beside")):
        if share and held.total_mib and share >= MUCH * held.total_mib and share >= lacking:
            return name  # type: ignore[return-value]
    half = tried is not None and held.total_mib is not None and tried > LARGE * held.total_mib
    if half and tried is not None and tried > (oom.allocated_mib or 0.0):
        return "request"
    if limited:
        return "limit"
    unused = oom.unused_mib or 0.0
    if tried is not None and unused + oom.slack_mib >= tried and unused >= PIECES * (oom.reserved_mib or 0.0):
        return "fragments"
    if tried is None and oom.total_mib is None and oom.library in ("cuBLAS", "cuDNN", "NCCL"):
        return "library"
    if oom.phase in ("loading", "optimizer", "evaluation"):
        return oom.phase
    return "activations"


_BATCH = Fix(
    "Halve the micro-batch and double the accumulation: the same training, a little slower",
    ("batch_size → half, gradient_accumulation_steps → twice",),
)
_CHECKPOINT = Fix(
    "Recompute activations instead of keeping them: about a third more time",
    ("model.gradient_checkpointing_enable()",),
)
_PINNED = Fix("Under WSL: no pinned memory, of which there is little", ("DataLoader(…, pin_memory=False)",))
_SHORTER = Fix("Shorter sequences: activations grow with them, plain attention with their square")
_EIGHT_BIT = Fix("An optimizer with 8-bit state: 2 bytes a parameter instead of 8", ("bitsandbytes.optim.AdamW8bit",))
_LORA = Fix("Train an adapter (LoRA): no gradients and no optimizer state for the rest of the model")
_SHARD = Fix("Share the state among several cards: FSDP, or DeepSpeed's ZeRO")
_HALF = Fix("Load the weights in bfloat16, half of float32", ("from_pretrained(…, torch_dtype=torch.bfloat16)",))
_TO_CPU = Fix("Read a checkpoint into main memory, not onto the card", ('torch.load(…, map_location="cpu")',))
_FOUR_BIT = Fix("Load the base model in 4 bits and train an adapter (QLoRA)")
_LOOP = Fix(
    "Let the optimizer go from parameter to parameter: no temporary tensors of the size of all", ("foreach=False",)
)
_SERVING = (
    Fix(
        "A shorter context or fewer requests at once: the cache of keys and values grows with both",
        ("vLLM: --max-model-len, --max-num-seqs", "SGLang: --context-length, --mem-fraction-static", "llama.cpp: -c"),
    ),
    Fix("Weights in 8 or 4 bits"),
    Fix("Share the model among several cards (tensor parallelism)"),
)
_EVAL_BATCH = Fix("A smaller batch in evaluations, under torch.no_grad(), and no logits kept for metrics")


_OTHER_LIBRARIES = (
    Fix("A smaller batch, or shorter sequences"),
    Fix("Recompute activations instead of keeping them: jax.checkpoint, tf.recompute_grad"),
    Fix("See what else is on the card: TensorFlow and JAX take most of it when they start", ("nvidia-smi",)),
)


def general_fixes(
    cause: Cause, oom: Oom, held: Holding, *, recomputes: bool = False, has_adapters: bool = False
) -> tuple[Fix, ...]:
    """The fixes that help whatever the model is and that are not in use yet, best first."""
    in_use = [fix for fix, used in ((_CHECKPOINT, recomputes or oom.checkpointed), (_LORA, has_adapters)) if used]
    return tuple(fix for fix in _fixes(cause, oom, held) if fix not in in_use)


def _fixes(cause: Cause, oom: Oom, held: Holding) -> tuple[Fix, ...]:
    """Fixes for a cause that work for any model, best first."""
    choose = TOOLS[oom.backend][1]
    pieces = _join_pieces(oom)
    elsewhere = oom.library in ("XLA", "TensorFlow") or "tensorflow/" in oom.message
    if FIRST_TRY.search(oom.message):
        return (_free_the_card(oom, held),)
    if elsewhere and oom.memory != "machine":
        return _OTHER_LIBRARIES if oom.memory != "tpu" else _OTHER_LIBRARIES[:2]
    if oom.library == "Paddle":
        return (_OTHER_LIBRARIES[0], _free_the_card(oom, held))
    if oom.serving and oom.memory != "machine" and cause not in ("others", "beside", "size"):
        return (pieces, *_SERVING[:2]) if cause == "fragments" else _SERVING
    where = Fix("Run once with errors where they happen", ("CUDA_LAUNCH_BLOCKING=1 …",))
    match cause:
        case "size":
            return (where,)
        case "others" | "beside":
            return (_free_the_card(oom, held), Fix("Use another card", (f"{choose}=1 …",)), _BATCH)
        case "limit":
            return (Fix("Lift the limit", ("torch.cuda.set_per_process_memory_fraction(1.0)",)), _BATCH, _CHECKPOINT)
        case "fragments" if oom.phase == "optimizer":
            return (pieces, *([_LOOP] if temporary(oom) else []), _EIGHT_BIT)
        case "fragments":
            return (pieces, _BATCH, _CHECKPOINT)
        case "refused":
            look = Fix(
                "Look at the card while it starts: something else may take the memory for a moment",
                (f"watch -n 1 {TOOLS[oom.backend][0]}",),
            )
            return (look, Fix("Under WSL, give it more memory in .wslconfig; in a container, raise its limit"), _BATCH)
        case "request":
            return (_attention(oom), _SHORTER, _BATCH)
        case "spilled":
            return (_BATCH, _CHECKPOINT, Fix("A smaller model, or one loaded in 4 bits"))
        case "machine":
            return _for_main_memory(oom)
        case "mps":
            ratio = Fix(
                "Lift the limit, with the risk that macOS runs out itself",
                ("export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",),
            )
            return (_BATCH, _CHECKPOINT, ratio)
        case "loading" if restoring(oom):
            return (_TO_CPU, _SHARD) if any("optim" in line for line in oom.lines) else (_TO_CPU, _HALF, _SHARD)
        case "loading":
            return (_HALF, _FOUR_BIT, _SHARD)
        case "optimizer" if temporary(oom):
            return (_LOOP, _EIGHT_BIT, _SHARD)
        case "optimizer":
            return (_EIGHT_BIT, _LORA, _SHARD)
        case "evaluation":
            return (_EVAL_BATCH, pieces, _BATCH)
        case "library" if oom.library == "NCCL":
            return (_BATCH, _CHECKPOINT, _free_the_card(oom, held))
        case "library":
            return (where, _BATCH, _CHECKPOINT)
    if oom.library == "torch" and "CUDA error: out of memory" in oom.message:  # the driver's, which has no figures
        return (_free_the_card(oom, held), _PINNED, _BATCH)
    return (_BATCH, _CHECKPOINT, _SHORTER)


def _join_pieces(oom: Oom) -> Fix:
    allocator = TOOLS[oom.backend][2]
    if not oom.old:
        return Fix("Let PyTorch join its free pieces, on Linux", (f"export {allocator}=expandable_segments:True",))
    since = "" if "max_split_size_mb" in oom.message else ", from PyTorch 1.10 on"
    return Fix(f"Keep PyTorch from splitting large blocks{since}", (f"export {allocator}=max_split_size_mb:512",))


def _attention(oom: Oom) -> Fix:
    if any("scaled_dot_product_attention" in line for line in oom.lines):  # it is in use, but not its kernel
        return Fix("A mask that flash or memory-efficient attention takes: other masks make it store all scores")
    return Fix("Flash or memory-efficient attention, which stores no scores", ('attn_implementation="sdpa"',))


def _for_main_memory(oom: Oom) -> tuple[Fix, ...]:
    if (oom.tried_mib or 0.0) >= HUGE_MIB:
        return (Fix("Print the shape that is asked for, at the line that the traceback ends with"),)
    stream = Fix("Stream or map the data instead of loading it whole; load weights with mmap or low_cpu_mem_usage=True")
    more = Fix("More memory for the job than it has now: Slurm's --mem, docker run --memory")
    if (oom.tried_mib or 0.0) >= PIECE_MIB:
        return (Fix("A smaller batch or shorter sequences, if the model runs on the processor"), stream, more)
    return (Fix("Fewer loader processes and batches ahead", ("num_workers=2, prefetch_factor=2",)), stream, more)


def restoring(oom: Oom) -> bool:
    """Whether a checkpoint was being read, into a model or an optimizer."""
    return oom.phase == "loading" and any(map(_READS_CHECKPOINT.search, oom.lines))


def temporary(oom: Oom) -> bool:
    """Whether an optimizer's line that failed computes on all parameters at once, with its state made before."""
    return any("_foreach_" in line for line in oom.lines[-2:])


def _free_the_card(oom: Oom, held: Holding) -> Fix:
    largest = max(held.pids, key=lambda pid: held.pids[pid], default=None)
    if largest is not None:
        return Fix("Stop the process that holds it, if it is yours", (f"ps -fp {largest}", f"kill {largest}"))
    return Fix("See what holds the card, and stop what is yours: a notebook, an earlier run", (TOOLS[oom.backend][0],))
