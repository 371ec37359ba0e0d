"""What a step's time goes into: the clock's own seconds, added up by kind of work."""

from __future__ import annotations

from oomph.planner import Plan
from oomph.predict.clock import host_seconds, program_of, reads_batch
from oomph.predict.kernels import LIKELY, op_seconds
from oomph.step.ops import Kernel, Op, Phase

PRODUCTS = "matrix products of the layers"
VOCABULARY = "matrix products with the vocabulary"
ATTENTION = "attention"
BYTES = "moving bytes"
OPTIMIZER = "the optimizer"
GAPS = "gaps between kernels"
HOST = "waiting for the host"


def step_shares(plan: Plan) -> dict[str, float]:
    """Seconds of one optimizer step by what they are spent on; empty where the device's rates are not known.

    They add up to the plan's likely step time where that is predicted.
    """
    config, device = plan.config, plan.device
    if plan.time is None or not device.bandwidth_gbs:
        return {}
    program = program_of(config)
    gap_s = 0.0 if device.kind == "cpu" else LIKELY.kernel_gap_s
    totals = dict.fromkeys((PRODUCTS, VOCABULARY, ATTENTION, BYTES, OPTIMIZER, GAPS, HOST), 0.0)
    for section in plan.steps[-1].sections:
        if section.ops and section.ops[0].phase is Phase.EVAL:
            continue
        device_s, kernels = 0.0, 0
        for op in section.ops:
            if op.kernel is Kernel.NONE:
                continue
            seconds = op_seconds(op, device, program, LIKELY)
            totals[_what(op, config.vocab_size)] += section.times * op.times * (seconds - gap_s)
            totals[GAPS] += section.times * op.times * gap_s
            device_s, kernels = device_s + op.times * seconds, kernels + op.times
        host_s = host_seconds(kernels, reads_batch(section), config, device, LIKELY)
        totals[HOST] += section.times * max(0.0, host_s - device_s)
    return totals


def _what(op: Op, vocabulary: int) -> str:
    if op.kernel is Kernel.GEMM:
        return VOCABULARY if vocabulary in op.shape else PRODUCTS
    if op.kernel is Kernel.ATTENTION:
        return ATTENTION
    return OPTIMIZER if op.phase in (Phase.OPTIMIZER, Phase.CLIP) else BYTES
