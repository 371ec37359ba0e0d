"""Loading a model, and the hours of an epoch of samples of several lengths."""

from __future__ import annotations

from typing import Any

import pytest

from oomph.config import from_dict
from oomph.planning.plan import Plan, plan
from oomph.units import MIB

LLAMA = {
    "trainer": "hf", "model_type": "llama", "n_layer": 4, "n_head": 8, "n_embd": 1024, "intermediate_size": 2816,
    "vocab_size": 128256, "tie_weights": False, "batch_size": 2, "block_size": 1024, "dtype": "bfloat16",
}  # fmt: skip
TABLE = 128256 * 1024  # numbers of the embedding, and of the head
BLOCK = 4 * 1024**2 + 3 * 1024 * 2816


def made(**keys: Any) -> Plan:
    return plan(from_dict(LLAMA | keys), "RTX 4090")


def loaded(**keys: Any) -> tuple[float, float]:
    """Bytes on the card, without the process's own, and on the host."""
    found = made(**keys)
    assert found.loading is not None
    return (found.loading.card_mib - found.memory.context_mib) * MIB, found.loading.host_mib * MIB


def test_a_whole_model_is_on_the_host_before_the_card_has_it() -> None:
    card, host = loaded()
    assert card == host == pytest.approx(4 * (2 * TABLE + 4 * BLOCK), rel=1e-3)


def test_a_quantized_base_goes_to_the_card_a_tensor_at_a_time() -> None:
    card, host = loaded(method="qlora", upcast="off")
    assert host == pytest.approx(2 * TABLE)
    assert card == pytest.approx(2 * 2 * TABLE + 0.516 * 4 * BLOCK, rel=1e-2)


def test_casting_to_float32_has_both_copies_of_a_tensor() -> None:
    card, _ = loaded(method="qlora")
    assert card == pytest.approx(4 * TABLE + 2 * TABLE + 4 * TABLE + 0.516 * 4 * BLOCK, rel=1e-2)


def test_sfttrainer_loads_to_the_card_and_a_paged_state_is_the_hosts() -> None:
    _, host = loaded(trainer="trl")
    assert host == 4 * TABLE
    _, paged = loaded(trainer="trl", optimizer="paged_adamw")
    assert paged - host == pytest.approx(8 * (2 * TABLE + 4 * BLOCK), rel=1e-3)


def test_loading_is_in_the_json_and_not_of_models_made_from_nothing() -> None:
    assert made().to_dict()["loading"]["on_the_host"] is True
    assert "loading" not in plan("gpt2", "RTX 4090").to_dict()


def test_epochs_of_samples_are_steps() -> None:
    found = made(num_samples=1000, num_train_epochs=2, gradient_accumulation_steps=4)
    assert found.config.max_iters == 2 * 125
    assert made(num_samples=1000, max_iters=7).config.max_iters == 7


def test_the_peak_is_the_longest_batchs_and_the_time_the_means() -> None:
    longest, mean, short = made(), made(mean_length=256), made(block_size=256)
    assert mean.memory.total_mib == longest.memory.total_mib
    assert longest.time and mean.time and short.time
    assert mean.time.step_ms == short.time.step_ms < longest.time.step_ms
    assert mean.data.tokens_per_step == 2 * 256


def test_samples_of_a_batch_are_padded_to_its_longest_and_tokens_are_theirs() -> None:
    even = made(lengths="p0:200,max:600")  # two a batch: 400 in the mean, padded to 467
    padded, longest = made(block_size=467), made(block_size=600)
    assert even.memory.total_mib == longest.memory.total_mib
    assert even.time and padded.time
    assert even.time.step_ms == padded.time.step_ms
    assert even.data.tokens_per_step == 2 * 400
    assert even.compute.flops_per_token_executed > padded.compute.flops_per_token_executed  # padding is computed too
