"""A traced model as a template: its op lists without sizes, the sizes at a few batches, and one block for many.

Every size in a step is a polynomial in the batch size B and the tokens T: linear in B, quadratic in T. So the lists are
traced at T = 128, 256 and 384 and interpolated exactly, in integers, and at one B so large that division splits each
number: the quotient is the part per sequence, the remainder the constant part. Repeating blocks are
traced as a few and repeated by `depth`. Exceptions have templates of their own: B = 1, where PyTorch
takes other paths, and T that is not a multiple of 128, to which kernels round. Compiled, each batch has its own,
except in a search, which scales inductor's plan for a prime number of sequences to any other: approximately
its plan for those. A template needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm, prod
from operator import mul
from typing import TYPE_CHECKING, Any

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step import loop
from oomph.step.compile.loop import CompiledLoop as CompiledLoop
from oomph.step.compile.loop import Programs
from oomph.step.depth import Gap, UnlikeBlocksError, block_of, deepened
from oomph.step.ops import Buffer, Kernel, Kind, Op, Phase, Section, Step, copied, exchanged
from oomph.step.optimizer import Optimizer
from oomph.step.parameters import Parameter

if TYPE_CHECKING:
    from fractions import Fraction

TILE = 128  # tokens: the largest multiple that a kernel rounds to
LENGTHS = (TILE, 2 * TILE, 3 * TILE)  # tokens at which the sizes are traced
SHORT = (16, 17, 18)  # tokens, for a model that loops over them
PRIME = 37  # sequences, compiled: other sizes are unlikely to be a multiple of it
MANY = 1 << 34  # sequences: more than the bytes of a weight, and times the bytes of a sequence still an int64


class TemplateFacts(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a model that do not depend on the batch."""

    parameters: tuple[Parameter, ...]
    trained: tuple[Parameter, ...]  # the parameters that get a gradient
    state: tuple[tuple[str, int], ...]  # parameters and buffers: name and bytes
    weight_bytes: int  # of one trained element
    makes_no_loss: bool = False  # it returns one tensor, whose mean is used as the loss
    own_inputs: tuple[tuple[int, ...], ...] = ()  # shapes, if the function supplied its inputs
    recurrent: tuple[str, ...] = ()  # kinds of recurrent layers, whose steps run differently on a GPU than in a trace


class Lists(msgspec.Struct, frozen=True, eq=False):
    """A model's op lists and the buffers that the loop around them holds, by role."""

    sections: dict[str, tuple[Op, ...]]
    roles: dict[str, tuple[Buffer, ...]]
    grads: dict[str, Buffer]
    cache: dict[str, Buffer] = {}  # keys and values that an eager program's variables hold after it


class Form(msgspec.Struct, frozen=True, array_like=True):
    """Op lists without their sizes. Buffers are numbered."""

    buffers: tuple[tuple[str, Kind, int | None], ...]
    sections: dict[str, tuple[tuple[Any, ...], ...]]  # name, phase, allocates, frees, kernel, dtype, dims, block
    roles: dict[str, tuple[int, ...]]
    grads: dict[str, int]
    cache: dict[str, int]

    def alike(self, other: Form) -> bool:
        """Whether the lists are equal except for the kinds of buffers: these are guessed from sizes and may mislead."""
        names = [[(name, block) for name, _, block in form.buffers] for form in (self, other)]
        return names[0] == names[1] and (self.sections, self.roles, self.grads, self.cache) == (
            other.sections, other.roles, other.grads, other.cache,
        )  # fmt: skip


def taken_apart(lists: Lists) -> tuple[Form, list[int]]:
    """The form of the lists, and their numbers: bytes of buffers; FLOPs, bytes moved, times and shape of operations."""
    numbered: dict[Buffer, int] = {}
    for buffer in (*(b for held in lists.roles.values() for b in held), *lists.grads.values(), *lists.cache.values()):
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
    named = [{name: numbered[b] for name, b in found.items()} for found in (lists.grads, lists.cache)]
    return Form(buffers, sections, roles, *named), [*(b.bytes for b in numbered), *numbers]


def put_together(form: Form, numbers: Sequence[int]) -> Lists:
    """The lists with that form and those numbers."""
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
    named = [{name: buffers[i] for name, i in found.items()} for found in (form.grads, form.cache)]
    return Lists(sections, roles, *named)


# --- repeating blocks -----------------------------------------------------------------------------


def marked(lists: Lists, gap: Gap) -> Lists:
    """The lists with every operation of the blocks around a gap labelled with its block.

    A block reaches from its first operation to the next block's first, wherever its last one runs. Raises
    `UnlikeBlocksError` if the blocks do not follow one another with equal operations.
    """
    blocks: dict[int, int | None] = {}  # by id of the operation
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
    named = [{name: new.get(b, b) for name, b in found.items()} for found in (lists.grads, lists.cache)]
    return Lists(sections, roles, *named)


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
    """The lists with the gap's blocks filled in."""
    named = _repeated(lists)
    sections, found = deepened([lists.sections[name] for name in named], (lists.grads, lists.cache), gap)
    filled = dict(zip(named, sections, strict=True))
    others = {name: _counted(ops, gap) for name, ops in lists.sections.items() if name not in filled}
    return Lists(filled | others, lists.roles, *found)


def _repeated(lists: Lists) -> list[str]:
    """The sections whose blocks repeat: not a compiled evaluation, where inductor fuses across blocks."""
    return [name for name in lists.sections if name != "evaluation" or "forward" not in lists.sections]


def _counted(ops: Sequence[Op], gap: Gap) -> tuple[Op, ...]:
    """An evaluation with each block's work multiplied by the number of such blocks: it keeps nothing of them."""
    times = gap.copies + 1
    inside = [gap.group_of(block_of(op.name)) == 0 for op in ops]
    return tuple(
        msgspec.structs.replace(op, times=times * op.times) if own else op for op, own in zip(ops, inside, strict=True)
    )


def check_lives(lists: Lists, facts: TemplateFacts) -> None:
    """Raises `UnlikeBlocksError` unless everything freed is alive, and trained parameters' gradients are held."""
    held = {b for role, found in lists.roles.items() if role in ("batch", "before", "zeros") for b in found}
    names = [name for name in lists.sections if name != "evaluation"]
    evaluation = [name for name in lists.sections if name == "evaluation"]
    for sections, live in ((evaluation, set(lists.roles["batch"])), (names, held)):
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
    """A model's lists for every batch it covers."""

    facts: TemplateFacts
    form: Form
    batch: int | None  # the batch size it covers; None: any of two or more
    tokens: tuple[int, ...]  # lengths at which it was traced; if only one, it covers that alone
    fixed: tuple[tuple[int, ...], ...]  # the form's numbers by length: the constant part
    each: tuple[tuple[int, ...], ...]  # and the part per sequence
    gap: tuple[int, int, int, int] | None  # before, template, after, period
    most_tokens: int  # up to where the interpolation was checked against a trace

    def covers(self, batch: int, tokens: int) -> bool:
        """Whether the template is valid for such a batch."""
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


def points(batch: int, tokens: int, cuda: bool, compiled: bool, search: bool = False) -> tuple[tuple[int, int], ...]:
    """Where to trace a template that covers such a batch. A CPU's and inductor's kernels change with the size."""
    if compiled:
        return ((PRIME if search and batch > 1 else batch, tokens),)
    lengths = LENGTHS if cuda and tokens % TILE == 0 else (tokens,)
    return tuple((MANY if batch > 1 else 1, length) for length in lengths)


def parted(number: int, batch: int) -> tuple[int, int]:
    """A number traced at batch size `MANY` or `PRIME`, split: the constant part, and the part per sequence."""
    if batch == PRIME:
        return (number, 0) if number % PRIME else (0, number // PRIME)
    return number % MANY, number // MANY


def _weight(lengths: Sequence[int], own: int, tokens: int) -> Fraction:
    """The weight of one length in Lagrange's interpolation."""
    from fractions import Fraction  # needed only for a traced model

    return prod((Fraction(tokens - other, own - other) for other in lengths if other != own), start=Fraction(1))


def step(facts: TemplateFacts, lists: Lists, config: TrainConfig, cuda: bool, first: bool) -> Step:
    """The first optimizer step or a later one, with one evaluation if the lists have it."""
    make = _compiled_step if "forward" in lists.sections else _eager_step
    return make(facts, lists, config, cuda, first)


def _state(facts: TemplateFacts) -> list[Buffer]:
    return [Buffer(name, size, Kind.PARAMETERS, block_of(name)) for name, size in facts.state if size]


def _eager_step(facts: TemplateFacts, lists: Lists, config: TrainConfig, cuda: bool, first: bool) -> Step:
    optimizer = Optimizer(config, cuda, facts.trained, facts.weight_bytes)
    grads = {p.name: lists.grads[p.name] for p in facts.trained if p.name in lists.grads}
    roles = lists.roles
    held = roles["before"], roles["after"]
    found = loop.MicroStep(lists.sections["micro-step"], *held, grads, len(roles["batch"]), lists.cache)
    count = max(1, config.gradient_accumulation_steps // config.world_size)
    resident, training = loop.training(optimizer, loop.with_previous_cache(found), count, first)
    evaluating = _evaluations(lists, 2 * config.eval_iters - 1) if "evaluation" in lists.sections else []
    sections = [*evaluating, *training] if first else [*training, *evaluating]
    return Step((*_state(facts), *resident), tuple(sections))


def _evaluations(lists: Lists, later: int) -> list[Section]:
    """estimate_loss: a first batch, then others, each while the results of the one before are alive."""
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


def _compiled_step(facts: TemplateFacts, lists: Lists, config: TrainConfig, cuda: bool, first: bool) -> Step:
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
    return around.step(optimizer, _state(facts), first)
