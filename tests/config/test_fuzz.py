"""Whatever a file holds, reading it gives a config or an `InputError`, and runs nothing."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.config import KEYS, LoadedConfig, load
from oomph.config.keys import keys
from oomph.config.reading.expression import parse_text
from oomph.errors import InputError

CANARY = "oomph_canary_sang"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def loads_or_refuses(path: Path) -> LoadedConfig | None:
    try:
        loaded = load([path])
    except InputError as error:
        assert error.problems
        assert all(len(str(problem)) < 1000 for problem in error.problems)
        return None
    return loaded


names = st.one_of(st.sampled_from(KEYS), st.sampled_from(["a", "b", "int", "x", "config_keys", "exec", "torch"]))
atoms = st.one_of(
    names,
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=5).map(repr),
    st.sampled_from(
        [
            "None",
            "True",
            "9**9**9",
            "'a'*10**9",
            "1<<10**12",
            "[]",
            "()",
            "{}",
            "b''",
            "...",
            f"open('{CANARY}', 'w')",
            f"__import__('pathlib').Path('{CANARY}').touch()",
            f"exec(\"open('{CANARY}', 'w')\")",
            f"(lambda: open('{CANARY}', 'w'))()",
            f"[open('{CANARY}', 'w') for _ in (1,)]",
        ]
    ),
)
operators = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<<", ">>", "|", "@", "<", "in", "is", "and", "or"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, operators, inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
        st.tuples(st.sampled_from(["str", "int", "round", "min", "len", "print", "abs"]), inner, inner).map(
            lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"
        ),
        inner.map(lambda text: f"[{text}]"),
        inner.map(lambda text: f"({text}, *{text})"),
        inner.map(lambda text: f"not {text}"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]})[{pair[1]}]"),
        st.tuples(names, inner).map(lambda pair: f"({pair[0]} := {pair[1]})"),
    ),
    max_leaves=5,
)
lines = st.one_of(
    st.tuples(names, st.sampled_from(["=", "+=", "**=", "*=", ": int ="]), expressions).map(" ".join),
    st.tuples(names, names, expressions).map(lambda parts: f"{parts[0]}, {parts[1]} = {parts[2]}"),
    st.tuples(names, names, expressions).map(lambda parts: f"{parts[0]} = {parts[1]} = {parts[2]}"),
    st.tuples(expressions, names, expressions).map(lambda p: f"if {p[0]}:\n  {p[1]} = {p[2]}\nelse:\n  {p[1]} = 1"),
    st.tuples(names, expressions).map(lambda pair: f"for {pair[0]} in {pair[1]}:\n  pass"),
    st.tuples(names, expressions).map(lambda pair: f"def {pair[0]}(x={pair[1]}):\n  global n_layer\n  n_layer = 1"),
    names.map(lambda name: f"import {name}\nfrom {name} import *"),
    names.map(lambda name: f"del {name}"),
    expressions,
)


@given(st.lists(lines, max_size=6).map("\n".join))
def test_no_python_text_is_run_or_brings_the_reader_down(folder: Path, text: str) -> None:
    path = folder / "run.py"
    path.write_text(text, encoding="utf-8", errors="replace")
    loads_or_refuses(path)
    assert not Path(CANARY).exists()


@given(st.sampled_from([".py", ".toml", ".json", ".pt", ""]), st.one_of(st.binary(), st.text().map(str.encode)))
def test_no_bytes_bring_the_reader_down(folder: Path, suffix: str, content: bytes) -> None:
    path = folder / f"run{suffix}"
    path.write_bytes(content)
    loads_or_refuses(path)


@given(st.sampled_from(["PK\x03\x04", '{"model_type": "gpt2", "n_layer": ', "n_layer = ", "[a]\nn_layer ="]), st.text())
def test_no_likely_beginning_brings_the_reader_down(folder: Path, head: str, tail: str) -> None:
    for suffix in (".py", ".toml", ".json"):
        path = folder / f"run{suffix}"
        path.write_text(head + tail, encoding="utf-8")
        loads_or_refuses(path)


@given(st.sampled_from(KEYS), st.one_of(st.text(), expressions))
def test_no_override_is_run_or_brings_the_reader_down(key: str, text: str) -> None:
    parse_text(keys()[key], text)
    with contextlib.suppress(InputError):
        load([], [(key, text, f"--{key}=…")])
    assert not Path(CANARY).exists()
