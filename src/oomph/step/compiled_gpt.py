"""What the programs that inductor generates for a nanoGPT-shaped model write to memory, and what they save.

Found by running inductor itself (`trace.compiled`), and held against it in the tests. What it writes to memory:

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
from oomph.step.kernels import cpu_flash_backward_bytes, efficient_backward_bytes, flash_backward_bytes
from oomph.step.models.gpt2 import attends_by_hand
from oomph.step.ops import Buffer, Kind

READS_BEFORE_WRITING = 4  # torch._inductor.config.realize_reads_threshold
PADDING_BYTES = 128  # torch._inductor.config.padding_alignment_bytes
PADDED_FROM_COLUMNS = 1024  # torch._inductor.config.padding_stride_threshold


class Sizes:
    """A config's shape and precision, in the numbers the programs need."""

    def __init__(self, config: TrainConfig, cuda: bool, threads: int = 1) -> None:
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
        self.checkpointed = config.checkpoint_layers  # blocks, from the first, that backward computes again
        self.chunk = min(config.loss_chunk or 0, self.rows)  # rows of the head and loss at a time; 0: all
        # nanoGPT enters autocast on a GPU only, oomph train on a CPU too.
        self.autocast = half and config.autocast and (cuda or config.trainer == "oomph")
        self.weight = 2 if half and not config.autocast else 4  # bytes of a parameter, its gradient, the stream
        self.compute = 2 if self.autocast or self.weight == 2 else 4  # bytes of what matrix products read and write
        self.recomputes = self.weight == 2  # one dtype throughout: a norm's input is put together again in backward
        self.threads = threads  # of the CPU's attention
        self.kernel = self._kernel(config.attention)
        self.by_hand = attends_by_hand(config)
        self.plain = self.kernel == "math" or (self.kernel == "cpu" and self.dropout)  # attention in training
        self.composed = self.plain and not self.by_hand and self.checkpointed > 0  # by scaled_dot_product_attention
        # Two checkpointed blocks and more share the constants of its softmax, which forward saves for them. Without
        # dropout and biases inductor therefore computes two blocks' softmaxes as one kernel, and their many operations
        # make it save the norm after the checkpointed blocks under autocast.
        self.constants = self.composed and self.checkpointed > 1
        self.paired = self.constants and not self.dropout and not self.bias
        # With dropout a CPU computes a block's softmax in one loop with the gradient of the scores after it.
        self.chained = self.constants and self.dropout and not cuda
        self.rebuilds = self.checkpointed > 0 and not (self.paired and self.autocast)
        self.dtype = str(config.dtype) if self.compute == 2 else ("tf32" if cuda and config.allow_tf32 else "float32")

    def _kernel(self, attention: str) -> str:
        """The kernel that scaled_dot_product_attention comes to; CUDA's flash kernel takes half precision only."""
        if attention == "math" or not self.cuda:
            return "math" if attention == "math" else "cpu"
        return "efficient" if self.compute == 4 else attention

    def attention_backward_bytes(self) -> tuple[int, ...]:
        """What attention's backward kernel allocates for itself."""
        shape = (self.batch, self.heads, self.tokens, self.width // self.heads)
        if self.kernel == "cpu":
            return cpu_flash_backward_bytes(self.threads, self.tokens, self.compute == 2)
        if self.kernel == "efficient":
            return efficient_backward_bytes(*shape, self.compute == 2)
        return flash_backward_bytes(*shape)

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
    written: tuple[Buffer, ...] = ()  # float32, by the backward program itself: its memory may serve again


class Plain(msgspec.Struct, eq=False):
    """What plain attention keeps for backward."""

    output: Buffer  # heads side by side, in the compute dtype
    operands: list[Buffer]  # queries, keys, values
    scores: list[Buffer]  # one or two numbers a score
    rows: list[Buffer]  # float32 numbers a row: its maximum, its sum
    flags: list[Buffer]  # bytes: which keys are masked, which weights dropped


class SavedBlock(msgspec.Struct, eq=False):
    """What a block keeps for backward."""

    norm_1: SavedNorm
    qkv: Buffer
    attention: tuple[Buffer, ...] | Plain  # output, logsumexp, the random state
    norm_2: SavedNorm
    fc: Buffer
    gelu: Buffer
    masks: tuple[Buffer, ...]
    half: dict[str, Buffer]


class Checkpoint(msgspec.Struct, eq=False):
    """What a block keeps that backward will compute again: its input, or both embeddings where that is their sum."""

    entry: tuple[Buffer, ...]
    random: tuple[Buffer, ...] = ()  # on a CPU the state its fused attention began with, which might draw numbers


class Begun(msgspec.Struct, eq=False):
    """Plain attention up to its scores, before the softmax."""

    qkv: Buffer
    wide: list[Buffer]  # queries and keys side by side, as forward multiplies them; empty where they have served
    operands: list[Buffer]  # and their half copies for backward
    scores: Buffer
    weighed: list[Buffer]  # what the softmax has written for backward; empty before it ran
    spent: tuple[Buffer, ...] = ()  # and for the product with the values alone


class Front(msgspec.Struct, eq=False):
    """A checkpointed block that the backward program has computed again up to attention's softmax or kernel."""

    norm_1: SavedNorm
    qkv: Buffer
    begun: Begun | None  # None: attention is a kernel of its own
    half: dict[str, Buffer]


class Recomputed(msgspec.Struct, eq=False):
    """A checkpointed block that the backward program has computed again: all of it is the program's own."""

    norm_1: SavedNorm
    qkv: Buffer
    attention: tuple[Buffer, ...] | Plain
    branch: Buffer | None  # attention's share of the stream; None: nothing reads it any more
    norm_2: SavedNorm
    fc: Buffer
    gelu: Buffer | None  # None: written together with its gradient
    end: Buffer | None  # the MLP's share of the stream, of a block whose output was not saved
    half: dict[str, Buffer]


class Saved(msgspec.Struct, eq=False):
    """What the forward program hands over."""

    blocks: list[SavedBlock | Checkpoint]
    norm_f: SavedNorm
    head: tuple[Buffer, ...]  # the head's half copy
    masks: tuple[Buffer, ...]
    logits: Buffer | None  # None: the loss comes in chunks
    statistics: tuple[Buffer, ...]
    loss: Buffer
    small: tuple[Buffer, ...]
    constants: tuple[Buffer, ...] = ()  # which checkpointed blocks' plain attention reads
    grads: tuple[Buffer, ...] = ()  # of the hidden state and of the head, where the forward makes them


class Stream:
    """The residual stream inside the forward program: what a kernel must read to know it."""

    def __init__(self, program: Generated, sizes: Sizes, reads: int) -> None:
        self.program, self.sizes = program, sizes
        self.reads = reads
        self.written: Buffer | None = None
        self.owned = True  # nobody saves what was written: it may be overwritten
        self.rebuilt = False  # backward builds it anew from here, and the next norm saves it as a whole
        self.pieces: list[Buffer] = []
        self.unsaved: list[Buffer] = []

    def join(self, piece: Buffer, masked: bool) -> None:
        """A branch's output is to be added."""
        self.pieces.append(piece)
        self.unsaved.append(piece)
        self.reads += 2 if masked else 1

    def save(self) -> tuple[Buffer, ...]:
        """The branches that no norm has saved yet: this one does, to put the stream together again in backward."""
        unsaved, self.unsaved = tuple(self.unsaved), []
        return unsaved

    def settle(self) -> bool:
        """Before a norm's kernel: whether it has to write the stream. In place, where it was written before."""
        if self.reads <= READS_BEFORE_WRITING:
            return False
        if self.written is None or not self.owned:
            self.write("stream", owned=True)
        return True

    def write(self, name: str, owned: bool) -> Buffer:
        """The buffer that the next kernel writes the stream to."""
        s = self.sizes
        self.written = self.program.new(name, s.rows * s.width, s.weight, Kind.ACTIVATIONS)
        self.owned = owned
        return self.written

    def settled(self) -> None:
        """After the kernel that wrote it: the pieces have served."""
        self.program.drop(self.sizes.compute, *self.pieces)
        self.pieces, self.unsaved, self.reads = [], [], 1

    def close(self) -> None:
        """After the last norm: nothing reads it any more."""
        self.program.drop(self.sizes.compute, *self.pieces)
        self.pieces = []
