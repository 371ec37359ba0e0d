"""A nanoGPT config file, or a whole `train.py`, read from its syntax tree. Nothing in it is ever run.

nanoGPT executes such files, so people write arithmetic, helper variables and conditions in them. They are evaluated.
A value known only by running the file is skipped with a note if no prediction needs it, else it is a problem.
A misspelt key, which nanoGPT silently accepts, is a problem too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from oomph.config.keys import keys
from oomph.config.layer import Layer, Scope, SourcedValue, UnknownValue, unknown_keys
from oomph.config.reading.expression import ExpressionError, UndecidableError, describe, evaluate, parse
from oomph.errors import InputError, Problem, nearest

_SETS_ANYTHING = frozenset({"exec", "execfile", "globals", "locals", "vars", "setattr"})
_BLOCKS = {
    ast.For: "a loop",
    ast.AsyncFor: "a loop",
    ast.While: "a loop",
    ast.FunctionDef: "a function",
    ast.AsyncFunctionDef: "a function",
    ast.ClassDef: "a class",
    ast.With: "a with block",
    ast.AsyncWith: "a with block",
    ast.Try: "a try block",
    ast.Match: "a match block",
    ast.Delete: "a del",
    ast.Assert: "an assert",
    ast.Expr: "a call",
}


def read(text: str, label: str, known: Scope) -> Layer:
    """The layer of a `.py` file. `known` holds the names it may use, and gains those it sets."""
    try:
        body = parse(text).body
    except ExpressionError as error:
        line = error.args[1]
        raise InputError(Problem(where=f"{label}:{line}" if line else label, what=str(error.args[0]))) from None
    end = next((place for place, statement in enumerate(body) if _ends_config(statement)), None)
    reader = _ConfigReader(label, known, whole_program=end is not None)
    try:
        reader.run(body[:end])
    except RecursionError:
        raise InputError(Problem(where=label, what="nested too deeply to be read")) from None
    return reader.finish()


def _ends_config(statement: ast.stmt) -> bool:
    """Whether this statement of a train.py ends the settings and begins the program."""
    match statement:
        case ast.Assign(targets=[ast.Name(id="config_keys")]):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id="exec")) as call):
            return any(isinstance(n, ast.Constant) and "configurator" in str(n.value)[:200] for n in ast.walk(call))
    return False


class _ConfigReader:
    """Walks the statements in order, as the interpreter would, and collects the settings."""

    def __init__(self, label: str, known: Scope, whole_program: bool) -> None:
        self.label = label
        self.names = known.names
        self.foreign = known.foreign
        self.whole_program = whole_program
        self.layer = Layer()
        self.helpers: dict[str, int] = {}  # a name that is not a key -> the line that sets it
        self.feeds: dict[str, set[str]] = {}  # a name -> the names in its value
        self.deciding: set[str] = set()  # names that conditions read
        self.elsewhere: set[str] = set()  # names read by code that is skipped

    def run(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value, statement)
                self._refuse_hidden_setting(statement, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, value, statement)
                self._refuse_hidden_setting(statement, value)
            case ast.AugAssign(target=target, op=op, value=value):
                if isinstance(target, ast.Name):
                    before = ast.Name(id=target.id, ctx=ast.Load())
                    value = ast.BinOp(left=before, op=op, right=value)
                self._bind(target, value, statement)
                self._refuse_hidden_setting(statement, value)
            case ast.If(test=test, body=body, orelse=orelse):
                self._condition(statement, test, body, orelse)
            case ast.Import() | ast.ImportFrom():
                self._import(statement)
            case ast.AnnAssign() | ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case _:
                self._pass_over(statement, _BLOCKS.get(type(statement), f"a {type(statement).__name__.lower()}"))

    def _bind(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            self.feeds.setdefault(target.id, set()).update(names_read(value) - {target.id})
            self._set(target.id, self._work_out(target.id, value, statement), statement)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target.elts, value, statement)
        else:  # torch.backends.cuda.matmul.allow_tf32 = True
            self.elsewhere |= names_read(target, value)
            self._note(statement, f"sets {describe(target)}, which is not a key; skipped")

    def _unpack(self, targets: Sequence[ast.expr], value: ast.expr, statement: ast.stmt) -> None:
        """`n_layer, n_head = 6, 6`: evaluate every value before setting any name, as Python does."""
        items = value.elts if isinstance(value, ast.Tuple | ast.List) else [value] * len(targets)
        found = [self._work_out("", item, statement) for item in items]
        if not isinstance(value, ast.Tuple | ast.List) and isinstance(found[0] if found else None, tuple):
            found = list(found[0])  # type: ignore[call-overload]
        plain = [target.id for target in targets if isinstance(target, ast.Name)]
        self.elsewhere |= names_read(*targets)
        if len(found) != len(targets) or len(plain) != len(targets) or any(isinstance(f, tuple) for f in found):
            self._forget(names_set(targets), statement, "it is unpacked from something that cannot be worked out")
            self.elsewhere |= names_read(value)
            return
        for name, item, result in zip(plain, items, found, strict=True):
            self.feeds.setdefault(name, set()).update(names_read(item) - {name})
            self._set(name, result, statement)

    def _work_out(self, name: str, value: ast.expr, statement: ast.stmt) -> object:
        try:
            return evaluate(value, self.names)
        except ExpressionError as error:
            return UnknownValue(f"its value cannot be worked out: {error}", needs_running=False)
        except UndecidableError as error:
            if name == "dtype" and _leaves(value) == ["bfloat16", "float16"]:
                return None  # nanoGPT's own default, which depends on the card: not set
            if name == "device" and "cuda" in _leaves(value):
                self._note(statement, "device depends on the machine; cuda is taken")
                return "cuda"
            return UnknownValue(f"only running the file could tell {error}")

    def _set(self, name: str, value: object, statement: ast.stmt) -> None:
        self.names[name] = UnknownValue("it is not set") if value is None and name in keys() else value
        if name in keys():
            self.layer.values[name] = SourcedValue(value, self._where(statement), firm=not self.whole_program)
        else:
            self.helpers.setdefault(name, statement.lineno)

    def _forget(self, names: Iterable[str], statement: ast.stmt, reason: str) -> bool:
        """Mark names that skipped code could set as unknown. Returns whether a key is among them."""
        found = False
        for name in sorted(names):
            self.names[name] = UnknownValue(reason)
            if name in keys():
                found = True
                self.layer.values[name] = SourcedValue(
                    self.names[name], self._where(statement), firm=not self.whole_program
                )
        return found

    def _condition(self, statement: ast.If, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        self.deciding |= names_read(test)
        self._refuse_hidden_setting(statement, test)
        try:
            chosen, other = (body, orelse) if evaluate(test, self.names) else (orelse, body)
        except (UndecidableError, ExpressionError) as error:
            self._pass_over(statement, "a condition", f"it is set under a condition that cannot be worked out: {error}")
            return
        self.elsewhere |= names_read(*other)
        self.run(chosen)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if anything := sets_anything(statement):
            self._could_set_anything(statement, anything)
        self._forget(names_set([statement]), statement, "it is imported")

    def _pass_over(self, statement: ast.stmt, what: str, reason: str | None = None) -> None:
        self.elsewhere |= names_read(statement)
        if anything := sets_anything(statement):
            self._could_set_anything(statement, anything)
        elif not self._forget(names_set([statement]), statement, reason or f"it is set by {what}, which is not run"):
            self._note(statement, f"{what} is not run and sets no key; skipped")

    def _refuse_hidden_setting(self, statement: ast.stmt, value: ast.expr) -> None:
        """Handle assignments inside an expression: `x = exec(...)`, `x = (batch_size := 4)`."""
        if anything := sets_anything(value):
            self._could_set_anything(statement, anything)
        inside = {n.target.id for n in ast.walk(value) if isinstance(n, ast.NamedExpr)}
        self._forget(inside, statement, "it is set inside an expression")

    def _could_set_anything(self, statement: ast.stmt, what: str) -> None:
        problem = Problem(
            where=self._where(statement),
            what=f"{what} could set any key, and it is not run",
            allowed="plain settings such as batch_size = 8; name a further config file as a source of its own",
        )
        self.layer.problems.append(problem)

    def finish(self) -> Layer:
        """The layer, with a note or a problem for each name that is neither a key nor used by one."""
        unknown: list[tuple[str, str]] = []
        useful = self._reach(set(self.layer.values) | self.deciding)
        seen_elsewhere = self._reach(self.elsewhere)
        for name, line in self.helpers.items():
            where = f"{self.label}:{line}"
            if self.whole_program:
                self.layer.foreign.add(name)
                if name not in useful:
                    self.layer.notes.append(f"{where}: {name} is not a key of nanoGPT or oomph; skipped")
            elif name.startswith("__"):  # __author__ and the like are not settings
                continue
            elif name in self.foreign:
                self.layer.notes.append(f"{where}: {name} is a key of the fork only; skipped")
            elif name in useful:
                continue
            elif name in seen_elsewhere:
                near = nearest(name, list(keys()))
                hint = f" (the nearest key is {near})" if near else ""
                self.layer.notes.append(f"{where}: {name} is not a key{hint}; skipped")
            else:
                unknown.append((name, where))
        self.layer.problems += unknown_keys(unknown, "; for a fork's own keys name its train.py first")
        return self.layer

    def _reach(self, start: set[str]) -> set[str]:
        """`start`, and the names it depends on through any number of helpers."""
        reached: set[str] = set()
        waiting = list(start)
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting.extend(self.feeds.get(name, ()))
        return reached

    def _where(self, statement: ast.stmt) -> str:
        return f"{self.label}:{statement.lineno}"

    def _note(self, statement: ast.stmt, text: str) -> None:
        self.layer.notes.append(f"{self._where(statement)}: {text}")


def _leaves(value: ast.expr) -> list[object]:
    """The constants a conditional expression chooses from, in order."""
    if isinstance(value, ast.IfExp):
        return _leaves(value.body) + _leaves(value.orelse)
    return [value.value] if isinstance(value, ast.Constant) else [None]


# --- which names a piece of Python reads or could set ---------------------------------------------------


def names_read(*nodes: ast.AST) -> set[str]:
    """Every name the code reads, at any depth."""
    return {
        inner.id
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
    }


def sets_anything(node: ast.AST) -> str | None:
    """The part of the code that could set any name at all, such as `exec`; None if nothing could."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in _SETS_ANYTHING:
            return f"{inner.func.id}()"
        if isinstance(inner, ast.ImportFrom) and any(alias.name == "*" for alias in inner.names):
            return f"from {inner.module or '.'} import *"
    return None


def names_set(nodes: Iterable[ast.AST]) -> set[str]:
    """Every module-level name the code could set. A function's own variables are not among them."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found |= {name} | _declared_global(node)
                continue
            case ast.Lambda():
                continue
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in names}
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _declared_global(node: ast.AST) -> set[str]:
    return {name for inner in ast.walk(node) if isinstance(inner, ast.Global) for name in inner.names}
