"""Batches: the right windows, in an order that resumes exactly, shared out without overlap."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from data_helpers import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.data import Batches, Prefetcher, find_dataset, prepare
from oomph.data.reader import _shuffled
from oomph.errors import InputError
from refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tokens that are their own positions, as nanoGPT would have written them."""
    np.arange(10_001, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "val.bin")
    return tmp_path


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_window_is_consecutive_tokens_and_y_is_x_one_later(folder: Path, order: str) -> None:
    x, y = next(Batches(folder, batch_size=6, block_size=32, order=order))
    assert x.shape == y.shape == (6, 32)
    assert x.dtype == y.dtype == np.int64
    assert x.flags.c_contiguous
    assert y.flags.c_contiguous
    assert (y == x + 1).all()
    assert (np.diff(x, axis=1) == 1).all()


def test_random_windows_begin_evenly_wherever_nanogpt_lets_them(folder: Path) -> None:
    batches = Batches(folder, "val", batch_size=1000, block_size=490)
    starts = np.concatenate([next(batches)[0][:, 0] for _ in range(20)])
    counts = np.bincount(starts)
    assert len(counts) == 10  # 500 - 490: from 0 to 9, as randint(len(data) - block_size)
    assert counts.min() > 1800
    assert counts.max() < 2200


@given(size=st.integers(1, 300), epochs=st.integers(1, 3), seed=st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_window_once_and_each_epoch_has_its_own_order(size: int, epochs: int, seed: int) -> None:
    order = _shuffled(np.arange(size * epochs, dtype=np.uint64), size, seed).reshape(epochs, size)
    assert (np.sort(order, axis=1) == np.arange(size)).all()
    if size > 20 and epochs > 1:
        assert (order[0] != order[1]).any()


def test_a_shuffled_order_looks_shuffled() -> None:
    order = _shuffled(np.arange(10_000, dtype=np.uint64), 10_000, 1).astype(np.int64)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.03
    assert (np.diff(order) == 1).sum() < 10


def test_a_place_in_a_trillion_windows_costs_no_more_than_one_in_a_thousand() -> None:
    size = 10**12 + 7
    order = _shuffled(np.arange(size - 5, size + 5, dtype=np.uint64), size, 3)
    assert (order < size).all()
    assert len(set(order.tolist())) == 10


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_resumed_reader_gives_the_very_next_batch(folder: Path, order: str) -> None:
    one = Batches(folder, batch_size=4, block_size=16, order=order)
    for _ in range(7):
        next(one)
    state = pickle.loads(pickle.dumps(one.state()))
    assert all(isinstance(value, int | str) for value in state.values())
    two = Batches(folder, batch_size=4, block_size=16, order=order, state=state)
    for _ in range(400):  # beyond the end of the first epoch
        assert (next(one)[0] == next(two)[0]).all()


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_ranks_together_read_what_one_would_read_alone(folder: Path, order: str) -> None:
    alone = Batches(folder, batch_size=12, block_size=16, order=order)
    ranks = [Batches(folder, batch_size=4, block_size=16, order=order, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(60):
        assert (np.concatenate([next(rank)[0] for rank in ranks]) == next(alone)[0]).all()


def test_ranks_read_disjoint_windows_all_through_an_epoch(folder: Path) -> None:
    np.arange(10_020, dtype=np.uint16).tofile(folder / "train.bin")
    ranks = [Batches(folder, batch_size=5, block_size=20, order="epochs", rank=rank, world_size=4) for rank in range(4)]
    assert ranks[0].epoch_windows == 500
    starts = sorted(int(start) for rank in ranks for _ in range(25) for start in next(rank)[0][:, 0])
    assert len(starts) == 500 and (np.diff(starts) == 20).all()


def test_each_epoch_cuts_the_text_elsewhere(folder: Path) -> None:
    batches = Batches(folder, batch_size=499, block_size=20, order="epochs")
    shifts = []
    for _ in range(4):
        starts = np.sort(next(batches)[0][:, 0])
        assert (np.diff(starts) == 20).all() and starts[0] < 20
        shifts.append(int(starts[0]))
    assert len(set(shifts)) > 1


def test_a_set_of_one_window_can_be_read_in_epochs(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "train.bin")
    starts = {int(start) for start in next(Batches(tmp_path, batch_size=99, block_size=16, order="epochs"))[0][:, 0]}
    assert starts <= {0, 1, 2, 3} and len(starts) > 1


@pytest.mark.parametrize(("even", "starts"), [(1, [0]), (3, [0, 4990, 9980]), (9999, list(range(0, 10_000, 20)))])
def test_evaluation_windows_are_spread_evenly_and_never_overlap(folder: Path, even: int, starts: list[int]) -> None:
    batches = Batches(folder, batch_size=len(starts), block_size=20, order="even", even=even)
    for _ in range(2):
        assert next(batches)[0][:, 0].tolist() == starts


def test_reading_maps_no_file(folder: Path) -> None:
    batches = Batches(folder, batch_size=4, block_size=16)
    next(batches)
    assert "train.bin" not in Path("/proc/self/maps").read_text()


def test_other_tokens_of_the_same_number_are_other_data(folder: Path) -> None:
    state = Batches(folder, batch_size=4, block_size=16).state()
    tokens = np.fromfile(folder / "train.bin", np.uint16)
    tokens[::100] += 1
    tokens.tofile(folder / "train.bin")
    with pytest.raises(InputError, match="sample differs"):
        Batches(folder, batch_size=4, block_size=16, state=state)


def test_a_file_truncated_while_it_is_read_is_an_error(folder: Path) -> None:
    batches = Batches(folder, batch_size=400, block_size=16)
    next(batches)
    (folder / "train.bin").write_bytes(bytes(100))
    with pytest.raises(InputError, match="truncated"):
        next(batches)


def test_half_the_batch_reads_the_same_windows(folder: Path) -> None:
    whole = Batches(folder, batch_size=8, block_size=16)
    next(whole)
    half = Batches(folder, batch_size=4, block_size=16, state=whole.state())
    assert (np.concatenate([next(half)[0], next(half)[0]]) == next(whole)[0]).all()


def test_another_seed_is_another_order(folder: Path) -> None:
    assert (
        Batches(folder, batch_size=8, block_size=16).starts()
        != Batches(folder, batch_size=8, block_size=16, seed=1).starts()
    ).any()


def test_a_state_of_other_data_or_settings_is_refused(folder: Path) -> None:
    state = Batches(folder, batch_size=8, block_size=16).state()
    with refused(found="16", allowed="32") as problems:
        Batches(folder, "val", batch_size=8, block_size=32, state=state)
    assert len(problems) == 3  # the block size, the number of tokens and a sample of them


def test_a_file_too_short_for_a_window_or_cut_short_is_refused(folder: Path) -> None:
    with refused(allowed="at least 501"):
        Batches(folder, "val", batch_size=1, block_size=500)
    (folder / "val.bin").write_bytes(b"odd")
    with refused("val.bin", found="3 bytes"):
        Batches(folder, "val", batch_size=1, block_size=1)


def test_all_wrong_arguments_are_reported_together(folder: Path) -> None:
    with pytest.raises(InputError) as error:
        Batches(folder, batch_size=0, block_size=4, order="sorted", rank=2, world_size=2)
    assert [problem.where for problem in error.value.problems] == ["order", "batch_size", "rank"]


def test_a_set_is_found_by_its_name_below_data_or_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50))
    prepare([source], tmp_path / "data" / "mine", tokenizer="bytes", val_fraction=0)
    monkeypatch.chdir(tmp_path)
    assert find_dataset("mine") == Path("data/mine")
    assert find_dataset(str(tmp_path / "data" / "mine")) == tmp_path / "data" / "mine"
    with refused(nearest="mine"):
        find_dataset("mien")
    assert next(Batches("mine", batch_size=2, block_size=8))[0].shape == (2, 8)


def test_a_reader_of_our_own_set_knows_its_checksum_and_its_32_bits(tmp_path: Path) -> None:
    import msgspec

    source = str(write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50))
    done = prepare([source], tmp_path / "out", tokenizer="bytes", val_fraction=0)
    batches = Batches(tmp_path / "out", batch_size=2, block_size=8)
    assert batches.state()["sha256"] == done.manifest.splits["train"].sha256
    np.arange(500, dtype=np.uint32).tofile(tmp_path / "out" / "train.bin")
    (tmp_path / "out" / "meta.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(done.manifest, dtype="uint32"))
    )
    x, _ = next(Batches(tmp_path / "out", batch_size=2, block_size=8))
    assert (np.diff(x, axis=1) == 1).all()


def test_prefetched_batches_and_their_state_are_the_readers(folder: Path) -> None:
    plain = Batches(folder, batch_size=4, block_size=16)
    with Prefetcher(Batches(folder, batch_size=4, block_size=16)) as prefetcher:
        for _ in range(20):
            x, y = next(prefetcher)
            wanted_x, wanted_y = next(plain)
            assert (x.numpy() == wanted_x).all()
            assert (y.numpy() == wanted_y).all()
            assert prefetcher.state() == plain.state()


def test_what_fails_in_the_background_is_raised_where_the_batch_is_asked_for(folder: Path) -> None:
    batches = Batches(folder, batch_size=4, block_size=16)
    batches._starts_of = lambda first, count: np.array([10**9])  # type: ignore[method-assign]  # noqa: ARG005
    with pytest.raises(InputError, match="truncated"):
        next(Prefetcher(batches))


def test_a_closed_prefetcher_stops_and_leaves_no_thread(folder: Path) -> None:
    prefetcher = Prefetcher(Batches(folder, batch_size=4, block_size=16))
    next(prefetcher)
    prefetcher.close()
    assert not prefetcher._thread.is_alive()
    with pytest.raises(StopIteration):
        next(prefetcher)
