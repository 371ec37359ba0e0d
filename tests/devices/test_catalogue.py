"""The catalogue: complete, sourced, and in agreement with NVIDIA's published rates."""

from __future__ import annotations

import pytest

from oomph.devices import Device, all_devices
from oomph.devices.device import RATES, context_by_rule, usable_by_rule
from oomph.devices.lookup import parse

DEVICES = all_devices()


def named(device: Device) -> str:
    return device.name


def test_names_are_unique() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)


@pytest.mark.parametrize("device", DEVICES, ids=named)
def test_each_device_has_a_source_and_possible_figures(device: Device) -> None:
    assert device.source
    assert 0 < device.usable_mib <= device.memory_mib
    assert 0 <= device.context_mib < 1000
    assert device.bandwidth_gbs is not None and 60 < device.bandwidth_gbs < 10_000
    low, high = device.gemm_tflops_low, device.gemm_tflops_high
    assert (low is None) == (high is None)
    assert low is None or high is None or low <= high
    assert (device.usd_per_hour_low or 0) <= (device.usd_per_hour_high or 0)
    assert device.kind != "cuda" or (device.watts and device.compute_capability and device.sm_count)


# Published peaks that stand up to 1.3 % apart from the rule at the listed clock; the published ones are kept.
PUBLISHED_APART = {"Tesla V100 PCIe 16GB", "Tesla V100 PCIe 32GB", "L20", "L40S"}


@pytest.mark.parametrize("device", [device for device in DEVICES if device.rate_class in RATES], ids=named)
def test_peaks_follow_the_published_rates_of_their_class(device: Device) -> None:
    assert device.rate_class and device.sm_count and device.boost_mhz
    rate = RATES[device.rate_class]
    clocks = device.sm_count * device.boost_mhz * 2 / 1e6
    share = 0.013 if device.name in PUBLISHED_APART else 0.005
    if rate.half:
        assert device.tflops_fp16 == pytest.approx(clocks * rate.half, rel=share, abs=0.05)
    if rate.tf32:
        assert device.tflops_tf32 == pytest.approx(clocks * rate.tf32, rel=share, abs=0.05)
    else:
        assert device.tflops_tf32 is None
    # Hopper and data-centre Blackwell clock their tensor cores lower than the rest; that clock is listed.
    if device.rate_class not in ("hopper", "bw_dc"):
        assert device.tflops_fp32 == pytest.approx(clocks * rate.fp32, rel=share, abs=0.05)


@pytest.mark.parametrize("device", [device for device in DEVICES if device.kind == "cuda"], ids=named)
def test_bfloat16_hardware_begins_with_compute_capability_8(device: Device) -> None:
    assert device.compute_capability is not None
    assert device.has_bf16 == (device.compute_capability >= 8.0)
    assert device.tflops_bf16 == (device.tflops_fp16 if device.has_bf16 else None)


def test_the_cards_of_known_runs_have_their_known_figures() -> None:
    by_name = {device.name: device for device in DEVICES}
    rtx_4070 = by_name["GeForce RTX 4070"]
    assert (rtx_4070.memory_mib, rtx_4070.usable_mib, rtx_4070.context_mib) == (12282, 11837, 240)
    assert (rtx_4070.tflops_bf16, rtx_4070.bandwidth_gbs, rtx_4070.watts) == (58.3, 504, 200)
    a4500 = by_name["RTX A4500"]
    assert (a4500.sm_count, a4500.memory_mib, a4500.bandwidth_gbs, a4500.watts) == (56, 20470, 640, 200)
    assert by_name["A10G"].tflops_bf16 == 70.0 and by_name["A10"].tflops_bf16 == 125


def test_usable_memory_by_rule_leaves_the_drivers_reserve() -> None:
    assert usable_by_rule(8192) == 7892
    assert usable_by_rule(24564) == 24564 - 467
    assert usable_by_rule(16384, "mps") == 10922


def test_context_by_rule_grows_with_multiprocessors_and_is_less_on_turing() -> None:
    assert context_by_rule(46) == 244
    assert context_by_rule(46, "Turing") == 174
    assert context_by_rule(None, kind="cpu") == 0


def test_a_row_with_several_memory_sizes_becomes_a_device_for_each() -> None:
    table = "[x] Apple, mps, Apple GPU  # why\n"
    table += (
        "Chip | - | 8 | - | 8192/16384 | - | - | 68 | 2.6 | 2.6 | - | 2.6 | - | - | - | - | - | -\n    from: test\n"
    )
    assert [(device.name, device.memory_mib) for device in parse(table)] == [("Chip 8GB", 8192), ("Chip 16GB", 16384)]


def test_peak_follows_the_dtype_and_what_the_hardware_does_with_it() -> None:
    by_name = {device.name: device for device in DEVICES}
    a100, t4, gtx = by_name["A100 SXM4 80GB"], by_name["Tesla T4"], by_name["GeForce GTX 1080"]
    assert a100.peak_tflops("bfloat16") == 312
    assert a100.peak_tflops("float32") == a100.peak_tflops("tf32") == 156
    assert a100.peak_tflops("float32", allow_tf32=False) == 19.5
    assert t4.peak_tflops("float16") == 65
    assert t4.peak_tflops("bfloat16") == 2.3  # emulated, as measured
    assert t4.peak_tflops("float32", allow_tf32=True) == 8.1  # Turing has no TF32
    assert by_name["TITAN RTX"].peak_tflops("bfloat16") == pytest.approx(13.05)
    assert gtx.peak_tflops("bfloat16") == pytest.approx(4.45)
