"""A model of the user's own, from a file or a Hugging Face config, planned like nanoGPT's."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

import oomph
from oomph import devices
from oomph.cli.main import main
from oomph.errors import InputError

FILE = """
import torch
from torch import nn
from torch.nn import functional as F

print("a model that talks")

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.hidden = nn.Linear(32, 64)
        self.head = nn.Linear(64, 96, bias=False)

    def forward(self, ids, targets):
        logits = self.head(F.gelu(self.hidden(self.embed(ids))))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def build():
    return Tiny()

def with_inputs():
    return Tiny(), (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64))

def broken():
    raise RuntimeError("no such layer")

def number():
    return 7

def leaves():
    raise SystemExit(0)

class Leaving(Tiny):
    def forward(self, ids, targets):
        raise SystemExit(5)

def ids():
    return torch.zeros(2, 5, dtype=torch.int64)

def named():
    return Tiny(), {"targets": ids(), "ids": ids()}

class Alone(Tiny):
    def forward(self, ids):
        return super().forward(ids, ids)

def one():
    return Alone(), ids()

def words():
    return Tiny(), "ids"

class Frozen(Tiny):
    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.hidden.requires_grad_(False)

class Far(Tiny):
    def forward(self, ids, targets):
        logits, loss = super().forward(ids, targets)
        return logits, loss + torch.cdist(self.head.weight, self.embed.weight.repeat(1, 2), p=1.0).mean()

class Logits(Tiny):
    def forward(self, ids, targets):
        return super().forward(ids, targets)[0]

class Value(Tiny):
    def forward(self, ids, targets):
        loss = super().forward(ids, targets)[1]
        return loss if loss.item() > 3 else 2 * loss

class Chosen(Tiny):
    def forward(self, ids, targets):
        logits, wanted = super().forward(ids, targets)[0].flatten(0, 1), targets.flatten()
        some = wanted > 0
        return F.cross_entropy(logits[some], wanted[some])

class Sparse(Tiny):
    def __init__(self):
        super().__init__()
        self.extra = nn.ModuleList([nn.Embedding(96, 32, sparse=True)])

def halved():
    return Tiny().bfloat16()

def moved():
    return Tiny().to("cuda", torch.bfloat16).cuda()

class Tied(Tiny):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight
        self.bfloat16()

class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return self.layer(x).mean()

def seen():
    return Seen(), torch.zeros(2, 3, 16, 16)

class Recalling(Tiny):
    def __init__(self):
        super().__init__()
        self.past = nn.GRU(32, 32)

    def forward(self, ids, targets):
        logits = self.head(F.gelu(self.hidden(self.past(self.embed(ids))[0])))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, ids, targets):
        return None

class Constant(Silent):
    def forward(self, ids, targets):
        return torch.zeros(())
"""
SMALL = {"batch_size": 4, "block_size": 16, "gradient_accumulation_steps": 2}
OURS = SMALL | {"trainer": "oomph"}  # nanoGPT as published has no such keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("compiled", [False, True])
def test_a_users_model_is_planned_eager_and_compiled(file: Path, compiled: bool) -> None:
    plan = oomph.plan(SMALL | {"compile": compiled}, "RTX 4070", model=f"{file}:build")
    assert plan.model.params == 96 * 32 + 32 * 64 + 64 + 64 * 96
    assert plan.memory.fits is True
    assert plan.time is not None
    assert plan.program == "tiny.py:build"
    parts = {part.name: part.mib for part in plan.memory.breakdown}
    assert parts["parameters"] == pytest.approx(plan.model.params * 4 / 2**20)


def test_the_function_may_bring_its_own_inputs(file: Path) -> None:
    plan = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=f"{file}:with_inputs")
    small = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=f"{file}:build")
    assert plan.memory.allocated_mib < small.memory.allocated_mib
    whose = "(2, 5) and (2, 5): tokens are counted as batch_size × block_size, 4 × 16"
    assert any(whose in note for note in plan.notes)
    assert not any("batch_size × block_size" in note for note in small.notes)


def test_the_optimizer_asked_for_is_kept_whoever_trains(file: Path) -> None:
    def state_mib(trainer: str) -> float:
        keys = SMALL | {"compile": False, "optimizer": "sgd", "trainer": trainer}
        plan = oomph.plan(keys, "RTX 4070", model=f"{file}:build")
        assert plan.config.optimizer == "sgd"
        assert not any("has no optimizer" in note for note in plan.notes)
        return {part.name: part.mib for part in plan.memory.breakdown}["optimizer state"]

    assert state_mib("nanogpt") == state_mib("oomph")


def test_what_the_model_prints_stays_out_of_the_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"--{key}={value}" for key, value in SMALL.items()]
    assert main(["plan", "--model", f"{file}:build", "--gpu", "RTX 4070", "--json", "--compile=False", *keys]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"]["params"] > 0
    assert "a model that talks" in captured.err


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{}:biuld", "did you mean build?"),
        ("{}:broken", "RuntimeError: no such layer"),
        ("{}:number", "found int"),
        ("{}:leaves", "SystemExit: 0"),
        ("{}:Leaving", "SystemExit: 5"),
        ("{}:words", "its inputs are no tensors"),
        ("{}", "file.py:function"),
        ("missing.py:build", "no such file"),
    ],
)
def test_a_model_that_cannot_be_had_says_why(file: Path, spec: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        oomph.plan(SMALL, "RTX 4070", model=spec.format(file))
    assert said in str(refused.value)


def test_only_what_the_file_defines_is_offered(file: Path) -> None:
    with pytest.raises(InputError) as refused:
        oomph.plan(SMALL, "RTX 4070", model=f"{file}:nope")
    assert "try: Tiny, build, with_inputs, broken, number, leaves" in str(refused.value)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "said"), [("Silent", "returns no loss"), ("Constant", "depends on no parameter")])
def test_a_model_without_a_loss_is_refused_cleanly(file: Path, name: str, said: str, compiled: bool) -> None:
    with pytest.raises(InputError, match=said):
        oomph.plan(SMALL | {"compile": compiled}, "RTX 4070", model=f"{file}:{name}")
    gc.collect()


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw8bit"])
def test_the_optimizers_state_follows_from_the_parameters(file: Path, optimizer: str) -> None:
    keys = OURS | {"compile": False, "optimizer": optimizer}
    plan = oomph.plan(keys, "RTX 4070", model=f"{file}:build")
    state_mib = {part.name: part.mib for part in plan.memory.breakdown}["optimizer state"]
    assert 0 < state_mib < 2 * 4 * plan.model.params / 2**20


def test_keys_that_the_model_decides_itself_are_named(file: Path) -> None:
    keys = OURS | {"compile": False, "checkpoint_layers": 2, "loss_chunk": 64, "attention": "efficient"}
    notes = " ".join(oomph.plan(keys, "RTX 4070", model=f"{file}:build").notes)
    assert "decides it: loss_chunk, checkpoint_layers" in notes  # and neither is in the figures
    assert "decides it" not in " ".join(oomph.plan(SMALL, "RTX 4070").notes)


def test_a_hugging_face_config_of_another_family_is_traced(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    path.write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 2, **sizes}))
    plan = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=str(path))
    assert plan.model.params > 2 * 128 * 32
    assert plan.memory.fits is True


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", ["named", "one"])
def test_inputs_may_be_named_or_one_alone(file: Path, function: str, compiled: bool) -> None:
    keys = SMALL | {"compile": compiled}
    plan = oomph.plan(keys, "RTX 4070", model=f"{file}:{function}")
    in_order = oomph.plan(keys, "RTX 4070", model=f"{file}:with_inputs")
    assert plan.model.params == in_order.model.params
    assert plan.compute.flops_per_step == in_order.compute.flops_per_step


def test_a_file_sees_no_arguments_of_oomph(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n" + FILE)
    assert main(["plan", "--model", f"{path}:build", "--gpu", "RTX 4070", "--compile=False"]) == 0


def test_frozen_parameters_are_in_no_gradient_bucket(file: Path) -> None:
    keys = SMALL | {"compile": False, "gradient_accumulation_steps": 8, "world_size": 8}
    plan = oomph.plan(keys, "RTX 4070", model=f"{file}:Frozen")
    alone = oomph.plan(keys | {"world_size": 1}, "RTX 4070", model=f"{file}:Frozen")
    more_bytes = sum(b.bytes for b in plan.steps[1].resident) - sum(b.bytes for b in alone.steps[1].resident)
    assert more_bytes == 4 * 96 * 64  # the head's


def test_arithmetic_that_is_not_counted_is_named(file: Path) -> None:
    notes = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=f"{file}:Far").notes
    (said,) = [note for note in notes if "not counted" in note]
    assert "cdist_backward" in said
    assert "norm" not in said  # gradient clipping's


def test_recurrent_layers_are_said_to_be_timed_roughly(file: Path) -> None:
    notes = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=f"{file}:Recalling").notes
    assert any("Recurrent layers (GRU)" in note for note in notes)


def test_compiling_takes_as_long_as_the_model_is_large_whatever_the_config_says(file: Path) -> None:
    plans = [oomph.plan(SMALL | {"n_layer": layers}, "RTX 4070", model=f"{file}:build") for layers in (1, 48)]
    times = [plan.time.compile_s for plan in plans if plan.time is not None]
    assert times == [2.0, 2.0]  # less than a block of a GPT


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_without_a_loss_of_its_own_is_planned_and_said_to_be(file: Path, compiled: bool) -> None:
    said = "returns one tensor and no loss"
    keys = SMALL | {"compile": compiled}
    assert any(said in note for note in oomph.plan(keys, "RTX 4070", model=f"{file}:Logits").notes)
    assert not any(said in note for note in oomph.plan(keys, "RTX 4070", model=f"{file}:build").notes)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", ["halved", "moved"])
def test_a_model_built_in_half_precision_takes_half_the_memory(file: Path, function: str, compiled: bool) -> None:
    keys = SMALL | {"compile": compiled}
    half, whole = (oomph.plan(keys, "RTX 4070", model=f"{file}:{name}") for name in (function, "build"))
    assert half.model.params == whole.model.params
    for name, extra in (("parameters", 0.0), ("optimizer state", 5 * 4 / 2**20)):  # one step counter a tensor
        sizes = [{part.name: part.mib for part in plan.memory.breakdown}[name] for plan in (half, whole)]
        assert sizes[0] == pytest.approx(sizes[1] / 2, abs=extra)


def test_weights_that_are_shared_stay_shared_when_they_are_converted(file: Path) -> None:
    plan = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=f"{file}:Tied")
    parts = {part.name: part.mib for part in plan.memory.breakdown}
    assert parts["parameters"] == 2 * (96 * 32 + 32 * 32 + 32) / 2**20


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Value", "of tiny.py (return loss if loss.item() > 3 else 2 * loss): reads a tensor's value"),
        (
            "Chosen",
            "of tiny.py (return F.cross_entropy(logits[some], wanted[some])): makes a tensor whose size depends",
        ),
        ("Sparse", "module extra.0: its Embedding has sparse gradients"),
        ("broken", 'of tiny.py (raise RuntimeError("no such layer")): calling it raised'),
    ],
)
def test_what_cannot_be_traced_is_told_with_its_line(file: Path, name: str, said: str, compiled: bool) -> None:
    with pytest.raises(InputError) as refused:
        oomph.plan(SMALL | {"compile": compiled}, "RTX 4070", model=f"{file}:{name}")
    assert said in str(refused.value)


def test_frozen_parameters_are_counted_apart(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=f"{file}:Frozen")
    assert plan.model.params_frozen == 96 * 32 + 32 * 64 + 64
    assert plan.model.params == plan.model.params_frozen + 64 * 96
    assert (plan.model.decay_params, plan.model.decay_tensors) == (64 * 96, 1)
    assert plan.model.no_decay_tensors == 0
    assert plan.to_dict()["model"]["params_frozen"] == plan.model.params_frozen
    assert oomph.plan(SMALL, "RTX 4070").model.params_frozen == 0
    main(["plan", "--model", f"{file}:Frozen", "--gpu", "RTX 4070", "--compile=False"])
    assert "5,184 of them frozen" in capsys.readouterr().out


def test_what_convolutions_copy_on_a_cpu_is_named(file: Path) -> None:
    keys = SMALL | {"compile": False, "device": "cpu"}
    moved_mib = 4 * (2 * 16 * 16 * (3 + 8) + 8 * 27 + 8) / 2**20
    said = [note for note in oomph.plan(keys, model=f"{file}:seen").notes if "convolution" in note]
    assert said and f"up to {moved_mib:,.1f} MiB" in said[0]
    on_a_card = oomph.plan(SMALL | {"compile": False}, "RTX 4070", model=f"{file}:seen")
    assert not any("convolution" in note for note in on_a_card.notes)


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 5, "n_head": 4, "vocab_size": 200, "n_positions": 256}


@pytest.fixture
def gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    return str(path)


@pytest.mark.parametrize("trainer", ["hf", "torch"])
def test_a_traced_program_is_the_described_one(gpt2: str, trainer: str) -> None:
    keys = {"trainer": trainer, "batch_size": 3, "block_size": 128}
    for more in ({"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 3}):
        described = oomph.plan(gpt2, "RTX 4070", **keys, **more)
        traced = oomph.plan(model=gpt2, gpu="RTX 4070", **keys, **more)
        assert traced.source == "traced, blocks repeated"
        assert traced.config.use_cache == (trainer == "torch")
        assert traced.memory.allocated_mib == described.memory.allocated_mib
        assert traced.memory.reserved_mib == described.memory.reserved_mib


def test_a_traced_config_is_trained_by_the_trainer_and_says_what_it_states(gpt2: str) -> None:
    plan = oomph.plan(model=gpt2, gpu="RTX 4070", n_layer=3, block_size=128)
    config = plan.to_dict()["config"]
    assert (plan.config.trainer, config["batch_size"]) == ("hf", 8)
    assert {key: config[key] for key in ("n_layer", "n_embd", "vocab_size")} == {
        "n_layer": 5, "n_embd": 64, "vocab_size": 200,
    }  # fmt: skip
    assert config["sources"]["n_layer"] == gpt2
    assert not {"dropout", "bias", "model_type", "tie_weights"} & (config.keys() | config["sources"].keys())
    assert any("Not used, because the traced model decides it: n_layer" in note for note in plan.notes)
    assert not any("n_embd" in note for note in plan.notes)  # of a shape that nobody planned


def test_a_model_is_traced_with_the_transformers_that_is_installed(gpt2: str) -> None:
    with pytest.raises(InputError, match=r"found 4\.50; try: 5\."):
        oomph.plan(model=gpt2, gpu="RTX 4070", transformers_version="4.50")


def test_a_file_is_fitted_like_any_other_model(file: Path) -> None:
    keys = {"batch_size": 64, "gradient_accumulation_steps": 1, "block_size": 512, "compile": False}
    found = oomph.fit(keys, devices.custom("small", mib=660, tflops=5.0, gbs=100.0, watts=None), model=f"{file}:build")
    assert found.now.memory.fits is False
    assert found.chosen is not None
    assert {option.plan.traced for option in found.options} == {f"{file}:build"}
    batches = {option.plan.config.batch_size for option in found.options if option.kind == "same"}
    assert {64, 32, 16, 8} <= batches
    assert not any({"n_layer", "n_embd", "method", "compile"} & option.changes.keys() for option in found.options)
    with pytest.raises(InputError, match="a traced model has one size"):
        oomph.fit(keys, "RTX 4070", model=f"{file}:build", largest=True)


@pytest.mark.slow
def test_a_second_fit_of_a_config_needs_no_torch(gpt2: str, tmp_path: Path) -> None:
    command = ["fit", "--model", gpt2, "--gpu_mib", "800", "--batch_size=64", "--block_size=256", "--all"]
    assert main([*command, "--write", str(tmp_path / "fits.toml")]) == 0
    code = f"import sys; from oomph.cli.main import main; main({command!r}); assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert "checkpointed" in answer
    assert main(["plan", str(tmp_path / "fits.toml"), "--model", gpt2, "--gpu_mib", "800"]) == 0
