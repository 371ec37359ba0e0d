"""What the simulated layers of an eager step share: sizes, precision, who holds what, and the walk backwards."""

from __future__ import annotations

from collections.abc import Callable

from oomph.config.schema import TrainConfig
from oomph.step.gpt_eager_ledger import Held, Ledger
from oomph.step.ops import Kernel, Kind

HALF_DTYPES = ("bfloat16", "float16")

Backward = Callable[["Run", "Node"], None]


def attends_by_hand(config: TrainConfig) -> bool:
    """Whether the program multiplies queries by keys itself: nanoGPT without the fused kernels."""
    return config.attention == "math" and config.trainer == "nanogpt"


class Node:
    """A node of the autograd graph: what it runs, and what it keeps for that."""

    __slots__ = ("extra", "name", "run", "saved")

    def __init__(self, run: Backward, name: str, saved: list[Held], extra: tuple[int, ...]) -> None:
        self.run, self.name, self.saved, self.extra = run, name, saved, extra


class Sizes:
    """The shape and the precision of a config, in the numbers that the layers need."""

    def __init__(self, config: TrainConfig, cuda: bool, threads: int = 1) -> None:
        half = config.dtype in HALF_DTYPES
        self.cuda = cuda
        self.threads = threads  # of the CPU's kernels
        self.batch = config.batch_size
        self.tokens = config.block_size
        self.rows = config.batch_size * config.block_size
        self.width = config.n_embd
        self.heads = config.n_head
        self.head_size = config.n_embd // config.n_head
        self.vocab = config.vocab_size
        self.bias = config.bias
        self.tied = config.tie_weights
        self.chunked = bool(config.loss_chunk)
        self.dropout = config.dropout
        # nanoGPT enters autocast on a GPU only: on the CPU it trains in float32 whatever `dtype` says.
        self.autocast = half and config.autocast and (cuda or config.trainer == "oomph")
        self.pure_half = half and not config.autocast
        self.weight_bytes = 2 if self.pure_half else 4  # a parameter, its gradient
        self.compute_bytes = 2 if self.autocast or self.pure_half else 4  # what matrix products read and write
        self.stream_bytes = 2 if self.pure_half else 4  # the residual stream and layer norms
        self.stat_bytes = 4 if cuda or not self.pure_half else 2  # a layer norm's mean and deviation
        self.dtype = self._dtype(config)
        self.loss_bytes = 2 if self.pure_half and not self.chunked else 4
        self.attention = self._attention(config)
        self.by_hand = attends_by_hand(config)
        # CUDA's flash kernel takes heads in multiples of 8: others are copied into wider ones.
        self.pads = cuda and self.attention == "flash" and self.head_size % 8 != 0
        self.kernel_head_size = -(-self.head_size // 8) * 8 if self.pads else self.head_size

    def _dtype(self, config: TrainConfig) -> str:
        if self.compute_bytes == 2 and config.dtype:
            return config.dtype
        return "tf32" if self.cuda and config.allow_tf32 else "float32"

    def _attention(self, config: TrainConfig) -> str:
        """The kernel that scaled_dot_product_attention comes to."""
        if config.attention == "math" or not self.cuda:
            return "math" if config.attention == "math" else "flash"
        if self.compute_bytes == 4:
            return "efficient"  # CUDA's flash kernel takes half precision only
        return config.attention


class Run:
    """One program while it runs: its ledger, its gradients, its saved tensors, autocast's cache of half weights."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.ledger = Ledger()
        self.grads: dict[str, Held] = {}
        self.nodes: list[Node] | None = None  # None: no gradients are asked for
        self.half_weights: dict[str, Held] | None = None  # None: outside autocast
        self.training = True  # dropout drops, and gradients are asked for
        self.recomputed = False  # saved tensors are a checkpoint's, and go as soon as a node has read them
        self.grad: Held | None = None  # what flows into the node that runs next
        self.waiting: Held | None = None  # a tied head's gradient, until the embedding's comes
        self.residual: list[Held] = []  # gradients waiting at a residual connection for the other branch

    def save(self, backward: Backward, name: str, saved: list[Held], *extra: int) -> None:
        """Add a node to the autograd graph, where one is being built."""
        if self.nodes is not None:
            self.nodes.append(Node(backward, name, saved, extra))

    def backward(self) -> None:
        """Run the graph's nodes, last first: the order of autograd's engine, which takes the newest that is ready."""
        nodes = self.nodes
        assert nodes is not None
        while nodes:
            node = nodes.pop()
            node.run(self, node)

    @property
    def attends_plainly(self) -> bool:
        """Whether attention is plain products: asked for, or because the CPU's flash kernel knows no dropout."""
        sizes = self.sizes
        return sizes.attention == "math" or (not sizes.cuda and sizes.dropout > 0 and self.training)

    def take_grad(self) -> Held:
        """The gradient handed to this node, which alone decides how long it lives."""
        grad, self.grad = self.grad, None
        assert grad is not None
        return grad

    def accumulate(self, parameter: str, grads: list[Held]) -> None:
        """AccumulateGrad: the first gradient becomes `.grad`, later ones are added into it and let go."""
        grad = grads.pop()
        if self.sizes.tied and parameter == "lm_head.weight":
            self.waiting = grad
        elif parameter in self.grads:
            self.ledger.note(f"{parameter}.grad", (), Kernel.POINTWISE, 3 * grad.bytes)
        else:
            self.grads[parameter] = grad

    def cast_weight(self, parameter: str, count: int) -> Held:
        """A parameter's half copy, made once within an autocast region."""
        assert self.half_weights is not None
        held = self.half_weights.get(parameter)
        if held is None:
            held = self.ledger.make(f"{parameter}.half", 2 * count, Kind.HALF_WEIGHTS, moved=6 * count)
            self.half_weights[parameter] = held
        return held
