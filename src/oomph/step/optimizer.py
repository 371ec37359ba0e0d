"""Clipping, the gradient scaler and the optimizers, as PyTorch runs them on a GPU or on the CPU.

Weights come in two groups, as in nanoGPT and transformers' Trainer: decayed (two dimensions and more), then the rest;
in a plain loop all in one. What each optimizer is:

- `adamw`: torch.optim.AdamW, fused, foreach or forloop. Fused keeps its step counters on the device.
- `sgd`: torch.optim.SGD with momentum `beta1`; weight decay adds a decayed copy of the gradients.
- `adafactor`: torch.optim.Adafactor, a row and a column of variances for a matrix.
- `muon`: torch.optim.Muon for the blocks' matrices, AdamW for embeddings, head and vectors.
- `adamw8bit`: bitsandbytes' AdamW8bit: a byte for each moment and a float32 scale for 256 of them; tensors of fewer
  than 4096 numbers stay in float32. Both look-up tables are shared.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.config.schema import TrainConfig
from oomph.step.ops import Buffer, Kernel, Kind, Phase
from oomph.step.parameters import Parameter
from oomph.step.precision import precision
from oomph.step.tensor.tensor import Ledger, Storage

_SMALL_8BIT = 4096  # bitsandbytes' min_8bit_size
_BLOCK_8BIT = 256
_TABLE_BYTES = 4 * 256  # a look-up table from bytes to float32
_MUON_STEPS = 5  # torch.optim.Muon's ns_steps


class Optimizer:
    """The optimizer of a config: its state, and its step."""

    def __init__(
        self, config: TrainConfig, cuda: bool, everything: Sequence[Parameter], weight_bytes: int | None = None
    ) -> None:
        """`everything` is what is trained; `weight_bytes` of one number, where the config does not say it."""
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
        """Which parameters are Muon's, and the groups of the rest."""
        splits = self.config.optimizer == "muon"
        self.matrices = [p for p in self.everything if splits and _is_hidden(p)]
        rest = [p for p in self.everything if not (splits and _is_hidden(p))]
        self.groups = [[p for p in rest if p.decayed], [p for p in rest if not p.decayed]]
        if self.config.trainer == "torch":
            self.groups = [rest]  # AdamW(model.parameters())

    def create_state(self) -> list[Storage]:
        """Every state tensor at once, as it is after the first step."""
        held = [Storage(self.ledger, held.buffer) for held in self._state_of(self.matrices, True)]
        for group in self.groups:
            held += self._state_of(group, False)
        if self.config.optimizer == "adamw8bit":
            held += [self.ledger.hold(name, _TABLE_BYTES, Kind.OPTIMIZER) for name in ("qmap1", "qmap2")]
        return held

    def _hold(self, parameter: Parameter, part: str, size_bytes: int) -> Storage:
        return self.ledger.hold(f"{parameter.name}.{part}", size_bytes, Kind.OPTIMIZER)

    def _state_of(self, group: list[Parameter], muon: bool) -> list[Storage]:
        """The state of one group in the order it is made."""
        held: list[Storage] = []
        for parameter in group:
            for part, size_bytes in self._parts(parameter, muon):
                held.append(self._hold(parameter, part, size_bytes))
        return held

    def _parts(self, parameter: Parameter, muon: bool) -> list[tuple[str, int]]:
        size = parameter.numel * self.weight_bytes
        name = self.config.optimizer
        on_device = not self.cuda  # step counters of the unfused loops stay with the host
        if muon:
            return [("momentum", size)]
        if name == "sgd":
            return [("momentum", size)] if self.config.beta1 else []
        if name == "adafactor":
            steps = [("step", 4)] if on_device else []
            if not parameter.decayed:
                return [*steps, ("variance", size)]
            rows, columns = _sides(parameter)
            return [*steps, ("row_var", rows * self.weight_bytes), ("col_var", columns * self.weight_bytes)]
        if name == "adamw8bit":
            if parameter.numel < _SMALL_8BIT:
                return [("state1", 4 * parameter.numel), ("state2", 4 * parameter.numel)]
            scales = 4 * -(-parameter.numel // _BLOCK_8BIT)
            moments = [("state1", parameter.numel), ("state2", parameter.numel)]
            return [*moments, ("absmax1", scales), ("absmax2", scales)]
        steps = [("step", 4)] if on_device or self.loop == "fused" else []
        return [*steps, ("exp_avg", size), ("exp_avg_sq", size)]

    def step(self, first: bool) -> None:
        """Clip, update, and let the gradients go."""
        self._clip()
        self.ledger.phase = Phase.OPTIMIZER
        if first and self.config.optimizer == "adamw8bit":
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
        self.verdicts.clear()
        self.grads.clear()

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
        total = sum(p.numel for p in self.everything) * self.weight_bytes
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
        """GradScaler.unscale_: a copy of the verdict "a gradient is not finite" stays until the scale is updated."""
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
        total = sum(p.numel for p in self.everything) * self.weight_bytes
        ledger.note("scaler.unscale", (), Kernel.POINTWISE, 2 * total)
        del found
        self.verdicts.append(copies[0])

    def _ask_scaler(self, fused: bool) -> None:
        """GradScaler.step: a fused optimizer takes the verdict, and the scale if it is to unscale itself."""
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
            self._adafactor(group)
        elif name == "adamw8bit" or self.loop == "fused":
            self._in_place(group)
        elif self.loop == "foreach":
            self._foreach(group)
        else:
            self._forloop(group)

    def _traffic(self, parameter: Parameter) -> int:
        """Read parameter, gradient and state, write parameter and state."""
        state = sum(size for _, size in self._parts(parameter, False))
        return 3 * parameter.numel * self.weight_bytes + 2 * state

    def _in_place(self, group: list[Parameter]) -> None:
        moved = sum(map(self._traffic, group))
        self.ledger.note("adamw", (), Kernel.OPTIMIZER, moved)

    def _foreach(self, group: list[Parameter]) -> None:
        ledger = self.ledger
        if not self.cuda:  # what step counters are raised by; a GPU's stay with the host
            ledger.make("adamw.one", 4, Kind.TEMPORARY)
        roots = [ledger.hold(f"{p.name}.sqrt", p.numel * self.weight_bytes, Kind.TEMPORARY) for p in group]
        # Ten passes over all numbers: decay, two moments in three, root, two scalings, the update.
        size = sum(held.bytes for held in roots)
        ledger.note("adamw.moments", (), Kernel.OPTIMIZER, 10 * size)
        ledger.note("adamw.sqrt", _buffers(roots), Kernel.OPTIMIZER, 2 * size)
        ledger.note("adamw.update", (), Kernel.OPTIMIZER, 8 * size)

    def _forloop(self, group: list[Parameter]) -> None:
        ledger = self.ledger
        denominator: Storage | None = None
        for parameter in group:
            size = parameter.numel * self.weight_bytes
            ledger.note(f"{parameter.name}.moments", (), Kernel.OPTIMIZER, 10 * size)
            root = ledger.make(f"{parameter.name}.sqrt", size, Kind.TEMPORARY, Kernel.OPTIMIZER, 2 * size)
            denominator = ledger.make(f"{parameter.name}.denominator", size, Kind.TEMPORARY, Kernel.OPTIMIZER, 2 * size)
            del root
            ledger.note(f"{parameter.name}.update", (), Kernel.OPTIMIZER, 6 * size)
        del denominator

    def _sgd(self, group: list[Parameter], first: bool) -> None:
        """Decay makes a copy of the gradients: of all at once (foreach) or of each in turn."""
        ledger = self.ledger
        decays = group is self.groups[0] and self.config.weight_decay != 0 and self.loop != "fused"
        turns = [[p] for p in group] if self.loop == "forloop" else [group]
        for turn in turns:
            size = sum(p.numel for p in turn) * self.weight_bytes
            decayed: list[Storage] = []
            if decays:
                decayed = [ledger.hold(f"{p.name}.decayed", p.numel * self.weight_bytes, Kind.TEMPORARY) for p in turn]
                ledger.note("sgd.decay", _buffers(decayed), Kernel.OPTIMIZER, 3 * size)
            if first:
                self._create(turn, False)
            del decayed
            ledger.note("sgd", (), Kernel.OPTIMIZER, 6 * size)

    def _adafactor(self, group: list[Parameter]) -> None:
        """Each tensor in turn, by an estimate of its own size from its row and column."""
        ledger = self.ledger
        estimate: Storage | None = None
        for parameter in group:
            size = parameter.numel * self.weight_bytes
            sides = [side * self.weight_bytes for side in _sides(parameter)] if parameter.decayed else [size]
            means = [
                ledger.make(f"{parameter.name}.mean", side, Kind.TEMPORARY, Kernel.OPTIMIZER, size) for side in sides
            ]
            estimate = ledger.make(f"{parameter.name}.update", size, Kind.TEMPORARY, Kernel.OPTIMIZER, size)
            means.clear()
            ledger.note(f"{parameter.name}.apply", (), Kernel.OPTIMIZER, 9 * size)
        del estimate

    def _muon(self) -> None:
        """Each matrix in turn; the last one's update is let go when the next has its own."""
        ledger = self.ledger
        update: Storage | None = None
        for parameter in self.matrices:
            count = parameter.numel
            size = count * self.weight_bytes
            update = ledger.make(f"{parameter.name}.nesterov", size, Kind.TEMPORARY, moved=5 * size)
            update = self._orthogonal(parameter, update)
            promoted: list[Storage] = []
            if not self.cuda and self.weight_bytes != 2:  # the CPU adds what is bfloat16 by a copy
                promoted = [ledger.hold(f"{parameter.name}.promoted", size, Kind.TEMPORARY)]
            ledger.note(f"{parameter.name}.apply", _buffers(promoted), Kernel.OPTIMIZER, 2 * count + 4 * size)
            del promoted
        del update

    def _orthogonal(self, parameter: Parameter, update: Storage) -> Storage:
        """Newton-Schulz iterations in bfloat16, by products along the shorter side."""
        ledger = self.ledger
        short, long = sorted(parameter.shape)
        half_bytes = 2 * parameter.numel
        current = update  # in pure bfloat16 the cast copies nothing
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
    """How many rows and how many columns a parameter's matrices have."""
    return parameter.numel // parameter.shape[-1], parameter.numel // parameter.shape[-2]


def _buffers(storages: Sequence[Storage]) -> tuple[Buffer, ...]:
    return tuple([storage.buffer for storage in storages])


def _is_hidden(parameter: Parameter) -> bool:
    """A block's matrix: what Muon is for."""
    return len(parameter.shape) == 2 and parameter.block is not None
