"""`custom`: a card by its numbers, and every wrong number named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.devices import custom, find
from oomph.errors import InputError


def test_an_unknown_card_by_numbers_has_them_and_the_rules_for_the_rest() -> None:
    device = custom("RTX 9999", mib=20000, tflops=100, gbs=800, watts=300)
    assert (device.name, device.memory_mib, device.usable_mib) == ("RTX 9999", 20000, 20000 - 380)
    assert (device.peak_tflops("bfloat16"), device.bandwidth_gbs, device.watts) == (100, 800, 300)
    assert device.peak_tflops("float32") == 50


def test_what_is_not_given_stays_unknown() -> None:
    device = custom(mib=8000)
    assert device.peak_tflops("bfloat16") is None
    assert device.bandwidth_gbs is None and device.watts is None


def test_numbers_replace_those_of_a_known_card() -> None:
    device, known = custom("4070", watts=150, tflops=60), find("4070")
    assert (device.watts, device.tflops_bf16, device.gemm_tflops_high) == (150, 60, None)
    assert (device.name, device.memory_mib, device.bandwidth_gbs) == (known.name, known.memory_mib, known.bandwidth_gbs)
    assert device.tflops_tf32 == known.tflops_tf32
    assert "as given" in device.source


def test_memory_decides_which_card_of_a_name_is_meant() -> None:
    assert custom("3080", mib="12288").name == "GeForce RTX 3080 12GB"


def test_every_wrong_number_is_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        custom("RTX 9999", mib=0, tflops="fast", gbs=float("nan"), watts=-1)
    assert [problem.where for problem in caught.value.problems] == [
        "--gpu_mib",
        "--gpu_tflops",
        "--gpu_gbs",
        "--gpu_watts",
        "gpu",
    ]


def test_an_unknown_card_needs_its_memory() -> None:
    with pytest.raises(InputError, match="--gpu_mib"):
        custom(tflops=100)


def test_an_old_compute_capability_means_no_bfloat16() -> None:
    assert custom(mib=8000, compute_capability=7.5).has_bf16 is False


@given(*[st.one_of(st.none(), st.floats(), st.text(max_size=8))] * 4)
def test_any_numbers_give_a_device_or_an_input_error(mib: object, tflops: object, gbs: object, watts: object) -> None:
    try:
        device = custom("nobody's card", mib=mib, tflops=tflops, gbs=gbs, watts=watts)  # type: ignore[arg-type]
    except InputError:
        return
    assert 0 <= device.usable_mib <= device.memory_mib
