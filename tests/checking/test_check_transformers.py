"""`oomph check` of transformers' models: what their classes really allocate on this CPU is what was planned."""

from __future__ import annotations

import gc
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

import oomph
from oomph import config as configs
from oomph import devices
from oomph.checking.child import do_steps, peak_allocated_bytes
from oomph.checking.launch import Job
from oomph.cli.main import main
from oomph.config import LoadedConfig
from oomph.config.programs import MODEL_TYPES
from oomph.config.reading import hugging_face
from oomph.step import models
from oomph.units import MIB

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_folder")]
TINY = {
    "device": "cpu", "trainer": "hf", "n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": 512, "block_size": 48,
    "batch_size": 2, "intermediate_size": 128, "head_dim": 16,
}  # fmt: skip
FAMILIES = tuple(family for family in MODEL_TYPES if family not in ("nanochat", "qwen"))
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")


def tiny(family: str, **keys: Any) -> LoadedConfig:
    """A tiny model of a family, with grouped queries and four experts where it has such."""
    own = {"num_key_value_heads": 2 if family in GROUPED else 4}
    own |= {"num_experts": 4, "num_experts_per_tok": 2} if family in ("mixtral", "qwen3_moe") else {}
    said = {**TINY, "model_type": family, **own, **keys}
    return configs.load((), [(key, str(value), f"--{key}") for key, value in said.items()])


def error(loaded: LoadedConfig, model: str | None = None) -> float:
    """By how much the plan is off what three steps in this process allocate at most: 0.001 is 0.1 %."""
    cpu = replace(devices.detect("cpu"), threads=torch.get_num_threads())
    planned = oomph.plan(loaded, cpu, model=model)
    micro_steps = min(2, planned.config.gradient_accumulation_steps)  # as a check runs them on a CPU
    job = Job(planned.config, "cpu", 2, micro_steps, allocations=True, data=None, model=model)
    gc.collect()  # what an earlier test left must not be freed while this one is recorded
    return planned.memory.allocated_mib * MIB / peak_allocated_bytes(lambda: do_steps(job, lambda _: None)) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_is_written_as_the_config_it_was_read_from(family: str) -> None:
    config = configs.settle(tiny(family, n_layer=6), devices.detect("cpu")).config
    theirs = transformers.AutoConfig.for_model(family, **hugging_face.written(config))
    built = transformers.AutoModelForCausalLM.from_config(theirs)
    assert [(name, tuple(p.shape)) for name, p in built.named_parameters()] == list(models.parameters(config))
    read = hugging_face.read(theirs.to_dict(), "config.json")
    assert not read.problems
    skipped = ("block_size", "word_embed_proj_dim")  # not the model's; the class fills in the width
    back = {key: said.value for key, said in read.values.items() if key not in skipped}
    assert back == {key: getattr(config, key) for key in back}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_allocates_what_was_planned(family: str) -> None:
    assert error(tiny(family)) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("trainer", ["hf", "torch"])
@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 5},
        {"checkpoint_layers": 3, "gradient_accumulation_steps": 2},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "autocast": False},
        {"attention": "math"},
        {"optimizer": "muon"},
        {"optimizer": "sgd"},
        {"optimizer": "adafactor", "dtype": "bfloat16", "autocast": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_every_setting_allocates_what_was_planned(family: str, keys: dict[str, Any], trainer: str) -> None:
    assert error(tiny(family, trainer=trainer, **keys)) == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trainer", ["hf", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiled_model_allocates_what_was_planned(family: str, trainer: str, dtype: str) -> None:
    keys = {"compile": True, "dtype": dtype, "trainer": trainer, "vocab_size": 2048, "batch_size": 4}
    torch._dynamo.reset()
    assert error(tiny(family, **keys)) == pytest.approx(0, abs=1e-3)
    assert error(tiny(family, **keys, gradient_accumulation_steps=2)) == pytest.approx(0, abs=1e-3)


def config_json(folder: Path, **keys: Any) -> str:
    """A config.json of an architecture that is not described."""
    path = folder / "config.json"
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    path.write_text(json.dumps({"model_type": "stablelm", "vocab_size": 512, "num_key_value_heads": 4} | shape | keys))
    return str(path)


@pytest.mark.parametrize("trainer", ["nanogpt", "hf", "torch"])
@pytest.mark.parametrize("checkpointed", [0, "all"])
def test_any_causal_model_allocates_what_its_trace_has(tmp_path: Path, trainer: str, checkpointed: int | str) -> None:
    keys = {"trainer": trainer, "checkpoint_layers": checkpointed, "gradient_accumulation_steps": 2}
    said = {"device": "cpu", "compile": False, "batch_size": 2, "block_size": 48, **keys}
    model = config_json(tmp_path)
    assert error(configs.as_loaded(said, model=model), model) == pytest.approx(0, abs=1e-3)


def flags(**keys: Any) -> list[str]:
    return [f"--{key}={value}" for key, value in {**TINY, **keys}.items()]


@pytest.mark.slow
def test_a_config_json_is_checked_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configs.settle(tiny("qwen3"), devices.detect("cpu")).config
    folder = tmp_path / "model"
    transformers.AutoConfig.for_model("qwen3", **hugging_face.written(config)).save_pretrained(folder)
    code = main(["check", str(folder), "--device=cpu", "--batch_size=2", "--block_size=48", "--steps=1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["outcome"] == "measured"
    assert result["config"]["model_type"] == "qwen3"
    assert result["config"]["trainer"] == "hf"
    assert result["config"]["transformers_version"] == ".".join(transformers.__version__.split(".")[:3])
    assert result["error"]["memory"]["allocated_mib"] == pytest.approx(0, abs=1e-3)
    if "ratios" in result:  # a busy machine's are not kept
        assert "qwen3" in result["ratios"]["of"]


@pytest.mark.parametrize("given", [{"model_type": "t5"}, {"model_type": "nobody"}, {"hidden_size": 65}], ids=str)
def test_a_config_json_that_cannot_be_built_is_an_input_error(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No causal model, no model at all, a width that is no multiple of the heads."""
    code = main(["check", "--model", config_json(tmp_path, **given), "--device=cpu", "--compile=False"])
    shown = capsys.readouterr()
    assert code == 2
    assert "config.json" in shown.err
    assert "Traceback" not in shown.err + shown.out


@pytest.mark.parametrize(("model", "trainer"), [("model.py:build", "hf"), ("config.json", "oomph")])
def test_a_model_that_a_check_does_not_run_is_refused(model: str, trainer: str) -> None:
    with pytest.raises(oomph.InputError) as refused:
        oomph.check({"device": "cpu", "trainer": trainer}, model=model)
    assert len(refused.value.problems) == 1


def test_a_model_that_transformers_cannot_build_is_an_input_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A width that is no multiple of the heads is refused by GPT-2's class, not by its description."""
    code = main(["check", *flags(model_type="gpt2", n_embd=66)])
    said = capsys.readouterr()
    assert code == 2
    assert "model_type" in said.err
    assert "Traceback" not in said.err + said.out


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("oomph.checking.check.find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(oomph.InputError) as refused:
        oomph.check(tiny("llama"))
    assert ["oomph[hf]" in str(problem) for problem in refused.value.problems] == [True]


def test_blocks_are_checkpointed_all_or_none() -> None:
    with pytest.raises(oomph.InputError) as refused:
        oomph.check(tiny("llama", checkpoint_layers=1))
    assert [problem.allowed for problem in refused.value.problems] == ["0 or all, which is 3"]


@pytest.mark.parametrize("keys", [{}, {"checkpoint_layers": "all"}, {"dtype": "bfloat16", "autocast": False}], ids=str)
@pytest.mark.parametrize(
    ("family", "method"), [("llama", "lora"), ("llama", "dora"), ("qwen3", "lora"), ("qwen3", "dora"), ("gpt2", "lora")]
)
def test_a_step_with_adapters_allocates_what_is_planned(family: str, method: str, keys: dict[str, Any]) -> None:
    targets = "c_attn" if family == "gpt2" else "all-linear"
    loaded = tiny(family, method=method, lora_rank=4, lora_dropout=0.1, lora_targets=targets, **keys)
    assert error(loaded) == pytest.approx(0, abs=1e-3)


def test_a_quantized_base_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "Qwen/Qwen3-0.6B", "--method=qlora", "--device=cpu"]) == 2
    assert capsys.readouterr().err.startswith("ERROR: --method=qlora: ")


@pytest.mark.parametrize(
    "keys",
    [
        {"checkpoint_layers": 0},
        {"gradient_accumulation_steps": 5},
        {"dtype": "bfloat16"},
        {"method": "lora"},
        {"method": "lora", "dtype": "bfloat16", "checkpoint_layers": 0, "lora_targets": "all-linear"},
        {"method": "dora", "checkpoint_layers": 0},
    ],
    ids=str,
)
def test_trls_own_trainer_allocates_what_was_planned(keys: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    assert error(tiny("qwen3", trainer="trl", **keys)) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    "keys", [{"compile": True}, {"packing": "padding_free"}, {"fused_loss": "liger"}, {"trl_version": "0.24"}], ids=str
)
def test_trls_trainer_is_not_run_as_another(keys: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    assert main(["check", *flags(trainer="trl", model_type="llama", num_key_value_heads=2, **keys)]) == 2
    assert next(iter(keys)) in capsys.readouterr().err
