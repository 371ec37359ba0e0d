"""The backward program that inductor generates for a nanoGPT-shaped model, by arithmetic.

It takes what the forward program saved, and lets each of it go after its last use. Gradients are fresh buffers: the
program returns them all at its end, and only then autograd adds them to those of earlier micro-steps. Under autocast
a weight's gradient is a half buffer first, whose memory the next weight of that size takes over.
"""

from __future__ import annotations

from oomph.step.compiled_gpt import Checkpoint, Saved, SavedBlock, SavedNorm, Sizes
from oomph.step.compiled_gpt_chunks import chunked_backward
from oomph.step.compiled_gpt_forward import Forward
from oomph.step.compiled_reuse import Generated
from oomph.step.gpt_eager_kernels import efficient_backward_bytes, flash_backward_bytes
from oomph.step.ops import Buffer, Kernel, Kind

ONE_HOT_BEFORE = (2, 5)  # pytorch#129043: before, the loss's backward writes the targets out as a float32 matrix
DONATED_FROM = (2, 6)  # pytorch#139669: since then what forward saved may be overwritten in place
SPLIT_ROWS = 16  # rows that one part of a split reduction sums up (inductor's mix-order reduction)
SPLIT_FROM_ROWS = 4096  # fewer rows are not split that way
SPLIT_FROM_COUNT = 5 * 2**20  # nor fewer elements


class Backward:
    """Writes the backward program."""

    def __init__(self, program: Generated, sizes: Sizes, saved: Saved, batch: tuple[Buffer, ...]) -> None:
        self.p, self.s, self.saved, self.batch = program, sizes, saved, batch
        self.grads: dict[str, Buffer] = {}
        self.split = sizes.rows >= SPLIT_FROM_ROWS and sizes.rows * sizes.width >= SPLIT_FROM_COUNT
        self.added = sizes.tied and sizes.compute == sizes.weight
        self.first_inputs: tuple[Buffer, ...] = ()
        self.head_grad: Buffer
        self.logits_grad: Buffer
        self.separate = self.split and sizes.autocast  # a split reduction's kernel does not write the half gradient

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
        stream = p.new("ln_f.dx", s.rows * s.width, s.weight, Kind.TEMPORARY)
        flow = self.norm("transformer.ln_f", self.saved.norm_f, flow, stream, self.mask_of(s.layers - 1, 1))
        for index in reversed(range(s.layers)):
            p.block = index
            block = self.saved.blocks[index]
            if isinstance(block, Checkpoint):
                block = Forward(p, s, training=True).recompute(index, block.entry)
                flow = self.block(index, block, flow, stream)
                p.drop(1, *block.masks)
            else:
                flow = self.block(index, block, flow, stream)
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
            wide = [p.new("loss.one_hot", count, 4, Kind.LOGITS)]
            p.run("loss.one_hot", Kernel.POINTWISE, 4 * count)
        gradient = logits
        if not in_place:
            gradient = p.new("logits.grad", s.rows * s.padded(s.vocab), s.compute, Kind.LOGITS)
        moved = count * (s.compute * (3 if zeros else 2) + (4 if one_hot else 0))
        p.run("loss", Kernel.REDUCTION, moved)
        p.drop(4, *wide)
        if not in_place and not zeros:
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

    def norm(
        self, name: str, saved: SavedNorm, flow: Buffer, stream: Buffer, masks: tuple[Buffer, ...], last: bool = False
    ) -> Buffer:
        """A layer norm's backward, added to the stream's gradient in place, and its half copy for what comes next."""
        p, s = self.p, self.s
        count = s.rows * s.width
        parts = -(-s.rows // SPLIT_ROWS) * s.width * (2 if s.bias else 1)
        workspace = p.new(f"{name}.parts", parts, 4, Kind.TEMPORARY) if self.split else None
        apart = count != 0 and (s.compute != s.weight or s.dropout) and not last
        following = flow
        if apart and not self.separate:
            following = p.new(f"{name}.dx.half", count, s.compute, Kind.TEMPORARY)
        p.run(f"{name}.backward", Kernel.REDUCTION, count * (3 * s.weight + s.compute))
        for part in ("weight", "bias") if s.bias else ("weight",):
            self.grads[f"{name}.{part}"] = p.new(f"{name}.{part}.grad", s.width, s.weight, Kind.GRADIENTS)
            p.run(f"{name}.{part}", Kernel.REDUCTION, 4 * parts if self.split else 2 * count * s.weight)
        p.release(*saved.deviation)
        if workspace is not None:
            p.drop(4, workspace)
        if not last:
            p.release(*saved.inputs)
        p.drop(s.compute, flow)
        if apart and self.separate:
            following = p.new(f"{name}.dx.half", count, s.compute, Kind.TEMPORARY)
            p.run(f"{name}.dx.half", Kernel.POINTWISE, count * (s.weight + s.compute))
        p.release(*masks)
        return following if apart else stream

    def mask_of(self, index: int, which: int) -> tuple[Buffer, ...]:
        """The dropout mask after attention (0) or the MLP (1) of a block."""
        block = self.saved.blocks[index]
        if isinstance(block, Checkpoint) or not block.masks:
            return ()
        return (block.masks[which],)

    def block(self, index: int, saved: SavedBlock, flow: Buffer, stream: Buffer) -> Buffer:
        """A block, last layer first. `flow` is the stream's gradient in the compute dtype."""
        p, s, name = self.p, self.s, f"transformer.h.{index}"
        rows, width = s.rows, s.width
        short = f"h.{index}"
        owned = flow is not stream
        # the MLP
        hidden = self.linear(saved, f"{name}.mlp.c_proj", 4 * width, width, saved.gelu)
        if owned:
            p.drop(s.compute, flow)
        p.run(f"{short}.mlp.gelu.backward", Kernel.POINTWISE, 12 * rows * width * s.compute)
        p.release(saved.fc)
        flow = self.linear(saved, f"{name}.mlp.c_fc", width, 4 * width, saved.norm_2.output)
        p.drop(s.compute, hidden)
        flow = self.norm(f"{name}.ln_2", saved.norm_2, flow, stream, self.mask_of(index, 0))
        # attention
        owned = flow is not stream
        output = self.linear(saved, f"{name}.attn.c_proj", width, width, None)
        if owned:
            p.drop(s.compute, flow)
        packed = self.attention(f"{short}.attn", saved, output)
        flow = self.linear(saved, f"{name}.attn.c_attn", width, 3 * width, saved.norm_1.output)
        p.drop(s.compute, packed)
        masks = self.mask_of(index - 1, 1) if index else ()
        return self.norm(f"{name}.ln_1", saved.norm_1, flow, stream, masks, last=index == 0)

    def attention(self, name: str, saved: SavedBlock, gradient: Buffer) -> Buffer:
        """The attention kernel's backward, and its three results put side by side."""
        p, s = self.p, self.s
        count, size = s.rows * s.width, s.width // s.heads
        shape = (s.batch, s.heads, s.tokens, size)
        if s.compute == 2:
            sizes: tuple[int, ...] = flash_backward_bytes(*shape)
        else:
            sizes = efficient_backward_bytes(*shape, False)
        temporaries = tuple([Buffer(f"{name}.sdpa.temporary", each, Kind.ATTENTION, p.block) for each in sizes])
        parts = [p.made(f"{name}.sdpa.d{part}", count * s.compute, Kind.TEMPORARY) for part in "qkv"]
        flops = 5 * s.batch * s.heads * s.tokens * s.tokens * size  # causal: half of five products
        p.run(f"{name}.sdpa.backward", Kernel.ATTENTION, 8 * count * s.compute, flops, shape, temporaries)
        p.drop(s.compute, gradient)
        p.release(*saved.attention, saved.qkv)
        packed = p.new(f"{name}.sdpa.dqkv", s.rows * s.padded(3 * s.width), s.compute, Kind.TEMPORARY)
        p.run(f"{name}.sdpa.dqkv", Kernel.POINTWISE, 6 * count * s.compute)
        p.drop(s.compute, *parts)
        return packed

    def linear(self, saved: SavedBlock, name: str, inputs: int, outputs: int, operand: Buffer | None) -> Buffer:
        """A linear layer's backward: the gradient of its input. With a bias autograd asks for that first."""
        if not self.s.bias:
            self.weight(name, inputs, outputs, operand)
        p, s, short = self.p, self.s, name.removeprefix("transformer.")
        gradient = p.new(f"{name}.dx", s.rows * s.padded(inputs), s.compute, Kind.TEMPORARY)
        p.product(short, s.rows, inputs, outputs, s.compute)
        if short in saved.half:
            p.release(saved.half[short])
        if s.bias:
            self.weight(name, inputs, outputs, operand)
        return gradient

    def weight(self, name: str, inputs: int, outputs: int, operand: Buffer | None) -> None:
        """A linear layer's weight gradient, and its bias's."""
        p, s = self.p, self.s
        raw = p.new(f"{name}.weight.dx", outputs * inputs, s.compute, Kind.TEMPORARY)
        p.product(f"{name}.weight", outputs, inputs, s.rows, s.compute)
        if operand is not None:
            p.release(operand)
        self.weight_grad(f"{name}.weight", raw, outputs * inputs)
        if s.bias:
            self.grads[f"{name}.bias"] = p.new(f"{name}.bias.grad", outputs, s.weight, Kind.GRADIENTS)
            p.run(f"{name}.bias", Kernel.REDUCTION, s.rows * outputs * s.compute)

    def weight_grad(self, name: str, raw: Buffer, count: int) -> None:
        """A weight's gradient in the weight's dtype: the product itself, where that is the compute dtype."""
        p, s = self.p, self.s
        if s.compute == s.weight:
            self.grads[name] = raw
            return
        self.grads[name] = p.new(f"{name}.grad", count, s.weight, Kind.GRADIENTS)
        p.run(f"{name}.grad", Kernel.POINTWISE, count * (s.compute + s.weight))
        p.drop(s.compute, raw)

    def embeddings(self, stream: Buffer) -> None:
        """Both tables' gradients; a tied head's joins the tokens'."""
        p, s, saved = self.p, self.s, self.saved
        count = s.vocab * s.width
        inputs = self.first_inputs
        table = p.new("transformer.wte.weight.scattered", count, s.weight, Kind.GRADIENTS)
        p.run("wte.zeros", Kernel.POINTWISE, count * s.weight)
        p.run("wte.backward", Kernel.INDEX, 3 * s.rows * s.width * s.weight)
        p.release(*self.batch[:1], *inputs, *saved.masks)
        positions = p.new("transformer.wpe.weight.grad", s.tokens * s.width, s.weight, Kind.GRADIENTS)
        p.run("wpe.backward", Kernel.INDEX, s.rows * s.width * s.weight)
        p.drop(s.weight, stream)
        p.release(*saved.small[:1])
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
