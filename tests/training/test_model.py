"""The model: nanoGPT's names and shapes, and the same figures by every way of computing them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oomph.config import TrainConfig
from oomph.step.parameters import parameters
from oomph.training.loss import head_loss
from oomph.training.model import GPT
from oomph.training.sample import Context


def small(**keys: object) -> TrainConfig:
    fields = {"vocab_size": 31, "n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 12, "loss_chunk": 5} | keys
    return TrainConfig(**fields)  # type: ignore[arg-type]


def made(config: TrainConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def batch(config: TrainConfig) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    both = torch.randint(config.vocab_size, (2, 3, config.block_size))
    return both[0], both[1]


def loss_and_gradients(config: TrainConfig) -> tuple[Tensor, list[Tensor]]:
    model = made(config)
    x, y = batch(config)
    torch.manual_seed(2)  # dropout
    loss = head_loss(model.trunk(x), model.lm_head.weight, y, config.loss_chunk or 0)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_the_planner_counts(bias: bool, tied: bool) -> None:
    config = small(bias=bias, tie_weights=tied)
    mine = [(name, tuple(p.shape)) for name, p in made(config).named_parameters()]
    assert mine == [(p.name, p.shape) for p in parameters(config)]


def test_a_tied_head_shares_the_embedding() -> None:
    model = made(small())
    assert model.lm_head.weight is model.transformer["wte"].weight
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(model.state_dict())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_checkpointed_blocks_give_the_same_gradients(dropout: float, count: int) -> None:
    loss, plain = loss_and_gradients(small(dropout=dropout))
    again, recomputed = loss_and_gradients(small(dropout=dropout, checkpoint_layers=count))
    assert torch.equal(loss, again)
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keys", [{"attention": "math"}, {"loss_chunk": 0}, {"loss_chunk": 1000}])
def test_other_kernels_and_chunks_agree(keys: dict[str, object]) -> None:
    loss, plain = loss_and_gradients(small())
    other_loss, other = loss_and_gradients(small(**keys))
    torch.testing.assert_close(loss, other_loss)
    for a, b in zip(plain, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_cached_keys_and_values_give_the_logits_of_the_whole_sequence() -> None:
    config = small()
    model = made(config).eval()
    x, _ = batch(config)
    cached = Context(model, x[:, :4])
    for length in range(4, config.block_size):
        whole = Context(model, x[:, :length], use_cache=False)
        torch.testing.assert_close(cached.logits(), whole.logits(), rtol=1e-4, atol=1e-5)
        cached.append(x[:, length])


def test_beyond_the_block_the_window_slides() -> None:
    config = small()
    model = made(config).eval()
    long = torch.randint(config.vocab_size, (1, config.block_size + 5))
    window = Context(model, long[:, -config.block_size :], use_cache=False)
    torch.testing.assert_close(Context(model, long).logits(), window.logits())
