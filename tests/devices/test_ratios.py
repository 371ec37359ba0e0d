"""What `oomph check --save` keeps: written whole, read by later plans, and never a reason to crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import oomph
from oomph.devices import calibrated, ratios
from oomph.devices.ratios import Ratios

CARD = oomph.find_gpu("RTX 4070")
FOUND = Ratios(date="2026-11-16", of="12 layers × 768", torch="2.13.0", time=1.07, context_mib=300.0, watts=171.0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_later_plan_uses_what_was_measured_and_says_when() -> None:
    before = oomph.plan("gpt2", "RTX 4070")
    ratios.save(CARD, True, FOUND)
    after = oomph.plan("gpt2", "RTX 4070")
    assert before.time is not None
    assert after.time is not None
    assert after.energy is not None
    for name in ("step_ms", "low_ms", "high_ms"):
        assert getattr(after.time, name) == pytest.approx(1.07 * getattr(before.time, name))
    assert after.memory.context_mib == 300
    assert after.memory.allocated_mib == before.memory.allocated_mib
    assert after.energy.watts == 171
    assert any(
        "2026-11-16" in note and "compiled steps × 1.07" in note and "oomph check" in note for note in after.notes
    )


def test_what_an_optimizer_imports_stays_apart_from_what_was_measured() -> None:
    cpu = replace(CARD, kind="cpu", name="a CPU", threads=2, optimizer_mib=78)
    ratios.save(cpu, True, FOUND)
    assert (calibrated(cpu).context_mib, calibrated(cpu).optimizer_mib) == (300, 78)


def test_another_card_and_a_plan_that_is_told_so_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios.save(CARD, True, FOUND)
    other = oomph.find_gpu("RTX 4090")
    assert calibrated(other) == other
    monkeypatch.setenv("OOMPH_RATIOS", "0")
    assert calibrated(CARD) == CARD


def test_saving_again_replaces_one_device_and_keeps_the_others() -> None:
    other = oomph.find_gpu("RTX 4090")
    ratios.save(CARD, True, FOUND)
    ratios.save(other, True, FOUND)
    path = ratios.save(CARD, True, Ratios(date="2026-11-17", of="gpt2", torch="2.13.0", time=0.9))
    assert ratios.load()[f"{other.name}, compiled"] == FOUND
    assert ratios.load()[f"{CARD.name}, compiled"].time == 0.9
    assert [file.name for file in path.parent.iterdir()] == ["ratios.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 2, "devices": {}}', b"\xff\xfe", b'{"version": 1}']
)
def test_a_damaged_file_is_a_note_in_a_plan_and_an_error_for_who_would_add_to_it(content: bytes) -> None:
    path = ratios.ratios_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    plan = oomph.plan("gpt2", "RTX 4070")
    assert any("ratios.json" in note and "delete it" in note for note in plan.notes)
    with pytest.raises(oomph.InputError, match="delete it"):
        ratios.save(CARD, True, FOUND)
    assert path.read_bytes() == content


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.builds(Ratios, st.text(), st.text(), st.text(), *3 * [st.none() | st.floats(allow_nan=False)]))
def test_whatever_was_kept_a_plan_stays_a_plan(found: Ratios) -> None:
    ratios.save(CARD, True, found)
    time = oomph.plan("gpt2", "RTX 4070").time
    assert time is not None
    assert 0 < time.low_ms <= time.step_ms <= time.high_ms < float("inf")


def test_a_cpu_with_other_threads_is_another_device() -> None:
    known = {"name": "a CPU", "kind": "cpu", "vendor": "", "arch": "", "has_bf16": False}
    sizes = {"memory_mib": 1, "usable_mib": 1, "context_mib": 0}
    one, two = (oomph.Device(**known, **sizes, threads=threads) for threads in (1, 2))  # type: ignore[arg-type]
    ratios.save(two, True, FOUND)
    assert calibrated(two).compiled_ratio == 1.07
    assert calibrated(one) == one


def test_eager_and_compiled_steps_are_kept_apart() -> None:
    ratios.save(CARD, True, FOUND)
    assert (calibrated(CARD).eager_ratio, calibrated(CARD).compiled_ratio) == (1.07, 1.07)
    ratios.save(CARD, False, Ratios(date="2026-11-17", of="gpt2", torch="2.13.0", time=0.8))
    kept = calibrated(CARD)
    assert (kept.eager_ratio, kept.compiled_ratio) == (0.8, 1.07)
    assert (kept.context_mib, kept.drawn_watts) == (300, 171)  # what the later run did not tell stays
    eager_note, compiled_note = kept.notes[-2:]
    assert "2026-11-17" in eager_note and "eager steps × 0.80." in eager_note
    assert "2026-11-16" in compiled_note and "compiled steps × 1.07;" in compiled_note
    eager, compiled = (oomph.plan({"compile": compiled}, calibrated(CARD)).time for compiled in (False, True))
    plain = [oomph.plan({"compile": compiled}, CARD).time for compiled in (False, True)]
    assert eager is not None and compiled is not None and plain[0] is not None and plain[1] is not None
    assert eager.step_ms == pytest.approx(0.8 * plain[0].step_ms)
    assert compiled.step_ms == pytest.approx(1.07 * plain[1].step_ms)
