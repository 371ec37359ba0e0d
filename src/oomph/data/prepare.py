"""`oomph.data.prepare`: check what the user asks for, then make the set of token files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from oomph.data import tokenizer as tokenizers
from oomph.data.errors import require
from oomph.data.recipe import TAIL, choose_splitting, make_recipe
from oomph.data.sources import DocumentSource, ReadOptions, resolve, single_text, split_by_tail
from oomph.data.task import JOURNAL_SECONDS, Prepared, Task
from oomph.errors import InputError, Problem

SMALL_BYTES = 2**22  # below this, starting processes takes longer than the work


def prepare(
    names: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    tokenizer_dir: str | Path | None = None,
    end_of_text: str | None = None,
    take: int | None = None,
    split: str | None = None,
    val_fraction: float | None = None,
    reading: ReadOptions | None = None,
    skip_broken: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    journal_seconds: float = JOURNAL_SECONDS,
    say: Callable[[str], None] = lambda _: None,
    show_progress: bool = False,
) -> Prepared:
    """Make a set of token files in `out`, resume an unfinished one, or return a finished one.

    `say` gets each decision as a line. Raises `InputError` if the input is wrong and `DataError` if the work fails.
    After either, and after an interruption, the same call continues where this one stopped.
    """
    reading = reading or ReadOptions()
    require("numpy", "oomph data")
    _check_numbers(take, workers)
    if not str(out):
        raise InputError(Problem("--out ''", "is empty", allowed="a folder, such as data/name"))
    tokenizers.check_spec(tokenizer, end_of_text)
    found = resolve(names, reading)
    if found.ignored:
        say(f"left out {len(found.ignored)} files of other formats, such as {found.ignored[0]}")
    if found.doubtful:
        more = f" ({len(found.doubtful) - 1} more files like it)" if len(found.doubtful) > 1 else ""
        say(f"NOTE: {found.doubtful[0]}{more}")
    text = single_text(found.sources)
    splitting = choose_splitting(split, val_fraction, text is not None)
    say(f"split by {splitting.by}, {splitting.val_fraction:.2%} for validation: {splitting.reason}")
    identity: dict[str, str | int | None] = {"name": tokenizer}
    if tokenizers.needs_learning(tokenizer):
        _refuse_single_pass(found.sources, tokenizer)
        chosen = None
    else:
        chosen = tokenizers.load_tokenizer(tokenizer, Path(tokenizer_dir) if tokenizer_dir else None, end_of_text)
        identity = {"name": chosen.name, "sha256": chosen.sha256, "end_of_text": chosen.end_of_text}
    recipe = make_recipe(found.sources, reading, splitting, identity, take)
    task = Task(Path(out), recipe, found.sources, tokenizer, chosen, splitting, take, skip_broken, journal_seconds, say)
    if not overwrite and (finished := task.finished()) is not None:
        return finished
    if splitting.by == TAIL and text is not None:
        task.sources = split_by_tail(text, splitting.val_fraction)
    return task.run(overwrite, workers or default_workers(found.sources), show_progress)


def default_workers(sources: Sequence[DocumentSource]) -> int:
    """One process per core; a single one if there is little text."""
    sizes = [source.size_bytes for source in sources]
    if all(size is not None for size in sizes) and sum(size or 0 for size in sizes) < SMALL_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_numbers(take: int | None, workers: int | None) -> None:
    problems = []
    if take is not None and take < 1:
        problems.append(Problem("--take", "too few tokens", found=str(take), allowed="at least 1"))
    if workers is not None and not 1 <= workers <= 1024:
        problems.append(Problem("--workers", "out of range", found=str(workers), allowed="1 to 1024"))
    if problems:
        raise InputError(problems)


def _refuse_single_pass(sources: Sequence[DocumentSource], tokenizer: str) -> None:
    if any(source.name == "-" for source in sources):
        raise InputError(
            Problem(
                f"--tokenizer {tokenizer}",
                "reads the text twice to learn from it, and standard input can be read only once",
                allowed="a file, or a ready tokenizer: gpt2, bytes, a tokenizer.json",
            )
        )
