"""What an explanation says of memory: predicted against observed, whose it is, what fills it, what helps."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.planner import Plan
from oomph.runs.case import Case
from oomph.runs.findings import Finding, Number, listed, sentences
from oomph.step.ops import Kind
from oomph.units import count, mib

FAR = 0.10  # of the prediction: beyond it, the run is not the one that was predicted
TIGHT = 0.05  # of what the card gives
SMALL_MIB = 16.0  # a part below this is not worth a word
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def findings(case: Case) -> Iterator[Finding]:
    """The findings, most telling first."""
    yield from _against_prediction(case)
    yield from _others(case)
    yield from _headroom(case)
    if case.plan is None:
        return
    yield _size(case, case.plan)
    yield _peak(case.plan)
    yield from _logits(case, case.plan)
    yield from _per_parameter(case.plan)
    yield from _compiling(case, case.plan)
    yield from _no_help(case, case.plan)


# --- what was seen ---------------------------------------------------------------------------------


def _against_prediction(case: Case) -> Iterator[Finding]:
    plan = case.plan
    readings = [reading for reading in case.readings() if reading.predicted_mib is not None]
    if plan is None or not readings:
        return
    first = readings[0]
    predicted = first.predicted_mib or 0.0
    error = first.observed_mib / predicted - 1 if predicted else 0.0
    memory = plan.memory
    logits = next((part.mib for part in memory.breakdown if part.name == Kind.LOGITS.value), 0.0)
    parts = [f"{part.name} {part.mib:,.0f}" for part in memory.breakdown if part.mib >= SMALL_MIB]
    context = "Python and torch" if plan.device.kind == "cpu" else "the CUDA context"
    far = abs(error) > FAR and abs(first.observed_mib - predicted) > SMALL_MIB * 4
    text = sentences(
        (
            f"predicted are {memory.total_mib:,.0f} MiB ({memory.low_mib:,.0f} to {memory.high_mib:,.0f}): "
            f"{memory.context_mib:,.0f} of {context} and {memory.reserved_mib:,.0f} reserved by PyTorch, "
            f"{memory.allocated_mib:,.0f} of them tensors at the fullest moment",
            f"those are, in MiB: {listed(parts)}" if parts else None,
            f"a formula that leaves out the logits and the loss misses {logits:,.0f} MiB, "
            f"{100 * logits / memory.allocated_mib:.0f} % of the tensors; with them no multiplier is needed"
            if not far and logits > 0.2 * memory.allocated_mib
            else None,
            f"the figures differ by {100 * error:+.0f} %: another torch than {plan.config.torch_version}, or settings "
            "that the log does not tell (--torch_version=…, --key=value)"
            if far
            else None,
            *(
                f"{each.name}: {each.observed_mib:,.0f} MiB, predicted {each.predicted_mib:,.0f}"
                for each in readings[1:]
            ),
        )
    )
    title = f"{first.observed_mib:,.0f} MiB were seen ({first.name}), and {predicted:,.0f} are predicted"
    numbers: dict[str, Number] = {"observed_mib": first.observed_mib, "predicted_mib": predicted, "error": error}
    numbers |= {part.name: part.mib for part in memory.breakdown}
    yield Finding("memory.predicted", "warning" if far else "info", title, text, numbers)


def _others(case: Case) -> Iterator[Finding]:
    others, process = case.others_mib, case.process_mib
    gpu = case.run.gpu
    if others is None or others < 1 or (process is None and case.oom is None):
        return
    device = case.device
    context = f" (about {device.context_mib:,.0f} MiB)" if device is not None else ""
    training = case.run.process
    named = [p for p in case.run.processes.values() if p is not training and training and p.gpu == training.gpu]
    names = ", ".join(f"{p.name.rpartition('/')[2]} {p.most_mib:,.0f} MiB" for p in named)
    unnamed = others - sum(p.most_mib for p in named)
    rest = f"; {unnamed:,.0f} MiB are in no line of the list" if named and unnamed > SMALL_MIB else ""
    shown = None
    if process is not None and gpu is not None and gpu.used_mib is not None:
        shown = f"{gpu.used_mib:,.0f} MiB are in use on the whole card, {process:,.0f} of them by the training process"
    text = sentences(
        (
            shown,
            f"the process's own figure already holds its CUDA context{context}, so the difference is not the context: "
            "it is the desktop and other programs",
            f"listed are {names}{rest}" if names else None,
            "to train beside them, keep as much free: --reserve_mib" if others > 500 else None,
        )
    )
    title = f"{others:,.0f} MiB on the card belong to other programs, not to the training"
    yield Finding("memory.others", "info", title, text, {"others_mib": others, "process_mib": process})


def _headroom(case: Case) -> Iterator[Finding]:
    plan = case.plan
    if plan is None or case.run.ooms or plan.memory.capacity_mib is None:
        return
    others = case.others_mib or 0.0
    taken = case.process_mib if case.process_mib is not None else plan.memory.total_mib
    room = plan.memory.capacity_mib - others
    left = room - taken
    how = "as seen" if case.process_mib is not None else "as predicted"
    beside = f", beside {others:,.0f} of other programs" if others else ""
    text = (
        f"A process gets about {plan.memory.capacity_mib:,.0f} MiB on this {plan.device.name}; the run takes "
        f"{taken:,.0f}, {how}{beside}."
    )
    numbers: dict[str, Number] = {"headroom_mib": left, "capacity_mib": plan.memory.capacity_mib, "taken_mib": taken}
    if left < TIGHT * room:
        more = (
            " On Linux the next larger tensor fails; Windows and WSL2 swap to main memory instead, many times slower."
        )
        title = f"{left:,.0f} MiB are left: the card is nearly full" if left > 0 else "The card is full"
        yield Finding("memory.headroom", "warning", title, text + more, numbers)
    else:
        yield Finding("memory.headroom", "info", f"{left:,.0f} MiB are left", text, numbers)


# --- what fills it -----------------------------------------------------------------------------------


def _peak(plan: Plan) -> Finding:
    from oomph.peak import sentences as about_peak

    memory = plan.memory
    shares = {part.name: part.mib for part in memory.breakdown}
    largest = max(shares, key=lambda name: shares[name])
    title = f"Memory is fullest in {memory.peak_at}; {largest} are the largest part"
    numbers: dict[str, Number] = {"allocated_mib": memory.allocated_mib, "peak_at": memory.peak_at}
    return Finding("memory.peak", "info", title, sentences(about_peak(plan)), numbers | dict(shares))


def _logits(case: Case, plan: Plan) -> Iterator[Finding]:
    """How large logits are, and that a smaller micro-batch is not the only cure."""
    config = plan.config
    words = config.batch_size * config.block_size * config.vocab_size
    half, full = words * NUMBER_BYTES[config.dtype or "float32"], words * 4
    parts = [
        f"{config.batch_size} × {config.block_size} tokens × {config.vocab_size} words: one tensor of logits is "
        + (f"{mib(half):,.0f} MiB in {config.dtype} and " if half != full else "")
        + f"{mib(full):,.0f} MiB in float32"
    ]
    numbers: dict[str, Number] = {"half_mib": mib(half), "float32_mib": mib(full)}
    if mib(half) < SMALL_MIB:
        return
    if config.return_logits and config.trainer == "nanogpt":
        patched = case.variant(return_logits=False)
        saved = plan.memory.total_mib - patched.memory.total_mib
        numbers |= {"saved_mib": saved, "patched_total_mib": patched.memory.total_mib}
        if saved > 1:
            parts.append(
                f"nanoGPT's training step returns them though nobody reads them; returning the loss alone saves "
                f"{saved:,.0f} MiB ({patched.memory.total_mib:,.0f} instead of {plan.memory.total_mib:,.0f}) and "
                "changes nothing in the mathematics" + _against_half(case, plan, patched)
            )
    title = f"One tensor of logits takes {mib(half):,.0f} MiB"
    yield Finding("memory.logits", "info", title, sentences(parts), numbers)


def _against_half(case: Case, plan: Plan, patched: Plan) -> str:
    """The classical cure beside it."""
    config = plan.config
    if config.batch_size % 2 or plan.time is None or patched.time is None:
        return ""
    half = case.variant(
        batch_size=config.batch_size // 2, gradient_accumulation_steps=config.gradient_accumulation_steps * 2
    )
    if half.time is None:
        return ""
    faster = half.time.step_ms / patched.time.step_ms - 1
    return (
        f"; halving the micro-batch to {half.config.batch_size} × {half.config.gradient_accumulation_steps} takes "
        f"{half.memory.total_mib:,.0f} MiB, but the step that returns no logits is {100 * faster:.0f} % faster than "
        "that"
    )


def _size(case: Case, plan: Plan) -> Finding:
    """How large the model is, and where its parameters are."""
    model, config = plan.model, plan.config
    groups = [f"{name} {count(size)}" for name, size in model.groups.items()]
    printed = case.run.printed.params
    tied = ", which is the head's matrix too" if config.tie_weights else ""
    text = sentences(
        (
            f"{config.n_layer} layers of width {config.n_embd} with {config.n_head} heads, and {config.vocab_size:,} "
            f"words{tied}: {listed(groups)}",
            f"with the position embeddings, which nanoGPT leaves out of its count, {count(model.params)}",
            f"the log prints {printed / 1e6:.2f} M" if printed else None,
        )
    )
    title = f"The model has {count(model.params_nanogpt)} parameters"
    numbers: dict[str, Number] = {"params": model.params, "params_nanogpt": model.params_nanogpt}
    return Finding("model.size", "info", title, text, numbers)


def _per_parameter(plan: Plan) -> Iterator[Finding]:
    """Weights, gradients and Adam: bytes a parameter before any activation."""
    config, model = plan.config, plan.model
    if config.optimizer != "adamw":
        return
    each = 4 if config.autocast or config.dtype == "float32" else 2
    total = 4 * each
    copies = next((part.mib for part in plan.memory.breakdown if part.name == Kind.HALF_WEIGHTS.value), 0.0)
    number = "float32" if each == 4 else str(config.dtype)
    tensors = model.decay_tensors + model.no_decay_tensors
    text = sentences(
        (
            f"a parameter is {each} bytes of weight, {each} of gradient and {2 * each} of Adam's two moments, all in "
            f"{number}: {count(model.params)} × {total} = {mib(total * model.params):,.0f} MiB",
            f"the weights alone are {mib(each * model.params):,.0f} MiB",
            f"autocast computes in {config.dtype}, but keeps weights and gradients in float32 and holds a "
            f"half-precision copy of the matrices beside them ({copies:,.0f} MiB at the peak)"
            if copies
            else None,
            f"Adam keeps its moments for all {tensors} tensors ({model.decay_tensors} decayed, "
            f"{model.no_decay_tensors} not)",
        )
    )
    title = f"Before any activation, a parameter takes {total} bytes"
    numbers: dict[str, Number] = {"bytes_per_parameter": total, "weights_mib": mib(each * model.params)}
    numbers |= {"params": model.params, "params_nanogpt": model.params_nanogpt, "state_mib": mib(total * model.params)}
    yield Finding("memory.per_parameter", "info", title, text, numbers)


# --- what helps, and what does not -----------------------------------------------------------------


def _compiling(case: Case, plan: Plan) -> Iterator[Finding]:
    """What torch.compile does to memory here."""
    if plan.device.kind == "cpu" or plan.config.checkpoint_layers:
        return
    compiled, eager = (plan, case.variant(compile=False)) if plan.config.compile else (case.variant(compile=True), plan)
    saved = 1 - compiled.memory.total_mib / eager.memory.total_mib
    logits = next((part.mib for part in eager.memory.breakdown if part.name == Kind.LOGITS.value), 0.0)
    text = sentences(
        (
            f"eager, the run needs {eager.memory.total_mib:,.0f} MiB ({eager.memory.allocated_mib:,.0f} of tensors at "
            f"the peak, in {eager.memory.peak_at}, {100 * logits / eager.memory.allocated_mib:.0f} % of them "
            f"logits and loss); compiled, {compiled.memory.total_mib:,.0f} ({compiled.memory.allocated_mib:,.0f})",
            "compiling takes time in the first step, and main memory, but the fused loss writes fewer copies of the "
            "logits",
        )
    )
    numbers: dict[str, Number] = {"eager_mib": eager.memory.total_mib, "compiled_mib": compiled.memory.total_mib}
    numbers["saved"] = saved
    if plan.config.compile:
        title = f"torch.compile saves {100 * saved:.0f} % of the memory here; switching it off would not help"
    else:
        title = f"torch.compile would save {100 * saved:.0f} % of the memory"
    yield Finding("memory.compile", "info", title, text, numbers)


def _no_help(case: Case, plan: Plan) -> Iterator[Finding]:
    """Advice that is often given and saves nothing here, each by the same simulation."""
    config = plan.config
    if plan.device.kind == "cpu":
        return
    toggled = case.variant(allow_tf32=not config.allow_tf32).memory.total_mib - plan.memory.total_mib
    parts = []
    if abs(toggled) < 1:
        parts.append(
            "torch.set_float32_matmul_precision (TF32) changes how fast float32 products are, not what is stored: 0 MiB"
        )
    scores = mib(config.batch_size * config.n_head * config.block_size**2 * NUMBER_BYTES[config.dtype or "float32"])
    if config.attention != "math":
        parts.append(
            f"flash attention stores none of the T × T scores (they would be {scores:,.0f} MiB a layer), so there is "
            "nothing to save there"
        )
    yield Finding(
        "memory.no_help",
        "info",
        "What would not save memory",
        sentences(parts),
        {"tf32_mib": toggled, "scores_per_layer_mib": scores},
    )
