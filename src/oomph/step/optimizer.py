"""Clipping, the gradient scaler and the optimizers, as PyTorch runs them on a GPU or on the CPU.

Weights come in two groups, as in nanoGPT and transformers' Trainer: decayed (two or more dimensions), then the rest;
in a plain loop all in one. The optimizers:

- `adamw`: torch.optim.AdamW, fused, foreach or forloop. Fused keeps its step counters on the device.
- `sgd`: torch.optim.SGD with momentum `beta1`; weight decay adds a decayed copy of the gradients.
- `adafactor`: torch.optim.Adafactor, a row and a column of variances per matrix; the Trainer's is transformers' own.
- `muon`: torch.optim.Muon for the blocks' matrices, AdamW for embeddings, head and vectors.
- `adamw8bit`: bitsandbytes' AdamW8bit: a byte per moment and a float32 scale for 256 of them; tensors of fewer
  than 4096 elements stay in float32. Both look-up tables are shared.
- `paged_adamw`, `paged_adamw8bit`: also bitsandbytes'; moments of tensors of 100,000 elements or more are in unified
  memory, which the driver moves between card and host, and which torch does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.config.programs import ON_THE_TRAINER, OWN_CLASSES, release
from oomph.config.schema import PAGED, TrainConfig
from oomph.step.models.lora import whole_dtype
from oomph.step.ops import Buffer, Kernel, Kind, Phase
from oomph.step.parameters import Parameter
from oomph.step.precision import precision
from oomph.step.tensor.layout import ITEM_BYTES
from oomph.step.tensor.tape import TRAINED_COPY
from oomph.step.tensor.tensor import Ledger, Storage

_SMALL_8BIT = 4096  # bitsandbytes' min_8bit_size
_BLOCK_8BIT = 256
_TABLE_BYTES = 4 * 256  # a look-up table from bytes to float32
_SMALL_PAGED = 100_000  # smaller tensors stay on the card
ADDED_IN_PLACE_SINCE = (2, 1)  # from this torch on, foreach AdamW adds epsilon to the roots in place (optim/adamw.py)
_MUON_STEPS = 5  # torch.optim.Muon's ns_steps


class Optimizer:
    """The optimizer of a config: its state and its step."""

    starts_with_state = False  # whether the state exists before the first step

    def __init__(
        self, config: TrainConfig, cuda: bool, everything: Sequence[Parameter], weight_bytes: int | None = None
    ) -> None:
        """`everything` is what is trained; `weight_bytes`: of one element, if the config does not determine it."""
        self.config, self.cuda = config, cuda
        self.ledger = Ledger()
        self.grads: list[Storage] = []
        self.loop = config.optimizer_loop or ("fused" if cuda else "forloop")
        self.everything = everything
        self.precision = precision(config, cuda)
        self.weight_bytes = weight_bytes or self.precision.weight_bytes
        self.matrices: list[Parameter] = []
        self.groups: list[list[Parameter]] = []
        self.state: list[Storage] = []
        self.verdicts: list[Storage] = []
        self._split()

    def _split(self) -> None:
        """Split the parameters into Muon's and the groups of the rest."""
        splits = self.config.optimizer == "muon"
        self.matrices = [p for p in self.everything if splits and _is_hidden(p)]
        rest = [p for p in self.everything if not (splits and _is_hidden(p))]
        self.groups = [[p for p in rest if p.decayed], [p for p in rest if not p.decayed]]
        if self.config.trainer == "torch" or self.config.trainer in OWN_CLASSES:
            self.groups = [rest]  # AdamW(model.parameters())

    def _size(self, parameter: Parameter) -> int:
        """Bytes of a parameter: peft trains whole modules in the dtype of the base, not of the adapters."""
        frozen = self.precision.frozen if TRAINED_COPY in parameter.name else None
        if frozen is None:
            return parameter.numel * self.weight_bytes
        return parameter.numel * ITEM_BYTES[whole_dtype(self.config, parameter.name, frozen)]

    def create_state(self) -> list[Storage]:
        """All state tensors, as they are after the first step."""
        held = [Storage(self.ledger, held.buffer) for held in self._state_of(self.matrices, True)]
        for group in self.groups:
            held += self._state_of(group, False)
        held += self._average()
        if self.config.optimizer.endswith("8bit"):
            held += [self.ledger.hold(name, _TABLE_BYTES, Kind.OPTIMIZER) for name in ("qmap1", "qmap2")]
        return held

    def _average(self) -> list[Storage]:
        """The moving average of the weights, which oomph train keeps if given a decay."""
        return [self._hold(p, "ema", p.numel * self.weight_bytes) for p in self.everything] if self._averages else []

    @property
    def _averages(self) -> bool:
        return self.config.ema > 0 and self.config.trainer == "oomph"

    def _hold(self, parameter: Parameter, part: str, size_bytes: int) -> Storage:
        return self.ledger.hold(f"{parameter.name}.{part}", size_bytes, Kind.OPTIMIZER)

    def _state_of(self, group: list[Parameter], muon: bool) -> list[Storage]:
        """The state of one group, in the order it is created."""
        held: list[Storage] = []
        for parameter in group:
            for part, size_bytes in self._parts(parameter, muon):
                held.append(self._hold(parameter, part, size_bytes))
        return held

    def _parts(self, parameter: Parameter, muon: bool) -> list[tuple[str, int]]:
        """The state of one parameter on the device, by name and bytes."""
        found = self._state(parameter, muon)
        if self.cuda and self.config.optimizer.startswith(PAGED) and parameter.numel >= _SMALL_PAGED:
            return [(name, size) for name, size in found if not name.startswith("state")]
        return found

    def paged_bytes(self) -> int:
        """Bytes of the state in unified memory."""
        kept = sum(size for p in self.everything for _, size in self._parts(p, False))
        return sum(size for p in self.everything for _, size in self._state(p, False)) - kept

    def _state(self, parameter: Parameter, muon: bool) -> list[tuple[str, int]]:
        size = self._size(parameter)
        name = self.config.optimizer
        on_device = not self.cuda  # step counters of the unfused loops stay on the host
        if muon:
            return [("momentum", size)]
        if name == "sgd":
            return [("momentum", size)] if self.config.beta1 else []
        if name == "adafactor":
            item = 4 if self._is_the_trainers else self.weight_bytes
            steps = [("step", 4)] if on_device or self._is_the_trainers else []  # the Trainer's: its root mean square
            if not parameter.decayed:
                return [*steps, ("variance", parameter.numel * item)]
            rows, columns = _sides(parameter)
            return [*steps, ("row_var", rows * item), ("col_var", columns * item)]
        if name in ("adamw8bit", "paged_adamw8bit", "paged_adamw"):
            if parameter.numel < _SMALL_8BIT or name == "paged_adamw":
                return [("state1", 4 * parameter.numel), ("state2", 4 * parameter.numel)]
            scales = 4 * -(-parameter.numel // _BLOCK_8BIT)
            moments = [("state1", parameter.numel), ("state2", parameter.numel)]
            return [*moments, ("absmax1", scales), ("absmax2", scales)]
        steps = [("step", 4)] if on_device or self.loop == "fused" else []
        return [*steps, ("exp_avg", size), ("exp_avg_sq", size)]

    def step(self, first: bool) -> None:
        """Clip, update, and free the gradients."""
        self._clip()
        self.ledger.phase = Phase.OPTIMIZER
        if first and self.config.optimizer.endswith("8bit"):
            self.state += [self.ledger.make(name, _TABLE_BYTES, Kind.OPTIMIZER) for name in ("qmap1", "qmap2")]
        if self.matrices:
            self._ask_scaler(fused=False)
            if first:
                self._create(self.matrices, True)
            self._muon()
        self._ask_scaler(fused=self.loop == "fused")
        for group in self.groups:
            if self.config.optimizer == "sgd":
                self._sgd(group, first)
                continue
            if first:
                self._create(group, False)
            self._update(group)
        self._follow(first)
        self.verdicts.clear()
        self.grads.clear()

    @property
    def _is_the_trainers(self) -> bool:
        return self.config.trainer in ON_THE_TRAINER

    def _follow(self, first: bool) -> None:
        """Move the average towards the new weights."""
        for held in self._average() if first else ():
            self.ledger.note(held.buffer.name, (held.buffer,), Kernel.POINTWISE, 2 * held.bytes)
            self.state.append(held)
        if self._averages:
            total = sum(p.numel for p in self.everything) * self.weight_bytes
            self.ledger.note("ema", (), Kernel.OPTIMIZER, 3 * total)

    @property
    def _scaled(self) -> bool:
        return self.precision.is_scaled

    def _create(self, group: list[Parameter], muon: bool) -> None:
        for held in self._state_of(group, muon):
            self.ledger.note(held.buffer.name, (held.buffer,), Kernel.POINTWISE, held.bytes)
            self.state.append(held)

    def _clip(self) -> None:
        ledger = self.ledger
        ledger.phase = Phase.CLIP
        total = sum(map(self._size, self.everything))
        if not self.config.grad_clip:
            return
        if self._scaled:
            for _ in range(2 if self.matrices else 1):
                self._unscale()
        count = len(self.everything)
        norms = [ledger.hold("clip.norm", self.weight_bytes, Kind.TEMPORARY) for _ in range(count)]
        ledger.note("clip.norms", _buffers(norms), Kernel.REDUCTION, total)
        stacked = ledger.make("clip.stack", self.weight_bytes * count, Kind.TEMPORARY)
        norm = ledger.make("clip.norm", self.weight_bytes, Kind.TEMPORARY, Kernel.REDUCTION)
        del stacked
        norms.clear()
        shifted = ledger.make("clip.shifted", self.weight_bytes, Kind.TEMPORARY)
        inverse = ledger.make("clip.inverse", self.weight_bytes, Kind.TEMPORARY)
        coefficient = ledger.make("clip.coefficient", self.weight_bytes, Kind.TEMPORARY)
        del shifted, inverse
        clamped = ledger.make("clip.clamped", self.weight_bytes, Kind.TEMPORARY)
        ledger.note("clip.scale", (), Kernel.POINTWISE, 2 * total)
        del norm, coefficient, clamped

    def _unscale(self) -> None:
        """GradScaler.unscale_: a copy of the found_inf flag stays until the scale is updated."""
        ledger = self.ledger
        double = ledger.make("scaler.scale_double", 8, Kind.TEMPORARY)
        inverse = ledger.make("scaler.inverse_double", 8, Kind.TEMPORARY)
        del double
        inverse = ledger.make("scaler.inverse", 4, Kind.TEMPORARY)
        self._check_finite()
        del inverse

    def _check_finite(self) -> None:
        ledger = self.ledger
        found = ledger.make("scaler.found_inf", 4, Kind.TEMPORARY)
        copies = [ledger.make(name, 4, Kind.TEMPORARY) for name in ("scaler.found_inf", "scaler.inverse")]
        total = sum(map(self._size, self.everything))
        ledger.note("scaler.unscale", (), Kernel.POINTWISE, 2 * total)
        del found
        self.verdicts.append(copies[0])

    def _ask_scaler(self, fused: bool) -> None:
        """GradScaler.step: a fused optimizer takes the found_inf flag, and the scale if it unscales itself."""
        if not self._scaled:
            return
        ledger, unscaled = self.ledger, bool(self.config.grad_clip)
        if not unscaled and fused:
            inverse = ledger.make("scaler.inverse", 4, Kind.TEMPORARY)
            self._check_finite()
            del inverse
        elif not unscaled:
            self._unscale()
        if fused:
            self.verdicts.append(ledger.make("scaler.verdict", 4, Kind.TEMPORARY))
            if not unscaled:
                self.verdicts.append(ledger.make("scaler.grad_scale", 4, Kind.TEMPORARY))

    def _update(self, group: list[Parameter]) -> None:
        if not group:
            return
        name = self.config.optimizer
        if name == "adafactor":
            (self._transformers_adafactor if self._is_the_trainers else self._adafactor)(group)
        elif name.endswith("8bit") or name.startswith(PAGED) or self.loop == "fused":
            self._in_place(group)
        elif self.loop == "foreach":
            self._foreach(group)
        else:
            self._forloop(group)

    def _traffic(self, parameter: Parameter) -> int:
        """Bytes read and written: parameter, gradient and state read, parameter and state written."""
        state = sum(size for _, size in self._state(parameter, False))
        return 3 * self._size(parameter) + 2 * state

    def _in_place(self, group: list[Parameter]) -> None:
        moved = sum(map(self._traffic, group))
        self.ledger.note("adamw", (), Kernel.OPTIMIZER, moved)

    def _foreach(self, group: list[Parameter]) -> None:
        ledger = self.ledger
        if not self.cuda:  # the increment of step counters; a GPU's counters stay on the host
            ledger.make("adamw.one", 4, Kind.TEMPORARY)
        roots = [ledger.hold(f"{p.name}.sqrt", self._size(p), Kind.TEMPORARY) for p in group]
        # Ten passes over all elements: decay, two moments in three, root, two scalings, the update.
        size = sum(held.bytes for held in roots)
        ledger.note("adamw.moments", (), Kernel.OPTIMIZER, 10 * size)
        ledger.note("adamw.sqrt", _buffers(roots), Kernel.OPTIMIZER, 2 * size)
        denominators: list[Storage] = []
        if release(self.config.torch_version) < ADDED_IN_PLACE_SINCE:
            denominators = [ledger.hold(f"{p.name}.denominator", self._size(p), Kind.TEMPORARY) for p in group]
            ledger.note("adamw.add", _buffers(denominators), Kernel.OPTIMIZER, 2 * size)
        ledger.note("adamw.update", (), Kernel.OPTIMIZER, 8 * size)
        del denominators

    def _forloop(self, group: list[Parameter]) -> None:
        ledger = self.ledger
        denominator: Storage | None = None
        for parameter in group:
            size = self._size(parameter)
            ledger.note(f"{parameter.name}.moments", (), Kernel.OPTIMIZER, 10 * size)
            root = ledger.make(f"{parameter.name}.sqrt", size, Kind.TEMPORARY, Kernel.OPTIMIZER, 2 * size)
            denominator = ledger.make(f"{parameter.name}.denominator", size, Kind.TEMPORARY, Kernel.OPTIMIZER, 2 * size)
            del root
            ledger.note(f"{parameter.name}.update", (), Kernel.OPTIMIZER, 6 * size)
        del denominator

    def _sgd(self, group: list[Parameter], first: bool) -> None:
        """Weight decay copies the gradients: all at once (foreach) or each in turn."""
        ledger = self.ledger
        decays = group is self.groups[0] and self.config.weight_decay != 0 and self.loop != "fused"
        turns = [[p] for p in group] if self.loop == "forloop" else [group]
        for turn in turns:
            size = sum(map(self._size, turn))
            decayed: list[Storage] = []
            if decays:
                decayed = [ledger.hold(f"{p.name}.decayed", self._size(p), Kind.TEMPORARY) for p in turn]
                ledger.note("sgd.decay", _buffers(decayed), Kernel.OPTIMIZER, 3 * size)
            if first:
                self._create(turn, False)
            del decayed
            ledger.note("sgd", (), Kernel.OPTIMIZER, 6 * size)

    def _adafactor(self, group: list[Parameter]) -> None:
        """Update each tensor in turn, by an estimate of its own size from its row and column."""
        ledger = self.ledger
        estimate: Storage | None = None
        for parameter in group:
            size = self._size(parameter)
            sides = [side * self.weight_bytes for side in _sides(parameter)] if parameter.decayed else [size]
            means = [
                ledger.make(f"{parameter.name}.mean", side, Kind.TEMPORARY, Kernel.OPTIMIZER, size) for side in sides
            ]
            estimate = ledger.make(f"{parameter.name}.update", size, Kind.TEMPORARY, Kernel.OPTIMIZER, size)
            means.clear()
            ledger.note(f"{parameter.name}.apply", (), Kernel.OPTIMIZER, 9 * size)
        del estimate

    def _transformers_adafactor(self, group: list[Parameter]) -> None:
        """transformers' Adafactor: each tensor in turn in float32; loop variables live until they are reassigned."""
        ledger, half = self.ledger, self.weight_bytes == 2
        grad: Storage | None = None
        update: Storage | None = None
        data: Storage | None = None

        def made(p: Parameter, part: str, size: int, moved: int | None = None) -> Storage:
            return ledger.make(
                f"{p.name}.{part}", size, Kind.TEMPORARY, Kernel.OPTIMIZER, 2 * size if moved is None else moved
            )

        for p in group:
            size = 4 * p.numel
            grad = made(p, "grad", size) if half else grad
            data = made(p, "data", size) if half else data
            square = made(p, "square", size)
            update = made(p, "update", size)
            del square
            means = [made(p, "mean", 4 * side, size) for side in (_sides(p) if p.decayed else ())]
            means.clear()
            update = made(p, "update", size)
            ledger.note(f"{p.name}.scale", (), Kernel.OPTIMIZER, 6 * size)
            negative = made(p, "negative", size)
            ledger.note(f"{p.name}.apply", (), Kernel.OPTIMIZER, 3 * size)
            del negative
        del grad, update, data

    def _muon(self) -> None:
        """Update each matrix in turn; one update is freed when the next exists."""
        ledger = self.ledger
        update: Storage | None = None
        for parameter in self.matrices:
            count = parameter.numel
            size = count * self.weight_bytes
            update = ledger.make(f"{parameter.name}.nesterov", size, Kind.TEMPORARY, moved=5 * size)
            update = self._orthogonal(parameter, update)
            promoted: list[Storage] = []
            if not self.cuda and self.weight_bytes != 2:  # the CPU adds bfloat16 by way of a copy
                promoted = [ledger.hold(f"{parameter.name}.promoted", size, Kind.TEMPORARY)]
            ledger.note(f"{parameter.name}.apply", _buffers(promoted), Kernel.OPTIMIZER, 2 * count + 4 * size)
            del promoted
        del update

    def _orthogonal(self, parameter: Parameter, update: Storage) -> Storage:
        """Newton-Schulz iterations in bfloat16, with products along the shorter side."""
        ledger = self.ledger
        short, long = sorted(parameter.shape)
        half_bytes = 2 * parameter.numel
        current = update  # in pure bfloat16 the cast makes no copy
        if self.weight_bytes != 2:
            current = ledger.make(f"{parameter.name}.half", half_bytes, Kind.TEMPORARY, moved=3 * half_bytes)
        norm = ledger.make(f"{parameter.name}.norm", 2, Kind.TEMPORARY, Kernel.REDUCTION, half_bytes)
        clamped = ledger.make(f"{parameter.name}.norm", 2, Kind.TEMPORARY)
        ledger.note(f"{parameter.name}.normalized", (), Kernel.POINTWISE, 2 * half_bytes)
        del norm, clamped
        gram: Storage | None = None
        step: Storage | None = None
        for _ in range(_MUON_STEPS):
            gram = self._product(parameter, short, short, long)
            step = self._product(parameter, short, short, short)
            current = self._product(parameter, short, long, short)
        del gram, step
        return current

    def _product(self, parameter: Parameter, m: int, n: int, k: int) -> Storage:
        held = self.ledger.hold(f"{parameter.name}.newton_schulz", 2 * m * n, Kind.TEMPORARY)
        moved = 2 * (m * n + n * k + m * k)
        name = f"{parameter.name}.newton_schulz"
        self.ledger.note(name, (held.buffer,), Kernel.GEMM, moved, 2 * m * n * k, (1, m, n, k), "bfloat16")
        return held


def _sides(parameter: Parameter) -> tuple[int, int]:
    """The number of rows and columns of a parameter's matrices."""
    return parameter.numel // parameter.shape[-1], parameter.numel // parameter.shape[-2]


def _buffers(storages: Sequence[Storage]) -> tuple[Buffer, ...]:
    return tuple([storage.buffer for storage in storages])


def _is_hidden(parameter: Parameter) -> bool:
    """Whether a parameter is a block's matrix, which Muon updates."""
    return len(parameter.shape) == 2 and parameter.block is not None
