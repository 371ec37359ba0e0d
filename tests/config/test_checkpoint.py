"""Checkpoints as torch really writes them, and pickles that would run something if they could."""

from __future__ import annotations

import contextlib
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oomph.config import load
from oomph.config.reading import pickles
from oomph.errors import InputError

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "bias": True, "vocab_size": 65, "dropout": 0.1}


class Evil:
    """Its pickle, read by Python's own reader, would write the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.canary)!r}, 'w').close()",)


def checkpoint(**more: Any) -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": SHAPE,
        "iter_num": 3,
        "best_val_loss": torch.tensor(2.5),
        "config": {"n_layer": 3, "batch_size": 7, "dtype": "float16", "dropout": 0.2, "fork_key": 1},
    } | more


def save(path: Path, content: object, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load([path])
    return str(caught.value)


def archive(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
    return path


def test_a_checkpoint_gives_its_config_and_the_shape_of_its_model(tmp_path: Path) -> None:
    loaded = load([save(tmp_path / "ckpt.pt", checkpoint())])
    config = loaded.config
    assert (config.n_layer, config.n_embd, config.vocab_size, config.bias) == (2, 64, 65, True)
    assert (config.batch_size, config.dtype, config.dropout) == (7, "float16", 0.2)
    assert loaded.sources["n_layer"].endswith("ckpt.pt")
    assert "fork_key" in loaded.notes[0]


def test_a_checkpoint_is_known_by_its_content_not_its_name(tmp_path: Path) -> None:
    assert load([save(tmp_path / "weights.py", checkpoint())]).config.n_layer == 2


def test_numpy_numbers_in_a_checkpoint_are_passed_over(tmp_path: Path) -> None:
    assert load([save(tmp_path / "ckpt.pt", checkpoint(best_val_loss=np.float32(2)))]).config.n_layer == 2


def test_reading_a_checkpoint_needs_no_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt.pt", checkpoint())
    code = f"import sys; from oomph.config import load; load([{str(path)!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkpoint_with_anything_else_in_it_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = save(tmp_path / "ckpt.pt", checkpoint(extra=Evil(canary)))
    message = refused(path)
    assert ".exec, which is neither" in message
    assert not canary.exists()
    pickle.loads(pickle.dumps(Evil(canary)))
    assert canary.exists()  # the canary sings where a pickle is run


def test_weights_alone_are_refused_with_a_cure(tmp_path: Path) -> None:
    assert "config.json" in refused(save(tmp_path / "model.pt", torch.nn.Linear(2, 2).state_dict()))


def test_the_old_torch_format_is_refused_with_a_cure(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt.pt", checkpoint(), _use_new_zipfile_serialization=False)
    assert "torch.save it again" in refused(path)


def test_an_archive_without_a_pickle_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("readme.txt", "hello")
    assert "data.pkl" in refused(tmp_path / "a.zip")


def test_a_checkpoint_cut_short_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt.pt", checkpoint())
    path.write_bytes(path.read_bytes()[:700])
    assert "archive" in refused(path)


def test_a_pickle_that_unpacks_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "ckpt.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", b"\x80\x02" + b"N" * (2**24))
    assert "16 MiB" in refused(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("bad", ["n_layer", 3, None, {}, {"n_layer": "x"}])
def test_a_checkpoint_whose_parts_are_not_what_they_should_be_is_refused(tmp_path: Path, bad: object) -> None:
    content = bad if not isinstance(bad, dict) else {"model_args": bad} if bad else {}
    assert refused(archive(tmp_path / "ckpt.pt", pickle.dumps(content, protocol=2)))


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read_as_python_reads_them(protocol: int) -> None:
    value = {"a": [1, -(2**70), 2.5, None, True], "b": ("x", b"y", ()), 3: {}, "s": {1, 2}, "long": "z" * 70_000}
    if protocol < 4:
        del value["s"]  # older protocols write a set as a call
    if protocol < 3:
        value["b"] = ("x",)  # and bytes too
    assert pickles.read(pickle.dumps(value, protocol=protocol)) == value


def test_an_ordered_dict_is_read_as_a_dict() -> None:
    assert pickles.read(pickle.dumps(OrderedDict(a=1), protocol=2)) == {"a": 1}


def test_a_key_that_would_take_for_ever_to_hash_is_refused() -> None:
    doubling = b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns."  # a pair of itself, sixty times over
    with pytest.raises(pickles.RefusedError, match="neither text nor a number"):
        pickles.read(doubling)


def test_a_huge_place_in_the_memo_takes_no_memory() -> None:
    assert pickles.read(b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".") is None


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_do_anything_but_read_or_refuse(data: bytes) -> None:
    with contextlib.suppress(pickles.RefusedError):
        pickles.read(b"\x80\x02" + data)


@given(st.data())
def test_a_damaged_checkpoint_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"model_args": SHAPE, "model": OrderedDict(a=[1.5, "x"])}, protocol=2))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(pickles.RefusedError):
        pickles.read(bytes(whole))


def test_odd_escapes_in_a_pickles_text_are_read_without_a_warning() -> None:
    assert pickles.read(b"S'\\o'\n.") == "\\o"
