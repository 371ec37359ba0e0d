"""Training against a plain reference: all logits, torch's cross-entropy, no chunks, no checkpointing, no tricks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from training_helpers import SMALL, Train, losses

from oomph import config as configs
from oomph.config import TrainConfig
from oomph.data.reader import Batches
from oomph.training.model import GPT
from oomph.training.optimizer import learning_rate

STEPS = 20


def tolerance(keys: dict[str, Any]) -> float:
    """Muon iterates in bfloat16, in which a gradient's last bit may become one of its eight."""
    return 1e-3 if keys.get("recipe") == "modern" and "optimizer" not in keys else 1e-5


def reference_optimizers(model: GPT, config: TrainConfig) -> list[tuple[torch.optim.Optimizer, float]]:
    """AdamW, and for the modern recipe Muon for the blocks' matrices, each with its learning rate."""
    muon = [p for n, p in model.named_parameters() if p.dim() == 2 and ".h." in n and config.optimizer == "muon"]
    others = [p for p in model.parameters() if not any(p is each for each in muon)]
    decay, rest = [p for p in others if p.dim() >= 2], [p for p in others if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=False,
        foreach=False,
    )
    if not muon or config.matrix_lr is None:
        return [(adamw, config.learning_rate)]
    own = torch.optim.Muon(muon, lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="original")
    return [(own, config.matrix_lr), (adamw, config.learning_rate)]


def reference(data: Path, **keys: Any) -> list[float]:
    """The loss of each step of a loop that anybody would write down first."""
    config = configs.from_dict(SMALL | keys).config
    torch.manual_seed(config.seed)
    model = GPT(config)
    optimizers = reference_optimizers(model, config)
    batches = Batches(data, "train", batch_size=config.batch_size, block_size=config.block_size, seed=config.seed)
    found = []
    for step in range(STEPS):
        for optimizer, top in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config) * top / config.learning_rate
        total = 0.0
        for _ in range(config.gradient_accumulation_steps):
            x, y = map(torch.from_numpy, next(batches))
            logits = model.lm_head(model.trunk(x))
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / config.gradient_accumulation_steps
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(total)
    return found


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"loss_chunk": 7},
        {"loss_chunk": 0},
        {"checkpoint_layers": 2, "loss_chunk": 16},
        {"attention": "math", "optimizer_loop": "foreach"},
        {"optimizer_loop": "forloop", "checkpoint_layers": 1},
        {"bias": True, "tie_weights": False},
        {"gradient_accumulation_steps": 1, "batch_size": 6},
        {"recipe": "modern"},
        {"recipe": "modern", "optimizer": "adamw"},
        {"recipe": "modern", "optimizer": "adamw", "num_key_value_heads": 1, "loss_chunk": 7, "checkpoint_layers": 1},
    ],
)
def test_twenty_steps_have_the_reference_losses(run: Train, data: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    run("run", max_iters=STEPS, **keys)
    how = ("loss_chunk", "checkpoint_layers", "attention", "optimizer_loop")  # what must not matter
    shape = {key: value for key, value in keys.items() if key not in how}
    mine = [loss for _, loss in losses(tmp_path / "run")]
    assert mine == pytest.approx(reference(data, **shape), abs=tolerance(keys))
    assert mine[-1] < mine[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "keys"), [(16, {}), (0, {}), (16, {"recipe": "modern", "optimizer": "adamw"})])
def test_a_compiled_model_has_the_reference_losses(
    run: Train, data: Path, tmp_path: Path, chunk: int, keys: dict[str, Any]
) -> None:
    run("run", max_iters=STEPS, compile=True, checkpoint_layers=1, loss_chunk=chunk, **keys)
    assert [loss for _, loss in losses(tmp_path / "run")] == pytest.approx(reference(data, **keys), abs=1e-5)


@pytest.mark.slow
def test_a_second_compiled_run_in_one_process_has_sizes_of_its_own(run: Train) -> None:
    run("one", max_iters=1, compile=True, loss_chunk=16, block_size=32)
    run("two", max_iters=1, compile=True, loss_chunk=16, block_size=16)  # torch warns, an error here, if it is dynamic
