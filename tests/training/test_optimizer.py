"""Optimizers: torch's arithmetic, state made up front, checkpoints that torch.optim reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.config import TrainConfig
from oomph.errors import InputError
from oomph.training.model import GPT
from oomph.training.optimizer import (
    FusedAdamW,
    clip_and_step,
    groups,
    make_optimizer,
    set_learning_rate,
    torch_optimizer,
)

NAMES = ("adamw", "sgd", "adafactor", "muon")


def model_of(config: TrainConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def config_of(**keys: Any) -> TrainConfig:
    shape = {"vocab_size": 31, "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "bias": True}
    return TrainConfig(**(shape | {"learning_rate": 1e-2, "optimizer_loop": "fused"} | keys))


def fill_gradients(model: GPT, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_fused_adamw_with_clipping_is_torch_adamw_after_clip_grad_norm() -> None:
    config = config_of()
    mine, theirs = model_of(config), model_of(config)
    fused = FusedAdamW(groups(mine.parameters(), config), config.learning_rate, (0.9, 0.95))
    plain = torch.optim.AdamW(groups(theirs.parameters(), config), lr=config.learning_rate, betas=(0.9, 0.95))
    for seed in range(8):
        fill_gradients(mine, seed)
        fill_gradients(theirs, seed)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain.step()
        clip_and_step(fused, [p.grad for p in mine.parameters() if p.grad is not None], norm, True, 1.0)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_state_goes_to_torch_adamw_and_back() -> None:
    config = config_of()
    mine, theirs = model_of(config), model_of(config)
    fused = FusedAdamW(groups(mine.parameters(), config), config.learning_rate, (0.9, 0.95))
    plain = torch.optim.AdamW(groups(theirs.parameters(), config), lr=config.learning_rate, betas=(0.9, 0.95))
    fill_gradients(mine, 0)
    fused.step()
    theirs.load_state_dict(mine.state_dict())
    plain.load_state_dict(fused.state_dict())
    back = FusedAdamW(groups(mine.parameters(), config), config.learning_rate, (0.9, 0.95))
    back.load_state_dict(plain.state_dict())
    for model, optimizer in ((mine, back), (theirs, plain)):
        fill_gradients(model, 1)
        optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_state_of_another_shape_is_refused() -> None:
    small, large = config_of(), config_of(n_embd=32)
    a, b = (FusedAdamW(groups(model_of(c).parameters(), c), 0.1, (0.9, 0.95)) for c in (small, large))
    with pytest.raises(ValueError, match="shape"):
        a.load_state_dict(b.state_dict())


@pytest.mark.parametrize("loop", ["fused", "foreach", "forloop"])
@pytest.mark.parametrize("name", NAMES)
def test_all_state_is_there_before_the_first_step_and_no_weight_has_moved(name: str, loop: str) -> None:
    config = config_of(optimizer=name, optimizer_loop=loop)
    model, untouched = model_of(config), model_of(config)
    optimizer = make_optimizer(model, config)
    before = {id(t) for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)}
    for a, b in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(a, b)
    fill_gradients(model, 0)
    optimizer.step()
    after = {id(t) for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)}
    assert before and after == before


@pytest.mark.parametrize("name", NAMES)
def test_the_first_real_step_is_that_of_an_optimizer_without_rehearsal(name: str) -> None:
    config = config_of(optimizer=name, optimizer_loop="forloop")
    results = []
    for rehearsed in (True, False):
        model = model_of(config)
        optimizer = make_optimizer(model, config) if rehearsed else torch_optimizer(model, config)
        set_learning_rate(optimizer, 1e-2)
        for seed in range(2):
            fill_gradients(model, seed)
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_decay_is_for_matrices_alone() -> None:
    config = config_of()
    decayed, kept = groups(model_of(config).parameters(), config)
    assert {p.dim() for p in decayed["params"]} == {2} and decayed["weight_decay"] == config.weight_decay
    assert {p.dim() for p in kept["params"]} == {1} and kept["weight_decay"] == 0


def test_eight_bits_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    config = config_of(optimizer="adamw8bit")
    with pytest.raises(InputError, match="pip install torchao"):
        make_optimizer(model_of(config), config)
