"""The forward programs that inductor generates for a nanoGPT-shaped model, of training and of evaluation."""

from __future__ import annotations

from oomph.step.compiled_gpt import Checkpoint, Plain, Saved, SavedBlock, SavedNorm, Sizes, Stream
from oomph.step.compiled_gpt_chunks import chunked_loss
from oomph.step.compiled_gpt_plain import attend_plainly, output_of
from oomph.step.compiled_reuse import Generated
from oomph.step.kernels import FLASH_STATE_BYTES, cpu_flash_bytes, efficient_lse_bytes, flash_lse_bytes
from oomph.step.ops import Buffer, Kernel, Kind

EFFICIENT_STATE_BYTES = (8, 8)  # the memory-efficient kernel's seed and offset
CPU_STATE_BYTES = 5056  # torch.get_rng_state(): the Mersenne twister and what it has drawn ahead
FEW_SEQUENCES = 2  # up to here the partitioner finds the normalised input cheaper to save than the embeddings;
FEW_SEQUENCES_DROPOUT = 3  # with dropout between both, one more


class Forward:
    """Writes the forward program, of training or of evaluation."""

    def __init__(self, program: Generated, sizes: Sizes, training: bool, returns_logits: bool = True) -> None:
        self.p, self.s, self.training, self.returns_logits = program, sizes, training, returns_logits
        self.keeps = training  # what is computed now is saved for backward
        self.dropping = sizes.dropout and training
        self.masks: list[Buffer] = []
        self.random: tuple[Buffer, ...] = ()
        self.constants: tuple[Buffer, ...] = ()
        self.highest = 0  # of what is compiled, where the loss is not

    def write(self) -> Saved:
        """The whole program; what it leaves allocated is what it returns."""
        p, s = self.p, self.s
        half = self.cast("h.0.attn.c_attn", 3 * s.width * s.width)
        norm, stream = self.embed()
        first_mask = tuple(self.masks)
        blocks: list[SavedBlock | Checkpoint] = []
        for index in range(s.layers):
            p.block = index
            self.masks, self.random = [], ()
            block, half, norm = self.block(index, half, norm, stream)
            if self.training:
                blocks.append(block)
        p.block = None
        return self.loss(blocks, norm, tuple(half.values()), first_mask)

    def embed(self) -> tuple[SavedNorm, Stream]:
        """Both tables' rows, added, and the first norm, which reads them from the tables where they are not saved."""
        p, s = self.p, self.s
        count = s.rows * s.width
        inputs: tuple[Buffer, ...] = ()
        reads = 3
        few = FEW_SEQUENCES_DROPOUT if s.dropout else FEW_SEQUENCES
        apart = s.batch > (1 if s.checkpointed else few)
        if self.training and apart:
            position = p.new("wpe", s.tokens * s.width, s.weight, Kind.ACTIVATIONS)
            p.run("wpe", Kernel.INDEX, 2 * s.tokens * s.width * s.weight)
            token = p.new("wte", count, s.weight, Kind.ACTIVATIONS)
            inputs, reads = (token, position), 2
            if not s.checkpointed:
                inputs = (*inputs, p.new("h.0.ln_1.mean", s.rows, 4, Kind.ACTIVATIONS))
        stream = Stream(p, s, reads + (1 if self.dropping else 0))
        self.mask("drop")
        p.block = 0
        if self.training and s.checkpointed:
            if not apart:
                inputs = (stream.write("h.0.input", owned=False),)
            output = p.new("h.0.ln_1.output", count, s.compute, Kind.ACTIVATIONS)
            p.run("h.0.ln_1", Kernel.REDUCTION, count * (2 * s.weight + s.compute))
            if not apart:
                stream.settled()
            return SavedNorm(output, inputs, ()), stream
        return self.norm("h.0.ln_1", stream, inputs, moved=count * s.weight), stream

    def norm(
        self, name: str, stream: Stream, inputs: tuple[Buffer, ...] = (), moved: int = 0, last: bool = False,
        rebuilt: bool = False,
    ) -> SavedNorm:  # fmt: skip
        """One kernel: the additions that have piled up, the norm, the cast.

        Where backward builds the norm's input anew (`rebuilt`), nothing but two numbers a row is saved.
        """
        p, s = self.p, self.s
        count = s.rows * s.width
        boundary = self.keeps and rebuilt
        kept = self.keeps and s.recomputes and not rebuilt
        writes = False if last or kept else stream.settle()
        taken = last and stream.written is not None and stream.owned and self.training and not rebuilt
        deviation: tuple[Buffer, ...] = ()
        before = stream.written if stream.owned and kept and stream.rebuilt else None
        if boundary:
            inputs = (p.new(f"{name}.mean", s.rows, 4, Kind.ACTIVATIONS),)
            stream.rebuilt = True
        elif kept:
            writes = stream.rebuilt
            inputs = (stream.write("stream", owned=False),) if writes else (*inputs, *stream.save())
            stream.rebuilt = False
            if name != "h.0.ln_1":
                inputs = (*inputs, p.new(f"{name}.mean", s.rows, 4, Kind.ACTIVATIONS))
        elif self.keeps:
            if taken and stream.written is not None:
                inputs = (stream.written,)  # nothing reads the stream after the last norm: written in place
            elif not inputs:
                inputs = (p.new(f"{name}.input", count, 4, Kind.ACTIVATIONS),)
        hidden = last and s.chunk > 0  # the chunked loss takes the norm's output as it is
        output = p.new(f"{name}.output", count, s.weight if hidden else s.compute, Kind.ACTIVATIONS)
        if self.keeps:
            deviation = (p.new(f"{name}.deviation", s.rows, 4, Kind.ACTIVATIONS),)
        if kept:  # product and stream are read, their sum written over one of them, and the output; first, just written
            moved += count * s.compute * (2 if name == "h.0.ln_1" else 4 + writes)
        else:
            moved += count * (s.compute * (1 + len(stream.pieces)) + 4 * (1 + self.keeps + writes))
        p.run(name, Kernel.REDUCTION, moved)
        if writes:
            stream.settled()
        if before is not None:
            p.drop(s.weight, before)
        if last and not kept:
            stream.close()
            if stream.written is not None and stream.owned and not taken:
                p.drop(s.weight, stream.written)
        return SavedNorm(output, inputs, deviation)

    def enter(self, index: int, stream: Stream, moved: int = 0) -> SavedNorm:
        """A checkpointed block's first norm: its kernel writes the stream, which is all that the block saves."""
        p, s = self.p, self.s
        count = s.rows * s.width
        before, owned = stream.written, stream.owned
        entry = stream.write(f"h.{index}.input", owned=False)
        output = p.new(f"h.{index}.ln_1.output", count, s.compute, Kind.ACTIVATIONS)
        moved += count * (s.compute * (1 + len(stream.pieces)) + 2 * s.weight)
        p.run(f"h.{index}.ln_1", Kernel.REDUCTION, moved)
        stream.settled()
        if before is not None and owned:
            p.drop(s.weight, before)
        return SavedNorm(output, (entry,), ())

    def block(
        self, index: int, half: dict[str, Buffer], norm_1: SavedNorm, stream: Stream
    ) -> tuple[SavedBlock | Checkpoint, dict[str, Buffer], SavedNorm]:
        """A block, and the norm after it, whose kernel holds the block's last addition.

        Also returned is the half weight that the program makes ahead of the next block.
        """
        p, s, name = self.p, self.s, f"h.{index}"
        checkpointed = self.training and index < s.checkpointed
        last = index == s.layers - 1
        self.keeps = self.training and not checkpointed
        saved = self.inside(index, half, norm_1, stream)
        stream.join(self.linear(f"{name}.mlp.c_proj", saved.gelu, 4 * s.width, s.width, half), self.dropping)
        self.mask(f"{name}.mlp.dropout")
        saved.masks = tuple(self.masks)
        self.keeps = self.training
        following: dict[str, Buffer] = {}
        if not last:
            following = self.cast(f"h.{index + 1}.attn.c_attn", 3 * s.width * s.width)
        elif not s.chunk:
            following = self.cast("lm_head", s.vocab * s.width)
        p.block = None if last else index + 1
        if self.training and index + 1 < min(s.checkpointed, s.layers):
            after = self.enter(index + 1, stream)
        else:
            rebuilt = self.training and s.rebuilds and index + 1 == s.checkpointed
            after = self.norm("ln_f" if last else f"h.{index + 1}.ln_1", stream, last=last, rebuilt=rebuilt)
        return Checkpoint(norm_1.inputs, self.random) if checkpointed else saved, following, after

    def inside(self, index: int, half: dict[str, Buffer], norm_1: SavedNorm, stream: Stream) -> SavedBlock:
        """A block up to its last product."""
        p, s, name = self.p, self.s, f"h.{index}"
        width, rows = s.width, s.rows
        qkv = self.linear(f"{name}.attn.c_attn", norm_1.output, width, 3 * width, half)
        attention = self.attend(f"{name}.attn", qkv)
        half |= self.cast(f"{name}.attn.c_proj", width * width)
        stream.join(self.linear(f"{name}.attn.c_proj", output_of(attention), width, width, half), self.dropping)
        self.mask(f"{name}.attn.resid_dropout")
        if not self.keeps and not isinstance(attention, Plain):
            p.drop(4, *attention[1:])
        half |= self.cast(f"{name}.mlp.c_proj", 4 * width * width)
        half |= self.cast(f"{name}.mlp.c_fc", 4 * width * width)
        norm_2 = self.norm(f"{name}.ln_2", stream)
        fc = self.linear(f"{name}.mlp.c_fc", norm_2.output, width, 4 * width, half)
        gelu = fc  # overwritten in place, where nothing keeps its input
        if self.keeps:
            gelu = p.new(f"{name}.mlp.gelu", rows * s.padded(4 * width), s.compute, Kind.ACTIVATIONS)
        in_place = 0 if self.keeps else fc.bytes
        p.run(f"{name}.mlp.gelu", Kernel.POINTWISE, 8 * rows * width * s.compute, in_place=in_place)
        return SavedBlock(norm_1, qkv, attention, norm_2, fc, gelu, tuple(self.masks), half)

    def loss(
        self,
        blocks: list[SavedBlock | Checkpoint],
        norm: SavedNorm,
        head: tuple[Buffer, ...],
        masks: tuple[Buffer, ...],
    ) -> Saved:
        """The head and the loss: of the logits' softmax only two numbers a row are written."""
        p, s = self.p, self.s
        if s.chunk:
            return self.chunks(blocks, norm, masks)
        columns = s.vocab if self.returns_logits else s.padded(s.vocab)  # a caller gets them without gaps
        logits = p.new("logits", s.rows * columns, s.compute, Kind.LOGITS)
        p.product("lm_head", s.rows, s.vocab, s.width, s.compute)
        if not self.training:
            p.drop(s.compute, norm.output, *head)
        statistics = tuple(p.new(f"loss.{what}", s.rows, 4, Kind.LOGITS) for what in ("maximum", "logarithm"))
        p.run("loss.softmax", Kernel.REDUCTION, s.rows * s.vocab * s.compute)
        loss = p.new("loss", 1, 4, Kind.LOGITS)
        small: tuple[Buffer, ...] = ()
        if self.training:
            small = (p.new("positions", s.tokens, 8, Kind.INPUTS), p.new("loss.count", 1, 4, Kind.LOGITS))
        p.run("loss", Kernel.REDUCTION, 16 * s.rows)
        if not self.training:
            p.drop(4, *statistics)
            if not self.returns_logits:
                p.drop(s.compute, logits)
        return Saved(blocks, norm, head, masks, logits, statistics, loss, small, self.constants)

    def chunks(self, blocks: list[SavedBlock | Checkpoint], norm: SavedNorm, masks: tuple[Buffer, ...]) -> Saved:
        """The head and the loss a chunk of rows at a time."""
        self.highest = self.p.highest
        small: tuple[Buffer, ...] = ()
        if self.training:
            small = (self.p.new("positions", self.s.tokens, 8, Kind.INPUTS),)
        loss, grads = chunked_loss(self.p, self.s, norm.output, self.training)
        return Saved(blocks, norm, (), masks, None, (), loss, small, self.constants, grads)

    def cast(self, name: str, count: int) -> dict[str, Buffer]:
        """A weight's half copy, under autocast."""
        if not self.s.autocast:
            return {}
        buffer = self.p.new(f"{name}.weight.half", count, 2, Kind.HALF_WEIGHTS)
        self.p.run(f"{name}.weight.half", Kernel.POINTWISE, 6 * count)
        return {name: buffer}

    def linear(self, name: str, x: Buffer, width_in: int, width_out: int, half: dict[str, Buffer]) -> Buffer:
        """A matrix product; in evaluation its operands are dead after it."""
        p, s = self.p, self.s
        bias = None
        if s.bias and s.autocast:
            bias = p.new(f"{name}.bias.half", width_out, 2, Kind.HALF_WEIGHTS)
            p.run(f"{name}.bias.half", Kernel.POINTWISE, 6 * width_out)
        output = p.new(name, s.rows * s.padded(width_out), s.compute, Kind.ACTIVATIONS)
        p.product(name, s.rows, width_out, width_in, s.compute)
        if bias is not None:
            p.drop(2, bias)
        if not self.keeps:
            p.drop(s.compute, x)
            if name in half:
                p.drop(2, half.pop(name))
        return output

    def attend(self, name: str, qkv: Buffer) -> tuple[Buffer, ...] | Plain:
        """A fused attention kernel: output, logsumexp, and on a card the random state; or plain products."""
        p, s = self.p, self.s
        if s.kernel == "math" or (s.kernel == "cpu" and self.dropping):
            found = attend_plainly(p, s, f"{name}.sdpa", qkv, self.keeps, self.dropping)
            # Which keys are masked, and zeros for rows that have no others.
            if self.training and s.constants and p.block == 0:
                scores = s.rows * s.heads * s.tokens
                masked = p.new(f"{name}.sdpa.masked", s.tokens * s.tokens, 1, Kind.ATTENTION)
                self.constants = (masked, p.new(f"{name}.sdpa.zeros", scores, 4, Kind.ATTENTION))
                p.run(f"{name}.sdpa.zeros", Kernel.POINTWISE, 4 * scores)
            return found
        shape = (s.batch, s.heads, s.tokens, s.width // s.heads)
        output = p.made(f"{name}.sdpa", s.rows * s.width * s.compute, Kind.ATTENTION)
        sums = (efficient_lse_bytes if s.kernel == "efficient" else flash_lse_bytes)(*shape[:3])
        made = [output, p.made(f"{name}.logsumexp", sums, Kind.ATTENTION)]
        temporaries: tuple[Buffer, ...] = ()
        if s.kernel == "cpu":
            spent = cpu_flash_bytes(s.threads, s.tokens, shape[3], s.compute == 2)
            temporaries = (Buffer(f"{name}.sdpa.temporary", spent, Kind.ATTENTION, p.block),)
            if self.training and not self.keeps:
                self.random = (p.made(f"{name}.random", CPU_STATE_BYTES, Kind.ATTENTION),)
        else:
            state = FLASH_STATE_BYTES if s.kernel == "flash" else EFFICIENT_STATE_BYTES
            made += [p.made(f"{name}.random", each, Kind.ATTENTION) for each in state]
        flops = 2 * s.batch * s.heads * s.tokens * s.tokens * shape[3]  # causal: half of two products
        moved = 4 * s.rows * s.width * s.compute
        p.run(f"{name}.sdpa", Kernel.ATTENTION, moved, flops, shape, temporaries)
        if not self.keeps:
            p.drop(s.compute, qkv)
        return tuple(made)

    def mask(self, name: str) -> None:
        """Dropout keeps a byte for each element; what it scales is never written on its own."""
        if self.dropping and self.keeps:
            self.masks.append(self.p.new(f"{name}.mask", self.s.rows * self.s.width, 1, Kind.ACTIVATIONS))
