"""The backward of a block's parts as inductor generates it: norms, linear layers, attention."""

from __future__ import annotations

from oomph.step.compiled_gpt import Begun, Checkpoint, Plain, Recomputed, Saved, SavedBlock, SavedNorm, Sizes
from oomph.step.compiled_gpt_plain import plain_backward
from oomph.step.compiled_reuse import Generated
from oomph.step.ops import Buffer, Kernel, Kind

SPLIT_ROWS = 16  # rows that one part of a split reduction sums up (inductor's mix-order reduction)
SPLIT_FROM_ROWS = 4096  # fewer rows are not split that way
SPLIT_FROM_COUNT = 5 * 2**20  # nor fewer elements


class Layers:
    """Writes the parts of blocks."""

    def __init__(self, program: Generated, sizes: Sizes, saved: Saved, batch: tuple[Buffer, ...]) -> None:
        self.p, self.s, self.saved, self.batch = program, sizes, saved, batch
        self.grads: dict[str, Buffer] = {}
        self.terms: list[Buffer] = []  # of the stream's gradient, not yet added
        self.split = sizes.rows >= SPLIT_FROM_ROWS and sizes.rows * sizes.width >= SPLIT_FROM_COUNT
        self.separate = self.split and sizes.autocast  # a split reduction's kernel does not write the half gradient

    def norm(
        self, name: str, saved: SavedNorm, flow: Buffer, stream: Buffer, masks: tuple[Buffer, ...],
        last: bool = False, rebuilt: tuple[Buffer, ...] = (), spent: tuple[Buffer, ...] = (), waits: bool = False,
    ) -> Buffer:  # fmt: skip
        """A layer norm's backward, added to the stream's gradient in place, and its half copy for what comes next.

        `rebuilt` is its normalised input, where backward makes that; `spent` are the parts its kernel reads for it.
        Where it `waits` the sum is left to the next norm, and what this one adds is written in float32.
        """
        p, s = self.p, self.s
        count = s.rows * s.width
        parts = -(-s.rows // SPLIT_ROWS) * s.width * (2 if s.bias else 1)
        workspace = p.new(f"{name}.parts", parts, 4, Kind.TEMPORARY) if self.split else None
        apart = count != 0 and (s.compute != s.weight or s.dropout) and not last
        following = flow
        if apart and not self.separate:
            following = p.new(f"{name}.dx.half", count, s.compute, Kind.TEMPORARY)
        if waits:
            self.terms.append(p.new(f"{name}.dx.float", count, 4, Kind.TEMPORARY))
        in_place = 0 if name == "transformer.ln_f" else stream.bytes
        p.run(f"{name}.backward", Kernel.REDUCTION, count * (3 * s.weight + s.compute), in_place=in_place)
        p.drop(s.compute, *spent)
        if not waits:
            p.drop(4, *self.terms)
            self.terms = []
        for part in ("weight", "bias") if s.bias else ("weight",):
            self.grads[f"{name}.{part}"] = p.new(f"{name}.{part}.grad", s.width, s.weight, Kind.GRADIENTS)
            p.run(f"{name}.{part}", Kernel.REDUCTION, 4 * parts if self.split else 2 * count * s.weight)
        p.release(*saved.deviation)
        p.drop(4, *rebuilt, *saved.written)
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

    def attention(
        self, name: str, saved: SavedBlock | Recomputed, gradient: Buffer, keeps_output: bool = False
    ) -> Buffer:
        """The attention kernel's backward, and its three results put side by side.

        On a CPU the memory of what it returns does not serve again: inductor takes no input of a program there for
        aligned, nor what a kernel makes of one, and asks the same alignment of a dead buffer and of the next.
        """
        p, s = self.p, self.s
        if isinstance(saved.attention, Plain):
            own = isinstance(saved, Recomputed)
            return plain_backward(p, s, name, saved.attention, gradient, own, self.chained if own else lambda: None)
        count, size = s.rows * s.width, s.width // s.heads
        shape = (s.batch, s.heads, s.tokens, size)
        sizes = s.attention_backward_bytes()
        temporaries = tuple([Buffer(f"{name}.sdpa.temporary", each, Kind.ATTENTION, p.block) for each in sizes])
        parts = [p.made(f"{name}.sdpa.d{part}", count * s.compute, Kind.TEMPORARY) for part in "qkv"]
        flops = 5 * s.batch * s.heads * s.tokens * s.tokens * size  # causal: half of five products
        p.run(f"{name}.sdpa.backward", Kernel.ATTENTION, 8 * count * s.compute, flops, shape, temporaries)
        p.drop(s.compute, gradient)
        if isinstance(saved, Recomputed):
            output, *rest = saved.attention
            p.drop(s.compute, saved.qkv)
            if not keeps_output:
                self.let_go(s.cuda, output)
            if s.cuda:
                p.drop(4, *rest)
            else:
                p.release(*rest)
        else:
            p.release(*saved.attention, saved.qkv)
        packed = p.new(f"{name}.sdpa.dqkv", s.rows * s.padded(3 * s.width), s.compute, Kind.TEMPORARY)
        p.run(f"{name}.sdpa.dqkv", Kernel.POINTWISE, 6 * count * s.compute)
        for part in parts:
            self.let_go(s.cuda, part)
        return packed

    def chained(self) -> Begun | None:
        """The block before, where its softmax is computed in one loop with the gradient of this one's scores."""
        return None

    def linear(self, saved: SavedBlock, name: str, inputs: int, outputs: int, operand: Buffer | None) -> Buffer:
        """A linear layer's backward: the gradient of its input. With a bias autograd asks for that first."""
        if not self.s.bias:
            self.weight(name, inputs, outputs, operand)
        gradient = self.input_grad(saved.half, name, inputs, outputs)
        if self.s.bias:
            self.weight(name, inputs, outputs, operand)
        return gradient

    def linear_again(self, block: Recomputed, name: str, inputs: int, outputs: int, operand: Buffer | None) -> Buffer:
        """The same in a recomputed block."""
        if not self.s.bias:
            self.weight(name, inputs, outputs, operand, own=True)
        gradient = self.input_grad(block.half, name, inputs, outputs, own=True)
        if self.s.bias:
            self.weight(name, inputs, outputs, operand, own=True)
        return gradient

    def input_grad(self, half: dict[str, Buffer], name: str, inputs: int, outputs: int, own: bool = False) -> Buffer:
        """The gradient of a linear layer's input, after which its half weight has served."""
        p, s, short = self.p, self.s, name.removeprefix("transformer.")
        gradient = p.new(f"{name}.dx", s.rows * s.padded(inputs), s.compute, Kind.TEMPORARY)
        p.product(short, s.rows, inputs, outputs, s.compute)
        if short in half:
            self.let_go(own, half[short])
        return gradient

    def let_go(self, own: bool, buffer: Buffer) -> None:
        """What the program made itself serves again; what forward saved is freed."""
        if own:
            self.p.drop(self.s.compute, buffer)
        else:
            self.p.release(buffer)

    def weight(self, name: str, inputs: int, outputs: int, operand: Buffer | None, own: bool = False) -> None:
        """A linear layer's weight gradient, and its bias's."""
        p, s = self.p, self.s
        raw = p.new(f"{name}.weight.dx", outputs * inputs, s.compute, Kind.TEMPORARY)
        p.product(f"{name}.weight", outputs, inputs, s.rows, s.compute)
        if operand is not None:
            self.let_go(own, operand)
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

    def mask_of(self, index: int, which: int) -> tuple[Buffer, ...]:
        """The dropout mask after attention (0) or the MLP (1) of a block."""
        block = self.saved.blocks[index]
        if isinstance(block, Checkpoint) or not block.masks:
            return ()
        return (block.masks[which],)
