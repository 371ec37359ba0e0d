"""Rates of cards: what limits them, told from the catalogue's figures."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph.devices.lookup import all_devices
from oomph.predict.clock import host_seconds, kernel_options
from oomph.predict.gpu_kernels import (
    BEST,
    INTEGERS_PER_CLOCK,
    LIKELY,
    WORST,
    KernelOptions,
    alignment_share,
    attention_seconds,
    bytes_per_s,
    flops_per_s,
    gemm_seconds,
    half_ratio,
    has_inline_ecc,
    op_seconds,
)
from oomph.step.ops import Kernel, Op, Phase

CONFIG = oomph.TrainConfig(dtype="bfloat16", torch_version="2.8")
CARDS = [device for device in all_devices() if device.kind == "cuda" and device.bandwidth_gbs]
cards = st.sampled_from(CARDS)


@given(cards)
def test_no_kernel_moves_more_than_the_memory_gives(card: oomph.Device) -> None:
    rates = [bytes_per_s(card, assume) for assume in (WORST, LIKELY, BEST)]
    assert rates == sorted(rates)
    assert 0 < rates[-1] < (card.bandwidth_gbs or 0) * 1e9


@given(cards, st.sampled_from(["bfloat16", "float16", "float32"]), st.booleans())
def test_best_likely_and_worst_rates_are_in_order(card: oomph.Device, dtype: str, allow_tf32: bool) -> None:
    rates = [flops_per_s(card, dtype, assume, allow_tf32) for assume in (WORST, LIKELY, BEST)]
    assert rates == sorted(rates)


def test_the_faster_the_memory_for_each_multiprocessor_the_smaller_the_share_that_kernels_reach() -> None:
    names = ("RTX A6000", "A100 SXM4 80GB", "H100 SXM5 80GB", "B200 SXM")
    found = [oomph.find_gpu(name) for name in names]
    shares = [bytes_per_s(card, LIKELY) / (card.bandwidth_gbs or 1) / 1e9 for card in found]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.85
    assert shares[-1] < 0.6


@pytest.mark.parametrize("name", ["L4", "L40", "A40", "A10G"])
def test_a_card_that_shows_fifteen_sixteenths_of_its_memory_checks_it_inline(name: str) -> None:
    assert has_inline_ecc(oomph.find_gpu(name))


@pytest.mark.parametrize("name", ["RTX A6000", "RTX 4070", "A100 SXM4 80GB", "H100 SXM5 80GB", "B200 SXM"])
def test_other_cards_do_not(name: str) -> None:
    assert not has_inline_ecc(oomph.find_gpu(name))


def test_a_board_with_little_power_may_fall_far_and_one_with_enough_does_not() -> None:
    starved, fed = (oomph.find_gpu(name) for name in ("L4", "RTX 4090"))
    assert half_ratio(starved, WORST) < 0.7 * half_ratio(starved, LIKELY)
    assert half_ratio(fed, WORST) > 0.8 * half_ratio(fed, LIKELY)


def test_one_measurement_is_not_taken_for_the_highest_of_many() -> None:
    card = oomph.find_gpu("RTX 4000 Ada")
    assert card.gemm_tflops_low == card.gemm_tflops_high
    assert half_ratio(card, LIKELY) < (card.gemm_tflops_low or 0) / (card.tflops_fp16 or 1) <= half_ratio(card, BEST)


@pytest.mark.parametrize("name", ["L4", "L40", "RTX 6000 Ada"])
def test_a_board_with_little_power_holds_the_lowest_rate_that_was_measured(name: str) -> None:
    card = oomph.find_gpu(name)
    assert (card.gemm_tflops_low or 0) < 0.75 * (card.gemm_tflops_high or 0)
    assert half_ratio(card, LIKELY) == pytest.approx((card.gemm_tflops_low or 0) / (card.tflops_fp16 or 1))
    assert half_ratio(card, WORST) < half_ratio(card, LIKELY) < half_ratio(card, BEST)


def test_an_odd_extent_is_slower_than_an_even_one_and_that_slower_than_a_multiple_of_eight() -> None:
    assert alignment_share(16384, 50257, 768) < alignment_share(16384, 50258, 768) < alignment_share(16384, 50304, 768)


def test_plain_float32_products_do_not_follow_the_tensor_cores_power_limit() -> None:
    """torch.matmul in float32 reaches 18 to 19 TFLOPS on an A100, 46 to 56 on an RTX 4090."""
    for name, low, high in (("A100 SXM4 80GB", 17, 19.5), ("RTX 4090", 46, 56)):
        assert low < flops_per_s(oomph.find_gpu(name), "float32", LIKELY, allow_tf32=False) / 1e12 < high


def test_a_kernel_takes_its_bytes_or_its_instructions_whichever_is_longer() -> None:
    card, program = oomph.find_gpu("A100 SXM4 80GB"), kernel_options(CONFIG)
    count, moved = 10**9, 5 * 10**9

    def seconds(kernel: Kernel, instructions: int = 0) -> float:
        op = Op("x", Phase.FORWARD, kernel=kernel, shape=(count, instructions), bytes_moved=moved)
        return op_seconds(op, card, program, LIKELY)

    assert seconds(Kernel.INTEGER, 1) == seconds(Kernel.POINTWISE)
    assert card.sm_count and card.boost_mhz
    fastest = count * 100 / (card.sm_count * INTEGERS_PER_CLOCK * card.boost_mhz * 1e6)
    assert fastest < seconds(Kernel.INTEGER, 100) < 1.5 * fastest


def test_attention_of_early_releases_is_slower() -> None:
    early, late = (kernel_options(msgspec.structs.replace(CONFIG, torch_version=version)) for version in ("2.0", "2.2"))
    assert early.attention_slowdown > late.attention_slowdown == 1.0


def test_attention_slows_down_with_a_power_limited_clock() -> None:
    flops = 4 * 64 * 16 * 12 * 1024 * 1025 // 2
    op = Op("sdpa", Phase.FORWARD, kernel=Kernel.ATTENTION, shape=(16, 12, 1024, 64), dtype="bfloat16", flops=flops)
    limited, program = oomph.find_gpu("L4"), kernel_options(CONFIG)
    free = msgspec.structs.replace(limited, gemm_tflops_low=121.0, gemm_tflops_high=121.0, watts=300.0)
    slower = half_ratio(free, LIKELY) / half_ratio(limited, LIKELY)
    seconds = [attention_seconds(op, card, program, LIKELY) for card in (limited, free)]
    assert seconds[0] / seconds[1] == pytest.approx(slower)


def test_the_first_releases_of_the_compiler_kept_the_host_busier() -> None:
    card = oomph.find_gpu("A100 SXM4 80GB")
    early, late = (msgspec.structs.replace(CONFIG, torch_version=version) for version in ("2.0", "2.8"))
    assert host_seconds(250, False, early, card, LIKELY) == 10 * host_seconds(250, False, late, card, LIKELY)


def test_nanogpt_cuts_its_batches_on_the_host_and_oomph_in_a_thread_beside_it() -> None:
    card = oomph.find_gpu("A100 SXM4 80GB")
    nanogpt, ours = (msgspec.structs.replace(CONFIG, trainer=trainer) for trainer in ("nanogpt", "oomph"))
    assert host_seconds(0, True, ours, card, LIKELY) == 0
    assert host_seconds(0, True, nanogpt, card, LIKELY) == pytest.approx(2 * CONFIG.batch_size * LIKELY.sample_host_s)
    assert host_seconds(0, False, nanogpt, card, LIKELY) == 0


def test_a_board_with_little_power_that_nobody_measured_is_taken_to_be_slower_than_one_with_enough() -> None:
    starved, fed = oomph.find_gpu("RTX 5000 Ada"), oomph.find_gpu("RTX A5500")
    assert starved.gemm_tflops_low is fed.gemm_tflops_low is None
    for assume in (BEST, LIKELY, WORST):
        assert half_ratio(starved, assume) < half_ratio(fed, assume)
        assert half_ratio(oomph.find_gpu("RTX 4090 Laptop"), assume) == half_ratio(fed, assume)


@pytest.mark.parametrize("name", ["T4", "V100 SXM2 16GB", "GTX 1080 Ti"])
def test_a_card_without_tf32_takes_float32_as_it_is_whatever_is_allowed(name: str) -> None:
    card = oomph.find_gpu(name)
    times = [
        oomph.plan(
            {"dtype": "float32", "compile": False, "n_layer": 1, "vocab_size": 50257, "allow_tf32": allowed}, card
        )
        for allowed in (True, False)
    ]
    first, second = (plan.time for plan in times)
    assert first is not None
    assert second is not None
    assert first.step_ms == second.step_ms


@pytest.mark.parametrize("name", ["T4", "V100 SXM2 16GB"])
def test_emulated_bfloat16_is_as_quick_as_it_was_measured(name: str) -> None:
    card = oomph.find_gpu(name)
    measured = (card.bf16_emulated_tflops or 0) * 1e12
    assert flops_per_s(card, "bfloat16", WORST, allow_tf32=True) < measured < flops_per_s(card, "bfloat16", BEST, True)
    assert flops_per_s(card, "bfloat16", LIKELY, allow_tf32=True) == pytest.approx(measured)


def test_plain_float32_products_of_a_board_with_little_power_lie_where_they_were_measured() -> None:
    """50.1 TFLOPS falling to 35.0 on an RTX 6000 Ada, 15.4 to 10.7 on an L4."""
    for name, low, high in (("RTX 6000 Ada", 35.0, 50.1), ("L4", 10.7, 15.4)):
        card = oomph.find_gpu(name)
        assert low < flops_per_s(card, "float32", LIKELY, allow_tf32=False) / 1e12 < high


def test_an_odd_number_of_tokens_is_no_odd_row() -> None:
    card = oomph.find_gpu("RTX 4090")
    options = KernelOptions(allow_tf32=False, attention_slowdown=1.0, pads=False, rows=4095)
    forward, scores = (1, 4095, 4096, 1024), (32, 4095, 4095, 128)
    seconds = [gemm_seconds(shape, "bfloat16", card, options, LIKELY) for shape in (forward, scores)]
    odd = [
        gemm_seconds(shape, "bfloat16", card, msgspec.structs.replace(options, rows=1), LIKELY)
        for shape in (forward, scores)
    ]
    assert seconds[0] < 0.5 * odd[0]
    assert seconds[1] == odd[1]
