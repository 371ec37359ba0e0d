"""Memory snapshots: a prediction written as one, read back, and opened by PyTorch's own tools."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.errors import InputError
from oomph.predict.allocator.replay import record, reserve
from oomph.predict.memory import find_peak
from oomph.step.ops import Buffer, Kind, Op, Phase, Section, Step
from oomph.step.snapshot import read as snapshot

MIB = 2**20


def small_step() -> Step:
    """Two blocks and a head, with weights and inputs there from the start."""
    weights, inputs = Buffer("wte", 30 * MIB, Kind.PARAMETERS), Buffer("X", 4096, Kind.INPUTS)
    kept = [Buffer(f"h.{block}.gelu", 13 * MIB + 100, Kind.ACTIVATIONS, block) for block in range(2)]
    logits, scratch = Buffer("logits", 55 * MIB, Kind.LOGITS), Buffer("scratch", 700, Kind.TEMPORARY)
    gradient = Buffer("wte.grad", 30 * MIB, Kind.GRADIENTS)
    ops = (
        *(Op(f"h.{at}", Phase.FORWARD, (buffer, scratch), (scratch,)) for at, buffer in enumerate(kept)),
        Op("lm_head", Phase.LOSS, (logits,)),
        Op("lm_head", Phase.BACKWARD, (gradient,), (logits,)),
        Op("h", Phase.BACKWARD, (), tuple(kept)),
    )
    return Step((weights, inputs), (Section("micro-step 1", ops),))


def plain(path: Path) -> dict[str, Any]:
    loaded = pickle.loads(path.read_bytes())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return snapshot.write(record(small_step()), tmp_path / "step.pickle")


# Writing


def test_the_file_is_a_pickle_of_protocol_4_with_plain_data_alone(written: Path) -> None:
    opcodes = list(pickletools.genops(written.read_bytes()))
    assert opcodes[0][1] == 4
    assert not {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ"} & {code.name for code, _, _ in opcodes}


def test_every_segment_is_obtained_before_anything_lies_in_it(written: Path) -> None:
    ranges: list[tuple[int, int]] = []
    for entry in plain(written)["device_traces"][0]:
        if entry["action"] == "segment_alloc":
            ranges.append((entry["addr"], entry["addr"] + entry["size"]))
        elif entry["action"] == "alloc":
            end = entry["addr"] + entry["size"]
            assert any(low <= entry["addr"] and end <= high for low, high in ranges)


def test_a_free_is_requested_and_completed_at_once(written: Path) -> None:
    entries = plain(written)["device_traces"][0]
    for entry, following in pairwise(entries):
        if entry["action"] == "free_requested":
            assert (following["action"], following["addr"]) == ("free_completed", entry["addr"])


def test_blocks_tile_their_segments_and_hold_what_is_live_at_the_end(written: Path) -> None:
    names = []
    for segment in plain(written)["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
            if block["state"] == "active_allocated":
                names.append(block["frames"][0]["name"])
        assert address == segment["address"] + segment["total_size"]
    assert sorted(names) == ["X", "wte", "wte.grad"]


def test_frames_name_the_buffer_and_the_operation(written: Path) -> None:
    entries = plain(written)["device_traces"][0]
    logits = next(entry for entry in entries if entry["action"] == "alloc" and entry["size"] == 55 * MIB)
    assert logits["frames"] == [
        {"filename": "logits and loss", "line": 0, "name": "logits"},
        {"filename": "micro-step 1, loss", "line": 3, "name": "lm_head"},
    ]
    assert logits["category"] == "activation"
    assert "unknown" in {entry["category"] for entry in entries}  # the viewer stops without one


def test_every_kind_has_a_category() -> None:
    from oomph.step.snapshot.write import CATEGORIES

    assert set(CATEGORIES) == set(Kind)


def test_a_step_that_does_not_fit_ends_with_the_failed_request(tmp_path: Path) -> None:
    path = snapshot.write(record(small_step(), capacity_bytes=80 * MIB), tmp_path / "oom.pickle")
    last = plain(path)["device_traces"][0][-1]
    assert (last["action"], last["size"]) == ("oom", 56 * MIB)
    assert last["device_free"] == 80 * MIB - snapshot.read(path).reserved_bytes
    assert snapshot.read(path).failures == ((56 * MIB, last["device_free"]),)


def test_an_old_file_is_replaced_whole_and_nothing_else_is_left(written: Path) -> None:
    snapshot.write(record(Step((), ())), written)
    assert plain(written)["segments"] == []
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        snapshot.write(record(Step((), ())), tmp_path / "nowhere" / "x.pickle")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        snapshot.write(record(Step((), ())), tmp_path / "file" / "x.pickle")


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("capacity_mib", [None, 80, 150])
def test_pytorchs_own_tools_accept_it(tmp_path: Path, expandable: bool, capacity_mib: int | None) -> None:
    from torch.cuda import _memory_viz

    capacity = None if capacity_mib is None else capacity_mib * MIB
    data = plain(snapshot.write(record(small_step(), capacity, expandable), tmp_path / "step.pickle"))
    assert "total_reserved" in _memory_viz.segsum(data)
    assert "Device 0" in _memory_viz.trace(data)
    assert "snapshot.pickle" in _memory_viz.trace_plot(data)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stats", "trace"])
def test_pytorchs_command_accepts_the_file(written: Path, command: str) -> None:
    run = [sys.executable, "-W", "ignore", "-m", "torch.cuda._memory_viz", command, str(written)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("total_reserved" if command == "stats" else "cudaMalloc") in done.stdout


# There and back

kinds = st.sampled_from(list(Kind))
buffers = st.builds(Buffer, st.text("abc.", min_size=1, max_size=5), st.integers(1, 30 * MIB), kinds)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    resident = tuple(draw(st.lists(buffers, max_size=4)))
    live, ops = list(resident), []
    for number in range(draw(st.integers(1, 12))):
        made = draw(st.lists(buffers, max_size=3))
        live += made
        gone = draw(st.lists(st.sampled_from(live), unique_by=id, max_size=4)) if live else []
        live = [buffer for buffer in live if not any(buffer is other for other in gone)]
        ops.append(Op(str(number), Phase.FORWARD, tuple(made), tuple(gone)))
    return Step(resident, (Section("s", tuple(ops)),))


@settings(max_examples=60, deadline=None)
@given(steps(), st.booleans())
def test_what_is_written_reads_back_with_the_same_peaks(
    tmp_path_factory: pytest.TempPathFactory, step: Step, expandable: bool
) -> None:
    path = tmp_path_factory.mktemp("snapshots") / "step.pickle"
    recording = snapshot.read(snapshot.write(record(step, None, expandable), path))
    reserved = reserve(step, None, expandable)
    assert recording.peak_bytes == find_peak(step).allocated_bytes
    assert recording.peak_reserved_bytes == reserved.peak_reserved_bytes
    assert recording.reserved_bytes == reserved.reserved_bytes
    assert recording.from_the_start
    if recording.peak_bytes:
        assert find_peak(recording.step).allocated_bytes == recording.peak_bytes
        live = sum(-(-buffer.bytes // 512) * 512 for buffer in recording.live_at_peak)
        assert live == recording.peak_bytes == recording.allocated_curve[recording.peak_index]
        assert sum(row.bytes for row in recording.by_frame()) == recording.peak_bytes


def test_two_steps_in_a_row_read_back_as_one_history(tmp_path: Path) -> None:
    first, later = small_step(), small_step()
    recording = snapshot.read(snapshot.write(record([first, later]), tmp_path / "two.pickle"))
    reserved = reserve([first, later])
    assert recording.peak_reserved_bytes == reserved.peak_reserved_bytes
    assert recording.allocated_curve[-1] == reserved.allocated_bytes
    assert recording.peak_bytes == find_peak(first).allocated_bytes
