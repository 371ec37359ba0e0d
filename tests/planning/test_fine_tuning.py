"""Fine-tuning as users ask for it: plans, what fit proposes, and what is refused."""

from __future__ import annotations

import math

import pytest

from oomph.config import from_dict, load
from oomph.config.load import Override
from oomph.errors import InputError
from oomph.fitting.fit import fit
from oomph.planning.plan import Plan, plan
from oomph.step.models import parameters

SMALL = {
    "trainer": "hf", "model_type": "llama", "n_layer": 8, "n_head": 8, "n_embd": 512, "intermediate_size": 1376,
    "vocab_size": 32000, "batch_size": 4, "block_size": 1024,
}  # fmt: skip


def planned(**keys: object) -> Plan:
    return plan(from_dict(SMALL | keys), "RTX 4070")


def overrides(**keys: object) -> list[Override]:
    return [(key, str(value), f"--{key}={value}") for key, value in keys.items()]


def part(found: Plan, name: str) -> float:
    return next((each.mib for each in found.memory.breakdown if each.name == name), 0.0)


def test_adapters_alone_are_trained() -> None:
    full, lora = planned(), planned(method="lora", lora_rank=16)
    trained = lora.model.params - lora.model.params_frozen
    assert trained == 8 * 2 * (512 * 16 + 16 * 512)
    assert lora.model.params == full.model.params + trained
    assert part(lora, "optimizer state") < part(full, "optimizer state") / 100


def test_each_smaller_base_takes_less() -> None:
    full, lora, qlora = planned(), planned(method="lora"), planned(method="qlora", upcast="off")
    assert part(qlora, "parameters") < part(lora, "parameters") < part(full, "parameters")


def test_a_frozen_weight_has_no_product_for_its_gradient() -> None:
    full, lora = planned(), planned(method="lora")
    assert lora.compute.flops_per_token == pytest.approx(2 / 3 * full.compute.flops_per_token, rel=0.12)
    assert lora.compute.flops_per_token_executed < 0.8 * full.compute.flops_per_token_executed


def test_qlora_is_nf4_with_quantized_scales_and_the_rest_in_float32() -> None:
    config = planned(method="qlora").config
    assert (config.quantization, config.double_quantization, config.upcast) == ("nf4", True, "all")
    assert (config.lora_targets, config.adapter_dtype) == ("q_proj,v_proj", "float32")


def test_whole_modules_are_copied_after_the_base_was_cast() -> None:
    whole = {"method": "qlora", "modules_to_save": "lm_head"}
    cast, kept = planned(**whole), planned(**whole, upcast="off")
    more = part(cast, "optimizer state") - part(kept, "optimizer state")
    assert more == pytest.approx(32000 * 512 * 2 * (4 - 2) / 2**20)  # two moments, of 4 bytes instead of 2


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"method": "lora", "compile": True}, "compile"),
        ({"method": "lora", "trainer": "nanogpt", "model_type": "gpt2", "intermediate_size": 2048}, "method"),
        ({"quantization": "nf4"}, "quantization"),
        ({"method": "qlora", "quantization": "off"}, "quantization"),
        ({"method": "dora", "quantization": "nf4"}, "quantization"),
    ],
)
def test_what_is_not_described_is_refused(keys: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as caught:
        load(overrides=overrides(**(SMALL | keys)))
    assert [problem.where.partition("=")[0] for problem in caught.value.problems] == [f"--{where}"]


def test_adapters_of_experts_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        load("mistralai/Mixtral-8x7B-v0.1", overrides(method="lora", lora_targets="all-linear"))
    assert [problem.where for problem in caught.value.problems] == ["--lora_targets=all-linear"]


MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


def test_experts_that_are_modules_have_adapters() -> None:
    config = load(
        MIXTRAL, overrides(method="lora", lora_rank=8, lora_targets="w1,w2,w3", transformers_version="4.57")
    ).config
    adapters = [math.prod(shape) for name, shape in parameters(config) if ".lora_" in name]
    assert sum(adapters) == 32 * 8 * 3 * (4096 + 14336) * config.lora_rank


def test_experts_that_are_modules_cannot_be_compiled() -> None:
    with pytest.raises(InputError) as caught:
        load(MIXTRAL, overrides(compile=True, transformers_version="4.57"))
    assert [problem.where for problem in caught.value.problems] == ["--compile=True"]


def test_bitsandbytes_quantizes_experts_before_transformers_5_only() -> None:
    later, before = (
        part(
            plan(load(MIXTRAL, overrides(method="qlora", upcast="off", transformers_version=each)), "H200"),
            "parameters",
        )
        for each in ("5.5", "4.57")
    )
    experts = 32 * 8 * 3 * 4096 * 14336
    assert (later - before) * 2**20 == pytest.approx(experts * (2 - 0.5 - 1 / 64), rel=1e-3)


@pytest.mark.slow
def test_fit_offers_adapters_where_a_whole_model_does_not_fit() -> None:
    found = fit(load("Qwen/Qwen3-4B", overrides(batch_size=2, block_size=512)), "RTX 4070")
    assert found.best is not None
    chosen = found.options[found.best]
    assert chosen.plan.config.method in ("lora", "qlora") and chosen.fits
    assert chosen.plan.config.n_layer == found.now.config.n_layer


@pytest.mark.slow
def test_fit_of_a_fine_tuning_keeps_the_model() -> None:
    asked = overrides(batch_size=2, block_size=32768, method="qlora", lora_rank=16)
    found = fit(load("Qwen/Qwen3-1.7B", asked), "RTX 4070")
    assert {(option.plan.config.n_layer, option.plan.config.n_embd) for option in found.options} == {(28, 2048)}
    assert found.best is not None and found.options[found.best].fits
    assert not any(option.plan.config.compile for option in found.options)


def test_a_target_that_no_layer_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        planned(method="lora", lora_targets="q_prj, v_proj, mlp.up_proj")
    assert [(problem.found, problem.nearest) for problem in caught.value.problems] == [("q_prj", "q_proj")]
