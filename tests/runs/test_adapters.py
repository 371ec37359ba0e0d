"""Why adapters take more than expected: each cause is the plan with it against the plan without."""

from __future__ import annotations

from pathlib import Path

import pytest
from explaining import explained, figures, get, number

from oomph.config import from_dict
from oomph.planning.plan import plan
from oomph.runs import explain
from oomph.units import MIB

KEYS = {
    "trainer": "hf", "model_type": "llama", "n_layer": 4, "n_head": 8, "n_embd": 1024, "intermediate_size": 2816,
    "vocab_size": 32000, "batch_size": 2, "block_size": 1024, "dtype": "bfloat16", "lora_targets": "all-linear",
}  # fmt: skip
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 11.6 GiB"
CAUSES = {
    "casts_mib": {"adapter_dtype": "bfloat16"},
    "upcast_mib": {"upcast": "off"},
    "checkpointing_mib": {"checkpoint_layers": 4},
    "logits_mib": {"fused_loss": "liger"},
}


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_each_cause_is_what_a_run_without_it_saves(method: str) -> None:
    keys = KEYS | {"method": method}
    found = get(explained(OOM, "oom.txt", **{key: str(value) for key, value in keys.items()}), "memory.adapters")
    whole = plan(from_dict(keys), "RTX 4070").memory.allocated_mib
    for name, change in CAUSES.items():
        if name == "upcast_mib" and method == "lora":
            assert name not in found.numbers
            continue
        without = plan(from_dict(keys | change), "RTX 4070").memory.allocated_mib
        assert number(found, name) == pytest.approx(whole - without, abs=0.01)
    assert number(found, "checkpointing_mib") > 100
    copies = {"lora": None, "qlora": 2816 * 1024 * 2 / MIB}  # an MLP's weight in 16 bits
    assert found.numbers.get("dequantized_mib") == copies[method]


def test_a_whole_model_has_no_such_finding() -> None:
    found = explained(OOM, "oom.txt", **{key: str(value) for key, value in KEYS.items() if key != "lora_targets"})
    assert found.finding("memory.adapters") is None


# --- what logs of fine-tuning tell -------------------------------------------------------------------

COUNTS = "trainable params: 41,943,040 || all params: 8,072,204,288 || trainable%: 0.5196\n"
FRAME = 'Traceback (most recent call last):\n  File "/x/peft/tuners/lora/layer.py", line 7, in forward\n    result\n'
UNSLOTH = (
    "==((====))==  Unsloth - 2x faster free finetuning | Num GPUs used = 1\n"
    "   \\\\   /|    Num examples = 22,206 | Num Epochs = 2 | Total steps = 750\n"
    "O^O/ \\_/ \\    Batch size per device = 4 | Gradient accumulation steps = 8\n"
    ' "-____-"     Trainable parameters = 41,943,040 of 8,072,204,288 (0.52% trained)\n'
)
CHECKPOINT = "gradient_checkpointing_enable"


def fixes(text: str) -> str:
    return " ".join(line for fix in explained(text, "log", None).fixes for line in fix.lines)


@pytest.mark.parametrize("log", [COUNTS, UNSLOTH])
def test_adapters_without_a_config_are_explained_in_general(log: str) -> None:
    found = get(explained(log + OOM, "log", None), "memory.adapters")
    assert found.numbers == {"trained": 41_943_040, "params": 8_072_204_288}
    assert found.basis == "guess"
    assert explained(log, "log", None).finding("memory.adapters") is None  # nothing to explain


def test_adapters_are_seen_in_a_traceback_too() -> None:
    assert get(explained(FRAME + OOM, "log", None), "memory.adapters").numbers == {}
    assert explained(OOM, "log", None).finding("memory.adapters") is None


def test_a_run_that_trains_most_weights_has_no_adapters() -> None:
    counts = "trainable params: 7,000,000,000 || all params: 8,072,204,288 || trainable%: 86.7\n"
    assert explained(counts + OOM, "log", None).finding("memory.adapters") is None


@pytest.mark.parametrize(
    "sign",
    [
        UNSLOTH,
        "Unsloth: Will patch your computer.\n",
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.\n",
        "[INFO] Gradient checkpointing enabled.\n",
        FRAME.replace("result", "x = self._gradient_checkpointing_func(self.__call__, x)"),
    ],
)
def test_checkpointing_that_is_on_is_not_proposed(sign: str) -> None:
    assert CHECKPOINT in fixes(COUNTS + OOM)
    assert CHECKPOINT not in fixes(sign + OOM)


def test_adapters_in_use_are_not_proposed() -> None:
    step = FRAME.replace("/x/peft/tuners/lora/layer.py", "/x/torch/optim/adamw.py").replace(
        "result", "optimizer.step()"
    )
    titles = [" ".join(fix.title for fix in explained(log + OOM, "log", None).fixes) for log in (step, COUNTS + step)]
    assert ["LoRA" in title for title in titles] == [True, False]


def test_another_count_of_trained_weights_is_a_contradiction() -> None:
    keys = {key: str(value) for key, value in (KEYS | {"method": "lora"}).items()}
    ours = int(number(get(explained(OOM, "log", **keys), "memory.adapters"), "trained"))
    for printed in (ours, 2 * ours):
        log = f"trainable params: {printed:,} || all params: 8,072,204,288 || trainable%: 0.5\n{OOM}"
        doubt = explained(log, "log", **keys).finding("log.contradiction")
        assert (doubt is not None) == (printed != ours)
        assert doubt is None or {ours, printed} <= figures(doubt.text)


def test_a_model_by_name_beside_unsloths_log_is_planned_as_unsloth_trains_it(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(UNSLOTH + OOM)
    length = [("block_size", "2048", "--block_size=2048")]
    found = explain([log, "meta-llama/Llama-3.1-8B"], "4090", overrides=length, with_fixes=False)
    assert found.plan is not None
    config = found.plan.config
    assert (config.trainer, config.method, config.batch_size) == ("unsloth", "qlora", 4)
    assert (config.gradient_accumulation_steps, config.checkpoint_layers) == (8, 32)
    assert number(get(found, "memory.adapters"), "trained") == 41_943_040
    assert found.finding("log.contradiction") is None


def test_a_program_that_needs_the_models_family_may_be_named_beside_it(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(OOM)
    given = [("trainer", "unsloth", "--trainer=unsloth"), ("block_size", "2048", "--block_size=2048")]
    given += [("batch_size", "2", "--batch_size=2")]
    found = explain([log, "meta-llama/Llama-3.1-8B"], "4090", overrides=given, with_fixes=False)
    assert found.plan is not None
    assert found.plan.config.trainer == "unsloth"
