"""The largest known model, the longest context, and what each flag of a run saves and costs."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from oomph.cli.main import main
from oomph.config import LoadedConfig, from_dict
from oomph.devices import find
from oomph.fitting.flags import longest_context, what_flags_do
from oomph.planning.plan import plan

LLAMA = {
    "trainer": "hf", "model_type": "llama", "n_layer": 4, "n_head": 8, "n_embd": 1024, "intermediate_size": 2816,
    "vocab_size": 32000, "batch_size": 2, "block_size": 1024, "dtype": "bfloat16", "method": "lora",
}  # fmt: skip
CARD = find("RTX 4070")


def change(keys: Mapping[str, str]) -> LoadedConfig:
    numbers = {"block_size", "batch_size", "gradient_accumulation_steps", "lora_rank", "checkpoint_layers"}
    words = {"True": True, "False": False, "all": 4, "0": 0, "0.05": 0.05}
    return from_dict(
        LLAMA | {key: words[v] if v in words else int(v) if key in numbers else v for key, v in keys.items()}
    )


def test_each_flag_is_the_plan_with_it_against_the_plan_without() -> None:
    found = what_flags_do(change, CARD)
    assert len(found.flags) > 10
    assert [flag.saved_mib for flag in found.flags] == sorted((flag.saved_mib for flag in found.flags), reverse=True)
    for flag in found.flags:
        other = plan(change(flag.keys), CARD)
        assert flag.saved_mib == found.now.memory.allocated_mib - other.memory.allocated_mib
        assert flag.plan.memory.total_mib == other.memory.total_mib


def test_the_longest_context_fits_and_the_next_does_not() -> None:
    found = longest_context(change, CARD)
    assert found.plan is not None
    length = found.plan.config.block_size
    assert length % 256 == 0
    assert found.plan.memory.fits
    assert plan(change({"block_size": str(length + 256)}), CARD).memory.fits is False


def test_no_context_fits_a_card_that_is_too_small() -> None:
    deep = LLAMA | {"n_layer": 1000}
    found = longest_context(lambda keys: from_dict(deep | {"block_size": int(keys["block_size"])}), CARD)
    assert found.plan is None
    assert found.verdict.startswith("No,")


@pytest.mark.slow
def test_the_largest_known_model_fits_and_a_larger_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--method=qlora", "--gpu", "4090", "--largest", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    sizes = [model["params"] for model in models]
    assert sizes == sorted(sizes, reverse=True)
    assert models[0]["fits"] is False
    assert sum(model["fits"] for model in models) > 3


def test_flags_are_a_table_of_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["Qwen/Qwen3-0.6B", "--method=lora", "--batch_size=2", "--block_size=512", "--gpu", "4090"]
    assert main(["fit", *asked, "--flags"]) == 0
    text = capsys.readouterr().out
    assert "--checkpoint_layers=all" in text
    assert max(map(len, text.splitlines())) <= 80
