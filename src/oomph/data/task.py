"""Making one set: chunks to the workers, tokens to the files, a journal on the way, final names at the end; and the
progress line meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from msgspec.structs import replace

from oomph.data.errors import DataError
from oomph.data.manifest import (
    MANIFEST,
    META_PICKLE,
    SET_FILES,
    TOKENIZER,
    VERSION,
    Manifest,
    Split,
    TokenizerInfo,
    meta_pickle,
    read_manifest,
    size_pickle,
    to_json,
    token_bytes,
)
from oomph.data.pieces import CHUNK_BYTES, Chunk, ChunkPart, SourcePosition
from oomph.data.recipe import TAIL, Splitting, differences, refuse
from oomph.data.sources import DocumentSource
from oomph.data.streams import StandardInput
from oomph.data.tokenizer import CharTokenizer, Gpt2Tokenizer, JsonTokenizer, Tokenizer, learn
from oomph.data.work import WORK, Journal, TokenFiles, WorkFolder
from oomph.data.workers import Encoded, EncodeSettings, encode_all
from oomph.errors import InputError, Problem
from oomph.units import MIB, count, duration

JOURNAL_SECONDS = 2.0


@dataclass
class Prepared:
    """The result of `oomph data`."""

    folder: Path
    manifest: Manifest
    already: bool = False  # the set was already finished
    resumed_tokens: int = 0  # tokens from an earlier run
    seconds: float = 0.0
    workers: int = 1
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cursor:
    """How far the work is once a chunk is written."""

    source: int
    at: SourcePosition
    read_bytes: int
    standard_input: SourcePosition | None


@dataclass
class Task:
    """Everything one run has to do."""

    out: Path
    recipe: dict[str, Any]
    sources: Sequence[DocumentSource]
    spec: str
    tokenizer: Tokenizer | None  # None: to be learned from the text
    splitting: Splitting
    take: int | None
    skip_broken: bool
    journal_seconds: float
    say: Callable[[str], None]

    def finished(self) -> Prepared | None:
        """The set if it is complete and has the same recipe, None if unfinished. Refuses a set with another recipe."""
        manifest = read_manifest(self.out)
        if manifest is None:
            return None
        if lines := differences(manifest.recipe, self.recipe):
            raise refuse(str(self.out), "a finished set", lines)
        if manifest.standard_input is not None:
            stream = StandardInput({**manifest.standard_input})  # raises if it differs
            if self.take is None and stream.read(1):
                raise refuse(str(self.out), "a finished set", ["standard input is longer than it was"])
        if damage := manifest.damage(self.out):
            cure = "--overwrite to make the set again"
            what = "the finished set is damaged"
            raise InputError(Problem(f"--out {self.out}", what, found=line, allowed=cure) for line in damage)
        return Prepared(self.out, manifest, already=True)

    def run(self, overwrite: bool, workers: int, show_progress: bool) -> Prepared:
        """Resume the unfinished set or start one, and finish it."""
        began = time.monotonic()
        if not overwrite:
            self._refuse_foreign_files()
        folder = WorkFolder(self.out)
        try:
            journal = self._journal(folder, overwrite)
            complete = read_manifest(folder.path)
            if complete is None:
                done = self._make_or_abandon(folder, journal, workers, show_progress)
            else:  # killed while files were moved to their final names
                done = Prepared(self.out, complete, resumed_tokens=journal.tokens)
            folder.publish(done.manifest.files)
        finally:
            folder.close()
        done.workers, done.seconds = workers, time.monotonic() - began
        return done

    def _refuse_foreign_files(self) -> None:
        """Refuse to replace files that oomph did not make, unless --overwrite."""
        if (self.out / WORK / MANIFEST).exists():
            return  # ours: a run was killed while moving them here
        foreign = [name for name in SET_FILES if (self.out / name).exists()]
        if foreign:
            raise InputError(
                Problem(
                    f"--out {self.out}",
                    "holds files that oomph data did not make",
                    found=", ".join(foreign),
                    allowed="another --out, or --overwrite to replace them",
                )
            )

    def _journal(self, folder: WorkFolder, overwrite: bool) -> Journal:
        journal = None if overwrite else folder.read_journal()
        if journal is None:
            folder.clear()
            journal = Journal(self.recipe)
            folder.write_journal(journal)
        elif lines := differences(journal.recipe, self.recipe):
            raise refuse(str(self.out), "an unfinished set", lines)
        return journal

    def _make_or_abandon(self, folder: WorkFolder, journal: Journal, workers: int, show_progress: bool) -> Prepared:
        """Make the set. If the input is wrong and no token was made, leave no unfinished set behind."""
        try:
            return self._make(folder, journal, workers, show_progress)
        except DataError:  # the input was right: keep a learned vocabulary
            raise
        except Exception:
            left = folder.read_journal()
            if left is None or not left.tokens:
                folder.abandon()
            raise

    def _make(self, folder: WorkFolder, journal: Journal, workers: int, show_progress: bool) -> Prepared:
        tokenizer = self.tokenizer or self._learn(folder)
        dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        files = TokenFiles(folder, journal, token_bytes(dtype))
        resumed = files.journal.tokens
        if files.note:
            self.say(files.note)
        if resumed:
            self.say(f"resuming after {resumed:,} tokens of an earlier run")
        settings = EncodeSettings(
            tokenizer, "<u2" if dtype == "uint16" else "<u4", self.splitting.val_fraction, self.skip_broken
        )
        try:
            self._check_standard_input(files.journal)
            self._fill(files, settings, workers, show_progress)
            if not files.journal.tokens:
                raise InputError(Problem("SOURCE", "contains no text", found=_emptiness(files.journal)))
            manifest = self._manifest(files, tokenizer, dtype)
            files.folder.write(MANIFEST, to_json(manifest))
        finally:
            files.close()
        return Prepared(self.out, manifest, resumed_tokens=resumed, notes=self._notes(manifest))

    def _check_standard_input(self, journal: Journal) -> None:
        """Refuse a different standard input, even if an earlier run has already read all of it."""
        before = any(source.name == "-" for source in self.sources[: journal.source])
        if before and journal.standard_input is not None:
            stream = StandardInput({**journal.standard_input})  # raises if it differs
            if stream.read(1):
                raise refuse(str(self.out), "an unfinished set", ["standard input is longer than it was"])

    def _learn(self, folder: WorkFolder) -> Tokenizer:
        self.say("reading the text once to learn its vocabulary")
        chunks = (chunk for chunk, _ in self._chunks(0, {}))
        many = self.splitting.by != TAIL
        return learn(self.spec, chunks, folder, self.splitting.val_fraction, many, self.take)

    def _fill(self, files: TokenFiles, settings: EncodeSettings, workers: int, show_progress: bool) -> None:
        """Write until the sources end or `take` is reached. Saves the journal however it ends."""
        sizes = [source.size_bytes for source in self.sources]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        progress: PreparationProgress | None = None
        saved = time.monotonic()
        chunks = self._chunks(files.journal.source, files.journal.at)
        try:
            for encoded, cursor in encode_all(chunks, settings, workers):
                if encoded.problem is not None:
                    raise InputError(encoded.problem)
                enough = _append(files, encoded, cursor, self.take)
                if progress is None:
                    progress = PreparationProgress(
                        show_progress, total, self.take, cursor.read_bytes, files.journal.tokens
                    )
                progress.update(cursor.read_bytes, files.journal.tokens)
                if enough:
                    break
                if time.monotonic() - saved >= self.journal_seconds:
                    files.save()
                    saved = time.monotonic()
        except BaseException:
            files.save_quietly()
            raise
        finally:
            if progress is not None:
                progress.close()
        files.save()

    def _chunks(self, first: int, at: SourcePosition) -> Iterator[tuple[Chunk, Cursor]]:
        """Chunks of all sources from a position, small ones joined; each with the cursor after it."""
        parts: list[ChunkPart] = []
        size = 0
        before = sum(source.size_bytes or 0 for source in self.sources[:first])
        cursor = Cursor(first, at, before, None)
        for index in range(first, len(self.sources)):
            source = self.sources[index]
            read_before = before
            before += source.size_bytes or 0
            for chunk, last in _with_last(source.chunks(at if index == first else {}, self.splitting.val_fraction)):
                parts += chunk.parts
                size += chunk.size_bytes
                stdin: SourcePosition | None = None
                if "sha256" in chunk.at:
                    stdin = {"offset": chunk.at["offset"], "sha256": chunk.at["sha256"]}
                read = before if last else read_before + chunk.read_bytes
                cursor = Cursor(index + last, {} if last else chunk.at, read, stdin or cursor.standard_input)
                if size >= CHUNK_BYTES // 2:
                    yield Chunk(tuple(parts), size, cursor.at, cursor.read_bytes), cursor
                    parts, size = [], 0
        if parts:
            yield Chunk(tuple(parts), size, cursor.at, cursor.read_bytes), cursor

    def _manifest(self, files: TokenFiles, tokenizer: Tokenizer, dtype: Literal["uint16", "uint32"]) -> Manifest:
        """The manifest. Also writes what is needed to turn ids back into text."""
        journal = files.journal
        counts = journal.counts
        if self.splitting.by == TAIL:  # one document, split in two
            counts = replace(counts, documents=1, empty=0)
        names = [split.file for split in journal.splits.values()]
        extra = None
        if isinstance(tokenizer, CharTokenizer):
            extra = META_PICKLE
            files.folder.write(extra, meta_pickle(tokenizer.characters, tokenizer.end_of_text))
        elif isinstance(tokenizer, JsonTokenizer):
            extra = TOKENIZER
            files.folder.write(extra, tokenizer.content)
            names.append(extra)
        if not isinstance(tokenizer, Gpt2Tokenizer):  # without meta.pkl nanoGPT assumes GPT-2's vocabulary
            names.append(META_PICKLE)
            if extra != META_PICKLE:
                files.folder.write(META_PICKLE, size_pickle(tokenizer.vocab_size))
        info = TokenizerInfo(tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.sha256, extra)
        return Manifest(
            version=VERSION,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            tokenizer=info,
            splits=journal.splits,
            counts=counts,
            files=names,
            recipe=self.recipe,
            standard_input=journal.standard_input,
        )

    def _why_no_validation(self) -> str:
        if self.splitting.by != TAIL:
            return "raise --val_fraction, or use --split tail for a single text"
        if self.take is not None and self.splitting.val_fraction:
            return "it is the end of the text, which --take does not reach: drop --take, or shorten the text"
        return "raise --val_fraction"

    def _notes(self, manifest: Manifest) -> list[str]:
        notes = []
        counts, tokens = manifest.counts, sum(split.tokens for split in manifest.splits.values())
        if self.take is not None and tokens < self.take:
            notes.append(f"the sources have only {tokens:,} tokens, fewer than the {self.take:,} asked for")
        if not manifest.splits["train"].tokens:
            notes.append("the training split is empty: lower --val_fraction, or give more text")
        if not manifest.splits["val"].tokens:
            notes.append(f"the validation split is empty: {self._why_no_validation()}")
        if counts.repaired:
            notes.append(f"invalid UTF-8 in {_documents(counts.repaired)} was replaced by U+FFFD")
        if counts.empty:
            notes.append(f"left out because empty: {_documents(counts.empty)}")
        if counts.broken:
            notes.append(f"{counts.broken:,} broken rows were skipped")
        if manifest.dtype == "uint32":
            notes.append("the vocabulary needs 32-bit tokens, and nanoGPT reads only 16-bit token files")
        return notes


def _documents(number: int) -> str:
    return "1 document" if number == 1 else f"{number:,} documents"


def _append(files: TokenFiles, encoded: Encoded, cursor: Cursor, take: int | None) -> bool:
    """Write a chunk's tokens and count them. True once `take` is reached, to the exact token."""
    before = files.journal
    left = None if take is None else take - before.tokens
    tokens, documents = {"train": 0, "val": 0}, {"train": 0, "val": 0}
    counts = replace(before.counts)
    repaired = before.repaired  # whether the current document is already counted as repaired
    for piece in encoded.pieces:
        taken = piece.tokens if left is None else min(piece.tokens, left - sum(tokens.values()))
        if left is not None and sum(tokens.values()) >= left:
            break
        name = "val" if piece.is_val else "train"
        tokens[name] += taken
        documents[name] += piece.begins
        counts.documents += piece.begins
        counts.empty += piece.empty
        repaired = repaired and not piece.begins
        counts.repaired += piece.repaired and not repaired
        repaired = repaired or piece.repaired
        counts.broken += piece.broken
        counts.text_bytes += piece.text_bytes * taken // piece.tokens if piece.tokens else 0  # a cut piece: its share
    views = {"train": memoryview(encoded.train), "val": memoryview(encoded.val)}
    files.append(
        {name: view[: tokens[name] * files.token_bytes] for name, view in views.items()},
        Journal(
            recipe=before.recipe,
            source=cursor.source,
            at=cursor.at,
            splits={
                name: Split(split.file, split.tokens + tokens[name], split.documents + documents[name])
                for name, split in before.splits.items()
            },
            counts=counts,
            repaired=repaired,
            standard_input=cursor.standard_input or before.standard_input,
        ),
    )
    return left is not None and sum(tokens.values()) >= left


def _with_last(chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, bool]]:
    """Each chunk, and whether it is the last, so that a finished source is never opened again."""
    held = next(chunks, None)
    for chunk in chunks:
        assert held is not None
        yield held, False
        held = chunk
    if held is not None:
        yield held, True


def _emptiness(journal: Journal) -> str:
    return f"{journal.counts.empty:,} empty documents, {journal.counts.broken:,} broken rows"


TERMINAL_SECONDS, PLAIN_SECONDS = 0.2, 10.0


class PreparationProgress:
    """The progress line, on standard error, so that standard output has only the result."""

    def __init__(
        self, shown: bool, total_bytes: int | None, take: int | None, begun_bytes: int, begun_tokens: int
    ) -> None:
        self._wanted = shown
        self._stream: TextIO = sys.stderr
        self._terminal = self._stream.isatty()
        self._total_bytes, self._take = total_bytes, take
        self._begun_bytes, self._begun_tokens = begun_bytes, begun_tokens
        self._start = self._shown = time.monotonic()

    def update(self, read_bytes: int, tokens: int) -> None:
        """Show the progress if enough time has passed."""
        if not self._wanted:
            return
        now = time.monotonic()
        if now - self._shown < (TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS):
            return
        self._shown = now
        line = self.line(read_bytes, tokens, now - self._start)
        self._stream.write(f"\r\x1b[2K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()

    def line(self, read_bytes: int, tokens: int, seconds: float) -> str:
        """The line: what is done, the rate since this run began, and the time to go at that rate."""
        rate_bytes = (read_bytes - self._begun_bytes) / max(seconds, 1e-9)
        rate_tokens = (tokens - self._begun_tokens) / max(seconds, 1e-9)
        parts = [f"{read_bytes / MIB:,.0f} MiB read", f"{count(tokens)} tokens"]
        shares = []
        if self._total_bytes:
            shares.append((read_bytes / self._total_bytes, self._total_bytes - read_bytes, rate_bytes))
        if self._take:
            shares.append((tokens / self._take, self._take - tokens, rate_tokens))
        if shares:
            parts.insert(0, f"{min(max(share for share, _, _ in shares), 1):6.1%}")
        parts.append(f"{rate_bytes / MIB:.1f} MiB/s")
        parts.append(f"{count(rate_tokens)} tokens/s")
        left = [remaining / rate for _, remaining, rate in shares if rate > 0]
        if left:
            parts.append(f"{duration(max(min(left), 0))} to go")
        return "  ".join(parts)

    def close(self) -> None:
        """Clear the line."""
        if self._terminal and self._wanted:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
