"""Findings about memory: predicted against observed, who holds it, what fills it, what helps."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.planning.plan import Plan
from oomph.runs.figures import Evidence
from oomph.runs.findings import Finding, listed, sentences
from oomph.runs.findings.oom import NUMBER_BYTES
from oomph.runs.run import Scalar
from oomph.step.ops import Kind
from oomph.units import count, memory_size, mib

GB_MIB = 1e9 / 2**20
FAR = 0.10  # share of the prediction; a larger difference means another run than predicted
TIGHT = 0.05  # of the usable memory
SMALL_MIB = 16.0  # smaller parts are not mentioned


def findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings, most useful first."""
    yield from _against_prediction(evidence)
    yield from _logged(evidence)
    yield from _others(evidence)
    yield from _headroom(evidence)
    if evidence.plan is None:
        return
    yield _size(evidence, evidence.plan)
    yield _peak(evidence.plan)
    yield from _logits(evidence, evidence.plan)
    yield from _per_parameter(evidence.plan)
    yield from _compiling(evidence, evidence.plan)
    yield from _no_help(evidence, evidence.plan)


# --- what was observed ---------------------------------------------------------------------------------


def _against_prediction(evidence: Evidence) -> Iterator[Finding]:
    plan, readings = evidence.plan, evidence.readings()
    if plan is None or not readings:
        return
    first, predicted = readings[0]
    error = first.mib / predicted - 1 if predicted else 0.0
    memory = plan.memory
    logits = next((part.mib for part in memory.breakdown if part.name == Kind.LOGITS.value), 0.0)
    parts = [f"{part.name} {part.mib:,.0f}" for part in memory.breakdown if part.mib >= SMALL_MIB]
    context = "Python and torch" if plan.device.kind == "cpu" else "the CUDA context"
    far = abs(error) > FAR and abs(first.mib - predicted) > SMALL_MIB * 4
    text = sentences(
        (
            f"predicted: {memory.total_mib:,.0f} MiB ({memory.low_mib:,.0f} to {memory.high_mib:,.0f}), of which "
            f"{context} takes {memory.context_mib:,.0f} and PyTorch reserves {memory.reserved_mib:,.0f}; tensors fill "
            f"{memory.allocated_mib:,.0f} of those at the peak",
            f"in MiB: {listed(parts)}" if parts else None,
            f"a formula without the logits and the loss misses {logits:,.0f} MiB, "
            f"{100 * logits / memory.allocated_mib:.0f} % of the tensors; with them, no multiplier is needed"
            if not far and logits > 0.2 * memory.allocated_mib
            else None,
            f"the figures differ by {100 * error:+.0f} %: another torch version than {plan.config.torch_version}, or "
            "settings that are not in the log (--torch_version=…, --key=value)"
            if far
            else None,
            *(f"{each.name}: {each.mib:,.0f} MiB, predicted {mib:,.0f}" for each, mib in readings[1:]),
        )
    )
    title = f"{first.mib:,.0f} MiB observed ({first.name}), {predicted:,.0f} predicted"
    numbers: dict[str, Scalar] = {"observed_mib": first.mib, "predicted_mib": predicted, "error": error}
    numbers |= {part.name: part.mib for part in memory.breakdown}
    yield Finding("memory.predicted", "warning" if far else "info", title, text, numbers)


def _logged(evidence: Evidence) -> Iterator[Finding]:
    """Memory in the log, if there is no plan to compare with."""
    own = [each for each in evidence.measured.memory() if each.of in ("allocated", "reserved")]
    if evidence.plan is None and own:
        in_gb = evidence.run.printed.memory_in_gb and own[0].name.endswith("as logged")
        size = f"{own[0].mib / GB_MIB:.4g} GB" if in_gb else memory_size(own[0].mib)
        title = f"{size} at the most: {own[0].name}"
        yield Finding("memory.logged", "info", title, "", {"mib": own[0].mib}, "read")


def _others(evidence: Evidence) -> Iterator[Finding]:
    others, process = evidence.others_mib, evidence.process_mib
    gpu = evidence.run.gpu
    if others is None or others < SMALL_MIB * 4 or (process is None and evidence.oom is None):
        return
    device = evidence.device
    context = f" (about {device.context_mib:,.0f} MiB)" if device is not None else ""
    training = evidence.run.process
    named = [p for p in evidence.run.processes.values() if p is not training and training and p.gpu == training.gpu]
    names = ", ".join(f"{p.name.rpartition('/')[2]} {p.most_mib:,.0f} MiB" for p in named)
    unnamed = others - sum(p.most_mib for p in named)
    rest = f"; {unnamed:,.0f} MiB are not listed" if named and unnamed > SMALL_MIB else ""
    shown = None
    if process is not None and gpu is not None and gpu.used_mib is not None:
        shown = f"{gpu.used_mib:,.0f} MiB are in use on the card, {process:,.0f} of them by the training process"
    text = sentences(
        (
            shown,
            f"the process's figure already includes its CUDA context{context}, so the difference is not the context: "
            "it is the desktop and other programs",
            f"listed: {names}{rest}" if names else None,
            "to leave them that much when planning, use --reserve_mib" if others > 500 else None,
        )
    )
    title = f"Other programs hold {others:,.0f} MiB of the card"
    yield Finding("memory.others", "info", title, text, {"others_mib": others, "process_mib": process})


def _headroom(evidence: Evidence) -> Iterator[Finding]:
    plan = evidence.plan
    if plan is None or evidence.run.ooms or plan.memory.capacity_mib is None:
        return
    others = evidence.others_mib or 0.0
    taken = evidence.process_mib if evidence.process_mib is not None else plan.memory.total_mib
    room = plan.memory.capacity_mib - others
    left = room - taken
    how = "observed" if evidence.process_mib is not None else "predicted"
    beside = f", and other programs {others:,.0f}" if others else ""
    text = (
        f"A process can use about {plan.memory.capacity_mib:,.0f} MiB of this {plan.device.name}; the run takes "
        f"{taken:,.0f} ({how}){beside}."
    )
    numbers: dict[str, Scalar] = {"headroom_mib": left, "capacity_mib": plan.memory.capacity_mib, "taken_mib": taken}
    if left < TIGHT * room:
        more = " On Linux the next larger tensor fails; Windows and WSL2 spill into main memory, many times slower."
        title = f"{left:,.0f} MiB free: the card is nearly full" if left > 0 else "The card is full"
        yield Finding("memory.headroom", "warning", title, text + more, numbers)
    else:
        yield Finding("memory.headroom", "info", f"{left:,.0f} MiB free", text, numbers)


# --- what fills it -----------------------------------------------------------------------------------


def _peak(plan: Plan) -> Finding:
    from oomph.planning.peak import peak_sentences
    from oomph.planning.plan import without_returned_logits

    memory = plan.memory
    shares = {part.name: part.mib for part in memory.breakdown}
    largest = max(shares, key=lambda name: shares[name])
    title = f"Memory peaks in {memory.peak_at}; the largest part: {largest}"
    numbers: dict[str, Scalar] = {"allocated_mib": memory.allocated_mib, "peak_at": memory.peak_at}
    return Finding(
        "memory.peak",
        "info",
        title,
        sentences(peak_sentences(plan, without_returned_logits(plan))),
        numbers | dict(shares),
    )


def _logits(evidence: Evidence, plan: Plan) -> Iterator[Finding]:
    """The size of the logits, and that a smaller micro-batch is not the only fix."""
    config = plan.config
    size = config.batch_size * config.block_size * config.vocab_size
    half, full = size * NUMBER_BYTES[config.dtype or "float32"], size * 4
    parts = [
        f"{config.batch_size} × {config.block_size} tokens × a vocabulary of {config.vocab_size:,}: a logits tensor is "
        + (f"{mib(half):,.0f} MiB in {config.dtype} and " if half != full else "")
        + f"{mib(full):,.0f} MiB in float32"
    ]
    numbers: dict[str, Scalar] = {"half_mib": mib(half), "float32_mib": mib(full)}
    if mib(half) < SMALL_MIB:
        return
    if config.return_logits and config.trainer == "nanogpt":
        patched = evidence.variant(return_logits=False)
        saved = plan.memory.total_mib - patched.memory.total_mib
        numbers |= {"saved_mib": saved, "patched_total_mib": patched.memory.total_mib}
        if saved > 1:
            parts.append(
                f"nanoGPT's training step returns them, but nothing uses them; returning only the loss saves "
                f"{saved:,.0f} MiB ({patched.memory.total_mib:,.0f} instead of {plan.memory.total_mib:,.0f}) and "
                "leaves the mathematics unchanged" + _against_half(evidence, plan, patched)
            )
    title = f"One logits tensor takes {mib(half):,.0f} MiB"
    yield Finding("memory.logits", "info", title, sentences(parts), numbers)


def _against_half(evidence: Evidence, plan: Plan, patched: Plan) -> str:
    """How the same fix compares with halving the micro-batch."""
    config = plan.config
    if config.batch_size % 2 or plan.time is None or patched.time is None:
        return ""
    half = evidence.variant(
        batch_size=config.batch_size // 2, gradient_accumulation_steps=config.gradient_accumulation_steps * 2
    )
    if half.time is None:
        return ""
    faster = half.time.step_ms / patched.time.step_ms - 1
    return (
        f"; halving the micro-batch to {half.config.batch_size} × {half.config.gradient_accumulation_steps} takes "
        f"{half.memory.total_mib:,.0f} MiB, but a step that returns no logits is {100 * faster:.0f} % faster than that"
    )


def _size(evidence: Evidence, plan: Plan) -> Finding:
    """The number of parameters, and where they are."""
    model, config = plan.model, plan.config
    groups = [f"{name} {count(size)}" for name, size in model.groups.items()]
    printed = evidence.run.printed.params
    tied = " (embedding tied to the head)" if config.tie_weights else ""
    text = sentences(
        (
            f"{config.n_layer} layers of width {config.n_embd} with {config.n_head} heads, and a vocabulary of "
            f"{config.vocab_size:,}{tied}: {listed(groups)}",
            f"{count(model.params)} with the position embeddings, which nanoGPT does not count"
            if model.params != model.params_nanogpt
            else None,
            f"the log prints {printed / 1e6:.2f} M" if printed else None,
        )
    )
    title = f"The model has {count(model.params_nanogpt)} parameters"
    numbers: dict[str, Scalar] = {"params": model.params, "params_nanogpt": model.params_nanogpt}
    return Finding("model.size", "info", title, text, numbers)


def _per_parameter(plan: Plan) -> Iterator[Finding]:
    """Bytes per parameter for weights, gradients and Adam, before any activation."""
    config, model = plan.config, plan.model
    if config.optimizer != "adamw" or config.method != "full":
        return
    each = 4 if config.autocast or config.dtype == "float32" else 2
    total = 4 * each
    copies = next((part.mib for part in plan.memory.breakdown if part.name == Kind.HALF_WEIGHTS.value), 0.0)
    number = "float32" if each == 4 else str(config.dtype)
    tensors = model.decay_tensors + model.no_decay_tensors
    text = sentences(
        (
            f"each parameter takes {each} bytes of weight, {each} of gradient and {2 * each} of Adam's two moments, "
            f"all in {number}: {count(model.params)} × {total} = {mib(total * model.params):,.0f} MiB",
            f"the weights alone are {mib(each * model.params):,.0f} MiB",
            f"autocast computes in {config.dtype} but keeps weights and gradients in float32, plus a half-precision "
            f"copy of the matrices ({copies:,.0f} MiB at the peak)"
            if copies
            else None,
            f"Adam keeps moments for all {tensors} tensors: {model.decay_tensors} with weight decay and "
            f"{model.no_decay_tensors} without",
        )
    )
    title = f"A parameter takes {total} bytes before any activation"
    numbers: dict[str, Scalar] = {"bytes_per_parameter": total, "weights_mib": mib(each * model.params)}
    numbers |= {"params": model.params, "params_nanogpt": model.params_nanogpt, "state_mib": mib(total * model.params)}
    yield Finding("memory.per_parameter", "info", title, text, numbers)


# --- what helps, and what does not -----------------------------------------------------------------


def _compiling(evidence: Evidence, plan: Plan) -> Iterator[Finding]:
    """What torch.compile does to memory here."""
    if plan.device.kind == "cpu" or plan.config.checkpoint_layers or plan.config.method != "full":
        return
    compiled, eager = (
        (plan, evidence.variant(compile=False)) if plan.config.compile else (evidence.variant(compile=True), plan)
    )
    saved = 1 - compiled.memory.total_mib / eager.memory.total_mib
    logits = next((part.mib for part in eager.memory.breakdown if part.name == Kind.LOGITS.value), 0.0)
    text = sentences(
        (
            f"eager, the run needs {eager.memory.total_mib:,.0f} MiB ({eager.memory.allocated_mib:,.0f} of tensors at "
            f"the peak, in {eager.memory.peak_at}, {100 * logits / eager.memory.allocated_mib:.0f} % of them "
            f"logits and loss); compiled, {compiled.memory.total_mib:,.0f} ({compiled.memory.allocated_mib:,.0f})",
            "compiling costs time in the first step, and main memory, but the fused loss makes fewer copies of the "
            "logits",
        )
    )
    numbers: dict[str, Scalar] = {"eager_mib": eager.memory.total_mib, "compiled_mib": compiled.memory.total_mib}
    numbers["saved"] = saved
    if plan.config.compile:
        title = f"torch.compile saves {100 * saved:.0f} % of the memory here; switching it off would not help"
    else:
        title = f"torch.compile would save {100 * saved:.0f} % of the memory"
    yield Finding("memory.compile", "info", title, text, numbers)


def _no_help(evidence: Evidence, plan: Plan) -> Iterator[Finding]:
    """Common advice that saves nothing here, by the same simulation."""
    config = plan.config
    if plan.device.kind == "cpu":
        return
    toggled = evidence.variant(allow_tf32=not config.allow_tf32).memory.total_mib - plan.memory.total_mib
    parts = []
    if abs(toggled) < 1:
        parts.append(
            "torch.set_float32_matmul_precision (TF32) changes the speed of float32 matrix products, not what is "
            "stored: 0 MiB"
        )
    scores = mib(config.batch_size * config.n_head * config.block_size**2 * NUMBER_BYTES[config.dtype or "float32"])
    if config.attention != "math":
        parts.append(
            f"flash attention stores none of the T × T scores ({scores:,.0f} MiB per layer): nothing to save there"
        )
    yield Finding(
        "memory.no_help",
        "info",
        "What would not save memory",
        sentences(parts),
        {"tf32_mib": toggled, "scores_per_layer_mib": scores},
    )
