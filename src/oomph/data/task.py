"""One set in work: blocks to the workers, tokens to the files, the journal in between, final names at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from oomph.data.encoders import CharEncoder, Encoder, Gpt2Encoder, JsonEncoder
from oomph.data.failure import DataError
from oomph.data.learned import learn
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
from oomph.data.pieces import BLOCK_BYTES, Block, Part, State
from oomph.data.progress import Progress
from oomph.data.recipe import TAIL, Splitting, differences, refuse
from oomph.data.sources import Source
from oomph.data.streams import StandardInput
from oomph.data.work import WORK, Journal, TokenFiles, WorkFolder
from oomph.data.workers import Encoded, Job, encode_all
from oomph.errors import InputError, Problem

JOURNAL_SECONDS = 2.0


@dataclass
class Prepared:
    """What a call did."""

    folder: Path
    manifest: Manifest
    already: bool = False  # the set was finished before
    resumed_tokens: int = 0  # that an earlier call had made
    seconds: float = 0.0
    workers: int = 1
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Where the work is once a block is written."""

    source: int
    at: State
    read_bytes: int
    standard_input: State | None


@dataclass
class Task:
    """All that one call has to do."""

    out: Path
    recipe: dict[str, Any]
    sources: Sequence[Source]
    spec: str
    encoder: Encoder | None  # None: to be learned from the text
    splitting: Splitting
    take: int | None
    skip_broken: bool
    journal_seconds: float
    say: Callable[[str], None]

    def finished(self) -> Prepared | None:
        """The set, where it is complete and made from the same; refused where it is made from something else."""
        manifest = read_manifest(self.out)
        if manifest is None:
            return None
        if lines := differences(manifest.recipe, self.recipe):
            raise refuse(str(self.out), "a finished set", lines)
        if manifest.standard_input is not None:
            stream = StandardInput({**manifest.standard_input})  # raises where it differs
            if self.take is None and stream.read(1):
                raise refuse(str(self.out), "a finished set", ["standard input is longer than it was"])
        if damage := manifest.damage(self.out):
            cure = "--overwrite to make the set anew"
            raise InputError(Problem(f"--out {self.out}", line, allowed=cure) for line in damage)
        return Prepared(self.out, manifest, already=True)

    def run(self, overwrite: bool, workers: int, show_progress: bool) -> Prepared:
        """Take up the unfinished set or begin one, and bring it to its end."""
        began = time.monotonic()
        if not overwrite:
            self._refuse_strangers()
        folder = WorkFolder(self.out)
        try:
            journal = self._journal(folder, overwrite)
            complete = read_manifest(folder.path)
            if complete is None:
                done = self._make_or_abandon(folder, journal, workers, show_progress)
            else:  # killed before all of it had its final name
                done = Prepared(self.out, complete, resumed_tokens=journal.tokens)
            folder.publish(done.manifest.files)
        finally:
            folder.close()
        done.workers, done.seconds = workers, time.monotonic() - began
        return done

    def _refuse_strangers(self) -> None:
        """Files of another maker are not replaced unasked."""
        if (self.out / WORK / MANIFEST).exists():
            return  # ours: a call was killed while it moved them here
        strangers = [name for name in SET_FILES if (self.out / name).exists()]
        if strangers:
            raise InputError(
                Problem(
                    f"--out {self.out}",
                    f"holds {', '.join(strangers)} that oomph data did not make",
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
        """Make the set; where nothing of it was made and the input is at fault, leave nothing to be continued."""
        try:
            return self._make(folder, journal, workers, show_progress)
        except DataError:  # the call was right: a vocabulary that was learned is worth keeping
            raise
        except Exception:
            left = folder.read_journal()
            if left is None or not left.tokens:
                folder.abandon()
            raise

    def _make(self, folder: WorkFolder, journal: Journal, workers: int, show_progress: bool) -> Prepared:
        encoder = self.encoder or self._learn(folder)
        dtype: Literal["uint16", "uint32"] = "uint16" if encoder.vocab_size <= 2**16 else "uint32"
        files = TokenFiles(folder, journal, token_bytes(dtype))
        resumed = files.journal.tokens
        if files.note:
            self.say(files.note)
        if resumed:
            self.say(f"going on after {resumed:,} tokens of an earlier call")
        job = Job(encoder, "<u2" if dtype == "uint16" else "<u4", self.splitting.val_fraction, self.skip_broken)
        try:
            self._check_standard_input(files.journal)
            self._fill(files, job, workers, show_progress)
            if not files.journal.tokens:
                raise InputError(Problem("SOURCE", "no text in it", found=_emptiness(files.journal)))
            manifest = self._manifest(files, encoder, dtype)
            files.folder.write(MANIFEST, to_json(manifest))
        finally:
            files.close()
        return Prepared(self.out, manifest, resumed_tokens=resumed, notes=self._notes(manifest))

    def _check_standard_input(self, journal: Journal) -> None:
        """Where an earlier call has read all of it, nothing else would notice that it is another."""
        before = any(source.name == "-" for source in self.sources[: journal.source])
        if before and journal.standard_input is not None:
            stream = StandardInput({**journal.standard_input})  # raises where it differs
            if stream.read(1):
                raise refuse(str(self.out), "an unfinished set", ["standard input is longer than it was"])

    def _learn(self, folder: WorkFolder) -> Encoder:
        self.say("reading the text once, to learn its vocabulary")
        blocks = (block for block, _ in self._blocks(0, {}))
        many = self.splitting.by != TAIL
        return learn(self.spec, blocks, folder, self.splitting.val_fraction, many, self.take)

    def _fill(self, files: TokenFiles, job: Job, workers: int, show_progress: bool) -> None:
        """Write until the sources end or enough is taken; save the journal on every way out."""
        sizes = [source.size_bytes for source in self.sources]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        progress: Progress | None = None
        saved = time.monotonic()
        blocks = self._blocks(files.journal.source, files.journal.at)
        try:
            for encoded, place in encode_all(blocks, job, workers):
                if encoded.problem is not None:
                    raise InputError(encoded.problem)
                enough = _append(files, encoded, place, self.take)
                if progress is None:
                    progress = Progress(show_progress, total, self.take, place.read_bytes, files.journal.tokens)
                progress.update(place.read_bytes, files.journal.tokens)
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

    def _blocks(self, first: int, at: State) -> Iterator[tuple[Block, Place]]:
        """Blocks of all sources from a place on, small ones joined; each with the place that follows it."""
        parts: list[Part] = []
        size = 0
        before = sum(source.size_bytes or 0 for source in self.sources[:first])
        place = Place(first, at, before, None)
        for index in range(first, len(self.sources)):
            source = self.sources[index]
            read_before = before
            before += source.size_bytes or 0
            for block, last in _with_last(source.blocks(at if index == first else {}, self.splitting.val_fraction)):
                parts += block.parts
                size += block.size_bytes
                stdin: State | None = None
                if "sha256" in block.at:
                    stdin = {"offset": block.at["offset"], "sha256": block.at["sha256"]}
                read = before if last else read_before + block.read_bytes
                place = Place(index + last, {} if last else block.at, read, stdin or place.standard_input)
                if size >= BLOCK_BYTES // 2:
                    yield Block(tuple(parts), size, place.at, place.read_bytes), place
                    parts, size = [], 0
        if parts:
            yield Block(tuple(parts), size, place.at, place.read_bytes), place

    def _manifest(self, files: TokenFiles, encoder: Encoder, dtype: Literal["uint16", "uint32"]) -> Manifest:
        """The manifest, and beside the token files what is needed to turn ids back into text."""
        journal = files.journal
        counts = journal.counts
        if self.splitting.by == TAIL:  # one document, cut in two
            counts = replace(counts, documents=1, empty=0)
        names = [split.file for split in journal.splits.values()]
        extra = None
        if isinstance(encoder, CharEncoder):
            extra = META_PICKLE
            files.folder.write(extra, meta_pickle(encoder.characters, encoder.end_of_text))
        elif isinstance(encoder, JsonEncoder):
            extra = TOKENIZER
            files.folder.write(extra, encoder.content)
            names.append(extra)
        if not isinstance(encoder, Gpt2Encoder):  # without it, nanoGPT would take GPT-2's vocabulary
            names.append(META_PICKLE)
            if extra != META_PICKLE:
                files.folder.write(META_PICKLE, size_pickle(encoder.vocab_size))
        info = TokenizerInfo(encoder.name, encoder.vocab_size, encoder.end_of_text, encoder.sha256, extra)
        return Manifest(
            version=VERSION,
            dtype=dtype,
            vocab_size=encoder.vocab_size,
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
            return "it is the end of the text, which --take does not reach: leave out --take, or shorten the text"
        return "raise --val_fraction"

    def _notes(self, manifest: Manifest) -> list[str]:
        notes = []
        counts, tokens = manifest.counts, sum(split.tokens for split in manifest.splits.values())
        if self.take is not None and tokens < self.take:
            notes.append(f"the sources end after {tokens:,} tokens: fewer than the {self.take:,} asked for")
        if not manifest.splits["train"].tokens:
            notes.append("the training split is empty: lower --val_fraction, or give more text")
        if not manifest.splits["val"].tokens:
            notes.append(f"the validation split is empty: {self._why_no_validation()}")
        if counts.repaired:
            notes.append(f"broken UTF-8 in {_documents(counts.repaired)} was replaced by U+FFFD")
        if counts.empty:
            notes.append(f"left out for having no text: {_documents(counts.empty)}")
        if counts.broken:
            notes.append(f"{counts.broken:,} broken rows were skipped")
        if manifest.dtype == "uint32":
            notes.append("the vocabulary needs 32 bits: nanoGPT itself reads only 16-bit token files")
        return notes


def _documents(number: int) -> str:
    return "1 document" if number == 1 else f"{number:,} documents"


def _append(files: TokenFiles, encoded: Encoded, place: Place, take: int | None) -> bool:
    """Write a block's tokens and count them; True once enough is taken, to the exact token."""
    before = files.journal
    left = None if take is None else take - before.tokens
    tokens, documents = {"train": 0, "val": 0}, {"train": 0, "val": 0}
    counts = replace(before.counts)
    repaired = before.repaired  # the document in work, counted once however long it is
    for run in encoded.runs:
        taken = run.tokens if left is None else min(run.tokens, left - sum(tokens.values()))
        if left is not None and sum(tokens.values()) >= left:
            break
        name = "val" if run.is_val else "train"
        tokens[name] += taken
        documents[name] += run.begins
        counts.documents += run.begins
        counts.empty += run.empty
        repaired = repaired and not run.begins
        counts.repaired += run.repaired and not repaired
        repaired = repaired or run.repaired
        counts.broken += run.broken
        counts.text_bytes += run.text_bytes * taken // run.tokens if run.tokens else 0  # of one that is cut, its share
    views = {"train": memoryview(encoded.train), "val": memoryview(encoded.val)}
    files.append(
        {name: view[: tokens[name] * files.token_bytes] for name, view in views.items()},
        Journal(
            recipe=before.recipe,
            source=place.source,
            at=place.at,
            splits={
                name: Split(split.file, split.tokens + tokens[name], split.documents + documents[name])
                for name, split in before.splits.items()
            },
            counts=counts,
            repaired=repaired,
            standard_input=place.standard_input or before.standard_input,
        ),
    )
    return left is not None and sum(tokens.values()) >= left


def _with_last(blocks: Iterator[Block]) -> Iterator[tuple[Block, bool]]:
    """Each block, and whether it is the last: a finished source is never opened again."""
    held = next(blocks, None)
    for block in blocks:
        assert held is not None
        yield held, False
        held = block
    if held is not None:
        yield held, True


def _emptiness(journal: Journal) -> str:
    return f"{journal.counts.empty:,} empty documents, {journal.counts.broken:,} broken rows"
