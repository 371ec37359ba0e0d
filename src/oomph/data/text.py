"""Plain text: a file is one document, or many between separators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from oomph.data.pieces import BLOCK_BYTES, Block, State, TextPart, cut_place, in_val
from oomph.data.streams import Opener, Stream


@dataclass(frozen=True)
class TextSource:
    """One stream of text. `start`, `end` and `is_val` serve the split of a single text into its two ends."""

    name: str
    identity: State
    size_bytes: int | None
    opener: Opener
    separator: bytes | None = None
    start: int = 0
    end: int | None = None
    is_val: bool | None = None

    def blocks(self, at: State, val_fraction: float) -> Iterator[Block]:
        """Blocks from a place on. Each depends on its place alone, so that a resumed run cuts as the first one did."""
        offset = int(at.get("offset", self.start))
        open_split: bool | None = bool(at["val"]) if "val" in at else None  # of a document that an earlier block began
        with closing(self.opener({**at, "offset": offset})) as stream:
            yield from self._blocks(stream, offset, open_split, val_fraction)

    def _blocks(self, stream: Stream, offset: int, open_split: bool | None, val_fraction: float) -> Iterator[Block]:
        data = b""
        while True:
            wanted = BLOCK_BYTES if self.end is None else min(BLOCK_BYTES, self.end - offset)
            data += stream.read(wanted - len(data))
            at_end = len(data) < BLOCK_BYTES
            part, used, open_split = self._part(data, at_end, open_split, val_fraction)
            mark = stream.mark(data[:used])
            offset += used
            data = data[used:]
            place: State = {"offset": offset, **mark}
            if open_split is not None:
                place["val"] = int(open_split)
            yield Block((part,), used, place, stream.read_bytes)
            if at_end:
                return

    def _part(
        self, data: bytes, at_end: bool, open_split: bool | None, val_fraction: float
    ) -> tuple[TextPart, int, bool | None]:
        """The part to hand over, how many bytes it uses up, and the split of a document that it leaves unfinished."""
        continues = open_split is not None
        split = self.is_val if open_split is None else open_split
        eot = self.is_val is None
        if at_end:
            return TextPart(data, self.separator, continues, True, split, eot), len(data), None
        if self.separator is not None and self.separator in data:
            # Not rfind: of three newlines the first two are a blank line, not the last two.
            place = len(data) - len(data.split(self.separator)[-1])
            part = TextPart(data[: place - len(self.separator)], self.separator, continues, True, split, eot)
            return part, place, None
        # A separator may begin in the last bytes: the cut stays before it.
        place = cut_place(data, len(data) - len(self.separator or b" ") + 1)
        if split is None:
            split = in_val(data, val_fraction)
        return TextPart(data[:place], None, continues, False, split, eot), place, split
