"""Which model prints these counts? All shapes that agree with the sizes in a nanoGPT log.

nanoGPT's model with L layers of width C, a vocabulary of V and T positions has

    decayed       2 + 4L tensors with  (V + T)·C + 12·L·C²  numbers
    not decayed   2L + 1 tensors with  (2L + 1)·C           numbers, or with biases
                  8L + 2 tensors with  (13L + 2)·C
    printed       all but the T·C position embeddings, rounded to 0.01 M

so the layers, the width and V + T follow exactly, and rounding leaves a few T, one of which is usual. The FLOPs per
token implied by the MFU, 6·printed + 12·L·C·T, and the tokens per step, a multiple of T, decide between the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from oomph.runs.run import PrintedCounts

# Common vocabulary sizes and their names.
VOCABULARIES = {
    65: "Shakespeare's characters",
    205: "enwik8's characters",
    256: "bytes",
    257: "bytes and an end token",
    4096: "TinyStories",
    8192: "8k",
    16384: "16k",
    30522: "BERT",
    32000: "Llama 2",
    32768: "32k",
    49152: "SmolLM",
    50257: "GPT-2",
    50280: "GPT-NeoX",
    50304: "GPT-2, padded to a multiple of 64",
    65536: "nanochat",
    100277: "cl100k",
    100352: "cl100k, padded",
    128256: "Llama 3",
    151936: "Qwen 2",
    200019: "o200k",
}
WIDEST, LONGEST, LARGEST_VOCABULARY = 32768, 1 << 17, 1 << 20
USUAL_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FLOPS_SLACK = 0.03  # the printed MFU is a running mean over steps


class ModelShape(msgspec.Struct, frozen=True, order=True):
    """The sizes of a GPT model."""

    n_layer: int
    n_embd: int
    vocab_size: int
    block_size: int
    bias: bool

    @property
    def oddity(self) -> int:
        """How unusual the sizes are: 0 for a common vocabulary and powers of two."""
        words = 0 if self.vocab_size in VOCABULARIES else 2 if self.vocab_size % 64 == 0 else 4
        positions = 0 if self.block_size & (self.block_size - 1) == 0 else 1 if self.block_size % 64 == 0 else 4
        return words + positions + (self.n_embd % 64 != 0)


class ShapeMatches(msgspec.Struct, frozen=True):
    """The most usual shapes that agree, and how many more unusual ones do."""

    shapes: tuple[ModelShape, ...]
    unusual: int


class KnownShape(msgspec.Struct, frozen=True):
    """What is known besides the printed counts."""

    keys: Mapping[str, object]  # known ones of n_layer, n_embd, vocab_size, block_size and bias
    flops_per_token: float | None = None  # implied by the printed MFU

    def whole(self, key: str) -> int | None:
        value = self.keys.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def solve(printed: PrintedCounts, known: KnownShape) -> ShapeMatches:
    """The shapes that agree with the counts and with what is known."""
    found = set(_shapes(printed, known))
    if len(found) > 1 and known.flops_per_token is not None:
        found = {shape for shape in found if _has_flops(shape, known.flops_per_token)} or found
    least = min((shape.oddity for shape in found), default=0)
    usual = sorted(shape for shape in found if shape.oddity == least)
    return ShapeMatches(tuple(usual), len(found) - len(usual))


def _shapes(printed: PrintedCounts, known: KnownShape) -> Iterator[ModelShape]:
    if printed.params is None and printed.decay_params is None:
        return
    for layers in _layers(printed, known):
        for bias in _biases(printed, known, layers):
            for width in _widths(printed, known, layers, bias):
                for vocabulary, length in _vocabularies_and_lengths(printed, known, layers, width, bias):
                    shape = ModelShape(layers, width, vocabulary, length, bias)
                    if _agrees(shape, printed, known):
                        yield shape


def _layers(printed: PrintedCounts, known: KnownShape) -> Iterable[int]:
    if printed.decay_tensors is not None:
        whole, rest = divmod(printed.decay_tensors - 2, 4)
        return [whole] if rest == 0 and 1 <= whole <= 10_000 else []
    layers = known.whole("n_layer")
    return range(1, 65) if layers is None else [layers]


def _biases(printed: PrintedCounts, known: KnownShape, layers: int) -> Iterable[bool]:
    bias = known.keys.get("bias")
    choices = [bias] if isinstance(bias, bool) else [False, True]
    if printed.no_decay_tensors is None:
        return choices
    return [choice for choice in choices if printed.no_decay_tensors == (8 * layers + 2 if choice else 2 * layers + 1)]


def vectors(layers: int, bias: bool) -> int:
    """Numbers in layer norms and biases, as multiples of the width."""
    return 13 * layers + 2 if bias else 2 * layers + 1


def _widths(printed: PrintedCounts, known: KnownShape, layers: int, bias: bool) -> Iterable[int]:
    width = known.whole("n_embd")
    if printed.no_decay_params is not None:
        whole, rest = divmod(printed.no_decay_params, vectors(layers, bias))
        return [whole] if rest == 0 and whole and (width is None or width == whole) else []
    if width is not None:
        return [width]
    size = printed.decay_params or printed.params or 0
    widest = min(WIDEST, int((size / (12 * layers)) ** 0.5) + 1)
    if printed.decay_params is not None:
        return [each for each in range(16, widest + 1, 8) if size % each == 0]
    return range(64, widest + 1, 64)  # from the rounded count alone: only usual widths


def _vocabularies_and_lengths(
    printed: PrintedCounts, known: KnownShape, layers: int, width: int, bias: bool
) -> Iterator[tuple[int, int]]:
    vocabulary, length = known.whole("vocab_size"), known.whole("block_size")
    blocks = 12 * layers * width * width
    if printed.decay_params is not None:
        both, rest = divmod(printed.decay_params - blocks, width)  # V + T
        if rest or both < 2:
            return
        if vocabulary is not None or length is not None:
            words = vocabulary if vocabulary is not None else both - (length or 0)
            yield words, both - words
            return
        for positions in _lengths(printed, layers, width, bias, both):
            yield both - positions, positions
        return
    middle = ((printed.params or 0) - blocks - vectors(layers, bias) * width) / width
    slack = printed.params_slack / width
    candidates = [vocabulary] if vocabulary is not None else list(VOCABULARIES)
    for words in candidates:
        if abs(words - middle) <= slack + 1e-6:
            for positions in [length] if length is not None else _lengths_by_flops(printed, known, layers, width):
                yield words, positions


def _lengths(printed: PrintedCounts, layers: int, width: int, bias: bool, both: int) -> Iterable[int]:
    """Context lengths that agree with the rounded count, given V + T."""
    if printed.params is None:
        common = [both - words for words in VOCABULARIES]
        return [length for length in common if 0 < length <= LONGEST and _usual_length(length)]
    total = (printed.decay_params or 0) + vectors(layers, bias) * width
    low = -(-(total - printed.params - printed.params_slack) // width)
    high = (total - printed.params + printed.params_slack) // width
    lengths = range(max(1, low), min(both - 1, high, LONGEST) + 1)
    # Tiny models leave thousands: take only usual ones.
    return lengths if len(lengths) <= 256 else [length for length in lengths if _usual_length(length)]


def _lengths_by_flops(printed: PrintedCounts, known: KnownShape, layers: int, width: int) -> Iterable[int]:
    """Usual context lengths near the one that the MFU implies."""
    if known.flops_per_token is None:  # unknown: try the usual ones, so that the rest can be inferred
        return USUAL_LENGTHS
    each = 12 * layers * width
    middle = (known.flops_per_token - 6 * (printed.params or 0)) / each
    slack = FLOPS_SLACK * known.flops_per_token / each
    return [length for length in range(64, 1 << 16, 64) if abs(length - middle) <= slack and _usual_length(length)]


def _usual_length(length: int) -> bool:
    return length % 64 == 0 or length in (8, 16, 32)


def _agrees(shape: ModelShape, printed: PrintedCounts, known: KnownShape) -> bool:
    if not (1 <= shape.vocab_size <= LARGEST_VOCABULARY and shape.block_size >= 1):
        return False
    for key in ("n_layer", "n_embd", "vocab_size", "block_size", "bias"):
        if known.keys.get(key) not in (None, getattr(shape, key)):
            return False
    if printed.tokens_per_step is not None and printed.tokens_per_step % shape.block_size:
        return False
    return printed.params is None or abs(_count(shape) - printed.params) <= printed.params_slack


def _count(shape: ModelShape) -> int:
    """Parameters as nanoGPT prints them."""
    blocks = 12 * shape.n_layer * shape.n_embd**2
    return shape.vocab_size * shape.n_embd + blocks + vectors(shape.n_layer, shape.bias) * shape.n_embd


def disagreements(shape: ModelShape, printed: PrintedCounts) -> list[tuple[str, str]]:
    """The counts that differ: (what this shape has, what was printed)."""
    found = []
    count = _count(shape)
    if printed.params is not None and abs(count - printed.params) > printed.params_slack:
        found.append((f"{count / 1e6:.2f} M parameters", f"{printed.params / 1e6:.2f} M"))
    decayed = (shape.vocab_size + shape.block_size) * shape.n_embd + 12 * shape.n_layer * shape.n_embd**2
    others = vectors(shape.n_layer, shape.bias) * shape.n_embd
    for name, ours, theirs in (
        ("decayed tensors", 2 + 4 * shape.n_layer, printed.decay_tensors),
        ("decayed parameters", decayed, printed.decay_params),
        ("tensors without decay", (8 if shape.bias else 2) * shape.n_layer + 1 + shape.bias, printed.no_decay_tensors),
        ("parameters without decay", others, printed.no_decay_params),
    ):
        if theirs is not None and ours != theirs:
            found.append((f"{ours:,} {name}", f"{theirs:,}"))
    tokens = printed.tokens_per_step
    if tokens is not None and tokens % shape.block_size:
        found.append((f"sequences of {shape.block_size:,}", f"{tokens:,} tokens per step, not a multiple of it"))
    return found


def _has_flops(shape: ModelShape, flops_per_token: float) -> bool:
    flops = 6 * _count(shape) + 12 * shape.n_layer * shape.n_embd * shape.block_size
    return abs(flops - flops_per_token) <= FLOPS_SLACK * flops_per_token
