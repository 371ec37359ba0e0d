"""How few cards would do."""

from __future__ import annotations

from typing import Any

import pytest

import oomph
from oomph.devices import Device
from oomph.fitting.several import MOST_CARDS, CardsOption, FewCards, few_cards

SMALL = {
    "trainer": "hf", "model_type": "llama", "n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 4000,
    "block_size": 256, "batch_size": 2, "max_iters": 1000,
}  # fmt: skip
LARGE = SMALL | {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 11008, "vocab_size": 32000}
CARD = oomph.find_gpu("A100 SXM4 80GB")


def fewest(config: dict[str, Any], card: Device = CARD, **limits: float) -> CardsOption:
    found = few_cards(config, cards=[card], **limits)
    assert len(found.options) == 1
    return found.options[0]


def test_one_card_is_enough_for_a_small_model() -> None:
    option = fewest(SMALL)
    assert (option.cards, option.does) == (1, True)


def test_a_model_that_one_card_does_not_hold_is_sharded_over_the_fewest_that_do() -> None:
    option = fewest(LARGE)
    assert option.cards > 1
    assert option.plan.config.parallel == "fsdp"
    half = oomph.plan(
        LARGE | {"world_size": option.cards // 2, "gradient_accumulation_steps": option.cards // 2, "batch_size": 1,
                 "parallel": "fsdp" if option.cards > 2 else "none", "checkpoint_layers": 32},
        CARD,
    )  # fmt: skip
    assert not half.memory.fits or half.memory.retries


def test_a_limit_of_hours_takes_more_cards() -> None:
    alone = fewest(SMALL)
    assert alone.plan.time is not None
    option = fewest(SMALL, hours=alone.plan.time.hours / 1.5)
    assert option.cards > alone.cards
    assert option.in_time


def test_a_program_that_was_told_no_accumulation_trains_as_many_tokens() -> None:
    def tokens(option: CardsOption) -> int:
        config = option.plan.config
        return config.max_iters * config.batch_size * config.gradient_accumulation_steps

    alone = fewest(SMALL)
    assert alone.plan.time is not None
    assert tokens(fewest(SMALL, hours=alone.plan.time.hours / 1.5)) == pytest.approx(tokens(alone), rel=0.01)


def test_what_costs_more_than_the_limit_does_not_do() -> None:
    option = fewest(SMALL, usd=1e-6)
    assert not option.in_budget
    assert not option.does


def test_a_batch_that_cannot_be_shared_out_stays_on_fewer_cards() -> None:
    found = few_cards(SMALL | {"batch_size": 1, "gradient_accumulation_steps": 2}, cards=[CARD], hours=1e-6)
    assert found.options[0].cards <= 2
    assert not found.fitting


def test_the_answer_is_sorted_and_named() -> None:
    found = few_cards(SMALL, cards=[CARD, oomph.find_gpu("RTX 4090")])
    assert [option.cards for option in found.options] == sorted(option.cards for option in found.options)
    assert f"1 × {found.options[0].device.name}" in found.verdict
    assert {option["gpu"] for option in found.to_dict()["options"]} == {CARD.name, "GeForce RTX 4090"}


def test_nothing_found_is_said() -> None:
    assert str(MOST_CARDS) in FewCards((), 3, None, None).verdict


def test_what_deepspeed_shares_is_neither_compiled_nor_sharded_another_way() -> None:
    keys = {"deepspeed": "zero3", "compile": False, "dtype": "bfloat16", "reduce_bucket_size": 10_000}
    config = fewest(LARGE | keys).plan.config
    assert (config.deepspeed, config.compile, config.parallel) == ("zero3", False, "none")
    assert config.world_size > 1
