"""The memory fold against a slow oracle that keeps a set of live buffers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomph.predict.memory import find_peak, rounded, timeline
from oomph.step.ops import Buffer, Kind, Op, Phase, Section, Step

KINDS = st.sampled_from(list(Kind))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A random but lawful step: only live buffers are freed."""
    size = st.integers(0, 5000)
    resident = [Buffer(f"r{i}", draw(size), draw(KINDS)) for i in range(draw(st.integers(0, 3)))]
    live = list(resident)
    sections = []
    for number in range(draw(st.integers(1, 3))):
        ops = []
        for index in range(draw(st.integers(1, 6))):
            new = [Buffer(f"b{number}.{index}.{i}", draw(size), draw(KINDS)) for i in range(draw(st.integers(0, 3)))]
            live += new
            gone = draw(st.lists(st.sampled_from(live), unique_by=id)) if live else []
            live = [buffer for buffer in live if buffer not in gone]
            ops.append(Op(f"op{index}", Phase.FORWARD, tuple(new), tuple(gone)))
        sections.append(Section(f"section {number}", tuple(ops)))
    return Step(tuple(resident), tuple(sections))


def live_sets(step: Step) -> list[set[Buffer]]:
    """The oracle: every buffer alive while each operation runs."""
    live, moments = set(step.resident), []
    for section in step.sections:
        for op in section.ops:
            live |= set(op.allocates)
            moments.append(set(live))
            live -= set(op.frees)
    return moments


@given(steps(), st.sampled_from([1, 512]))
def test_the_timeline_counts_what_is_alive_at_each_operation(step: Step, rounding: int) -> None:
    expected = [sum(rounded(b.bytes, rounding) for b in alive) for alive in live_sets(step)]
    found = timeline(step, rounding)
    assert list(found.total_bytes) == expected
    by_kind = [sum(column[index] for column in found.kinds.values()) for index in range(len(found.ops))]
    assert by_kind == [sum(b.bytes for b in alive) for alive in live_sets(step)]


@given(steps(), st.sampled_from([1, 512]))
def test_the_peak_is_the_fullest_moment_and_names_who_holds_it(step: Step, rounding: int) -> None:
    peak = find_peak(step, rounding)
    fullest = max(live_sets(step), key=lambda alive: sum(rounded(b.bytes, rounding) for b in alive))
    assert peak.allocated_bytes == sum(rounded(b.bytes, rounding) for b in fullest)
    assert sum(rounded(b.bytes, rounding) for b in peak.live) == peak.allocated_bytes
    assert peak.op in peak.section.ops


@given(st.lists(steps(), min_size=1, max_size=3))
def test_the_peak_of_several_steps_is_the_fullest_ones(several: list[Step]) -> None:
    assert find_peak(several) == max((find_peak(step) for step in several), key=lambda peak: peak.allocated_bytes)


@given(steps())
def test_the_shares_by_kind_sum_to_what_the_live_buffers_ask_for(step: Step) -> None:
    peak = find_peak(step)
    assert sum(peak.by_kind().values()) == sum(buffer.bytes for buffer in peak.live)


@given(st.integers(0, 10**12))
def test_rounding_adds_less_than_one_block(size: int) -> None:
    assert 0 <= rounded(size, 512) - size < 512
    assert rounded(size, 512) % 512 == 0
