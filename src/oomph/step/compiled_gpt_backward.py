"""The backward program that inductor generates for a nanoGPT-shaped model, by arithmetic.

It takes what the forward program saved, and lets each of it go after its last use. Gradients are fresh buffers: the
program returns them all at its end, and only then autograd adds them to those of earlier micro-steps. Under autocast
a weight's gradient is a half buffer first, whose memory the next weight of that size takes over.
"""

from __future__ import annotations

from oomph.step.compile.model import DONATED_FROM, ONE_HOT_BEFORE
from oomph.step.compiled_gpt import Checkpoint, Plain, Recomputed, Saved, SavedBlock, Sizes
from oomph.step.compiled_gpt_again import Again
from oomph.step.compiled_gpt_chunks import chunked_backward
from oomph.step.compiled_reuse import Generated
from oomph.step.ops import Buffer, Kernel, Kind


class Backward(Again):
    """Writes the backward program."""

    def __init__(self, program: Generated, sizes: Sizes, saved: Saved, batch: tuple[Buffer, ...]) -> None:
        super().__init__(program, sizes, saved, batch)
        self.added = sizes.tied and sizes.compute == sizes.weight
        self.first_inputs: tuple[Buffer, ...] = ()
        self.head_grad: Buffer
        self.logits_grad: Buffer

    def write(self, zeros: tuple[Buffer, ...], version: tuple[int, ...]) -> dict[str, Buffer]:
        """The whole program. `zeros` is the gradient of returned logits. Returns the gradients by parameter name."""
        p, s, logits = self.p, self.s, self.saved.logits
        if logits is None:
            flow = chunked_backward(p, s, self.saved.grads)
            p.release(*self.batch[1:])
            if not s.tied:
                self.grads["lm_head.weight"] = self.saved.grads[1]
        else:
            flow = self.head(logits, zeros, version)
        outermost = self.recompute(s.layers - 1) if s.rebuilds else None
        rebuilt, spent = self.rebuild("transformer.ln_f", outermost)
        stream = p.new("ln_f.dx", s.rows * s.width, s.weight, Kind.TEMPORARY)
        masks = self.mask_of(s.layers - 1, 1)
        flow = self.norm("transformer.ln_f", self.saved.norm_f, flow, stream, masks, rebuilt=rebuilt, spent=spent)
        for index in reversed(range(s.layers)):
            p.block = index
            block = self.saved.blocks[index]
            if isinstance(block, Checkpoint):
                again = outermost or self.recompute(index)
                assert again is not None
                flow = self.again(index, again, flow, stream)
                self.first_inputs = again.norm_1.inputs
                outermost = None
            else:
                flow, outermost = self.block(index, block, flow, stream)
                self.first_inputs = block.norm_1.inputs
        p.block = None
        self.embeddings(stream)
        return self.grads

    def head(self, logits: Buffer, zeros: tuple[Buffer, ...], version: tuple[int, ...]) -> Buffer:
        """The logits' gradient, then the head's and the hidden state's.

        A tied head's gradient waits for the embedding's. In one dtype the sum of both is a single matrix product
        (addmm) at the end, for which the logits' gradient and the hidden state are kept.
        """
        p, s, saved = self.p, self.s, self.saved
        count = s.rows * s.vocab
        in_place = not zeros and version >= DONATED_FROM
        wide: list[Buffer] = []
        one_hot = version < ONE_HOT_BEFORE
        if one_hot:
            wide = [p.new("loss.one_hot", count, s.weight, Kind.LOGITS)]  # the softmax's dtype
            p.run("loss.one_hot", Kernel.POINTWISE, s.weight * count)
        gradient = logits
        if not in_place:
            gradient = p.new("logits.grad", s.rows * s.padded(s.vocab), s.compute, Kind.LOGITS)
        moved = count * (s.compute * (3 if zeros else 2) + (s.weight if one_hot else 0))
        p.run("loss", Kernel.REDUCTION, moved, in_place=gradient.bytes if in_place else 0)
        p.drop(s.weight, *wide)
        if zeros:
            p.leave(logits)
        elif not in_place:
            p.release(logits)
        p.release(*zeros, *saved.statistics, *saved.small[1:], *self.batch[1:])
        if not self.added:
            self.head_grad = p.new("lm_head.weight.dx", s.vocab * s.width, s.compute, Kind.TEMPORARY)
            p.product("lm_head.weight", s.vocab, s.width, s.rows, s.compute)
            p.release(saved.norm_f.output)
        flow = p.new("lm_head.dx", s.rows * s.width, s.compute, Kind.TEMPORARY)
        p.product("lm_head", s.rows, s.width, s.vocab, s.compute)
        if self.added:
            self.logits_grad = gradient
        else:
            p.drop(s.compute, gradient)
        p.release(*saved.head)
        if not s.tied:
            self.weight_grad("lm_head.weight", self.head_grad, s.vocab * s.width)
        return flow

    def block(self, index: int, saved: SavedBlock, flow: Buffer, stream: Buffer) -> tuple[Buffer, Recomputed | None]:
        """A block, last layer first. `flow` is the stream's gradient in the compute dtype.

        Its first norm may read the output of a checkpointed block, which is then computed again before.
        """
        p, s, name = self.p, self.s, f"transformer.h.{index}"
        rows, width = s.rows, s.width
        short = f"h.{index}"
        owned = flow is not stream
        # the MLP
        hidden = self.linear(saved, f"{name}.mlp.c_proj", 4 * width, width, saved.gelu)
        if owned:
            p.drop(s.compute, flow)
        p.run(f"{short}.mlp.gelu.backward", Kernel.POINTWISE, 12 * rows * width * s.compute, in_place=hidden.bytes)
        p.release(saved.fc)
        flow = self.linear(saved, f"{name}.mlp.c_fc", width, 4 * width, saved.norm_2.output)
        p.drop(s.compute, hidden)
        flow = self.norm(f"{name}.ln_2", saved.norm_2, flow, stream, self.mask_of(index, 0))
        # attention
        owned = flow is not stream
        operand = saved.attention.output if isinstance(saved.attention, Plain) else None
        output = self.linear(saved, f"{name}.attn.c_proj", width, width, operand)
        if owned:
            p.drop(s.compute, flow)
        packed = self.attention(f"{short}.attn", saved, output)
        flow = self.linear(saved, f"{name}.attn.c_attn", width, 3 * width, saved.norm_1.output)
        p.drop(s.compute, packed)
        masks = self.mask_of(index - 1, 1) if index else ()
        outermost = self.recompute(index - 1) if s.rebuilds and index == s.checkpointed else None
        rebuilt, spent = self.rebuild(f"{name}.ln_1", outermost)
        flow = self.norm(f"{name}.ln_1", saved.norm_1, flow, stream, masks, index == 0, rebuilt, spent)
        return flow, outermost

    def narrowed(self, name: str, wide: Buffer) -> Buffer:
        """A float32 gradient in half precision."""
        p = self.p
        narrow = p.new(f"{name}.grad", wide.bytes // 4, 2, Kind.GRADIENTS)
        p.run(f"{name}.grad", Kernel.POINTWISE, 3 * wide.bytes // 2)
        p.drop(4, wide)
        return narrow

    def embeddings(self, stream: Buffer) -> None:
        """Both tables' gradients; a tied head's joins the tokens'."""
        p, s, saved = self.p, self.s, self.saved
        count = s.vocab * s.width
        inputs = self.first_inputs
        table = p.new("transformer.wte.weight.scattered", count, 4, Kind.GRADIENTS)  # half rows add up in float32
        p.run("wte.zeros", Kernel.POINTWISE, count * 4)
        p.run("wte.backward", Kernel.INDEX, 3 * s.rows * s.width * s.weight)
        p.release(*self.batch[:1], *inputs, *saved.masks)
        positions = p.new("transformer.wpe.weight.grad", s.tokens * s.width, 4, Kind.GRADIENTS)
        p.run("wpe.backward", Kernel.INDEX, s.rows * s.width * s.weight)
        p.drop(s.weight, stream)
        p.release(*saved.small[:1])
        if s.weight == 2:
            positions = self.narrowed("transformer.wpe.weight", positions)
            table = self.narrowed("transformer.wte.weight", table)
        self.grads["transformer.wpe.weight"] = positions
        if not s.tied:
            self.grads["transformer.wte.weight"] = table
            return
        if saved.grads:  # autograd adds the table's gradient to the head's
            self.grads["transformer.wte.weight"] = saved.grads[1]
            p.run("wte.tied", Kernel.POINTWISE, 3 * count * s.weight)
            p.drop(s.weight, table)
            return
        self.grads["transformer.wte.weight"] = p.new("transformer.wte.weight.grad", count, s.weight, Kind.GRADIENTS)
        if self.added:
            p.product("lm_head.weight", s.vocab, s.width, s.rows, s.compute)
            p.drop(s.compute, self.logits_grad)
            p.release(saved.norm_f.output)
        else:
            p.run("wte.tied", Kernel.POINTWISE, count * (2 * s.weight + s.compute))
            p.drop(s.compute, self.head_grad)
        p.drop(s.weight, table)
