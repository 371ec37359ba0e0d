"""The expression evaluator held against Python itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.config.reading.expression import MAX_BITS, ExpressionError, UndecidableError, evaluate_text

numbers = st.one_of(st.integers(-1000, 1000).map(str), st.floats(-100, 100).map(repr), st.sampled_from(["True", "0"]))
operators = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<<", ">>", "<", "==", "and", "or"])


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, operators, inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda text: f"(not {text})"),
        inner.map(lambda text: f"abs({text})"),
        st.tuples(inner, inner).map(lambda pair: f"max({pair[0]}, {pair[1]})"),
        st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
    )


@given(st.recursive(numbers, grow, max_leaves=6))
def test_arithmetic_gives_what_python_gives_or_is_refused_as_too_large(text: str) -> None:
    try:
        found = evaluate_text(text)
    except ExpressionError as error:
        # Python fails too, or the value, or one on the way to it, is beyond what any setting needs.
        if "too large" not in str(error):
            with pytest.raises((ArithmeticError, TypeError, ValueError)):
                result = eval(text)
                if isinstance(result, complex):
                    raise TypeError from None
        return
    expected = eval(text)
    assert type(found) is type(expected)
    both_nan = isinstance(expected, float) and math.isnan(expected)
    assert both_nan or found == expected


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_power_grows_beyond_the_bound(base: int, exponent: int) -> None:
    try:
        result = evaluate_text(f"{base} ** {exponent}")
    except ExpressionError:
        return
    assert isinstance(result, int)
    assert result.bit_length() <= MAX_BITS


@pytest.mark.parametrize(
    "text",
    ["print(1)", "__import__('os')", "open('x')", "(1).real", "[i for i in (1,)]", "lambda: 1", "x", "1j"],
)
def test_what_is_not_arithmetic_is_not_worked_out(text: str) -> None:
    with pytest.raises(UndecidableError):
        evaluate_text(text)


def test_a_choice_between_equal_values_needs_no_condition() -> None:
    assert evaluate_text("3 if unknown else 3") == 3
