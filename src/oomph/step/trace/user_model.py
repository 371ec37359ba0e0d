"""A user's own model: built from their file or a Hugging Face config, traced into the same op lists.

`file.py:function` runs the user's code on request: the one exception to "input is never executed".
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.config.programs import ON_THE_TRAINER, TRANSFORMERS
from oomph.config.schema import TrainConfig
from oomph.errors import InputError, Problem, nearest
from oomph.step.depth import Gap, UnlikeBlocksError
from oomph.step.trace.eager import program as eager
from oomph.step.trace.eager.record import MOST_CALLS, MOST_CALLS_ALONE, LoopError
from oomph.step.trace.failure import failure, unplannable
from oomph.step.trace.fakes import DTYPES, building, convert, facts
from oomph.step.trace.hugging_face import CausalWithLoss, causal_model_builder
from oomph.step.trace.loops import rolled
from oomph.step.trace.template import (
    MANY,
    SHORT,
    Lists,
    Template,
    TemplateFacts,
    check_lives,
    marked,
    parted,
    points,
    taken_apart,
)

MOST_CALLS_COMPILED = 4096  # by one module alone: inductor takes milliseconds for each
ENDLESS = 1 << 40  # tokens: for rolled loops there is no longer trace to compare with
_PERIODS = (1, 2, 3, 4, 6, 8)  # of repeating kinds of blocks
FAILURES = (Exception, SystemExit)  # a model that calls exit() must not end the plan with its exit code


class Cut(NamedTuple):
    """Blocks to leave out, and the gaps that may stand for them."""

    first: int
    last: int  # the first block after the cut
    gaps: tuple[Gap, ...]


class _Stack:
    """The matching lists of blocks in a model: of equal length, with kinds that repeat."""

    def __init__(self, model: nn.Module) -> None:
        lists = [
            found
            for path, found in model.named_modules()
            if isinstance(found, nn.ModuleList | nn.Sequential) and not any(p.isdigit() for p in path.split("."))
        ]
        self.length = max(map(len, lists), default=0)
        self.lists = [found for found in lists if len(found) == self.length]
        self.kinds = list(zip(*(_kinds(found) for found in self.lists), strict=True))

    def cuts(self, compiled: bool) -> list[Cut]:
        """The cuts to try, the cheapest to trace first.

        Compiled, up to four blocks at the front and two at the back differ from the others, and memory reuse may
        alternate between two blocks.
        """
        starts = ((period, start) for period in _PERIODS for start in range(3) if self._repeats(period, start))
        period, start = next(starts, (0, 0))
        if not period:
            return []
        sides = ((start + 4, 2, (1, 2)),) if compiled else ((start, 0, (1,)), (start + 1, 1, (1,)))
        return [cut for head, tail, turns in sides if (cut := self._cut(head, tail, [period * n for n in turns]))]

    def _cut(self, head: int, tail: int, periods: Sequence[int]) -> Cut | None:
        """The blocks between two groups of the longest period after the head and one before the tail."""
        longest = max(periods)
        first, last = head + 2 * longest, self.length - tail - longest
        last -= (last - first) % longest
        gaps = tuple(Gap(first - 2 * each, first - each, last, each) for each in periods)
        return Cut(first, last, gaps) if last > first else None

    def _repeats(self, period: int, start: int) -> bool:
        kinds = self.kinds[start:]
        return len(kinds) >= 4 * period and kinds[period:] == kinds[:-period]

    def leave_out(self, cut: Cut) -> None:
        """Remove the blocks. The others keep their numbers."""
        for found in self.lists:
            for number in range(cut.first, cut.last):
                del found._modules[str(number)]


def _kinds(blocks: Iterable[nn.Module]) -> list[Hashable]:
    """A key for each block: its modules with their settings, except its own index, and its parameters' shapes."""
    every = [[(name, type(m), _settings(m)) for name, m in block.named_modules()] for block in blocks]
    numbers = {
        (name, key)
        for name, _, settings in every[-1]
        for key, value in settings
        if type(value) is int and value == len(every) - 1
    }
    return [
        (
            tuple((n, kind, tuple(s for s in found if (n, s[0]) not in numbers)) for n, kind, found in modules),
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()),
        )
        for modules, block in zip(every, blocks, strict=True)
    ]


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, str)
    return tuple((key, value) for key, value in vars(module).items() if isinstance(value, plain))


def make_template(spec: str, config: TrainConfig, cuda: bool, cover_more: bool, search: bool = False) -> Template:
    """The template of the model named by `spec`, for the config's batch; with `cover_more` for others too, and in a
    `search`, approximately, for compiled ones.

    The function takes no arguments and returns a module, called with token ids and targets, both (batch_size,
    block_size), that returns a loss or a tuple with one; or it returns the module and the inputs to call it with.
    """
    with redirect_stdout(sys.stderr):  # what the model prints is not part of our output
        found = _Tracing(spec, config, cuda)
        asked = (config.batch_size, config.block_size)
        wanted = points(*asked, cuda, bool(config.compile), search) if cover_more and not found.own else (asked,)
        try:
            found.look_for_loops()
            return found.first_alike((wanted, tuple(p for p in wanted if p[1] == asked[1]), (asked,)))
        except LoopError:
            found.rolls = True
            short = () if found.own else tuple((wanted[0][0], length) for length in SHORT)
            return found.first_alike((short, (asked,)))


class _Tracing:
    """A model under a config, and what has been found out about it."""

    def __init__(self, spec: str, config: TrainConfig, cuda: bool) -> None:
        self.spec, self.config, self.cuda = spec, config, cuda
        self.build, self.inputs, self.own = _builder(spec, config)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = self.built()
        if problems := unplannable(spec, model):
            raise InputError(problems)
        layers = (type(each).__name__ for each in model.modules() if cuda and isinstance(each, nn.RNNBase))
        shapes = tuple(tuple(t.shape) for t in self.inputs) if self.own else ()
        self.facts = facts(model, own_inputs=shapes, recurrent=tuple(dict.fromkeys(layers)))
        self.cuts = _Stack(model).cuts(bool(config.compile))
        self.unused: nn.Module | None = model
        self.rolls = False  # whether it loops over its tokens, so that only a few are traced

    def look_for_loops(self) -> None:
        """Refuse to compile a model with a long loop over tokens: torch.compile unrolls it, and would not end."""
        if self.config.compile:
            try:
                with self.mode:
                    eager.lists(self.built(), self.inputs, **self._options(), most_alone=MOST_CALLS_COMPILED)
            except LoopError:
                what, instead = (
                    "has a loop over its tokens, which torch.compile writes out one by one",
                    "compile = False",
                )
                raise InputError(Problem(self.spec, what, allowed=instead)) from None
            except FAILURES:
                return  # other errors are reported when it is traced

    def first_alike(self, lengths: Sequence[tuple[tuple[int, int], ...]]) -> Template:
        """The template that covers most: with blocks left out if possible, at the first of these batches that works."""
        tried = [where for where in dict.fromkeys(lengths) if where]
        for cut in [*self.cuts, None]:
            for where in tried if cut is not None or not self.cuts or self.rolls else tried[-1:]:
                with contextlib.suppress(UnlikeBlocksError):
                    return self.template(cut, where)
        raise AssertionError("a model that is traced whole, at the size asked for, has blocks like its own")

    def built(self) -> nn.Module:
        """The whole model, on fake tensors."""
        with self.mode, building():
            model = self.build()
            if not self.config.autocast:
                convert(model, DTYPES[self.config.dtype or "float32"])
        return model

    def template(self, cut: Cut | None, where: Sequence[tuple[int, int]]) -> Template:
        """The template traced at `where`, checked against a trace of the requested batch."""
        model, self.unused = self.unused or self.built(), None
        if cut is not None:
            _Stack(model).leave_out(cut)
        returned: list[bool] = []
        handle = model.register_forward_hook(lambda _module, _inputs, result: returned.append(_is_no_loss(result)))
        asked = (self.config.batch_size, self.config.block_size)
        short = self.rolls and tuple(where) != (asked,)
        compared = (self.config.batch_size, SHORT[-1] + 2) if short else asked
        nearly = bool(self.config.compile) and where[0][0] != asked[0]
        every = [*where, *([] if nearly or compared in where else [compared])]
        try:
            found = [self._lists(model, point, final=cut is None and point == asked) for point in every]
            found = [rolled(each, tokens) for each, (_, tokens) in zip(found, every, strict=True)] if short else found
        finally:
            handle.remove()
        known = msgspec.structs.replace(self.facts, makes_no_loss=any(returned))
        for gap in cut.gaps if cut is not None else (None,):
            with contextlib.suppress(UnlikeBlocksError):
                return _template(known, every, len(where), found, gap, nearly)
        raise UnlikeBlocksError

    def _lists(self, model: nn.Module, point: tuple[int, int], final: bool) -> Lists:
        with self.mode:
            ids = torch.zeros(point, dtype=torch.int64)
        inputs = self.inputs if self.own else (ids,) * len(self.inputs)
        config, options = self.config, self._options()
        try:
            if config.compile:
                from oomph.step.trace.inductor import program as compiled

                program: dict[str, Any] = {
                    "torch_version": config.torch_version,
                    "keep_output": config.trainer not in ON_THE_TRAINER,  # the Trainer drops them before backward
                    "evaluation": config.trainer not in TRANSFORMERS,
                }
                return compiled.lists(model, inputs, self.mode, **options, **program)
            most = MOST_CALLS if self.rolls else MOST_CALLS_ALONE
            with self.mode:
                return eager.lists(model, inputs, **options, trainer=config.trainer, most_alone=most)
        except (InputError, UnlikeBlocksError, LoopError):
            raise
        except FAILURES as error:
            if not final:
                raise UnlikeBlocksError from error  # it may need all of its blocks, or another batch size
            how = "as torch.compile would" if config.compile else "eagerly"
            raise InputError(failure(self.spec, f"the model cannot be traced {how}", error)) from error

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            "dtype": config.dtype, "autocast": config.autocast, "cuda": self.cuda, "attention": config.attention,
        }  # fmt: skip


def _template(
    facts: TemplateFacts,
    where: Sequence[tuple[int, int]],
    traced: int,
    found: Sequence[Lists],
    gap: Gap | None,
    nearly: bool,
) -> Template:
    """The template of lists traced at these batches; those after the first `traced` are only compared."""
    parts = [taken_apart(lists if gap is None else marked(lists, gap)) for lists in found]
    sides = None if gap is None else (gap.before, gap.template, gap.after, gap.period)
    batch, lengths = where[0][0], tuple([tokens for _, tokens in where[:traced]])
    covers_all = batch == MANY or nearly
    pairs = [[parted(n, batch) if covers_all else (n, 0) for n in numbers] for _, numbers in parts[:traced]]
    fixed, each = zip(*(zip(*found_there, strict=True) for found_there in pairs), strict=True)
    longest = ENDLESS if lengths == SHORT else max(tokens for _, tokens in where)
    made = Template(facts, parts[0][0], None if covers_all else batch, lengths, fixed, each, sides, longest)
    for point, (form, numbers) in zip(where, parts, strict=True):
        if not form.alike(made.form) or numbers != made.numbers_at(*point):
            raise UnlikeBlocksError
    if gap is not None:
        check_lives(made.lists(*where[-1]), facts)
    return made


def _is_no_loss(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.dim() > 0


def _builder(spec: str, config: TrainConfig) -> tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], bool]:
    """The function that builds the model, its inputs, and whether the user supplied these."""
    path, colon, function = spec.rpartition(":")
    ids = torch.zeros((config.batch_size, config.block_size), dtype=torch.int64)
    if spec.endswith(".json"):
        return _hugging_face(Path(spec), config), (ids, ids), False
    if not colon or not path.endswith(".py"):
        raise InputError(Problem(f"--model {spec}", "names no model", allowed="file.py:function, or a config.json"))
    build = _function(Path(path), function)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = _call(spec, build)
    if isinstance(made, nn.Module):
        return build, (ids, ids), False
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return _with_inputs(spec, build, made[1])
    allowed = "an nn.Module, or a tuple of an nn.Module and its inputs"
    raise InputError(Problem(spec, "returns no model", found=type(made).__name__, allowed=allowed))


def _with_inputs(
    spec: str, build: Callable[[], Any], given: Any
) -> tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], bool]:
    """A model and its inputs: one tensor, several in order, or several by name."""
    names = tuple(given) if isinstance(given, Mapping) else ()
    found = [given] if isinstance(given, torch.Tensor) else list(given.values()) if names else given
    if not isinstance(found, list | tuple) or not all(isinstance(each, torch.Tensor) for each in found):
        allowed = "a tensor, a tuple of tensors, or a dict of them"
        raise InputError(Problem(spec, "its inputs are no tensors", found=type(given).__name__, allowed=allowed))
    inputs = tuple(torch.zeros(each.shape, dtype=each.dtype) for each in found)
    return (lambda: _Named(build()[0], names) if names else build()[0]), inputs, True


class _Named(nn.Module):
    """Calls a model with named inputs, given in order."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def _function(path: Path, name: str) -> Callable[[], Any]:
    """The function `name` of a Python file, which is executed to find it."""
    if not path.is_file():
        raise InputError(Problem(str(path), "there is no such file"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # so that the file's own imports work
    try:
        with mock.patch.object(sys, "argv", [str(path)]):  # hide our own arguments from the file
            spec.loader.exec_module(module)
    except FAILURES as error:
        raise InputError(failure(str(path), "running it raised", error)) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    found: Any = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if _defined_in(module, value) and key[0] != "_"]
        allowed = ", ".join(functions) or None
        problem = Problem(str(path), f"has no function '{name}'", allowed=allowed, nearest=nearest(name, functions))
        raise InputError(problem)
    return lambda: _call(f"{path}:{name}", found)


def _defined_in(module: Any, value: Any) -> bool:
    """Whether a file defines a function or class itself instead of importing it."""
    return isinstance(value, FunctionType | type) and value.__module__ == module.__name__


def _call(spec: str, build: Callable[[], Any]) -> Any:
    try:
        with mock.patch.object(sys, "argv", [spec.rpartition(":")[0]]), building():
            return build()
    except InputError:
        raise
    except FAILURES as error:
        raise InputError(failure(spec, "calling it raised", error)) from error


def _hugging_face(path: Path, config: TrainConfig) -> Callable[[], nn.Module]:
    """The function that builds a config's model with float32 weights, whatever dtype its checkpoint was saved in."""
    build = causal_model_builder(path, bool(config.checkpoint_layers))
    return lambda: CausalWithLoss(build().float(), bool(config.use_cache))
