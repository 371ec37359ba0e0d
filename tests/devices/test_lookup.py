"""`find`: what people type and drivers print, and never the wrong card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.devices import Device, all_devices, find
from oomph.errors import InputError

NAMES = [(name, device.name) for device in all_devices() for name in (device.name, *device.aliases)]


@pytest.mark.parametrize(("typed", "expected"), NAMES)
def test_each_name_and_alias_finds_its_own_device(typed: str, expected: str) -> None:
    assert find(typed).name == find(typed.lower()).name == expected


@pytest.mark.parametrize("device", all_devices(), ids=lambda device: device.name)
def test_what_the_driver_prints_finds_the_device(device: Device) -> None:
    assert find(f"NVIDIA {device.name}", device.memory_mib) == find(device.name)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("4070", "GeForce RTX 4070"),
        ("rtx4070", "GeForce RTX 4070"),
        ("RTX-4070", "GeForce RTX 4070"),
        ("NVIDIA GeForce RTX 4070", "GeForce RTX 4070"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "GeForce RTX 4070 Laptop GPU"),
        ("4070 mobile", "GeForce RTX 4070 Laptop GPU"),
        ("4070 Max-Q", "GeForce RTX 4070 Laptop GPU"),
        ("4070ti", "GeForce RTX 4070 Ti"),
        ("4070s", "GeForce RTX 4070 SUPER"),
        ("4070 Ti SUPER", "GeForce RTX 4070 Ti SUPER"),
        ("rtx 4070 12 GB", "GeForce RTX 4070"),
        ("4060 ti 16", "GeForce RTX 4060 Ti 16GB"),
        ("3080 12gb", "GeForce RTX 3080 12GB"),
        ("3060", "GeForce RTX 3060 12GB"),
        ("3060 8gb", "GeForce RTX 3060 8GB"),
        ("4090d", "GeForce RTX 4090 D"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("H100 96GB", "H100 SXM5 96GB"),
        ("A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("a100 40gb", "A100 SXM4 40GB"),
        ("A100 80GB PCIe", "A100 PCIe 80GB"),
        ("v100 16gb", "Tesla V100 SXM2 16GB"),
        ("Tesla T4", "Tesla T4"),
        ("t4 16gb", "Tesla T4"),
        ("a40", "A40"),
        ("a4000", "RTX A4000"),
        ("l4", "L4"),
        ("l40", "L40"),
        ("L40S 48GB", "L40S"),
        ("6000 ada", "RTX 6000 Ada Generation"),
        ("quadro rtx 6000", "Quadro RTX 6000"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ("titan rtx", "TITAN RTX"),
        ("7900xtx", "Radeon RX 7900 XTX"),
        ("m2 max 32", "Apple M2 Max 32GB"),
    ],
)
def test_what_people_type_finds_the_card_they_mean(typed: str, expected: str) -> None:
    assert find(typed).name == expected


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        ("3080", {"GeForce RTX 3080 10GB", "GeForce RTX 3080 12GB"}),
        ("NVIDIA GeForce RTX 4060 Ti", {"GeForce RTX 4060 Ti 8GB", "GeForce RTX 4060 Ti 16GB"}),
        ("a100", {"A100 SXM4 40GB", "A100 SXM4 80GB", "A100 PCIe 40GB", "A100 PCIe 80GB"}),
        ("h100", {"H100 SXM5 80GB", "H100 SXM5 96GB", "H100 PCIe 80GB", "H100 NVL 94GB"}),
        ("rtx 6000", {"Quadro RTX 6000", "RTX 6000 Ada Generation"}),
        ("m1", {"Apple M1 8GB", "Apple M1 16GB"}),
    ],
)
def test_a_name_of_several_cards_is_refused_with_all_of_them(typed: str, candidates: set[str]) -> None:
    with pytest.raises(InputError) as caught:
        find(typed)
    allowed = caught.value.problems[0].allowed or ""
    listed = {device.name for device in all_devices() if repr(device.name) in allowed}
    assert listed == candidates
    assert {find(name).name for name in listed} == candidates
    assert "--gpu_mib" in allowed


@pytest.mark.parametrize(
    ("typed", "memory_mib", "expected"),
    [
        ("NVIDIA GeForce RTX 3080", 10240, "GeForce RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 3080", 12288, "GeForce RTX 3080 12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "GeForce RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 2060", 12288, "GeForce RTX 2060 12GB"),
        ("v100", 32510, "Tesla V100 SXM2 32GB"),
    ],
)
def test_the_memory_that_the_driver_shows_decides(typed: str, memory_mib: int, expected: str) -> None:
    device = find(typed, memory_mib)
    assert device.name == expected
    assert device.memory_mib == memory_mib


def test_an_old_drivers_smaller_total_keeps_the_usable_memory_seen() -> None:
    assert find("RTX 3090", 24268).usable_mib == find("RTX 3090").usable_mib


def test_a_card_with_other_memory_than_sold_gets_the_usable_memory_by_rule() -> None:
    device = find("RTX 2080 Ti", 22528)
    assert (device.memory_mib, device.usable_mib) == (22528, 22528 - 428)


def test_a_socket_left_open_is_chosen_and_said() -> None:
    assert "A100 PCIe 80GB" in find("a100 80gb").notes[-1]


@pytest.mark.parametrize("typed", ["a4", "407", "l", "4070 x", "gtx 4070", "rtx 1080", "h10", "nvidia", "16gb", ""])
def test_part_of_a_name_or_a_wrong_word_matches_nothing(typed: str) -> None:
    with pytest.raises(InputError, match="unknown device"):
        find(typed)


def test_an_unknown_card_is_told_the_nearest_and_how_to_give_numbers() -> None:
    with pytest.raises(InputError) as caught:
        find("RTX 4071")
    problem = caught.value.problems[0]
    assert problem.nearest == "'GeForce RTX 4070'"
    assert all(
        option in (problem.allowed or "") for option in ("--gpu_mib", "--gpu_tflops", "--gpu_gbs", "--gpu_watts")
    )


def test_a_known_card_with_a_memory_it_is_not_sold_with_is_refused() -> None:
    with pytest.raises(InputError, match=r"'GeForce RTX 4070' \(12282 MiB\)"):
        find("4070 16gb")


@given(
    st.one_of(
        st.text(max_size=40), st.from_regex(r"(rtx|a|h|m|tesla|titan)? ?[0-9]{0,5} ?(ti|gb|max|s)?", fullmatch=True)
    )
)
def test_any_text_finds_a_device_or_says_what_is_wrong(text: str) -> None:
    try:
        assert find(text) is not None
    except InputError as error:
        assert error.problems


@given(st.integers(min_value=1, max_value=10**6))
def test_a_memory_total_given_is_the_memory_returned(memory_mib: int) -> None:
    device = find("RTX 3080", memory_mib)
    assert device.memory_mib == memory_mib
    assert 0 <= device.usable_mib <= memory_mib
