"""The programs that inductor generates for a nanoGPT-shaped model: forward, backward, evaluation. By arithmetic.

Found by running inductor itself (`compiled.py`), and held against it in the tests. What it writes to memory:

- a layer norm and everything pointwise before it is one kernel. It writes the normalised input (float32) and the
  norm's output in the compute dtype: both are saved, the one for the norm's backward, the other for the weight's;
- the residual stream is not written after each addition: additions pile up inside the next norms' kernels, and a
  kernel that would read more than four buffers for it writes it out;
- each weight's half copy is made just before use and saved for backward: casts of inputs are never recomputed
  where a matrix product reads them;
- gelu is written (the product after it reads it) and its input is saved too; nothing else of it;
- of the loss only the logits in the compute dtype, and a maximum and a logarithm a row;
- the first block, of three sequences and more, saves the embeddings themselves and recomputes its norm's input.
"""

from __future__ import annotations

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.compiled_reuse import Generated
from oomph.step.ops import Buffer, Kernel, Kind

READS_BEFORE_WRITING = 4  # torch._inductor.config.realize_reads_threshold
PADDING_BYTES = 128  # torch._inductor.config.padding_alignment_bytes
PADDED_FROM_COLUMNS = 1024  # torch._inductor.config.padding_stride_threshold
FEW_SEQUENCES = 2  # up to here the partitioner finds the normalised input cheaper to save than the embeddings;
FEW_SEQUENCES_DROPOUT = 3  # with dropout between both, one more


class Sizes:
    """A config's shape and precision, in the numbers the programs need."""

    def __init__(self, config: TrainConfig, cuda: bool) -> None:
        half = config.dtype in ("bfloat16", "float16")
        self.cuda = cuda
        self.layers = config.n_layer
        self.batch = config.batch_size
        self.tokens = config.block_size
        self.rows = config.batch_size * config.block_size
        self.width = config.n_embd
        self.heads = config.n_head
        self.vocab = config.vocab_size
        self.bias = config.bias
        self.tied = config.tie_weights
        self.dropout = config.dropout > 0
        self.autocast = half and config.autocast and cuda  # nanoGPT enters autocast on a GPU only
        self.weight = 2 if half and not config.autocast else 4  # bytes of a parameter, its gradient, the stream
        self.compute = 2 if self.autocast or self.weight == 2 else 4  # bytes of what matrix products read and write
        self.recomputes = self.weight == 2  # one dtype throughout: norms' inputs are put together again from what is saved
        self.dtype = str(config.dtype) if self.compute == 2 else ("tf32" if cuda and config.allow_tf32 else "float32")


    @property
    def peaks_at_logits(self) -> bool:
        """Whether an evaluation needs more for a row of logits than inside a block: stream, branches, MLP, qkv."""
        return self.vocab * self.compute >= self.width * (self.weight + 11 * self.compute)

    def padded(self, columns: int) -> int:
        """Columns with which inductor lays out a matrix on a card: wide rows start at multiples of 128 bytes."""
        align = PADDING_BYTES // self.compute
        if not self.cuda or columns <= PADDED_FROM_COLUMNS or columns % align == 0:
            return columns
        return -(-columns // align) * align


class SavedNorm(msgspec.Struct, eq=False):
    """What a layer norm keeps for backward."""

    output: Buffer  # in the compute dtype: the operand of the weight gradients after it
    inputs: tuple[Buffer, ...]  # the normalised input; in the first block the embeddings, mean and deviation
    deviation: tuple[Buffer, ...]


class SavedBlock(msgspec.Struct, eq=False):
    """What a block keeps for backward."""

    norm_1: SavedNorm
    qkv: Buffer
    attention: tuple[Buffer, ...]  # output, logsumexp, the random state
    norm_2: SavedNorm
    fc: Buffer
    gelu: Buffer
    masks: tuple[Buffer, ...]
    half: dict[str, Buffer]


class Saved(msgspec.Struct, eq=False):
    """What the forward program hands over."""

    blocks: list[SavedBlock]
    norm_f: SavedNorm
    head: tuple[Buffer, ...]  # the head's half copy
    masks: tuple[Buffer, ...]
    logits: Buffer
    statistics: tuple[Buffer, ...]
    loss: Buffer
    small: tuple[Buffer, ...]


class Stream:
    """The residual stream inside the forward program: what a kernel must read to know it."""

    def __init__(self, program: Generated, sizes: Sizes, reads: int) -> None:
        self.program, self.sizes = program, sizes
        self.reads = reads
        self.written: Buffer | None = None
        self.pieces: list[Buffer] = []

    def join(self, piece: Buffer, masked: bool) -> None:
        """A branch's output is to be added."""
        self.pieces.append(piece)
        self.reads += 2 if masked else 1

    @property
    def newest(self) -> list[Buffer]:
        """The branch added last."""
        return self.pieces[-1:]

    def settle(self) -> bool:
        """Before a norm's kernel: whether it has to write the stream. In place, where it was written before."""
        if self.reads <= READS_BEFORE_WRITING:
            return False
        if self.written is None:
            s = self.sizes
            self.written = self.program.new("stream", s.rows * s.width, s.weight, Kind.ACTIVATIONS)
        return True

    def settled(self) -> None:
        """After the kernel that wrote it: the pieces have served."""
        self.program.drop(self.sizes.compute, *self.pieces)
        self.pieces, self.reads = [], 1

    def close(self) -> None:
        """After the last norm: nothing reads it any more."""
        self.program.drop(self.sizes.compute, *self.pieces)
        self.pieces = []


class Forward:
    """Writes the forward program, of training or of evaluation."""

    def __init__(self, program: Generated, sizes: Sizes, training: bool, returns_logits: bool = True) -> None:
        self.p, self.s, self.training, self.returns_logits = program, sizes, training, returns_logits
        self.dropping = sizes.dropout and training
        self.masks: list[Buffer] = []

    def write(self) -> Saved:
        """The whole program; what it leaves allocated is what it returns."""
        p, s = self.p, self.s
        half = self.cast("h.0.attn.c_attn", 3 * s.width * s.width)
        norm, stream = self.embed()
        first_mask = tuple(self.masks)
        blocks = []
        head: tuple[Buffer, ...] = ()
        for index in range(s.layers):
            p.block = index
            self.masks = []
            block, half, norm = self.block(index, half, norm, stream)
            if index == s.layers - 1:
                head = tuple(half.values())
            if self.training:
                blocks.append(block)
        p.block = None
        return self.loss(blocks, norm, head, first_mask)

    def embed(self) -> tuple[SavedNorm, Stream]:
        """Both tables' rows, added, and the first norm, which reads them from the tables where they are not saved."""
        p, s = self.p, self.s
        count = s.rows * s.width
        inputs: tuple[Buffer, ...] = ()
        reads = 3
        if self.training and s.batch > (FEW_SEQUENCES_DROPOUT if s.dropout else FEW_SEQUENCES):
            position = p.new("wpe", s.tokens * s.width, s.weight, Kind.ACTIVATIONS)
            p.run("wpe", Kernel.INDEX, 2 * s.tokens * s.width * s.weight)
            token = p.new("wte", count, s.weight, Kind.ACTIVATIONS)
            mean = p.new("h.0.ln_1.mean", s.rows, 4, Kind.ACTIVATIONS)
            inputs, reads = (token, position, mean), 2
        stream = Stream(p, s, reads + (1 if self.dropping else 0))
        self.mask("drop")
        p.block = 0
        norm = self.norm("h.0.ln_1", stream, inputs, moved=count * s.weight)
        return norm, stream

    def norm(
        self, name: str, stream: Stream, inputs: tuple[Buffer, ...] = (), moved: int = 0, last: bool = False
    ) -> SavedNorm:
        """One kernel: the additions that have piled up, the norm, the cast."""
        p, s = self.p, self.s
        count = s.rows * s.width
        kept = self.training and s.recomputes
        writes = False if last or kept else stream.settle()
        taken = last and stream.written is not None and self.training
        deviation: tuple[Buffer, ...] = ()
        if self.training and s.recomputes:
            inputs = (*inputs, *stream.newest)
            if name != "h.0.ln_1":
                inputs = (*inputs, p.new(f"{name}.mean", s.rows, 4, Kind.ACTIVATIONS))
        elif self.training:
            if taken and stream.written is not None:
                inputs = (stream.written,)  # nothing reads the stream after the last norm: written in place
            elif not inputs:
                inputs = (p.new(f"{name}.input", count, 4, Kind.ACTIVATIONS),)
        output = p.new(f"{name}.output", count, s.compute, Kind.ACTIVATIONS)
        if self.training:
            deviation = (p.new(f"{name}.deviation", s.rows, 4, Kind.ACTIVATIONS),)
        pieces = len(stream.pieces)
        moved += count * (s.compute * (1 + pieces) + 4 * (1 + self.training + writes))
        p.run(name, Kernel.REDUCTION, moved)
        if writes:
            stream.settled()
        if last and not kept:
            stream.close()
            if stream.written is not None and not taken:
                p.drop(s.weight, stream.written)
        return SavedNorm(output, inputs, deviation)

    def block(
        self, index: int, half: dict[str, Buffer], norm_1: SavedNorm, stream: Stream
    ) -> tuple[SavedBlock, dict[str, Buffer], SavedNorm]:
        """A block, and the norm after it, whose kernel holds the block's last addition."""
        p, s, name = self.p, self.s, f"h.{index}"
        width, rows = s.width, s.rows
        qkv = self.linear(f"{name}.attn.c_attn", norm_1.output, width, 3 * width, half)
        attention = self.attend(f"{name}.attn", qkv)
        last = index == s.layers - 1
        following = (
            self.cast("lm_head", s.vocab * width)
            if last
            else self.cast(f"h.{index + 1}.attn.c_attn", 3 * width * width)
        )
        half |= self.cast(f"{name}.attn.c_proj", width * width)
        stream.join(self.linear(f"{name}.attn.c_proj", attention[0], width, width, half), self.dropping)
        self.mask(f"{name}.attn.resid_dropout")
        if not self.training:
            p.drop(4, *attention[1:])
        half |= self.cast(f"{name}.mlp.c_proj", 4 * width * width)
        half |= self.cast(f"{name}.mlp.c_fc", 4 * width * width)
        norm_2 = self.norm(f"{name}.ln_2", stream)
        fc = self.linear(f"{name}.mlp.c_fc", norm_2.output, width, 4 * width, half)
        if self.training:
            gelu = p.new(f"{name}.mlp.gelu", rows * s.padded(4 * width), s.compute, Kind.ACTIVATIONS)
        else:
            gelu = fc  # overwritten in place: nothing keeps its input
        p.run(f"{name}.mlp.gelu", Kernel.POINTWISE, 8 * rows * width * s.compute)
        stream.join(self.linear(f"{name}.mlp.c_proj", gelu, 4 * width, width, half), self.dropping)
        self.mask(f"{name}.mlp.dropout")
        block = SavedBlock(norm_1, qkv, attention, norm_2, fc, gelu, tuple(self.masks), half)
        p.block = None if last else index + 1
        after = self.norm("ln_f" if last else f"h.{index + 1}.ln_1", stream, last=last)
        return block, following, after

    def loss(
        self, blocks: list[SavedBlock], norm: SavedNorm, head: tuple[Buffer, ...], masks: tuple[Buffer, ...]
    ) -> Saved:
        """The head and the loss: of the logits' softmax only two numbers a row are written."""
        p, s = self.p, self.s
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
            small = (p.new("loss.count", 1, 4, Kind.LOGITS), p.new("positions", s.tokens, 8, Kind.INPUTS))
        p.run("loss", Kernel.REDUCTION, 16 * s.rows)
        if not self.training:
            p.drop(4, *statistics)
            if not self.returns_logits:
                p.drop(s.compute, logits)
        return Saved(blocks, norm, head, masks, logits, statistics, loss, small)

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
        if not self.training:
            p.drop(s.compute, x)
            if name in half:
                p.drop(2, half.pop(name))
        return output

    def attend(self, name: str, qkv: Buffer) -> tuple[Buffer, ...]:
        """Flash attention, or for float32 the memory-efficient kernel: output, logsumexp, the random state."""
        p, s = self.p, self.s
        output = p.made(f"{name}.sdpa", s.rows * s.width * s.compute, Kind.ATTENTION)
        logsumexp = p.made(f"{name}.logsumexp", 4 * s.rows * s.heads, Kind.ATTENTION)
        seed = p.made(f"{name}.seed", 16 if s.compute == 2 else 8, Kind.ATTENTION)
        offset = p.made(f"{name}.offset", 8, Kind.ATTENTION)
        size = s.width // s.heads
        flops = 2 * s.batch * s.heads * s.tokens * s.tokens * size  # causal: half of two products
        shape = (s.batch, s.heads, s.tokens, size)
        p.run(f"{name}.sdpa", Kernel.ATTENTION, 4 * s.rows * s.width * s.compute, flops, shape)
        if not self.training:
            p.drop(s.compute, qkv)
        return output, logsumexp, seed, offset

    def mask(self, name: str) -> None:
        """Dropout keeps a byte for each element; what it scales is never written on its own."""
        if self.dropping:
            self.masks.append(self.p.new(f"{name}.mask", self.s.rows * self.s.width, 1, Kind.ACTIVATIONS))
