"""The answers people came for: run D, the day of guessed widths, and a clear no."""

from __future__ import annotations

import msgspec
import pytest

import oomph
from oomph import config as configs
from oomph import devices
from oomph.devices import find
from oomph.fitting.cards import which_cards
from oomph.fitting.fit import WORTH_A_CHANGE, fit
from oomph.fitting.result import KINDS, Fit, Option
from oomph.fitting.space import changes_between, different_rows, ladders, programs
from oomph.step import build as steps

HISTORY = {
    "n_layer": 12, "n_head": 12, "block_size": 1024, "batch_size": 16, "gradient_accumulation_steps": 32,
    "max_iters": 20000,
}  # fmt: skip
SMALL_RUN = HISTORY | {"n_layer": 2, "n_head": 4, "n_embd": 256}
CONTRACT = {
    "changes", "trainer", "kind", "fits", "total_mib", "saved_mib", "tokens_per_s", "hours", "effect", "reason",
}  # fmt: skip


def option_with(found: Fit, trainer: str = "nanogpt", **changes: object) -> Option:
    """The option that makes exactly those changes."""
    for option in found.options:
        if option.trainer == trainer and option.changes == changes:
            return option
    raise AssertionError(f"no option {changes}: {[option.changes for option in found.options]}")


def test_run_d_does_not_fit_as_it_is_and_fits_at_8_by_64_or_better(run_d: Fit) -> None:
    assert run_d.now.memory.fits is False
    best = run_d.chosen
    assert best is not None
    assert (best.trainer, best.patched, best.kind, best.sequences) == ("nanogpt", False, "same", 512)
    assert best.plan.config.batch_size >= 8
    assert "8 × 64" in run_d.verdict or "batch_size" in run_d.verdict


def test_the_four_options_of_the_usual_advice_are_all_there_with_figures(run_d: Fit) -> None:
    halves = [(8, 64), (4, 128), (2, 256)]
    usual = [option_with(run_d, batch_size=size, gradient_accumulation_steps=steps) for size, steps in halves]
    usual += [option_with(run_d, batch_size=8), option_with(run_d, n_layer=9), option_with(run_d, n_head=8, n_embd=512)]
    usual += [option_with(run_d, compile=False)]
    for option in usual:
        assert option.plan.memory.total_mib > 0
        assert option.tokens_per_s
        assert option.effect
        assert option.reason
    assert [option.kind for option in usual] == ["same"] * 3 + ["different"] * 3 + ["same"]
    assert usual[3].sequences == 256


def test_oomph_runs_the_batch_of_16_unchanged_and_the_report_says_why(run_d: Fit) -> None:
    unchanged = [
        option
        for option in run_d.options
        if option.trainer == "oomph" and option.name == "as it is" and option.plan.config.batch_size == 16
    ]
    assert [option.fits for option in unchanged] == [True]
    assert any("oomph train runs 16 × 32 unchanged" in sentence and "logits" in sentence for sentence in run_d.why)


def test_a_step_that_returns_the_loss_alone_saves_two_logits_of_nanogpts_memory(run_d: Fit) -> None:
    patched = option_with(run_d, return_logits=False)
    logits_mib = 16 * 1024 * 50304 * 2 / 2**20
    assert patched.patched
    assert patched.fits
    assert patched.saved_mib > 1.5 * logits_mib


def test_options_are_ranked_fitting_first_then_by_kind_then_by_speed(run_d: Fit) -> None:
    order = [(not option.fits, KINDS.index(option.kind), -(option.tokens_per_s or 0)) for option in run_d.options]
    assert order == sorted(order)


def test_the_safest_option_has_the_most_room_among_those_nearly_as_fast(run_d: Fit) -> None:
    assert run_d.best is not None
    assert run_d.safest is not None
    best, safest = run_d.options[run_d.best], run_d.options[run_d.safest]
    assert (safest.plan.memory.headroom_mib or 0) >= (best.plan.memory.headroom_mib or 0)
    assert (safest.tokens_per_s or 0) >= 0.95 * (best.tokens_per_s or 0)


def test_no_two_options_are_the_same_setting(run_d: Fit) -> None:
    settings = [option.plan.config for option in run_d.options]
    assert len(set(settings)) == len(settings)


def test_the_json_has_every_key_of_the_contract(run_d: Fit) -> None:
    result = run_d.to_dict()
    assert {"now", "options", "best", "safest", "evaluated"} <= set(result)
    assert result["evaluated"] >= 2000
    assert all(set(option) >= CONTRACT for option in result["options"])
    assert result["now"]["memory"]["fits"] is False
    msgspec.json.encode(result)


@pytest.mark.slow
@pytest.mark.parametrize("width", [384, 512, 576])  # 768 is run D
def test_each_width_of_the_day_of_guesses_gets_its_answer_from_one_command(width: int) -> None:
    found = fit(HISTORY | {"n_embd": width, "n_head": width // 64}, "RTX 4070")
    assert found.chosen is not None
    assert found.chosen.kind == "same"
    assert found.chosen.plan.config.n_embd == width
    assert found.chosen.sequences == 512


def test_heads_of_42_are_warned_about() -> None:
    found = fit(SMALL_RUN | {"n_embd": 504, "n_head": 12}, "RTX 4070")
    assert any("heads of 42" in note for note in found.now.notes)


def test_what_fits_as_it_is_is_left_alone_unless_a_change_pays() -> None:
    found = fit(SMALL_RUN, "RTX 3090")
    assert found.now.memory.fits
    assert found.chosen is not None
    now = found.now.time
    assert now is not None
    if found.chosen.changes:
        assert (found.chosen.tokens_per_s or 0) > (1 + WORTH_A_CHANGE) * now.tokens_per_s
    else:
        assert "fits as it is" in found.verdict


SMALL_ON_LITTLE = ({"n_layer": 3, "n_embd": 1024, "n_head": 16, "vocab_size": 8192}, 1000)


@pytest.mark.parametrize(
    ("config", "card"), [SMALL_ON_LITTLE, pytest.param("gpt2-xl", "RTX 2060 6GB", marks=pytest.mark.slow)]
)
def test_nothing_fits_is_a_clear_no_with_the_gap_and_the_nearest_that_would(
    config: dict[str, int] | str, card: int | str
) -> None:
    device = card if isinstance(card, str) else devices.custom("small", mib=card, tflops=20.0, gbs=300.0, watts=None)
    found = fit(config, device)
    assert found.verdict.startswith("No")
    assert "too many" in found.verdict
    assert all(option.kind != "same" for option in found.options if option.fits)
    nearest = found.chosen
    assert nearest is not None
    assert nearest.fits
    assert any("the nearest that fits" in sentence for sentence in found.why)
    assert any("smallest card for the same training is, at its leanest" in sentence for sentence in found.why)
    thin = nearest.plan.memory.high_mib > (nearest.plan.memory.capacity_mib or 0)
    assert thin == any("within what a prediction may miss" in sentence for sentence in found.why)


def test_what_compile_saves_is_said_of_the_batch_that_was_asked_for(run_d: Fit) -> None:
    assert any("switching compile off does not save memory at 16 × 32" in sentence for sentence in run_d.why)


def test_bits_of_a_format_are_told_from_bits_of_a_number(run_d: Fit) -> None:
    coarse = next(option for option in run_d.options if option.name == "bfloat16 throughout")
    assert "8 significant bits" in coarse.effect


@pytest.mark.parametrize(
    ("size", "name", "share"), [(3, "a smaller batch", "1/3 of the tokens"), (4, "half the batch", "half the tokens")]
)
def test_an_odd_micro_batch_is_not_said_to_be_halved(size: int, name: str, share: str) -> None:
    found = programs(configs.as_loaded(SMALL_RUN | {"batch_size": size}), find("RTX 4070"))
    smaller = next(different_rows(found["nanogpt"]))
    assert (smaller.name, smaller.changes) == (name, {"batch_size": size // 2})
    assert share in smaller.effect


def test_the_verdict_on_a_late_run_says_its_hours_once() -> None:
    small = devices.custom("small", mib=2500, tflops=20.0, gbs=300.0, watts=None)
    late = fit(SMALL_RUN, small, hours=1)
    assert late.verdict.startswith("Too slow: nanoGPT lacks")
    assert late.verdict.count(f"{late.chosen.hours if late.chosen else 0:,.1f} h") == 1


def test_reserved_memory_is_kept_free() -> None:
    device = find("RTX 4070")
    need = oomph.plan(SMALL_RUN, device).memory.total_mib
    tight = fit(SMALL_RUN, device, reserve_mib=device.usable_mib - need / 2)
    assert tight.chosen is not None
    assert tight.chosen.plan.memory.total_mib <= need / 2
    assert tight.chosen.sequences == 512


def test_tokens_set_the_length_of_the_run_and_hours_limit_it() -> None:
    short = fit(SMALL_RUN, "RTX 4070", tokens=1e8, hours=24)
    assert short.now.config.max_iters == -(-(10**8) // 524_288)
    assert short.chosen is not None
    assert (short.chosen.hours or 0) <= 24
    late = fit(SMALL_RUN, "RTX 4070", hours=1)
    assert late.verdict.startswith("Too slow")
    assert late.chosen is not None
    assert late.chosen.kind == "same"
    assert any("of the way" in sentence for sentence in late.why)


def test_a_config_written_for_oomph_is_offered_to_nanogpt_without_what_nanogpt_lacks() -> None:
    ours = SMALL_RUN | {"trainer": "oomph", "loss_chunk": 1024, "checkpoint_layers": 1}
    found = fit(ours, "RTX 4070")
    assert found.now.config.trainer == "oomph"
    for option in found.options:
        if option.trainer == "nanogpt":
            assert (option.plan.config.loss_chunk, option.plan.config.checkpoint_layers) == (0, 0)


def test_which_card_would_do_names_the_smallest_and_simulates_each() -> None:
    cards = [oomph.find_gpu(name) for name in ("RTX 3090", "RTX 4070", "RTX 2060 6GB")]
    found = which_cards(HISTORY | {"n_embd": 768}, cards=cards)
    by_name = {card.device.name: card for card in found.cards}
    assert by_name["GeForce RTX 3090"].unchanged
    assert not by_name["GeForce RTX 4070"].unchanged
    assert all(card.plan.memory.fits for card in found.fitting)
    assert found.fitting[0].device.usable_mib == min(card.device.usable_mib for card in found.fitting)
    assert found.fitting[0].device.name in found.verdict


def test_a_change_of_the_arithmetic_is_searched_too_and_the_star_is_its_fastest() -> None:
    config = {
        "n_layer": 2, "n_embd": 1024, "n_head": 16, "vocab_size": 8192, "batch_size": 4, "block_size": 512,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    device = devices.custom("small", mib=1100, tflops=20.0, gbs=300.0, watts=None)
    found = fit(config, device)
    best = found.chosen
    assert best is not None
    assert (best.kind, best.plan.config.optimizer, best.plan.config.autocast) == ("nearly", "adamw8bit", True)
    size, steps = best.plan.config.batch_size, best.plan.config.gradient_accumulation_steps
    leanest = msgspec.structs.replace(
        best.plan.config, batch_size=1, gradient_accumulation_steps=size * steps, checkpoint_layers=2, compile=False
    )
    other = oomph.plan(leanest, device)
    assert other.time is not None
    assert (best.tokens_per_s or 0) > other.time.tokens_per_s


def test_the_safest_fits_even_where_the_prediction_misses(run_d: Fit) -> None:
    assert run_d.safest is not None
    memory = run_d.options[run_d.safest].plan.memory
    assert memory.high_mib <= (memory.capacity_mib or 0)


def test_where_no_setting_of_the_program_is_safe_the_best_is_one_of_the_next_program_that_is() -> None:
    config = SMALL_RUN | {"batch_size": 1, "gradient_accumulation_steps": 4}
    roomy = devices.custom("tight", mib=4000, tflops=20.0, gbs=300.0, watts=None)
    need = oomph.plan(config | {"expandable_segments": True}, roomy).memory.total_mib
    found = fit(config, msgspec.structs.replace(roomy, usable_mib=int(need) + 12))
    assert found.chosen is not None and found.chosen.patched
    assert found.chosen.plan.memory.high_mib <= (found.chosen.plan.memory.capacity_mib or 0)
    assert not any(
        option.plan.memory.high_mib <= (option.plan.memory.capacity_mib or 0)
        for option in found.options
        if option.trainer == "nanogpt" and not option.patched and option.kind == "same"
    )


def test_an_effective_batch_with_a_large_prime_in_it_asks_for_no_endless_simulation() -> None:
    program = programs(configs.as_loaded(SMALL_RUN | {"gradient_accumulation_steps": 1_000_003}), find("RTX 4070"))
    chunked = [ladder.config for ladder in ladders(program["oomph"]) if ladder.config.loss_chunk]
    largest = max(chunked, key=lambda config: config.batch_size * config.block_size // (config.loss_chunk or 1))
    assert largest.batch_size == 16 * 1_000_003
    assert sum(len(section.ops) for section in steps.build(largest).sections) < 1000


def test_without_a_model_the_cards_are_told_for_the_default_one_and_the_answer_says_so() -> None:
    cards = [oomph.find_gpu("RTX 3090")]
    assert "nanoGPT's default: 12 layers × 768" in which_cards(None, cards=cards, tokens=1e9).verdict
    assert "default" not in which_cards(SMALL_RUN, cards=cards).verdict


def test_keys_that_follow_from_width_and_heads_are_no_changes_of_their_own() -> None:
    shapes = [{"n_head": 6, "n_embd": 384}, {"n_head": 12, "n_embd": 768}]
    shapes.append({**shapes[-1], "num_key_value_heads": 3})
    before, after, grouped = (oomph.plan({"trainer": "oomph", **shape}, "RTX 4070").config for shape in shapes)
    assert changes_between(before, after) == {"n_head": 12, "n_embd": 768}
    assert changes_between(after, grouped) == {"num_key_value_heads": 3}


SMALL_LLAMA = {
    "trainer": "hf", "model_type": "llama", "n_layer": 2, "n_embd": 1024, "n_head": 16, "intermediate_size": 4096,
    "vocab_size": 1024, "block_size": 64, "batch_size": 1,
}  # fmt: skip


def card(mib: float) -> devices.Device:
    return devices.custom(None, mib=mib, tflops=50, gbs=500, watts=None)


def test_bfloat16_throughout_and_8_bit_adam_are_taken_together_where_neither_is_enough() -> None:
    tight, roomier = fit(SMALL_LLAMA, card(880)), fit(SMALL_LLAMA, card(950))
    assert tight.chosen is not None
    assert (tight.chosen.plan.config.autocast, tight.chosen.plan.config.optimizer) == (False, "adamw8bit")
    assert tight.chosen.kind == "nearly"
    both = [each for each in roomier.options if not each.plan.config.autocast and "optimizer" in each.changes]
    assert both == []


@pytest.mark.parametrize("trainer", ["hf", "torch"])
def test_transformers_models_checkpoint_all_blocks_or_none_and_then_keep_no_cache(trainer: str) -> None:
    shape = {"n_layer": 3, "n_embd": 512, "n_head": 8, "intermediate_size": 2048, "batch_size": 4}
    options = fit(SMALL_LLAMA | shape | {"trainer": trainer, "transformers_version": "4.57"}, card(1000)).options
    assert {each.plan.config.checkpoint_layers for each in options} >= {0, 3}
    for each in options:
        config = each.plan.config
        assert config.checkpoint_layers in (0, config.n_layer)
        assert config.use_cache == (not config.checkpoint_layers and not config.compile)
