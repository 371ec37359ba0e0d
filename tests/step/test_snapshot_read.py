"""Reading snapshots that others made: what they tell, and what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomph.errors import InputError
from oomph.predict.memory import find_peak
from oomph.step.ops import Kind, Phase
from oomph.step.snapshot import read as snapshot

MIB = 2**20
BASE = 0x7F0000000000


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


IN_LAYER = [
    frame("??", 0, "at::native::linear"),
    frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125, "forward"),
    frame("/home/ann/nanoGPT/model.py", 83, "forward"),
    frame("/home/ann/nanoGPT/train.py", 300, "<module>"),
]
IN_OPTIMIZER = [
    frame("/venv/lib/python3.11/site-packages/torch/optim/adamw.py", 120, "step"),
    frame("/home/ann/nanoGPT/train.py", 317, "<module>"),
]


def entry(action: str, address: int, size: int, frames: object = (), **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": BASE + address, "size": size, "stream": 0, "frames": frames, **more}


def gone(address: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", address, size), entry("free_completed", address, size)]


def segment(*blocks: tuple[int, str], address: int = 0, device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": BASE + address,
        "total_size": sum(size for size, _ in blocks),
        "stream": 0,
        "segment_type": "large",
        "blocks": [{"size": size, "requested_size": size, "state": state, "frames": []} for size, state in blocks],
    }


def real_one() -> dict[str, Any]:
    """A history that began in the middle of a run: weights were there, and something that it sees freed."""
    return {
        "segments": [
            segment((20 * MIB, "active_allocated"), (20 * MIB, "active_allocated"), (20 * MIB, "inactive")),
        ],
        "device_traces": [
            [
                entry("alloc", 40 * MIB, 15 * MIB, IN_LAYER),
                *gone(40 * MIB, 15 * MIB),
                *gone(20 * MIB, 8 * MIB),
                entry("alloc", 20 * MIB, 20 * MIB, IN_OPTIMIZER),
                entry("segment_free", 60 * MIB, 10 * MIB),
            ]
        ],
    }


def save(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


# What a snapshot tells


def test_what_the_history_did_not_allocate_was_there_before(tmp_path: Path) -> None:
    recording = snapshot.read(save(tmp_path, real_one()))
    assert sorted(buffer.bytes for buffer in recording.step.resident) == [8 * MIB, 20 * MIB]
    assert not recording.from_the_start


def test_the_curve_follows_each_allocation_and_free(tmp_path: Path) -> None:
    recording = snapshot.read(save(tmp_path, real_one()))
    assert [size // MIB for size in recording.allocated_curve] == [43, 28, 20, 40]
    assert (recording.peak_bytes, recording.peak_index) == (43 * MIB, 0)
    assert find_peak(recording.step).allocated_bytes == 43 * MIB


def test_the_peak_is_grouped_by_the_users_own_line(tmp_path: Path) -> None:
    recording = snapshot.read(save(tmp_path, real_one()))
    rows = {row.frame: (row.bytes // MIB, row.count) for row in recording.by_frame()}
    assert rows == {snapshot.BEFORE: (28, 2), "model.py:83 forward": (15, 1)}
    assert [buffer.bytes // MIB for buffer in recording.largest(2)] == [20, 15]


def test_phases_follow_from_the_frames(tmp_path: Path) -> None:
    history = [entry("alloc", at * MIB, 512, frames) for at, frames in enumerate([IN_LAYER, IN_OPTIMIZER, []])]
    content = {"segments": [segment((9 * MIB, "inactive"))], "device_traces": [history]}
    (section,) = snapshot.read(save(tmp_path, content)).step.sections
    assert [op.phase for op in section.ops] == [Phase.FORWARD, Phase.OPTIMIZER, Phase.BACKWARD]
    assert section.ops[2].name == snapshot.NO_FRAME


def test_reserved_memory_is_followed_back_from_the_end(tmp_path: Path) -> None:
    recording = snapshot.read(save(tmp_path, real_one()))
    assert (recording.reserved_bytes, recording.peak_reserved_bytes) == (60 * MIB, 70 * MIB)


def test_of_several_devices_the_fullest_is_read_unless_one_is_named(tmp_path: Path) -> None:
    content = {
        "segments": [segment((2 * MIB, "active_allocated")), segment((6 * MIB, "active_allocated"), device=1)],
        "device_traces": [[], []],
    }
    path = save(tmp_path, content)
    assert snapshot.read(path).device == 1
    assert snapshot.read(path, device=0).peak_bytes == 2 * MIB
    with pytest.raises(InputError, match="no such device; found 2; try: 0, 1"):
        snapshot.read(path, device=2)


def test_a_snapshot_without_history_tells_what_is_live(tmp_path: Path) -> None:
    recording = snapshot.read(save(tmp_path, real_one()["segments"]))  # an older one is a bare list of segments
    assert (recording.peak_bytes, recording.peak_index) == (40 * MIB, -1)
    assert recording.allocated_curve == ()
    assert recording.step.sections == ()


def test_categories_become_kinds(tmp_path: Path) -> None:
    history = [entry("alloc", 0, 512, IN_LAYER, category="gradient"), entry("alloc", 512, 512, IN_LAYER)]
    content = {"segments": [segment((2 * MIB, "inactive"))], "device_traces": [history]}
    (section,) = snapshot.read(save(tmp_path, content)).step.sections
    assert [op.allocates[0].kind for op in section.ops] == [Kind.GRADIENTS, Kind.TEMPORARY]


def test_names_cannot_carry_control_characters(tmp_path: Path) -> None:
    history = [entry("alloc", 0, 512, [frame("/x/\x1b[31mred.py", 1, "a\nb" + "c" * 500)])]
    content = {"segments": [], "device_traces": [history]}
    name = snapshot.read(save(tmp_path, content)).live_at_peak[0].name
    assert name.startswith("?[31mred.py:1 a?bc")
    assert len(name) == 200


# What is refused


class Canary:
    """Pickled, it asks the reader to make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_with_code_in_it_is_refused_and_nothing_runs(tmp_path: Path, protocol: int) -> None:
    content = real_one()
    content["external_annotations"] = [Canary(tmp_path / "ran")]
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(InputError, match=r"refused: .*nothing in it was run; found a pickle that asks for .*mkdir"):
        snapshot.read(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (3, "found an int"),
        ([], "found an empty list"),
        ({"model": 1}, "found a dict with the keys 'model'"),
        ({}, "found a dict with no keys"),
        ({"segments": 3}, r"Expected `array`, got `int` - at `\$.segments`"),
        ({"segments": [{"address": 1}]}, "missing required field `total_size`"),
        ({"segments": [], "device_traces": [[{"size": 3}]]}, "missing required field `action`"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "size": -3}]]}, "Expected `int` >= 0"),
    ],
)
def test_a_pickle_of_another_shape_is_refused_with_the_reason(tmp_path: Path, content: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        snapshot.read(save(tmp_path, content))


def test_missing_files_folders_and_empty_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, reason in (("none", "No such file"), (".", "Is a directory"), ("empty", "empty"), ("a\0b", "cannot be")):
        with pytest.raises(InputError, match=reason):
            snapshot.read(tmp_path / name)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(real_one(), protocol=4)
    path = tmp_path / "cut.pickle"
    for length in range(1, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="not a whole pickle"):
            snapshot.read(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda junk: b"\x80\x04" + junk + b".")))
def test_junk_is_refused_and_nothing_else_happens(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "junk"
    path.write_bytes(junk)
    with pytest.raises(InputError):
        snapshot.read(path)


odd_frames = st.lists(
    st.dictionaries(st.sampled_from(["filename", "line", "name"]), st.one_of(st.text(), st.integers()))
)
entries = st.fixed_dictionaries(
    {
        "action": st.sampled_from(
            ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom"]
        ),
        "addr": st.integers(0, 5),
        "size": st.integers(0, 3000),
        "frames": st.one_of(odd_frames, st.text(), st.none()),
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(entries, max_size=15))
def test_any_history_of_the_right_shape_is_read_consistently(tmp_path: Path, history: list[dict[str, Any]]) -> None:
    recording = snapshot.read(save(tmp_path, {"segments": [], "device_traces": [history]}))
    assert sum(row.bytes for row in recording.by_frame()) == recording.peak_bytes
    assert all(size >= 0 for size in recording.allocated_curve)
    assert recording.peak_bytes >= max(recording.allocated_curve, default=0)


def test_a_snapshot_that_pytorch_made_of_a_real_run_tells_gradients_and_state_to_the_byte(tmp_path: Path) -> None:
    import torch
    from torch.cuda import _memory_viz

    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    inputs = torch.randn(64, 256)
    with torch.profiler.profile(profile_memory=True, with_stack=True, record_shapes=True) as profile:
        for _ in range(2):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    recording = snapshot.read(save(tmp_path, _memory_viz._profile_to_snapshot(profile)))
    held = {kind: sum(b.bytes for b in recording.live_at_peak if b.kind is kind) for kind in Kind}
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert held[Kind.GRADIENTS] == sum(sizes)
    assert held[Kind.OPTIMIZER] == sum(2 * size + 4 for size in sizes)  # two moments and a step count a tensor
