"""A pickle read as data. Pickles are programs; this follows only the instructions that build plain values.

Names in the pickle (`torch._utils._rebuild_tensor_v2`) are never imported: names that a nanoGPT checkpoint needs become
inert `StandIn`s; with any other name or instruction the whole pickle is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

MAX_PICKLE_BYTES = 2**24  # GPT-2 XL with its optimizer's state takes less than one MiB

_TORCH_NAMES = frozenset(
    {
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
    }
)
_NUMPY_NAMES = frozenset(
    {
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "scalar"),
        ("_codecs", "encode"),  # how numpy's scalars carry their bytes
    }
)
_TORCH_TYPE = re.compile(r"(b?float|u?int)(8|16|32|64)|bool|device|Size|[A-Za-z0-9]*Storage")


class RefusedError(Exception):
    """The pickle holds something other than plain values and tensors, or is damaged."""


class StandIn(msgspec.Struct, frozen=True):
    """The name of a torch or numpy object, in place of the object."""

    name: str


_ORDERED_DICT = StandIn("collections.OrderedDict")
_MARK = StandIn("mark")


def read(data: bytes) -> object:
    """The plain values of a pickle, with a `StandIn` for each tensor. Raises `RefusedError`; runs nothing."""
    machine = _PickleMachine()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pickletools decodes escapes in text and warns about odd ones
            for name, arg in _instructions(data):
                if name == "STOP":
                    return machine.pop()
                machine.step(name, arg)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise RefusedError(f"the pickle is damaged ({type(error).__name__})") from None
    raise RefusedError("the pickle is cut short")


def _instructions(data: bytes) -> Iterator[tuple[str, Any]]:
    from pickletools import genops  # only decodes instructions

    for opcode, arg, _ in genops(data):
        yield opcode.name, arg


class _PickleMachine:
    """The stack and the memo of a pickle, for the instructions that build plain values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, arg: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _PUT:
            self.memo[arg] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in _GET:
            self.stack.append(self.memo[arg])
        elif name == "GLOBAL":
            self.admit(*arg.split(" ", 1))
        elif handler := _HANDLERS.get(name):
            handler(self)
        elif _LITERAL.fullmatch(name):
            self.stack.append(arg)
        elif name not in _IGNORED:
            raise RefusedError(f"the pickle uses {name}, which plain values do not need")

    def pop(self) -> Any:
        return self.stack.pop()

    def to_mark(self) -> list[Any]:
        """Pop and return everything above the last mark, and pop the mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def admit(self, module: str, name: str) -> None:
        """Push a stand-in for a name that nanoGPT's checkpoints may hold; any other is refused."""
        if (module, name) == ("collections", "OrderedDict"):
            self.stack.append(_ORDERED_DICT)
        elif (
            (module == "torch._utils" and name in _TORCH_NAMES)
            or (module == "torch" and _TORCH_TYPE.fullmatch(name))
            or (module == "torch.storage" and name in ("UntypedStorage", "TypedStorage"))
            or (module, name) in _NUMPY_NAMES
        ):
            self.stack.append(StandIn(f"{module}.{name}"))
        else:
            raise RefusedError(f"it names {module}.{name}, which is neither a plain value nor a tensor")

    def call(self) -> None:
        """REDUCE: an OrderedDict becomes a dict, a tensor becomes a stand-in, and nothing is called."""
        args, function = self.pop(), self.pop()
        if not isinstance(function, StandIn) or (function is _ORDERED_DICT and args != ()):
            raise RefusedError("the pickle calls something in a way that checkpoints do not")
        self.stack.append({} if function is _ORDERED_DICT else function)

    def update(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise RefusedError("the pickle sets items of something that is not a dict")
        target.update(_dict_of(pairs))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(map(_plain_key, items))
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise RefusedError("the pickle appends to something that is not a list")

    def tuple_of(self, size: int) -> None:
        items = tuple(self.stack[len(self.stack) - size :])
        if len(items) != size:
            raise IndexError
        del self.stack[len(self.stack) - size :]
        self.stack.append(items)


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(map(_plain_key, items[::2]), items[1::2], strict=True))


def _plain_key(key: Any) -> Any:
    """The key, if it is quick to hash: nested tuples can be made to take forever."""
    if key is not None and not isinstance(key, str | bytes | int | float):
        raise RefusedError("the pickle has a key that is neither text nor a number")
    return key


def _two(machine: _PickleMachine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


def _persistent(machine: _PickleMachine) -> None:
    machine.pop()  # the location of the tensor's bytes in the archive: never read
    machine.stack.append(StandIn("storage"))


def _stack_global(machine: _PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError
    machine.admit(module, name)


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_EMPTY: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}
_LITERAL = re.compile(r"(BIN|SHORT_BIN)?(INT[12]?|STRING|UNICODE8?|BYTES8?|FLOAT)|LONG[14]?")
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_IGNORED = frozenset({"PROTO", "FRAME"})
_HANDLERS: dict[str, Callable[[_PickleMachine], Any]] = {
    "POP": _PickleMachine.pop,
    "POP_MARK": _PickleMachine.to_mark,
    "TUPLE": lambda m: m.stack.append(tuple(m.to_mark())),
    "TUPLE1": lambda m: m.tuple_of(1),
    "TUPLE2": lambda m: m.tuple_of(2),
    "TUPLE3": lambda m: m.tuple_of(3),
    "LIST": lambda m: m.stack.append(m.to_mark()),
    "DICT": lambda m: m.stack.append(_dict_of(m.to_mark())),
    "SETITEM": lambda m: m.update(_two(m)),
    "SETITEMS": lambda m: m.update(m.to_mark()),
    "APPEND": lambda m: m.extend([m.pop()]),
    "APPENDS": lambda m: m.extend(m.to_mark()),
    "ADDITEMS": lambda m: m.extend(m.to_mark()),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _PickleMachine.call,
    "BUILD": _PickleMachine.pop,  # the state of an object that stays inert
    "BINPERSID": _persistent,
}
