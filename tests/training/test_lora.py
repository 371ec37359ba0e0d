"""Adapters in `oomph train`: what is trained, saved, resumed, averaged, exported, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import Train, losses, weights

from oomph import config as configs
from oomph import fit
from oomph.cli.main import main
from oomph.training import checkpoint
from oomph.training.lora import is_adapter, merged
from oomph.training.model import GPT
from oomph.training.sample import open_model
from oomph.training.weights import read_weights
from refusals import refused

LORA: dict[str, Any] = {"method": "lora", "lora_rank": 3, "lora_alpha": 6.0, "lora_targets": "all-linear"}


@pytest.fixture
def base(run: Train, tmp_path: Path) -> Path:
    run("base", max_iters=3)
    return tmp_path / "base"


def test_only_adapters_learn(run: Train, base: Path, tmp_path: Path) -> None:
    result = run("run", init_from=str(base), **LORA, learning_rate=0.02, eval_interval=20, max_iters=20)
    before, after = weights(base), weights(tmp_path / "run")
    assert {name for name in after if not is_adapter(name)} == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    learned = [name for name in after if is_adapter(name)]
    assert len(learned) == 2 * 4 * 2  # two blocks, four layers each, two matrices
    assert all(after[name].any() for name in learned)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert result.val_loss is not None and result.val_loss < first["val_loss"]


def test_a_run_begins_at_the_base_and_its_adapters_are_peft(run: Train, base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run("run", init_from=str(base), **LORA, learning_rate=0.1, warmup_iters=0)
    ours = open_model(tmp_path / "run").model
    theirs = GPT(open_model(base).config)
    theirs.load_state_dict(weights(base))
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn", "c_proj", "c_fc"])
    adapted = peft.get_peft_model(theirs, settings).eval()
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        plain = theirs.trunk(tokens)
        for name, tensor in weights(tmp_path / "run").items():
            if is_adapter(name):
                place = f"base_model.model.{name.replace('.weight', '.default.weight')}"
                adapted.get_parameter(place).copy_(tensor)
        assert torch.allclose(theirs.trunk(tokens), ours.trunk(tokens), atol=1e-6)
        assert not torch.allclose(plain, ours.trunk(tokens), atol=1e-3)


@pytest.mark.parametrize("keys", [{"lora_dropout": 0.2}, {"dtype": "bfloat16"}, {"ema": 0.9}], ids=str)
def test_it_resumes_to_the_last_bit(run: Train, base: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    keys = LORA | {"init_from": str(base)} | keys
    run("whole", **keys)
    run("parts", **keys, max_iters=3)
    run("parts", options={"resume": True}, max_iters=6)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    once, twice = (checkpoint.load(checkpoint.saved(tmp_path / name)[-1]) for name in ("whole", "parts"))
    for entry in {"model", "ema"} & once.keys():
        assert all(torch.equal(once[entry][name], twice[entry][name]) for name in once[entry])


def test_memory_that_runs_out_changes_no_loss(
    run: Train, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oomph.training import model as model_module

    keys = LORA | {"init_from": str(base)}
    run("whole", **keys)
    head, count = model_module.head_loss, [0]

    def faulty(*arguments: Any) -> Any:
        count[0] += torch.is_grad_enabled()
        if count[0] == 4:
            raise torch.OutOfMemoryError("injected")
        return head(*arguments)

    monkeypatch.setattr(model_module, "head_loss", faulty)
    assert run("hurt", **keys).shrunk == 1
    assert [loss for _, loss in losses(tmp_path / "hurt")] == pytest.approx(
        [loss for _, loss in losses(tmp_path / "whole")], abs=1e-5
    )


def test_what_is_exported_and_begun_with_is_merged(run: Train, base: Path, tmp_path: Path) -> None:
    run("run", options={"export": True}, init_from=str(base), **LORA)
    last = weights(tmp_path / "run")
    whole = merged(last, 2.0)
    layer = "transformer.h.1.mlp.c_fc"
    product = last[f"{layer}.lora_B.weight"] @ last[f"{layer}.lora_A.weight"]
    assert torch.allclose(whole[f"{layer}.weight"], last[f"{layer}.weight"] + 2 * product)
    for path in (tmp_path / "run", tmp_path / "run" / "huggingface"):
        found = read_weights(path)
        assert all(torch.allclose(found[name], tensor, atol=1e-7) for name, tensor in whole.items())
        assert not any(map(is_adapter, found))
    tokens = torch.arange(32).view(2, 16)
    both = [open_model(path).model.trunk(tokens) for path in (tmp_path / "run", tmp_path / "run" / "huggingface")]
    assert torch.allclose(*both, atol=1e-5)
    assert run("more", init_from=str(tmp_path / "run"), max_iters=2).finished


@pytest.mark.usefixtures("letters")
def test_a_run_with_adapters_is_sampled(
    run: Train, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("run", init_from=str(base), **LORA)
    assert main(["sample", str(tmp_path / "run"), "--prompt", "abc", "--tokens", "9", "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out.strip("\n")) >= 9


@pytest.mark.parametrize(
    ("key", "value"),
    [("method", "qlora"), ("method", "dora"), ("optimizer", "muon"), ("compile", True), ("parallel", "fsdp"),
     ("lora_targets", "lm_head"), ("lora_targets", "q_proj"), ("quantization", "nf4"), ("modules_to_save", "lm_head")],
)  # fmt: skip
def test_what_it_does_not_have_is_refused(run: Train, base: Path, key: str, value: object) -> None:
    with refused():
        run("run", **{"init_from": str(base)} | LORA | {key: value})


def test_adapters_need_trained_weights(run: Train) -> None:
    with refused("method", allowed="--init_from"):
        run("run", **LORA)


@pytest.mark.parametrize(("key", "value"), [("lora_rank", 4), ("lora_alpha", 3.0), ("lora_targets", "c_attn")])
def test_a_resumed_run_keeps_its_adapters(run: Train, base: Path, key: str, value: object) -> None:
    run("run", init_from=str(base), **LORA, max_iters=2)
    with refused(found=str(value)):
        run("run", options={"resume": True}, **{key: value})


def test_adapters_of_nanogpts_model_are_planned_for_oomph() -> None:
    loaded = configs.as_loaded({"method": "lora"})
    assert loaded.config.trainer == "oomph"


def test_a_search_is_among_oomph_trains_settings() -> None:
    shape = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 50304, "block_size": 512, "batch_size": 8}
    found = fit({**shape, "method": "lora"}, "RTX 4070")
    assert {option.trainer for option in found.options} == {"oomph"}
    assert not any({"method", "adapter_dtype"} & option.changes.keys() for option in found.options)
