"""The value of a Python expression, computed from its syntax tree, never by running it.

Only constants, arithmetic, comparisons, conditions, flat lists, f-strings and a few pure builtins are supported, and
every result is bounded in size, so that no text can take long.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from oomph.config.keys import Key
from oomph.config.layer import UnknownValue, parser_message
from oomph.config.values import show
from oomph.units import parse_count

MAX_BITS = 256  # in a whole number
MAX_CHARS = 1000  # in text that an expression builds
MAX_ITEMS = 100  # in a list that an expression builds

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "round": round,
    "min": min,
    "max": max,
    "abs": abs,
    "len": len,
}


class UndecidableError(Exception):
    """The value can be found only by running the expression."""


class ExpressionError(Exception):
    """The expression is wrong, or its value is too large."""


def parse(text: str) -> ast.Module:
    """The syntax tree, or `ExpressionError` with the line as its second argument."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in the user's file
            return ast.parse(text)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"not Python: {parser_message(error)}", getattr(error, "lineno", None)) from None


def parse_text(key: Key, text: str) -> object:
    """The value of `--key=text`: nanoGPT's literals, and 3.68B or True in any case. `coerce` then checks it."""
    text = text.strip()
    if key.optional and text.lower() == "none":
        return None
    if key.kind is bool:
        return _BOOLEANS.get(text.lower(), text)
    if key.kind is str:
        return _unquoted(text)
    number = parse_count(text) if key.kind is int else None
    if number is not None:
        return number
    try:
        return evaluate_text(text)
    except (UndecidableError, ExpressionError):
        return text  # not a number: coerce reports it, quoting the text as written


def evaluate_text(text: str) -> object:
    """The value of an expression that uses no names, such as "5*8"."""
    if len(text) > MAX_CHARS:
        raise ExpressionError("too long for an expression")
    match parse(text).body:
        case [ast.Expr(value=expression)]:
            return evaluate(expression, {})
    raise ExpressionError("not an expression")


def evaluate(node: ast.expr, names: Mapping[str, object]) -> object:
    """The value of `node`, given the `names` known so far. Raises `UndecidableError` or `ExpressionError`."""
    try:
        return _value(node, names)
    except RecursionError:
        raise ExpressionError("nested too deeply to be worked out") from None


def describe(node: ast.AST) -> str:
    """An expression in a few characters, for messages: `time.time()`, `os.environ[…]`."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{describe(value)}.{attr}"
        case ast.Call(func=func):
            return f"{describe(func)}({'…' if node.args or node.keywords else ''})"
        case ast.Subscript(value=value):
            return f"{describe(value)}[…]"
    return {ast.NamedExpr: "an assignment inside an expression", ast.Lambda: "a lambda"}.get(
        type(node), f"a {type(node).__name__.lower()} expression"
    )


def _value(node: ast.expr, names: Mapping[str, object]) -> object:
    match node:
        case ast.Constant(value=value):
            return _constant(value)
        case ast.Name(id=name):
            return _name(name, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, names), _value(right, names))
        case ast.UnaryOp(op=op, operand=operand):
            return _bounded(_attempt(_UNARY[type(op)], _value(operand, names)))
        case ast.BoolOp(op=op, values=values):
            return _boolean(isinstance(op, ast.And), values, names)
        case ast.Compare():
            return _comparison(node, names)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _conditional(test, body, orelse, names)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_scalar(_value(item, names)) for item in items)
        case ast.JoinedStr(values=values):
            return _fstring(values, names)
        case ast.Call():
            return _call(node, names)
        case ast.Subscript(value=value, slice=index):
            return _item(_value(value, names), _value(index, names))
    raise UndecidableError(describe(node))


def _constant(value: object) -> object:
    if value is None or isinstance(value, int | float | str):
        return _bounded(value) if isinstance(value, int) else value
    raise UndecidableError(f"a {type(value).__name__}")


def _name(name: str, names: Mapping[str, object]) -> object:
    if name not in names:
        raise UndecidableError(f"{name}, which is not set before it")
    value = names[name]
    if isinstance(value, UnknownValue):
        raise UndecidableError(name)
    return value


def _scalar(value: object) -> object:
    if isinstance(value, tuple):  # comparing nested lists can take unbounded time
        raise UndecidableError("a list inside a list")
    return value


def _binary(op: ast.operator, left: object, right: object) -> object:
    function = _BINARY.get(type(op))
    if function is None or (isinstance(left, str) and isinstance(op, ast.Mod)):
        raise UndecidableError(f"the operator {type(op).__name__}")
    if isinstance(op, ast.Pow | ast.LShift | ast.Mult | ast.Add):
        _refuse_growth(op, left, right)
    return _bounded(_attempt(function, left, right))


def _refuse_growth(op: ast.operator, left: object, right: object) -> None:
    """Raises before computing a result that would be too large."""
    too_large = False
    if isinstance(left, int) and isinstance(right, int):
        if isinstance(op, ast.Pow):
            too_large = abs(right) * left.bit_length() > 2 * MAX_BITS
        elif isinstance(op, ast.LShift):
            too_large = right > MAX_BITS
    else:
        for items, other in ((left, right), (right, left)):
            if isinstance(items, str | tuple):
                longer = isinstance(op, ast.Mult) and isinstance(other, int)
                size = len(items) * other if longer and isinstance(other, int) else len(items) + _length(other)
                too_large |= size > (MAX_CHARS if isinstance(items, str) else MAX_ITEMS)
    if too_large:
        raise ExpressionError("the value is too large")


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | tuple) else 0


def _bounded(value: object) -> object:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ExpressionError("the number is too large")
    if isinstance(value, complex):
        raise ExpressionError("the number is not real")
    return value


def _attempt(function: Callable[..., Any], *values: object) -> object:
    """A pure operation on bounded values; what Python would raise becomes `ExpressionError`."""
    try:
        result: object = function(*values)
    except (ArithmeticError, TypeError, ValueError, IndexError) as error:
        raise ExpressionError(str(error)[:100]) from None
    return result


def _boolean(all_of: bool, operands: list[ast.expr], names: Mapping[str, object]) -> object:
    value: object = None
    for operand in operands:
        value = _value(operand, names)
        if bool(value) != all_of:
            break
    return value


def _comparison(node: ast.Compare, names: Mapping[str, object]) -> bool:
    left = _value(node.left, names)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _value(comparator, names)
        if not _attempt(_COMPARE[type(op)], left, right):
            return False
        left = right
    return True


def _conditional(test: ast.expr, body: ast.expr, orelse: ast.expr, names: Mapping[str, object]) -> object:
    try:
        chosen = body if _value(test, names) else orelse
    except UndecidableError:
        first, second = _value(body, names), _value(orelse, names)
        if type(first) is type(second) and first == second:  # either branch gives the same value
            return first
        raise
    return _value(chosen, names)


def _fstring(parts: list[ast.expr], names: Mapping[str, object]) -> str:
    text = ""
    for part in parts:
        if isinstance(part, ast.FormattedValue):
            value = _scalar(_value(part.value, names))
            text += _formatted(repr(value) if part.conversion == ord("r") else value, part.format_spec, names)
        else:
            text += str(_value(part, names))
        if len(text) > MAX_CHARS:
            raise ExpressionError("the text is too long")
    return text


def _formatted(value: object, spec: ast.expr | None, names: Mapping[str, object]) -> str:
    written = str(_value(spec, names)) if spec is not None else ""
    if re.search(r"[0-9]{4}", written):  # a width of billions would be filled with spaces
        raise ExpressionError("the width of a formatted value is too large")
    return str(_attempt(format, value, written))


def _call(node: ast.Call, names: Mapping[str, object]) -> object:
    function = _CALLS.get(node.func.id) if isinstance(node.func, ast.Name) and node.func.id not in names else None
    if function is None or node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
        raise UndecidableError(describe(node))
    values = [_value(arg, names) for arg in node.args]
    if function is round and any(not isinstance(v, int | float | None) or abs(v or 0) > 30 for v in values[1:]):
        raise ExpressionError("round takes at most 30 digits")
    if function is str and any(isinstance(value, tuple) for value in values):
        raise UndecidableError("the text of a list")
    return _bounded(_attempt(function, *values))


def _item(items: object, index: object) -> object:
    if not isinstance(items, str | tuple) or not isinstance(index, int):
        raise UndecidableError(f"an item of {show(items)}")
    return _attempt(operator.getitem, items, index)


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
