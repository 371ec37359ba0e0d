"""`explain_failures()`: an out-of-memory error is explained where it happens, and stays what it is."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

import oomph

OOM = (
    "CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of 11.62 GiB of which 1.06 GiB is free."
    " Process 2143 has 5.00 GiB memory in use. Including non-PyTorch memory, this process has 5.25 GiB memory in use. "
    "Of the allocated memory 4.25 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture(autouse=True)
def _hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back after each test


def test_the_error_of_a_with_block_is_explained_and_raised_unchanged() -> None:
    out = io.StringIO()
    error = RuntimeError(OOM)
    with pytest.raises(RuntimeError) as caught, oomph.explain_failures(file=out):
        raise error
    assert caught.value is error
    assert "Other processes hold 5.31 GiB" in out.getvalue()
    assert out.getvalue().count("what to do") == 1


def test_other_errors_are_left_alone() -> None:
    out = io.StringIO()
    with pytest.raises(KeyError), oomph.explain_failures(file=out):
        raise KeyError("x")
    assert out.getvalue() == ""


def test_living_tensors_are_listed_with_their_sizes() -> None:
    torch = pytest.importorskip("torch")
    from oomph.report.failures import living_tensors

    held = [torch.zeros(1231, 1000) for _ in range(3)]
    line = next(line for line in living_tensors() if "(1231, 1000)" in line)
    assert line == "14 MiB: tensor (1231, 1000) float32 on cpu, 3 of them"
    del held


@pytest.mark.slow
def test_one_line_in_a_script_is_enough() -> None:
    code = f"import oomph; oomph.explain_failures()\nraise RuntimeError({OOM!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.index("Traceback") < found.stderr.index("Other processes hold 5.31 GiB")
