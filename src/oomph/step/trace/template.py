"""A traced model as a template: its op lists without sizes, the sizes at a few batches, and one block for many.

Every size in a step is a polynomial in the batch size B and the tokens T: linear in B, quadratic in T. So the lists are
traced at T = 128, 256 and 384 and interpolated exactly, with whole numbers, and at one B so large that it parts each
number by itself: the quotient is what a sequence adds, the remainder what there is without any. Blocks that repeat are
traced as a few and repeated by `depth`. What this does not hold for has a template of its own: B = 1, where PyTorch
takes other paths, and T that is no multiple of 128, to which kernels round. A template needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm, prod
from operator import mul
from typing import Any

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step import loop
from oomph.step.compile.loop import CompiledLoop as CompiledLoop
from oomph.step.compile.loop import Programs
from oomph.step.depth import Gap, UnlikeBlocksError, block_of, deepened
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section, Step, copied, exchanged
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import Parameter

TILE = 128  # tokens: the coarsest that a kernel rounds to
LENGTHS = (TILE, 2 * TILE, 3 * TILE)  # tokens at which the sizes are traced
SHORT = (16, 17, 18)  # where the model has a loop over them
MANY = 1 << 34  # sequences: more than the bytes of a weight, and with the bytes of a sequence still an int64


class TemplateFacts(msgspec.Struct, frozen=True, array_like=True):
    """What of a model does not depend on the batch."""

    parameters: tuple[Parameter, ...]
    trained: tuple[Parameter, ...]  # of the parameters, those that get a gradient
    state: tuple[tuple[str, int], ...]  # parameters and buffers: name and bytes
    weight_bytes: int  # of one number that is trained
    makes_no_loss: bool = False  # it returns one tensor, whose mean stands for a loss
    own_inputs: tuple[tuple[int, ...], ...] = ()  # shapes, where the function brought its inputs
    recurrent: tuple[str, ...] = ()  # kinds of recurrent layers whose steps a card does not take as a trace has them


class Lists(msgspec.Struct, frozen=True, eq=False):
    """A model's op lists and the buffers that the loop around them holds, by role."""

    sections: dict[str, tuple[Op, ...]]
    roles: dict[str, tuple[Buffer, ...]]
    grads: dict[str, Buffer]


class Form(msgspec.Struct, frozen=True, array_like=True):
    """Op lists without their sizes. Buffers are numbered."""

    buffers: tuple[tuple[str, Kind, int | None], ...]
    sections: dict[str, tuple[tuple[Any, ...], ...]]  # name, phase, allocates, frees, kernel, dtype, dims, block
    roles: dict[str, tuple[int, ...]]
    grads: dict[str, int]

    def alike(self, other: Form) -> bool:
        """Whether the lists are the same but for the kinds of buffers: those are told by sizes, which may mislead."""
        names = [[(name, block) for name, _, block in form.buffers] for form in (self, other)]
        return names[0] == names[1] and (self.sections, self.roles, self.grads) == (
            other.sections, other.roles, other.grads,
        )  # fmt: skip


def taken_apart(lists: Lists) -> tuple[Form, list[int]]:
    """The form of the lists, and their numbers: bytes of buffers; FLOPs, bytes moved, times and shape of operations."""
    numbered: dict[Buffer, int] = {}
    for buffer in (*(b for held in lists.roles.values() for b in held), *lists.grads.values()):
        numbered.setdefault(buffer, len(numbered))
    sections: dict[str, tuple[tuple[Any, ...], ...]] = {}
    numbers: list[int] = []
    for name, ops in lists.sections.items():
        forms = []
        for op in ops:
            made = tuple([numbered.setdefault(buffer, len(numbered)) for buffer in op.allocates])
            gone = tuple(sorted([numbered.setdefault(buffer, len(numbered)) for buffer in op.frees]))
            forms.append((op.name, op.phase, made, gone, op.kernel, op.dtype, len(op.shape), op.block))
            numbers += (op.flops, op.bytes_moved, op.times, *op.shape)
        sections[name] = tuple(forms)
    buffers = tuple([(b.name, b.kind, b.block) for b in numbered])
    roles = {role: tuple([numbered[b] for b in held]) for role, held in lists.roles.items()}
    grads = {name: numbered[b] for name, b in lists.grads.items()}
    return Form(buffers, sections, roles, grads), [*(b.bytes for b in numbered), *numbers]


def put_together(form: Form, numbers: Sequence[int]) -> Lists:
    """The lists of that form with those numbers."""
    rest = iter(numbers)
    buffers = [Buffer(name, next(rest), Kind(kind), block) for name, kind, block in form.buffers]
    sections: dict[str, tuple[Op, ...]] = {}
    for section, forms in form.sections.items():
        ops = []
        for name, phase, made, gone, kernel, dtype, dims, block in forms:
            flops, moved, times = next(rest), next(rest), next(rest)
            shape = tuple([next(rest) for _ in range(dims)])
            allocates, frees = tuple([buffers[i] for i in made]), tuple([buffers[i] for i in gone])
            work = (Kernel(kernel), shape, dtype, flops, moved, times, block)
            ops.append(Op(name, Phase(phase), allocates, frees, *work))
        sections[section] = tuple(ops)
    roles = {role: tuple([buffers[i] for i in held]) for role, held in form.roles.items()}
    return Lists(sections, roles, {name: buffers[i] for name, i in form.grads.items()})


# --- blocks that repeat ---------------------------------------------------------------------------


def marked(lists: Lists, gap: Gap) -> Lists:
    """The lists with every operation of the blocks around a gap marked as one of its block's.

    A block is what lies between two first operations of a block, wherever its last one runs. Raises
    `UnlikeBlocksError` where the blocks do not follow one another alike.
    """
    blocks: dict[int, int | None] = {}  # by operation
    labels: dict[Buffer, int] = {}
    for ops in (lists.sections[name] for name in _repeated(lists)):
        for part in (
            [op for op in ops if op.phase is not Phase.BACKWARD],
            [op for op in ops if op.phase is Phase.BACKWARD],
        ):
            _mark(part, gap, blocks, labels)
    new = {buffer: Buffer(buffer.name, buffer.bytes, buffer.kind, block) for buffer, block in labels.items()}
    sections = {}
    for name, ops in lists.sections.items():
        found = exchanged(ops, new)
        sections[name] = tuple(
            msgspec.structs.replace(op, block=blocks.get(id(old))) for old, op in zip(ops, found, strict=True)
        )
    roles = {role: tuple([new.get(b, b) for b in held]) for role, held in lists.roles.items()}
    return Lists(sections, roles, {name: new.get(b, b) for name, b in lists.grads.items()})


def _mark(ops: Sequence[Op], gap: Gap, blocks: dict[int, int | None], labels: dict[Buffer, int]) -> None:
    groups = [gap.group_of(block_of(op.name)) for op in ops]
    backward = bool(ops) and ops[0].phase is Phase.BACKWARD
    order = (1, 0, -1) if backward else (-1, 0, 1)
    firsts = (gap.before, gap.template, gap.after)
    start = 0
    while order[0] in groups[start:]:
        try:
            first = groups.index(order[0], start)
            second = groups.index(order[1], first)
            third = groups.index(order[2], second)
        except ValueError:
            raise UnlikeBlocksError from None
        size = second - first
        segments = [ops[at : at + size] for at in (first, second, third)]
        alike = [[_likeness(op) for op in segment] for segment in segments]
        if third - second != size or not alike[0] == alike[1] == alike[2]:
            raise UnlikeBlocksError
        for group, segment in zip(order, segments, strict=True):
            for op in segment:
                blocks[id(op)] = firsts[group + 1]
                labels.update({b: firsts[group + 1] for b in op.allocates if b.block is None})
        start = third + size
    if any(group == 0 and id(op) not in blocks for group, op in zip(groups, ops, strict=True)):
        raise UnlikeBlocksError


def _likeness(op: Op) -> tuple[Any, ...]:
    name = ".".join("#" if part.isdigit() else part for part in op.name.split("."))
    made = tuple((b.bytes, b.kind) for b in op.allocates)
    return name, op.kernel, op.dtype, op.shape, op.flops, op.bytes_moved, made


def grown(lists: Lists, gap: Gap) -> Lists:
    """The lists with the blocks of the gap filled in."""
    named = _repeated(lists)
    sections, (grads,) = deepened([lists.sections[name] for name in named], (lists.grads,), gap)
    filled = dict(zip(named, sections, strict=True))
    others = {name: _counted(ops, gap) for name, ops in lists.sections.items() if name not in filled}
    return Lists(filled | others, lists.roles, grads)


def _repeated(lists: Lists) -> list[str]:
    """The sections whose blocks are alike: not a compiled evaluation's, where inductor fuses across blocks."""
    return [name for name in lists.sections if name != "evaluation" or "forward" not in lists.sections]


def _counted(ops: Sequence[Op], gap: Gap) -> tuple[Op, ...]:
    """An evaluation that counts a block's work as often as it has such blocks: it keeps nothing of them."""
    times = gap.copies + 1
    inside = [gap.group_of(block_of(op.name)) == 0 for op in ops]
    return tuple(
        msgspec.structs.replace(op, times=times * op.times) if own else op for op, own in zip(ops, inside, strict=True)
    )


def check_lives(lists: Lists, facts: TemplateFacts) -> None:
    """Raises `UnlikeBlocksError` unless what is freed lives, and gradients are there that parameters want."""
    held = {b for role, found in lists.roles.items() if role in ("batch", "before", "zeros") for b in found}
    names = [name for name in lists.sections if name != "evaluation"]
    for sections, live in ((["evaluation"], set(lists.roles["batch"])), (names, held)):
        for op in (op for name in sections for op in lists.sections[name]):
            if not live.isdisjoint(op.allocates):
                raise UnlikeBlocksError
            live.update(op.allocates)
            if not live.issuperset(op.frees):
                raise UnlikeBlocksError
            live.difference_update(op.frees)
    if not held.issuperset(lists.grads.values()) or not lists.grads.keys() <= {p.name for p in facts.trained}:
        raise UnlikeBlocksError


# --- the template ---------------------------------------------------------------------------------


class Template(msgspec.Struct, frozen=True, array_like=True):
    """A model's lists for every batch that it covers."""

    facts: TemplateFacts
    form: Form
    batch: int | None  # the batch size that it covers; None for any of two or more
    tokens: tuple[int, ...]  # lengths at which it was traced; one where it covers that alone
    fixed: tuple[tuple[int, ...], ...]  # the form's numbers by length: what they are without a sequence,
    each: tuple[tuple[int, ...], ...]  # and what one more adds
    gap: tuple[int, int, int, int] | None  # before, template, after, period
    most_tokens: int  # to which the interpolation was held against a trace

    def covers(self, batch: int, tokens: int) -> bool:
        """Whether the template holds for such a batch."""
        if batch < 2 if self.batch is None else batch != self.batch:
            return False
        if len(self.tokens) == 1:
            return tokens == self.tokens[0]
        return tokens % gcd(*self.tokens) == 0 and tokens <= self.most_tokens

    def numbers_at(self, batch: int, tokens: int) -> list[int]:
        """The form's numbers at that batch."""
        weights = [_weight(self.tokens, own, tokens) for own in self.tokens]
        whole = lcm(*(weight.denominator for weight in weights))
        times = [int(weight * whole) for weight in weights]
        times += [batch * each for each in times]
        return [sum(map(mul, times, column)) // whole for column in zip(*self.fixed, *self.each, strict=True)]

    def lists(self, batch: int, tokens: int) -> Lists:
        """The lists at that batch, with all blocks."""
        lists = put_together(self.form, self.numbers_at(batch, tokens))
        return grown(lists, Gap(*self.gap)) if self.gap else lists


def points(batch: int, tokens: int, cuda: bool, compiled: bool) -> tuple[tuple[int, int], ...]:
    """Where to trace a template that covers such a batch. A CPU's kernels and inductor's have other ranges of size."""
    if compiled:
        return ((batch, tokens),)
    lengths = LENGTHS if cuda and tokens % TILE == 0 else (tokens,)
    return tuple((MANY if batch > 1 else 1, length) for length in lengths)


def parted(batch: int, numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A form's numbers at a batch size: without a sequence, and what one adds, where the batch is so large to tell."""
    if batch != MANY:
        return tuple(numbers), (0,) * len(numbers)
    return tuple([number % MANY for number in numbers]), tuple([number // MANY for number in numbers])


def _weight(lengths: Sequence[int], own: int, tokens: int) -> Fraction:
    """Lagrange's."""
    return prod((Fraction(tokens - other, own - other) for other in lengths if other != own), start=Fraction(1))


def steps(
    facts: TemplateFacts, lists: Lists, config: TrainConfig, cuda: bool, workspace_bytes: Sequence[int]
) -> tuple[Step, Step]:
    """The first and a later optimizer step, each with one evaluation."""
    make = _compiled_step if "forward" in lists.sections else _eager_step
    first, later = (make(facts, lists, config, cuda, first, workspace_bytes) for first in (True, False))
    return first, later


def _state(facts: TemplateFacts) -> list[Buffer]:
    return [Buffer(name, size, Kind.PARAMETERS, block_of(name)) for name, size in facts.state if size]


def _eager_step(
    facts: TemplateFacts, lists: Lists, config: TrainConfig, cuda: bool, first: bool, workspace_bytes: Sequence[int]
) -> Step:
    optimizer = Optimizer(config, cuda, facts.trained, facts.weight_bytes)
    grads = {p.name: lists.grads[p.name] for p in facts.trained if p.name in lists.grads}
    roles = lists.roles
    pattern = loop.MicroStep(lists.sections["micro-step"], roles["before"], roles["after"], grads, len(roles["batch"]))
    count = max(1, config.gradient_accumulation_steps // config.world_size)
    resident, training = loop.training(optimizer, pattern, count, first)
    evaluating = _evaluations(lists, 2 * config.eval_iters - 1)
    held = [Buffer("workspace", size, Kind.WORKSPACE) for size in workspace_bytes]
    sections = [*evaluating, *training] if first else [*training, *evaluating]
    return Step((*_state(facts), *resident, *held), tuple(sections))


def _evaluations(lists: Lists, later: int) -> list[Section]:
    """estimate_loss: a first batch, and others, each while what the one before it made is held."""
    ops, fetched = lists.sections["evaluation"], len(lists.roles["batch"])
    gone = {buffer for op in ops for buffer in op.frees}
    made = [buffer for op in ops for buffer in op.allocates if buffer not in gone]
    batch, results = made[:fetched], made[fetched:]
    new = {buffer: copied(buffer) for buffer in made}
    again = exchanged(ops, new)
    last = next(index for index, op in enumerate(ops) if batch and batch[-1] in op.allocates) if batch else 0
    for at, frees in ((last, batch), (-1, [*results, *new.values()])):
        again[at] = msgspec.structs.replace(again[at], frees=(*again[at].frees, *frees))
    return [Section("evaluation, first batch", ops), Section("evaluation, later batches", tuple(again), later)]


def _compiled_step(
    facts: TemplateFacts, lists: Lists, config: TrainConfig, cuda: bool, first: bool, workspace_bytes: Sequence[int]
) -> Step:
    roles, sections = lists.roles, lists.sections
    programs = Programs(
        batch=roles["batch"],
        forward=sections["forward"],
        loss=roles["loss"][0],
        outputs=roles["outputs"],
        zeros=roles["zeros"],
        backward=sections["backward"],
        grads={p.name: lists.grads[p.name] for p in facts.parameters if p.name in lists.grads},
        evaluation=sections["evaluation"],
        evaluation_outputs=roles["evaluation_outputs"],
    )
    count = max(1, config.gradient_accumulation_steps // config.world_size)
    around = CompiledLoop(programs, count, 2 * config.eval_iters, bool(roles["kept"]))
    optimizer = Optimizer(config, cuda, facts.trained, facts.weight_bytes)
    return around.step(optimizer, _state(facts), first, workspace_bytes)
