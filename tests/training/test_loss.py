"""The chunked loss against its oracle, over dtypes and odd shapes; and that it never holds the full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.training.loss import chunked_loss, plain_loss


def example(rows: int, width: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows * 1000 + vocab)
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,))


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


def held_against_the_plain_path(rows: int, width: int, vocab: int, chunk: int, compiled: bool) -> None:
    hidden, weight, targets = example(rows, width, vocab)
    plain, chunked = plain_loss(hidden, weight, targets), chunked_loss(hidden, weight, targets, chunk, compiled)
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(chunked, hidden, weight), gradients(plain, hidden, weight), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        alone = chunked_loss(hidden, weight, targets, chunk, compiled)
    torch.testing.assert_close(alone, plain, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 9), vocab=st.integers(1, 70), chunk=st.integers(1, 50))
def test_loss_and_gradients_are_those_of_the_plain_path(rows: int, width: int, vocab: int, chunk: int) -> None:
    held_against_the_plain_path(rows, width, vocab, chunk, compiled=False)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 9), vocab=st.integers(1, 70), chunk=st.integers(1, 50))
def test_what_is_to_be_compiled_computes_the_same(rows: int, width: int, vocab: int, chunk: int) -> None:
    with torch.compiler.set_stance("force_eager"):
        held_against_the_plain_path(rows, width, vocab, chunk, compiled=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_it_computes_the_same_whatever_the_rows() -> None:
    for rows, chunk in ((24, 8), (29, 8), (5, 8), (1, 8)):
        held_against_the_plain_path(rows, 4, 50, chunk, compiled=True)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 9), vocab=st.integers(1, 70), chunk=st.integers(1, 50))
def test_a_padded_head_computes_the_same(rows: int, width: int, vocab: int, chunk: int) -> None:
    with torch.compiler.set_stance("force_eager"):
        held_against_eager_under_autocast(rows, width, vocab, chunk)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("vocab", [50, 56])
def test_compiled_under_autocast_it_computes_the_same(vocab: int) -> None:
    held_against_eager_under_autocast(32, 8, vocab, chunk=8)


def held_against_eager_under_autocast(rows: int, width: int, vocab: int, chunk: int) -> None:
    hidden, weight, targets = example(rows, width, vocab)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager, compiled = (chunked_loss(hidden, weight, targets, chunk, compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(compiled, hidden, weight), gradients(eager, hidden, weight), strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)  # bfloat16 rounds once more or less


def test_the_incoming_gradient_scales_both_gradients() -> None:
    hidden, weight, targets = example(9, 4, 11)
    once = gradients(chunked_loss(hidden, weight, targets, 4), hidden, weight)
    thrice = gradients(chunked_loss(hidden, weight, targets, 4) * 3, hidden, weight)
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * a, b)


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = example(9, 4, 11)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(hidden, weight, targets, 4), plain_loss(hidden, weight, targets))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_half_and_gradients_stay_float32(half: torch.dtype) -> None:
    hidden, weight, targets = example(33, 8, 50)
    with torch.autocast("cpu", dtype=half):
        loss = chunked_loss(hidden, weight, targets, 8)
    assert loss.dtype == torch.float32
    grad_hidden, grad_weight = gradients(loss, hidden, weight)
    assert grad_hidden.dtype == grad_weight.dtype == torch.float32
    exact = plain_loss(hidden, weight, targets)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grad_weight, gradients(exact, weight)[0], rtol=0.1, atol=5e-3)


def test_in_float16_no_words_gradient_is_lost() -> None:
    """Spread over 4,000 words and divided by 8,192 rows, it would be below what float16 can say."""
    hidden, weight, targets = example(8192, 2, 4000)
    with torch.no_grad():
        hidden *= 0.01
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked_loss(hidden, weight, targets, 1024)
    found, exact = (gradients(each, weight)[0] for each in (loss, plain_loss(hidden, weight, targets)))
    unseen = torch.ones(4000, dtype=torch.bool)
    unseen[targets] = False
    assert unseen.sum() > 100
    torch.testing.assert_close(found[unseen], exact[unseen], rtol=0.05, atol=1e-10)


@pytest.mark.parametrize("chunk", [300, 2048, 4096])
def test_in_float16_a_word_that_is_everywhere_does_not_overflow(chunk: int) -> None:
    """Its gradient is a sum over all rows of a chunk, made before any scale of the loss could make it smaller."""
    hidden, weight, targets = example(4096, 4, 50)
    with torch.no_grad():
        hidden[:, 0] = 500.0
        weight[:, 0] = 0.0
        targets.fill_(7)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked_loss(hidden, weight, targets, chunk)
    found, exact = (gradients(each, weight)[0] for each in (loss, plain_loss(hidden, weight, targets)))
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)


def test_pure_bfloat16_weights_get_bfloat16_gradients() -> None:
    hidden, weight, targets = example(20, 8, 30, torch.bfloat16)
    grad_hidden, grad_weight = gradients(chunked_loss(hidden, weight, targets, 6), hidden, weight)
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16


def test_huge_logits_give_a_finite_loss() -> None:
    hidden = torch.full((2, 1), 1000.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = chunked_loss(hidden, weight, torch.tensor([1, 1]), 1)
    assert loss.item() == 2000.0


class Largest(TorchDispatchMode):
    """The most elements any tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, list | tuple) else (out,):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden, weight, targets = example(64, 4, 100)
    with Largest() as largest:
        chunked_loss(hidden, weight, targets, 8).backward()
    assert largest.numel == 8 * 100
