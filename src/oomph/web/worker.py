"""A process that answers questions, one after another: `python -m oomph.web.worker RUNS_FOLDER`.

Questions come in on standard input and answers go out on standard output, each a length and as many bytes of
MessagePack. It ends when its input does, so that it never outlives the server.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

LENGTH = struct.Struct("<Q")
WORTH_PACKING_BYTES = 4096
HALVES = ("plan, asked", "plan, other")  # what two workers make of one question
MAX_MEMORY_BYTES = 16 * 2**30  # of address space: an absurd question must not fill the machine


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A status, and the JSON that goes with it."""

    status: int
    body: bytes
    packed: bool = False  # with gzip

    def plain(self) -> bytes:
        """The JSON itself."""
        import gzip

        return gzip.decompress(self.body) if self.packed else self.body


def main() -> int:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle, which then closes our input
    _limit_memory()
    # Whatever prints must not end up among the answers.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, output, sys.argv[1])
    return 0


def serve(questions: BinaryIO, answers: BinaryIO, runs_folder: str) -> None:
    """The loop."""
    from oomph.web.answers import answer

    while len(head := questions.read(LENGTH.size)) == LENGTH.size:
        verb, body = msgspec.msgpack.decode(questions.read(*LENGTH.unpack(head)), type=tuple[str, bytes])
        found = pack(*answer(verb, body, runs_folder), whole=verb not in HALVES)
        reply = msgspec.msgpack.encode(found)
        answers.write(LENGTH.pack(len(reply)) + reply)
        answers.flush()


def pack(status: int, body: bytes, whole: bool = True) -> Answer:
    """The answer, compressed here and not in the server where it is long enough to be worth it, and whole."""
    import gzip

    if len(body) < WORTH_PACKING_BYTES or not whole:
        return Answer(status, body)
    return Answer(status, gzip.compress(body, compresslevel=1, mtime=0), packed=True)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MAX_MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))


if __name__ == "__main__":
    sys.exit(main())
