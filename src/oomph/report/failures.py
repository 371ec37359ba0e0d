"""`explain_failures()`: one line in a script or notebook that explains an out-of-memory error when it happens.

    import oomph
    oomph.explain_failures()

The error itself is never changed, caught or delayed: the explanation is printed after its traceback.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Any

from oomph.errors import says_out_of_memory
from oomph.units import MIB

HISTORY = 100_000  # allocations that torch remembers
TENSORS = 6  # the largest live ones to list
LEAST_MIB = 1.0


class explain_failures:  # noqa: N801  called like a function
    """Explains an out-of-memory error that ends the script, the notebook's cell, or the block of a `with`."""

    def __init__(self, gpu: str | None = None, file: IO[str] | None = None) -> None:
        """`gpu` names the card if torch does not; `file`: where to print, else standard error."""
        self._gpu, self._file = gpu, file
        self._explained: BaseException | None = None
        self._record_history()
        self._before = sys.excepthook
        shell = _notebook()
        if shell is not None:
            shell.set_custom_exc((RuntimeError, MemoryError), self._in_notebook)
        else:
            sys.excepthook = self._at_the_end

    def __enter__(self) -> explain_failures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._explain(error)
        if sys.excepthook == self._at_the_end and error is None:
            sys.excepthook = self._before

    def _at_the_end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        self._explain(error)

    def _in_notebook(self, shell: Any, kind: Any, error: BaseException, trace: Any, tb_offset: Any = None) -> None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        self._explain(error)

    def _explain(self, error: BaseException) -> None:
        """Print the explanation, once; if explaining fails, print nothing."""
        if error is self._explained or not _is_out_of_memory(error):
            return
        self._explained = error
        with contextlib.suppress(Exception):
            print(explanation(error, self._gpu), file=self._file or sys.stderr, flush=True)

    @staticmethod
    def _record_history() -> None:
        torch = sys.modules.get("torch")
        with contextlib.suppress(Exception):
            if torch is not None and torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or says_out_of_memory(str(error))
    )


def _notebook() -> Any:
    """IPython's shell, if there is one."""
    ipython = sys.modules.get("IPython")
    with contextlib.suppress(Exception):
        return ipython.get_ipython() if ipython is not None else None
    return None


def explanation(error: BaseException, gpu: str | None = None) -> str:
    """One screen about an error, and the tensors that are alive now."""
    from oomph.report.explain import document
    from oomph.report.terminal import to_text
    from oomph.runs.explain import explain
    from oomph.runs.reading.reader import read_text

    text = "".join(traceback.format_exception(error))
    run = read_text(text, type(error).__name__)
    run.snapshots += _snapshots()
    found = explain(run, gpu or None, with_fixes=False)
    alive = living_tensors()
    held = "\n".join(("tensors alive now", *(f"· {line}" for line in alive), "")) if alive else ""
    return f"\n{to_text(document(found))}{held}"


def _snapshots() -> list[Any]:
    """torch's memory history as a recording, if it was kept."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_available():
            from oomph.step.snapshot import read as snapshot

            with TemporaryDirectory() as folder:
                path = Path(folder) / "memory.pickle"
                torch.cuda.memory._dump_snapshot(str(path))
                return [snapshot.read(path)]
    return []


def living_tensors() -> list[str]:
    """The largest tensors that Python holds, equal ones grouped, the largest sum first."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    sums: dict[str, list[float]] = {}
    seen: set[int] = set()
    for thing in gc.get_objects():
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's deprecated objects warn when they are looked at
            if not isinstance(thing, torch.Tensor) or thing.is_meta:
                continue
            storage = thing.untyped_storage()
            if storage.data_ptr() in seen or storage.nbytes() < LEAST_MIB * MIB:
                continue
            seen.add(storage.data_ptr())
            what = "parameter" if isinstance(thing, torch.nn.Parameter) else "tensor"
            name = f"{what} {tuple(thing.shape)} {str(thing.dtype).removeprefix('torch.')} on {thing.device}"
            sums.setdefault(name, []).append(storage.nbytes() / MIB)
    ranked = sorted(sums.items(), key=lambda entry: -sum(entry[1]))[:TENSORS]
    return [
        f"{sum(sizes):,.0f} MiB: {name}" + (f", {len(sizes)} of them" if len(sizes) > 1 else "")
        for name, sizes in ranked
    ]
