"""Why adapters take more than people expect: what LoRA saves, and what stays or comes on top."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.config.programs import TRANSFORMERS
from oomph.planning.plan import Plan
from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, known, sentences
from oomph.runs.run import Scalar
from oomph.step.ops import Kind
from oomph.units import MIB, count

PEFT = ("hf", "trl", "torch")  # programs with peft's own layers, which Unsloth replaces
SMALL_MIB = 16.0  # smaller parts are not mentioned


def findings(evidence: Evidence) -> Iterator[Finding]:
    """One finding, if the run has adapters: in MiB with a plan; without one, in general if memory ran out."""
    plan = evidence.plan
    if plan is not None and plan.config.method != "full":
        yield _planned(evidence, plan)
    elif plan is None and evidence.oom is not None and evidence.has_adapters:
        yield _in_general(evidence)


def _planned(evidence: Evidence, plan: Plan) -> Finding:
    model = plan.model
    parts = sorted(_parts(evidence, plan), key=lambda part: -part[2])
    trained = model.params - model.params_frozen
    shares = {part.name: part.mib for part in plan.memory.breakdown}
    held = {kind: shares.get(kind.value, 0.0) for kind in (Kind.PARAMETERS, Kind.ACTIVATIONS, Kind.LOGITS)}
    text = sentences(
        (
            f"{count(trained)} of {count(model.params)} weights are trained; "
            + ", ".join(f"{kind.value} {size:,.0f}" for kind, size in held.items() if size >= SMALL_MIB)
            + " MiB stay",
            *(sentence for _, sentence, size in parts if size >= SMALL_MIB),
            f"a batch is as long as its longest sample: planned are {plan.config.block_size:,} tokens"
            if plan.config.packing == "off"
            else None,
        )
    )
    numbers: dict[str, Scalar] = {"trained": trained} | {name: size for name, _, size in parts}
    title = f"Adapters save gradients and optimizer state: {plan.memory.allocated_mib:,.0f} MiB are left"
    return Finding("memory.adapters", "info", title, text, numbers)


def _parts(evidence: Evidence, plan: Plan) -> Iterator[tuple[str, str, float]]:
    """A name, a sentence and MiB for each cause. The MiB are the difference to a plan without it; of quantized
    layers, the size of the largest copy."""
    config = plan.config
    base = config.base_dtype or config.dtype

    def saved(**keys: object) -> float:
        return plan.memory.allocated_mib - evidence.variant(**keys).memory.allocated_mib

    if config.adapter_dtype == "float32" != base and base is not None:
        size = saved(adapter_dtype=base)
        what = f"adapters in float32 over a base in {base}"
        copies = ": each adapted layer keeps its own cast copy of its input" if config.trainer in PEFT else ""
        yield "casts_mib", f"{what}{copies}, {size:,.0f} MiB (adapter_dtype={base} is without)", size
    if config.upcast == "all":
        size = saved(upcast="off")
        what = "prepare_model_for_kbit_training brings embedding, head and norms to float32"
        yield "upcast_mib", f"{what}, {size:,.0f} MiB at the peak (upcast=off is without)", size
    if not config.checkpoint_layers:
        size = saved(checkpoint_layers=config.n_layer)
        yield "checkpointing_mib", f"computing activations again in backward saves {size:,.0f} MiB", size
    if config.fused_loss == "off" and config.trainer in TRANSFORMERS:
        size = saved(fused_loss="liger")
        yield "logits_mib", f"a fused loss, without all logits, saves {size:,.0f} MiB", size
    if size := _largest_copy_mib(plan):
        what = f"a quantized layer is copied back to {config.dtype} for each product"
        yield "dequantized_mib", f"{what}, the largest to {size:,.0f} MiB", size


def _largest_copy_mib(plan: Plan) -> float:
    """The largest weight that a quantized layer is turned back into, for one product; 0 without such layers."""
    buffers = (b for step in plan.steps for section in step.sections for op in section.ops for b in op.allocates)
    return max((b.bytes for b in buffers if b.name.endswith("dequantize")), default=0) / MIB


# --- without a plan --------------------------------------------------------------------------------

_LONGEST = "a batch is as long as its longest sample: one long sample can decide"
_COPIED = "a 4- or 8-bit layer is copied back to 16 bits for each product"
_ON_TOP = (
    "adapters in float32 over a 16-bit base keep a cast copy of each adapted layer's input",
    "prepare_model_for_kbit_training brings embedding, head and norms to float32",
    "logits are tokens × vocabulary, in float32 for the loss, and their gradient",
    _COPIED,
    _LONGEST,
)
_NOT_RECOMPUTED = "without gradient checkpointing all that the layers compute is kept"
_UNSLOTH = ("Unsloth computes the loss in parts and, unless told not to, activations again", _COPIED, _LONGEST)


def _in_general(evidence: Evidence) -> Finding:
    """What may take memory beside the adapters: the log does not tell which of it this run has."""
    printed = evidence.run.printed
    trained, total = printed.params_trained, printed.params_total
    own = evidence.run.program == "unsloth"
    stays = "weights and activations" if own else "weights, activations and logits"
    on_top = [*([] if evidence.recomputes else [_NOT_RECOMPUTED]), *_ON_TOP]
    text = sentences(
        (
            f"{count(trained)} of {count(total)} weights are trained: {stays} do not shrink"
            if trained and total
            else None,
            *(_UNSLOTH if own else on_top),
            "this is so in general, and each may be this run's: a config given with the log tells how much it takes",
        )
    )
    title = "Adapters save gradients and optimizer state, not what the layers compute"
    return Finding("memory.adapters", "info", title, text, known({"trained": trained, "params": total}), "guess")
