"""Stopping and going on: to the last bit as if nothing had happened."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import SMALL, VOCAB, Train, losses, weights, write_data

from oomph import config as configs
from oomph import devices
from oomph.errors import InputError
from oomph.training import checkpoint
from oomph.training import feed as feed_module
from oomph.training import model as model_module
from oomph.training.start import resumed_config
from oomph.training.trainer import Trainer
from refusals import refused


def same_weights(a: Path, b: Path) -> bool:
    mine, theirs = weights(a), weights(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    "keys",
    [
        {"dropout": 0.2},
        {"dropout": 0.1, "checkpoint_layers": 1},
        {"optimizer": "muon"},
        {"optimizer": "sgd"},
        {"optimizer": "adafactor"},
        {"optimizer_loop": "foreach"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "autocast": False},
        {"recipe": "modern", "dropout": 0.1, "num_key_value_heads": 1, "ema": 0.9},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_undisturbed_one_to_the_last_bit(
    run: Train, tmp_path: Path, keys: dict[str, object]
) -> None:
    run("whole", max_iters=8, **keys)
    run("parts", max_iters=3, **keys)
    run("parts", options={"resume": True}, max_iters=8, **keys)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")


class TwoParts(torch.Tensor):
    """A tensor made of two, as torchao's 8-bit state is made of codes and scales."""

    whole: torch.Tensor
    rest: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor, rest: torch.Tensor) -> TwoParts:
        made: TwoParts = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)
        made.whole, made.rest = whole, rest
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "rest"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> TwoParts:
        return TwoParts(parts["whole"], parts["rest"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


class TwoPartMomentum(torch.optim.Optimizer):
    """In the place of torchao's optimizer."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = TwoParts(torch.zeros_like(parameter), torch.zeros_like(parameter))
                parts = state["exp_avg"]
                now = 0.9 * (parts.whole + parts.rest) + parameter.grad
                parts.whole.copy_(now.round())
                parts.rest.copy_(now - parts.whole)
                parameter.sub_(group["lr"] * now)


def test_a_checkpoint_of_wrapped_optimizer_state_needs_no_library_to_be_read(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(AdamW8bit=TwoPartMomentum))
    run("whole", max_iters=6, optimizer="adamw8bit")
    run("parts", max_iters=3, optimizer="adamw8bit")
    state = checkpoint.load(checkpoint.saved(tmp_path / "parts")[-1])["optimizer"]["state"]
    assert all(type(part) is torch.Tensor for entry in state.values() for part in entry["exp_avg"].values())
    run("parts", options={"resume": True}, max_iters=6, optimizer="adamw8bit")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_while_a_resumed_run_trains_its_checkpoint_is_out_of_memory(
    run: Train, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    run("run", max_iters=2, optimizer=optimizer)
    load, head = checkpoint.load, model_module.head_loss
    loaded: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(path: Path) -> dict[str, Any]:
        content = load(path)
        loaded.extend(weakref.ref(tensor) for tensor in content["model"].values())
        return content

    def counting(*given: Any) -> torch.Tensor:
        alive.append(sum(tensor() is not None for tensor in loaded))
        return head(*given)

    monkeypatch.setattr(checkpoint, "load", watched)
    monkeypatch.setattr(model_module, "head_loss", counting)
    run("run", options={"resume": True}, max_iters=3, optimizer=optimizer)
    assert len(loaded) > 10 and set(alive) == {0}


def test_resuming_needs_nothing_but_the_folder(run: Train, tmp_path: Path) -> None:
    from oomph.training.run import train

    run("run", max_iters=4, dropout=0.1)
    result = train(resume=tmp_path / "run", quiet=True, measure=False)
    assert result.steps == 4 and result.finished


def test_evaluations_and_the_best_loss_go_on_where_they_were(run: Train, tmp_path: Path) -> None:
    run("whole", max_iters=8, eval_interval=2)
    run("parts", max_iters=4, eval_interval=2)
    run("parts", options={"resume": True}, max_iters=8, eval_interval=2)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    found = [[(line["step"], line["val_loss"]) for line in each if "val_loss" in line] for each in lines]
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [0, 2, 4, 6, 8]


def test_metrics_written_after_the_checkpoint_are_replaced(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=4)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step":4,"loss":1.0}\n{"step":5,"lo')
    run("run", options={"resume": True}, max_iters=6)
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]


def test_a_changed_key_is_logged(run: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run("run", max_iters=3)
    run("run", options={"resume": True, "quiet": False}, max_iters=5, learning_rate=2e-3)
    out = capsys.readouterr().out
    assert "changed: learning_rate: 0.01 in the checkpoint, now 0.002" in out
    assert "changed: max_iters: 3 in the checkpoint, now 5" in out


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "n_head", "block_size", "vocab_size"])
def test_a_changed_shape_is_refused_with_both_values(run: Train, key: str) -> None:
    run("run", max_iters=2)
    with pytest.raises(InputError, match=f"{key} cannot change") as error:
        run("run", options={"resume": True}, **{key: 8})
    assert "found 8; try" in str(error.value)


def test_other_data_is_refused(run: Train, data: Path) -> None:
    run("run", max_iters=2)
    (data / "train.bin").write_bytes((data / "train.bin").read_bytes()[:-200])
    with refused("step_00000002.pt", found="3900 tokens here, 4000", allowed="--weights"):
        run("run", options={"resume": True}, max_iters=4)


def test_another_seed_or_order_is_refused_with_the_way_out(run: Train) -> None:
    run("run", max_iters=2)
    with refused(found="5", allowed="1337, or --weights"):
        run("run", options={"resume": True}, max_iters=4, seed=5)
    with refused("--order", found="epochs", allowed="random, or --weights"):
        run("run", options={"resume": True, "order": "epochs"}, max_iters=4)


@pytest.mark.parametrize(("old", "new"), [("float32", "float16"), ("float16", "bfloat16")])
def test_a_run_resumes_in_another_precision(run: Train, tmp_path: Path, old: str, new: str) -> None:
    run("run", max_iters=2, dtype=old)
    run("run", options={"resume": True}, max_iters=4, dtype=new)
    assert len(losses(tmp_path / "run")) == 4


@pytest.mark.parametrize("keys", [{}, {"init_from": "resume"}], ids=str)
@pytest.mark.parametrize("option", [{"weights": "/nowhere"}, {"overwrite": True}], ids=str)
def test_overwrite_and_weights_exclude_resume(run: Train, keys: dict[str, Any], option: dict[str, Any]) -> None:
    run("run", max_iters=2)
    with refused(f"--{next(iter(option))}"):
        run("run", options={"resume": not keys, **option}, max_iters=4, **keys)


def test_a_damaged_checkpoint_is_refused_and_an_older_one_works(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=4, eval_interval=2)
    older, newest = checkpoint.saved(tmp_path / "run")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    with refused(".pt", allowed="--resume"):
        run("run", options={"resume": True}, max_iters=6)
    assert run("run", options={"resume": older}, max_iters=6).steps == 6


def test_nothing_to_resume_is_refused(run: Train) -> None:
    with refused(found="folder"):
        run("nowhere", options={"resume": True})


def test_a_nanogpt_checkpoint_resumes_at_its_step(run: Train, tmp_path: Path) -> None:
    run("ours", max_iters=4)
    content = checkpoint.load(checkpoint.saved(tmp_path / "ours")[-1])
    del content["oomph"]
    content["config"]["a_key_of_a_fork"] = 1
    content["model"] = {f"_orig_mod.{name}": value for name, value in content["model"].items()}
    (tmp_path / "theirs").mkdir()
    torch.save(content, tmp_path / "theirs" / "ckpt.pt")
    run("theirs", init_from="resume", max_iters=6)
    run("ours", options={"resume": True}, max_iters=6)
    assert losses(tmp_path / "theirs") == losses(tmp_path / "ours")[4:]


@pytest.mark.parametrize(
    ("theirs", "now", "dtype"),
    [("cpu", {}, "float32"), ("cuda", {"device": "cpu"}, "float32"), ("cpu", {"dtype": "bfloat16"}, "bfloat16")],
)
def test_nanogpts_recorded_dtype_counts_only_for_the_device_it_ran_on(
    tmp_path: Path, theirs: str, now: dict[str, str], dtype: str
) -> None:
    """On a CPU nanoGPT records float16 and computes in float32."""
    content = {"config": {"device": theirs, "dtype": "float16"}, "model_args": {}}
    path = tmp_path / "ckpt.pt"
    loaded, _ = resumed_config(path, content, configs.from_dict(now))
    assert (configs.settle(configs.with_trainer(loaded, "oomph"), devices.detect("cpu")).config.dtype) == dtype


def test_nanogpts_dtype_on_a_card_is_kept_on_a_card(tmp_path: Path) -> None:
    content = {"config": {"device": "cuda", "dtype": "float16"}, "model_args": {}}
    assert resumed_config(tmp_path / "ckpt.pt", content, configs.from_dict({}))[0].config.dtype == "float16"


@pytest.mark.parametrize("change", [{"batch_size": 2, "gradient_accumulation_steps": 4}, {"batch_size": 8}])
def test_evaluations_compare_whatever_micro_batch_a_run_is_resumed_with(run: Train, change: dict[str, int]) -> None:
    before = run("run", max_iters=3)
    after = run("run", options={"resume": True}, eval_only=True, **change)
    assert after.val_loss == pytest.approx(before.val_loss, abs=1e-6)


def test_evaluations_do_not_depend_on_the_seed(run: Train, tmp_path: Path) -> None:
    first = run("first", max_iters=2, seed=1)
    second = run("second", options={"weights": tmp_path / "first"}, eval_only=True, seed=2)
    assert second.val_loss == pytest.approx(first.val_loss, abs=1e-6)


def test_other_data_of_the_same_size_is_refused(run: Train, data: Path) -> None:
    run("run", max_iters=2)
    tokens = np.fromfile(data / "train.bin", "<u2")
    tokens[::7] = 1
    tokens.tofile(data / "train.bin")
    with pytest.raises(InputError, match="as many tokens, but different ones"):
        run("run", options={"resume": True}, max_iters=4)


def test_a_token_beyond_the_vocabulary_anywhere_ends_the_run_with_its_work_saved(
    run: Train, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.fromfile(data / "train.bin", "<u2")
    tokens[3600:] = VOCAB + 5
    tokens.tofile(data / "train.bin")
    monkeypatch.setattr(feed_module, "check_vocabulary", lambda *_: None)  # as if it had looked elsewhere
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: 1.0)
    with pytest.raises(InputError, match=f"train.bin: contains tokens beyond.*token {VOCAB + 5}, vocab_size = {VOCAB}"):
        run("run", max_iters=40, batch_size=1, gradient_accumulation_steps=1)
    assert checkpoint.step_of(checkpoint.saved(tmp_path / "run")[-1]) == len(losses(tmp_path / "run"))


def test_a_resumed_torch_optimizer_does_not_live_in_the_mapped_file(run: Train, tmp_path: Path) -> None:
    """Its state is copied, or dropping the file's pages would undo what it learns."""
    keys = {"optimizer": "muon", "n_embd": 64}  # whose matrices fill pages of the file
    run("whole", max_iters=6, **keys)
    run("run", max_iters=3, **keys)
    run("run", options={"resume": True}, max_iters=6, **keys)
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_eval_only_on_a_resumed_run_trains_nothing(run: Train, tmp_path: Path) -> None:
    run("run", max_iters=3)
    before = weights(tmp_path / "run")
    result = run("run", options={"resume": True}, max_iters=9, eval_only=True)
    assert result.steps == 3 and result.val_loss is not None
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path / "run").items())


def test_a_changed_default_is_logged_too(run: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run("run", max_iters=2)
    run("run", options={"resume": True, "quiet": False}, max_iters=3, weight_decay=0.3, dtype="bfloat16")
    out = capsys.readouterr().out
    assert "changed: weight_decay: 0.1 in the checkpoint, now 0.3" in out
    assert "changed: dtype: float32 in the checkpoint, now bfloat16" in out


@pytest.mark.parametrize(
    "keys",
    [{"optimizer": "muon"}, {"optimizer": "sgd"}, {"optimizer": "adafactor"}, {"optimizer_loop": "foreach"}, {}],
    ids=str,
)
def test_changed_decay_is_used_by_every_optimizer(run: Train, tmp_path: Path, keys: dict[str, object]) -> None:
    run("run", max_iters=2, **keys)
    run("run", options={"resume": True}, max_iters=3, weight_decay=0.7, beta1=0.5, **keys)
    state = checkpoint.load(checkpoint.saved(tmp_path / "run")[-1])["optimizer"]
    found = [group for part in state.get("parts", [state]) for group in part["param_groups"]]
    assert {group["weight_decay"] for group in found} == {0.7, 0.0}
    assert all(group["betas"][0] == 0.5 for group in found if "betas" in group)
    assert all(group["momentum"] == 0.5 for group in found if "dampening" in group)


@pytest.mark.parametrize(("old", "new"), [("adamw", "sgd"), ("adamw", "muon"), ("muon", "adamw"), ("sgd", "adafactor")])
def test_another_optimizer_is_refused_with_both_names(run: Train, old: str, new: str) -> None:
    run("run", max_iters=2, optimizer=old)
    with refused(found=new, allowed=f"{old}, or --weights"):
        run("run", options={"resume": True}, max_iters=3, optimizer=new)


@pytest.mark.usefixtures("tensorboard")
def test_a_resumed_run_keeps_its_options(run: Train, tmp_path: Path) -> None:
    from oomph.training.run import train

    asked = {"order": "epochs", "keep": 1, "save_minutes": 3.0, "tensorboard": True, "export": True}
    run("run", options=asked, max_iters=2)
    events = list((tmp_path / "run" / "tensorboard").iterdir())
    (tmp_path / "run" / "huggingface" / "model.safetensors").unlink()
    train({"max_iters": 4, "eval_interval": 1}, resume=tmp_path / "run", quiet=True, measure=False)
    assert len(checkpoint.saved(tmp_path / "run")) == 1
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == len(events) + 1
    assert (tmp_path / "run" / "huggingface" / "model.safetensors").is_file()
    ours = checkpoint.load(checkpoint.saved(tmp_path / "run")[-1])["oomph"]
    assert ours["options"] == asked | {"weights": "", "trackio": False} and ours["data"]["order"] == "epochs"


def test_options_given_again_win(run: Train, tmp_path: Path) -> None:
    run("run", options={"export": True, "keep": 1}, max_iters=2)
    run("run", options={"resume": True, "export": False, "keep": 3}, max_iters=4, eval_interval=1)
    assert len(checkpoint.saved(tmp_path / "run")) == 3


def test_nanogpts_first_checkpoint_resumes_without_optimizer_state(run: Train, tmp_path: Path) -> None:
    run("ours", max_iters=1, optimizer_loop="foreach")
    content = checkpoint.load(checkpoint.saved(tmp_path / "ours")[-1])
    del content["oomph"]
    content["optimizer"]["state"] = {}
    content["best_val_loss"] = torch.tensor(3.5)  # as nanoGPT has it
    (tmp_path / "theirs").mkdir()
    torch.save(content, tmp_path / "theirs" / "ckpt.pt")
    assert run("theirs", init_from="resume", max_iters=3, optimizer_loop="foreach").steps == 3


def wrong_checkpoint(content: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        content = content[name]
    content[last] = value


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("config", [1, 2]),
        ("model_args", "x"),
        ("iter_num", "abc"),
        ("iter_num", -5),
        ("iter_num", True),
        ("best_val_loss", "low"),
        ("model", {"lm_head.weight": 3}),
        ("model", {3: torch.zeros(2)}),
        ("optimizer", 7),
        ("optimizer", {"state": 3, "param_groups": []}),
        ("optimizer", {"state": {0: {"exp_avg": 1}}, "param_groups": [{}]}),
        ("optimizer.state", {0: {"step": torch.zeros(()), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}}),
        ("oomph", [1]),
        ("oomph.version", 99),
        ("oomph.batch_size", 0),
        ("oomph.micro_steps", "2"),
        ("oomph.random", [{"cpu": 3}]),
        ("oomph.random", [{"cpu": torch.zeros(3, dtype=torch.uint8)}]),
        ("oomph.batch_size", None),
        ("oomph.random", None),
        ("oomph.standing", {"seconds": "long"}),
        ("oomph.standing.seconds", None),
        ("oomph.standing.metrics_bytes", 0.5),
        ("oomph.data.block_size", torch.ones(2)),
        ("oomph.data.sha256", 3),
        ("oomph.data", {"position": -1}),
        ("oomph.decided", 3),
        ("oomph.options", []),
    ],
    ids=str,
)
def test_a_checkpoint_with_wrong_entries_is_refused(finished: Path, tmp_path: Path, where: str, value: object) -> None:
    from oomph.training.run import train

    content = checkpoint.load(checkpoint.saved(finished)[-1])
    wrong_checkpoint(content, where, value)
    (tmp_path / "wrong").mkdir()
    torch.save(content, tmp_path / "wrong" / "ckpt.pt")
    with pytest.raises(InputError, match=r"ckpt\.pt|reader's state"):
        train({"max_iters": 9}, resume=tmp_path / "wrong", quiet=True, measure=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, for tests that only read it."""
    from oomph.training.run import train

    folder = tmp_path_factory.mktemp("finished")
    data = write_data(folder / "tokens")
    keys = SMALL | {"dataset": str(data), "out_dir": str(folder / "run"), "max_iters": 2}
    train(keys, quiet=True, measure=False)
    return folder / "run"
