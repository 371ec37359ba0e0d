"""Checkpointed blocks in the backward program that inductor generates.

Every operation of such a block is marked to be computed again, and the partitioner saves its input alone. The block
before a norm that is not checkpointed is computed again as a whole, for that norm's gradient; the others up to the
MLP's inside. What is computed again is the program's own, and its memory serves again.
"""

from __future__ import annotations

from oomph.step.compiled_gpt import Checkpoint, Plain, Recomputed
from oomph.step.compiled_gpt_forward import Forward
from oomph.step.compiled_gpt_layers import SPLIT_ROWS, Layers
from oomph.step.compiled_gpt_plain import output_of
from oomph.step.ops import Buffer, Kernel, Kind


class Again(Layers):
    """Writes checkpointed blocks."""

    def recompute(self, index: int) -> Recomputed | None:
        """A checkpointed block once more; None for another."""
        if not 0 <= index < self.s.checkpointed:
            return None
        block = self.saved.blocks[index]
        assert isinstance(block, Checkpoint)
        before, self.p.block = self.p.block, index
        again = Forward(self.p, self.s, training=True).recompute(index, block, index == self.s.checkpointed - 1)
        self.p.block = before
        return again

    def rebuild(self, name: str, block: Recomputed | None) -> tuple[Buffer, ...]:
        """The normalised input of the norm after the outermost recomputed block, from that block's parts."""
        p, s = self.p, self.s
        if block is None or block.end is None:
            return ()
        count = s.rows * s.width
        found = block.end if s.compute == 4 else p.new(f"{name}.input", count, 4, Kind.TEMPORARY)  # in place
        if self.split or s.compute == 4:
            p.run(f"{name}.input", Kernel.POINTWISE, count * (2 * s.compute + s.weight + 4))
        if found is not block.end:
            p.drop(s.compute, block.end)
        if block.branch is not None and block.norm_2.written[2:]:
            p.drop(s.compute, block.branch)
            block.branch = None
        return (found,)

    def again(self, index: int, block: Recomputed, flow: Buffer, stream: Buffer) -> Buffer:
        """A recomputed block. Whatever it holds is the program's own, and serves again."""
        p, s, name = self.p, self.s, f"transformer.h.{index}"
        width, short = s.width, f"h.{index}"
        wide = s.rows * s.padded(4 * width)
        gelu = block.gelu
        if gelu is not None:
            hidden = self.linear_again(block, f"{name}.mlp.c_proj", 4 * width, width, gelu)
        else:
            hidden = self.input_grad(block.half, f"{name}.mlp.c_proj", 4 * width, width, own=True)
            gelu = p.new(f"{short}.mlp.gelu", wide, s.compute, Kind.TEMPORARY)
        p.run(f"{short}.mlp.gelu.backward", Kernel.POINTWISE, 16 * s.rows * width * s.compute, in_place=hidden.bytes)
        p.drop(s.compute, block.fc)
        if block.gelu is None:
            self.weight(f"{name}.mlp.c_proj", 4 * width, width, gelu, own=True)
        if flow is not stream:
            p.drop(s.compute, flow)
        flow = self.linear_again(block, f"{name}.mlp.c_fc", width, 4 * width, block.norm_2.output)
        p.drop(s.compute, hidden)
        if block.branch is not None:
            return self.attention_late(index, block, flow, stream)
        flow = self.norm(f"{name}.ln_2", block.norm_2, flow, stream, ())
        owned = flow is not stream
        operand = block.attention.output if isinstance(block.attention, Plain) else None
        output = self.linear_again(block, f"{name}.attn.c_proj", width, width, operand)
        if owned:
            p.drop(s.compute, flow)
        packed = self.attention(f"{short}.attn", block, output)
        flow = self.linear_again(block, f"{name}.attn.c_attn", width, 3 * width, block.norm_1.output)
        p.drop(s.compute, packed)
        return self.norm(f"{name}.ln_1", block.norm_1, flow, stream, (), last=index == 0)

    def attention_late(self, index: int, block: Recomputed, flow: Buffer, stream: Buffer) -> Buffer:
        """The order in which inductor puts attention's half of a recomputed block: weights' gradients come last.

        Both norms' weights are summed up together, so what the second norm read stays until the first one's gradient.
        """
        p, s, name, short = self.p, self.s, f"transformer.h.{index}", f"h.{index}"
        width, count = s.width, s.rows * s.width
        following = p.new(f"{name}.ln_2.dx.half", count, 2, Kind.TEMPORARY) if s.autocast else stream
        p.run(f"{name}.ln_2.backward", Kernel.REDUCTION, count * (3 * s.weight + 2 * s.compute), in_place=stream.bytes)
        output = self.input_grad(block.half, f"{name}.attn.c_proj", width, width, own=True)
        packed = self.attention(f"{short}.attn", block, output, keeps_output=True)
        dx = self.input_grad(block.half, f"{name}.attn.c_attn", width, 3 * width, own=True)
        parts = 2 * -(-s.rows // SPLIT_ROWS) * width * (2 if s.bias else 1)
        workspace = (p.new(f"{name}.parts", parts, 4, Kind.TEMPORARY),) if self.split else ()
        for norm in ("ln_2", "ln_1"):
            for part in ("weight", "bias") if s.bias else ("weight",):
                grad = p.new(f"{name}.{norm}.{part}.grad", width, s.weight, Kind.GRADIENTS)
                self.grads[f"{name}.{norm}.{part}"] = grad
                p.run(f"{name}.{norm}.{part}", Kernel.REDUCTION, 2 * count * s.weight)
        p.drop(4, *workspace, *block.norm_2.written)
        assert block.branch is not None
        p.drop(s.compute, flow, block.branch)
        own = s.cuda or isinstance(block.attention, Plain)  # a CPU's comes from a wrapper around its random state
        self.weight(f"{name}.attn.c_proj", width, width, output_of(block.attention), own=own)
        if following is not stream:
            p.drop(s.compute, following)
        self.weight(f"{name}.attn.c_attn", width, 3 * width, block.norm_1.output, own=True)
        p.drop(s.compute, packed)
        following = stream
        if s.autocast and index:
            following = p.new(f"{name}.ln_1.dx.half", count, 2, Kind.TEMPORARY)
        p.run(f"{name}.ln_1.backward", Kernel.REDUCTION, count * (3 * s.weight + 2 * s.compute), in_place=stream.bytes)
        if index:
            p.release(*block.norm_1.inputs)
        p.drop(4, *block.norm_1.written)
        p.drop(s.compute, dx)
        return following
