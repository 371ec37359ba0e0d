"""Checkpointed blocks in the backward program that inductor generates.

Every operation of such a block is marked to be computed again, and the partitioner saves its input alone. The block
before a norm that is not checkpointed is computed again as a whole, for that norm's gradient; the others up to the
MLP's inside. What is computed again is the program's own, and its memory serves again.
"""

from __future__ import annotations

from oomph.step.compiled_gpt import Begun, Checkpoint, Front, Plain, Recomputed, Saved, SavedNorm, Sizes
from oomph.step.compiled_gpt_forward import Forward
from oomph.step.compiled_gpt_layers import SPLIT_ROWS, Layers
from oomph.step.compiled_gpt_plain import attend_again, begin_plainly, output_of, weigh, weigh_together
from oomph.step.compiled_reuse import Generated
from oomph.step.ops import Buffer, Kernel, Kind


class Anew(Forward):
    """Writes the forward of checkpointed blocks into the backward program."""

    def front(self, index: int, saved: Checkpoint) -> Front:
        """In the backward program: a checkpointed block once more, up to attention's kernel or softmax.

        The first block's norm writes its input where that takes too much to read once more: embeddings and dropout.
        """
        s, name = self.s, f"h.{index}"
        self.p.block = index
        half = self.cast(f"{name}.attn.c_attn", 3 * s.width * s.width)
        written: tuple[Buffer, ...] = ()
        if len(saved.entry) > 1 and self.dropping:
            written = (self.p.new(f"{name}.ln_1.input", s.rows * s.width, 4, Kind.TEMPORARY),)
        norm_1 = self.norm_again(f"{name}.ln_1", written)
        qkv = self.linear(f"{name}.attn.c_attn", norm_1.output, s.width, 3 * s.width, half)
        begun = begin_plainly(self.p, s, f"{name}.attn.sdpa", qkv, keeps=True) if s.plain else None
        return Front(norm_1, qkv, begun, half)

    def recompute(self, index: int, saved: Checkpoint, front: Front, outermost: bool) -> Recomputed:
        """The rest of the block.

        Of the outermost one everything, for the norm after it reads its output. The others go up to the MLP's inside,
        and gelu is left to the kernel that writes its gradient.
        """
        p, s, name = self.p, self.s, f"h.{index}"
        width, count = s.width, s.rows * s.width
        p.block, half, norm_1 = index, front.half, front.norm_1
        attention: tuple[Buffer, ...] | Plain
        if front.begun is not None:
            attention = attend_again(p, s, f"{name}.attn.sdpa", front.begun, self.dropping)
        else:
            attention = self.attend(f"{name}.attn", front.qkv)
        p.release(*saved.random)
        half |= self.cast(f"{name}.attn.c_proj", width * width)
        branch = self.linear(f"{name}.attn.c_proj", output_of(attention), width, width, half)
        half |= self.cast(f"{name}.mlp.c_proj", 4 * width * width) | self.cast(f"{name}.mlp.c_fc", 4 * width * width)
        written: tuple[Buffer, ...] = ()
        entry = saved.entry
        if len(entry) > 1 and self.dropping and s.weight == 4:  # in place of the tokens' embeddings
            written, entry = entry[:1], entry[1:]
        elif len(entry) > 1 or self.dropping:  # too much to read once more for the norm's gradient
            written = (p.new(f"{name}.ln_2.input", count, 4, Kind.TEMPORARY),)
        if self.dropping:
            written += (p.new(f"{name}.attn.resid_dropout.random", count, 4, Kind.TEMPORARY),)
        norm_2 = self.norm_again(f"{name}.ln_2", written)
        whole = len(saved.entry) > 1 and self.dropping  # the stream itself was written, all that is read from here on
        if whole:
            p.drop(s.compute, branch)
            p.release(*entry)
            entry = ()
        fc = self.linear(f"{name}.mlp.c_fc", norm_2.output, width, 4 * width, half)
        gelu = end = None
        if outermost:
            gelu = p.new(f"{name}.mlp.gelu", s.rows * s.padded(4 * width), s.compute, Kind.ACTIVATIONS)
            p.run(f"{name}.mlp.gelu", Kernel.POINTWISE, 8 * count * s.compute)
            end = self.linear(f"{name}.mlp.c_proj", gelu, 4 * width, width, half)
        elif written and not whole:
            p.drop(s.compute, branch)
        norm_1.inputs = entry
        kept = None if whole or (written and not outermost) else branch
        return Recomputed(norm_1, front.qkv, attention, kept, norm_2, fc, gelu, end, half)

    def norm_again(self, name: str, written: tuple[Buffer, ...]) -> SavedNorm:
        """A recomputed norm's kernel: its output and two numbers a row. Its input is put together once more later."""
        p, s = self.p, self.s
        output = p.new(f"{name}.output", s.rows * s.width, s.compute, Kind.ACTIVATIONS)
        rows = [p.new(f"{name}.{what}", s.rows, 4, Kind.ACTIVATIONS) for what in ("mean", "deviation")]
        p.run(name, Kernel.REDUCTION, s.rows * s.width * (2 * s.compute + s.weight + 4 * len(written)))
        return SavedNorm(output, (), (), (*written, *rows))


class Again(Layers):
    """Writes checkpointed blocks: computes them again, then their gradients."""

    def __init__(self, program: Generated, sizes: Sizes, saved: Saved, batch: tuple[Buffer, ...]) -> None:
        super().__init__(program, sizes, saved, batch)
        self.fronts: dict[int, Front] = {}  # of blocks whose softmax has run

    def recompute(self, index: int) -> Recomputed | None:
        """A checkpointed block once more; None for another."""
        if not 0 <= index < self.s.checkpointed:
            return None
        p, s, block = self.p, self.s, self.saved.blocks[index]
        assert isinstance(block, Checkpoint)
        before = p.block
        front = self.fronts.pop(index, None)
        if front is None:
            front = self.front(index)
            if s.paired and front.begun is not None:
                weigh_together(p, [front.begun, *self.ahead(index)])
            if index < (2 if s.paired else 1) and not s.chained:
                p.release(*self.saved.constants)
        outermost = s.rebuilds and index == s.checkpointed - 1
        again = Anew(p, s, training=True).recompute(index, block, front, outermost)
        p.block = before
        return again

    def front(self, index: int) -> Front:
        """A checkpointed block once more, up to attention's kernel or softmax."""
        block = self.saved.blocks[index]
        assert isinstance(block, Checkpoint)
        return Anew(self.p, self.s, training=True).front(index, block)

    def ahead(self, index: int) -> list[Begun]:
        """The block before up to its softmax, if there is one: already begun when its turn comes."""
        if index == 0:
            return []
        front = self.fronts[index - 1] = self.front(index - 1)
        return [front.begun] if front.begun is not None else []

    def chained(self) -> Begun | None:
        p, s, index = self.p, self.s, self.p.block
        if not s.chained or not index:
            return None
        (begun,) = self.ahead(index)
        weigh(p, s, f"h.{index - 1}.attn.sdpa", begun, dropping=True)
        p.block = index
        return begun

    def rebuild(self, name: str, block: Recomputed | None) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
        """The normalised input of the norm after the outermost recomputed block, and the parts that it is made from.

        In half precision the norm's own kernel makes it, unless that is a split reduction, and reads the parts.
        """
        p, s = self.p, self.s
        if block is None or block.end is None:
            return (), ()
        count = s.rows * s.width
        found = block.end if s.compute == 4 else p.new(f"{name}.input", count, 4, Kind.TEMPORARY)  # in place
        spent: tuple[Buffer, ...] = () if found is block.end else (block.end,)
        if block.branch is not None and block.norm_2.written[2:]:
            spent += (block.branch,)
            block.branch = None
        if self.split or s.compute == 4:
            p.run(f"{name}.input", Kernel.POINTWISE, count * (2 * s.compute + s.weight + 4))
            p.drop(s.compute, *spent)
            spent = ()
        return (found,), spent

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
        floats = s.recomputes and s.dropout  # a half stream: dropout's kernel leaves the sum to the next norm's
        flow = self.norm(f"{name}.ln_2", block.norm_2, flow, stream, (), waits=floats and index == 0)
        owned = flow is not stream
        operand = block.attention.output if isinstance(block.attention, Plain) else None
        output = self.linear_again(block, f"{name}.attn.c_proj", width, width, operand)
        if owned:
            p.drop(s.compute, flow)
        packed = self.attention(f"{short}.attn", block, output)
        if index == 0 and s.chained:
            p.release(*self.saved.constants)
        flow = self.linear_again(block, f"{name}.attn.c_attn", width, 3 * width, block.norm_1.output)
        p.drop(s.compute, packed)
        return self.norm(f"{name}.ln_1", block.norm_1, flow, stream, (), index == 0, waits=floats and index > 0)

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
