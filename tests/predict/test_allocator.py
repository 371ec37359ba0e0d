"""The caching allocator's rules, one by one, and steps run through it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predict.allocator.caching import CachingAllocator, OutOfMemoryError
from oomph.predict.allocator.replay import reserve
from oomph.predict.memory import find_peak
from oomph.step.ops import Buffer, Kind, Op, Phase, Section, Step

MIB = 2**20


def buffer(mib: float, name: str = "x") -> Buffer:
    return Buffer(name, int(mib * MIB), Kind.ACTIVATIONS)


def op(name: str, allocates: tuple[Buffer, ...] = (), frees: tuple[Buffer, ...] = ()) -> Op:
    return Op(name, Phase.FORWARD, allocates, frees)


def step(*ops: Op, resident: tuple[Buffer, ...] = ()) -> Step:
    return Step(resident, (Section("micro-step 1", ops),))


# Segments


@pytest.mark.parametrize(
    ("requested", "reserved_mib"),
    [
        (1, 2),
        (1 * MIB, 2),
        (1 * MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB - 511, 10),  # rounds to 10 MiB, which has a segment of its own
        (10 * MIB + 1, 12),
        (4 * 1024 * 50257 * 4, 786),  # 785.3 MiB of logits: the 786.00 MiB of a published error message
        (2 * 1024 * 50304 * 4, 394),
    ],
)
def test_a_first_request_reserves_a_segment_of_its_class(requested: int, reserved_mib: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(requested)
    assert allocator.reserved_bytes == reserved_mib * MIB


def test_a_cublas_workspace_alone_is_counted_as_measured_on_an_rtx_4090() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * 4096 * 1024 + 8 * 16 * 1024)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (8_519_680, 20_971_520)


def test_an_empty_request_takes_nothing() -> None:
    allocator = CachingAllocator(capacity_bytes=0)
    allocator.free(allocator.allocate(0))
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0


def test_a_negative_request_is_an_error() -> None:
    with pytest.raises(ValueError, match="-512"):
        CachingAllocator().allocate(-512)


# Splitting and best fit


def test_a_large_block_is_split_only_where_more_than_one_mib_remains() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    assert allocator.allocate(29 * MIB).size == 30 * MIB
    assert allocator.allocated_bytes == 30 * MIB  # PyTorch counts the whole block as allocated
    other = CachingAllocator()
    other.free(other.allocate(30 * MIB))
    assert other.allocate(29 * MIB - 512).size == 29 * MIB - 512
    assert [block.size for block in other.large.blocks] == [1 * MIB + 512]


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(512) for _ in range(2 * MIB // 512)]
    assert allocator.reserved_bytes == allocator.allocated_bytes == 2 * MIB
    assert len({block.address for block in blocks}) == len(blocks)


def test_the_smallest_block_that_fits_is_taken_and_of_equals_the_lowest() -> None:
    allocator = CachingAllocator()
    wide, first, second = (allocator.allocate(size * MIB) for size in (40, 30, 30))
    first_address = first.address
    for block in (second, wide, first):
        allocator.free(block)
    assert allocator.allocate(24 * MIB).address == first_address


def test_free_neighbours_merge_so_that_a_larger_request_fits() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    left, middle, right = (allocator.allocate(10 * MIB) for _ in range(3))
    for block in (left, right, middle):
        allocator.free(block)
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 30 * MIB


# A full card


def test_a_full_card_gives_back_unused_segments_and_tries_again() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 80 * MIB)
    assert allocator.peak_reserved_bytes == 80 * MIB


def test_a_segment_in_partial_use_cannot_be_given_back() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    whole = allocator.allocate(60 * MIB)
    allocator.free(whole)
    allocator.allocate(20 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(51 * MIB + 1)
    assert (caught.value.tried_bytes, caught.value.free_bytes) == (52 * MIB, 40 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB, 60 * MIB)
    assert [block.size for block in allocator.large.blocks] == [40 * MIB]
    assert allocator.retries == 1


def test_after_a_failure_the_allocator_still_serves_what_fits() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(41 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.allocated_bytes == 40 * MIB


# Expandable segments


def test_an_expandable_segment_grows_by_pages_of_20_mib() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(25 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(16 * MIB)  # 15 MiB are free behind the first: one page more makes room
    assert allocator.reserved_bytes == 60 * MIB


def test_growth_room_is_used_last() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    front = allocator.allocate(18 * MIB)
    allocator.allocate(12 * MIB)
    start = front.address
    allocator.free(front)
    # 10 MiB are free at the end and 18 at the front: the end could grow, so the front is the tighter fit.
    assert allocator.allocate(5 * MIB).address == start


def test_expandable_segments_serve_what_fragments_cannot() -> None:
    def churn(expandable: bool) -> int:
        allocator = CachingAllocator(expandable_segments=expandable)
        for size in (30, 32, 34, 36, 38):
            block = allocator.allocate(size * MIB)
            allocator.free(block)
        return allocator.peak_reserved_bytes

    assert churn(False) == (30 + 32 + 34 + 36 + 38) * MIB
    assert churn(True) == 40 * MIB


def test_under_pressure_pages_move_from_one_pool_to_the_other() -> None:
    allocator = CachingAllocator(capacity_bytes=22 * MIB, expandable_segments=True)
    allocator.free(allocator.allocate(5 * MIB))
    for _ in range(11):
        allocator.allocate(1 * MIB)
        allocator.allocate(1 * MIB)
    assert allocator.allocated_bytes == allocator.reserved_bytes == 22 * MIB
    assert allocator.retries == 1


# Steps run through it


def test_reserved_memory_stays_at_its_peak_when_buffers_are_freed() -> None:
    a, b, c = buffer(30), buffer(40), buffer(25)
    result = reserve(step(op("first", (a,)), op("second", (b,), (a,)), op("third", (c,), (b, c))))
    assert result.peak_reserved_bytes == result.peak_allocated_bytes == 70 * MIB
    assert (result.allocated_bytes, result.reserved_bytes) == (0, 70 * MIB)
    assert result.fits


def test_an_operation_allocates_before_it_frees() -> None:
    old, new = buffer(30), buffer(30)
    result = reserve(step(op("make", (old,)), op("replace", (new,), (old,)), op("drop", (), (new,))))
    assert result.peak_reserved_bytes == 60 * MIB


def test_what_is_there_before_the_step_counts() -> None:
    result = reserve(step(resident=(buffer(30), buffer(0.5))))
    assert result.peak_reserved_bytes == 32 * MIB


def test_a_step_ends_at_the_request_that_fails() -> None:
    fine, large = buffer(30, "h.0.gelu"), buffer(80, "logits")
    result = reserve(step(op("block", (fine,)), op("lm_head", (large,))), capacity_bytes=100 * MIB)
    assert not result.fits
    assert result.peak_reserved_bytes == result.allocated_bytes == 30 * MIB


def test_weights_too_large_for_the_card_do_not_fit() -> None:
    assert not reserve(step(resident=(buffer(30, "wte"),)), capacity_bytes=10 * MIB).fits


def test_a_tight_card_costs_retries_where_a_roomy_one_reserves_more() -> None:
    a, b = buffer(30), buffer(50)
    program = step(op("a", (a,), (a,)), op("b", (b,), (b,)))
    assert reserve(program).peak_reserved_bytes == 80 * MIB
    tight = reserve(program, capacity_bytes=60 * MIB)
    assert (tight.fits, tight.retries, tight.peak_reserved_bytes) == (True, 1, 50 * MIB)


def test_a_second_step_takes_over_what_the_first_left() -> None:
    weights, state, logits = buffer(30, "wte"), buffer(60, "exp_avg.wte"), buffer(25, "logits")
    first = step(op("adam", (state, logits)), resident=(weights,))
    later = step(op("head", (again := buffer(25, "logits"),), (again,)), resident=(buffer(30, "wte"), state))
    result = reserve([first, later])
    assert result.allocated_bytes == 90 * MIB
    assert result.peak_reserved_bytes == 116 * MIB  # the second step's logits lie where the first's were


@given(st.lists(st.integers(0, 5 * MIB), max_size=12), st.booleans())
def test_the_allocated_peak_is_the_plain_sum_where_blocks_fit_exactly(sizes: list[int], expandable: bool) -> None:
    buffers = [Buffer(str(at), size, Kind.ACTIVATIONS) for at, size in enumerate(sizes)]
    forward = [op(b.name, (b,)) for b in buffers]
    backward = [op("d" + b.name, (), (b,)) for b in reversed(buffers)]
    program = step(op("begin"), *forward, *backward)
    result = reserve(program, None, expandable)
    plain = find_peak(program).allocated_bytes
    assert plain <= result.peak_allocated_bytes
    if expandable:  # any rest of 512 bytes is split off
        assert result.peak_allocated_bytes == plain
    assert result.allocated_bytes == 0


def gathering(units: int, recorded: bool) -> Step:
    """Units gathered one after another, each freed before the next."""
    flats = [Buffer("gathered", 100 << 20, Kind.GATHERED, at, 1, recorded) for at in range(units)]
    ops = [
        op for flat in flats for op in (Op("gather", Phase.FORWARD, (flat,)), Op("free", Phase.FORWARD, (), (flat,)))
    ]
    return Step((), (Section("step", tuple(ops)),))


def test_memory_that_another_stream_was_told_of_is_reused_a_unit_later() -> None:
    at_once, later = (reserve(gathering(5, recorded)) for recorded in (False, True))
    assert at_once.peak_reserved_bytes == 100 << 20
    assert later.peak_reserved_bytes == 200 << 20  # limit_all_gathers: two in flight
    assert later.peak_allocated_bytes == at_once.peak_allocated_bytes == 100 << 20


def test_a_full_card_waits_for_the_other_stream() -> None:
    found = reserve(gathering(5, True), capacity_bytes=150 << 20)
    assert found.fits
    assert found.retries > 0
