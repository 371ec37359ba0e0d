"""Which names a piece of Python could set or reads: asked of the code that is passed over."""

from __future__ import annotations

import ast
from collections.abc import Iterable

_SETS_ANYTHING = frozenset({"exec", "execfile", "globals", "locals", "vars", "setattr"})


def names_read(*nodes: ast.AST) -> set[str]:
    """Every name the code reads, at any depth."""
    return {
        inner.id
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
    }


def sets_anything(node: ast.AST) -> str | None:
    """What in the code could set any name at all, such as `exec`; None where nothing could."""
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
