"""Run any command as it is, keep its output in a log, and watch it.

    terminal ←→ oomph ←→ pty or pipes ←→ the command
                  └→ the log, read again every few seconds for its losses and speed

On a terminal the command gets a pty of its own, so that colours, progress bars and questions work; else it gets two
pipes. Bytes are passed on and written to the log before anything else is done with them. Signals go to the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import selectors
import shlex
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from oomph.runs.follow import Follower, Notice

CHUNK = 1 << 16
EVERY_S = 2.0
TICK_S = 0.25
DRAIN_S = 1.0  # after the command has ended, for what its children still print
CATCH_UP_BYTES = 1 << 20  # the most of the log to read at once, so that a flood of output is not delayed
_TO_GROUP = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)  # as a terminal sends them
_TO_COMMAND = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TOLD = ("silent", "not_finite")  # notices that are printed among the program's own lines
KILL_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    code: int  # its exit code, or 128 plus the signal's number
    signal: int | None
    log: Path
    seconds: float
    interrupted: bool  # by the user
    silent_s: float | None  # seconds without a line at the end, if more than its steps explain
    memory_killer: bool  # Linux killed a process for memory in the meantime


def launch(
    command: Sequence[str], follower: Follower, tell: Callable[[str], None], every_s: float = EVERY_S
) -> Outcome:
    """Run the command to its end; `follower` has the log. Raises `OSError` if the command cannot be started."""
    with follower.path.open("wb", buffering=0) as log:
        return _Launch(command, follower, log.fileno(), tell, every_s).run()


class _Launch:
    def __init__(
        self, command: Sequence[str], follower: Follower, log: int, tell: Callable[[str], None], every_s: float
    ) -> None:
        self.command, self.follower, self.log, self.tell, self.every_s = command, follower, log, tell, every_s
        self.on_terminal = sys.stdout.isatty()
        self.interrupted = False
        self.silent_since: float | None = None
        self.selector = selectors.DefaultSelector()
        self.process: subprocess.Popen[bytes] | None = None
        self.pty: int | None = None
        self.keyboard: int | None = None  # the pty, if our input goes to it

    def run(self) -> Outcome:
        began, kills = time.monotonic(), _kills()
        with self._signals(), self._terminal():
            process = self._start()
            try:
                self._copy(process)
                code = process.wait()
            finally:
                self._close(process)
        self.follower.look()
        return Outcome(
            code=code if code >= 0 else 128 - code,
            signal=-code if code < 0 else None,
            log=self.follower.path,
            seconds=time.monotonic() - began,
            interrupted=self.interrupted,
            silent_s=None if self.silent_since is None else time.monotonic() - self.silent_since,
            memory_killer=_kills() > kills,
        )

    # --- the command -----------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        if not self.on_terminal:
            out = subprocess.PIPE
            process = subprocess.Popen(self.command, stdout=out, stderr=out, start_new_session=not sys.stdin.isatty())
            assert process.stdout is not None
            assert process.stderr is not None
            self.selector.register(process.stdout.fileno(), selectors.EVENT_READ, 1)
            self.selector.register(process.stderr.fileno(), selectors.EVENT_READ, 2)
            self.process = process
            return process
        ours, theirs = pty.openpty()
        self.pty = ours
        _resize(ours)
        own_input = theirs if sys.stdin.isatty() else None
        self.process = subprocess.Popen(
            self.command, stdin=own_input, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: _take_terminal(theirs),
        )  # fmt: skip
        os.close(theirs)
        self.selector.register(ours, selectors.EVENT_READ, 1)
        if own_input is not None:
            self.keyboard = ours
            self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, 0)
        return self.process

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        self.selector.close()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if self.pty is not None:
            os.close(self.pty)

    def _copy(self, process: subprocess.Popen[bytes]) -> None:
        """Copy all input and output until the command has ended and closed its output."""
        looked, ended = time.monotonic(), None
        while any(key.data for key in self.selector.get_map().values()):
            for key, _ in self.selector.select(TICK_S):
                self._pass_on(key.fd, key.data)
            now = time.monotonic()
            if process.poll() is not None:
                ended = ended or now
                if now - ended > DRAIN_S:
                    return
            elif now - looked >= self.every_s:
                looked = now
                self._look()

    def _pass_on(self, source: int, target: int) -> None:
        try:
            data = os.read(source, CHUNK)
        except OSError:  # a pty whose other end is closed
            data = b""
        if not data:
            self.selector.unregister(source)
            return
        if target == 0:
            _write(self.keyboard or 0, data)
            return
        _write(self.log, data)
        _write(target, data)  # a closed pipe does not stop the run

    def _look(self) -> None:
        for notice in self.follower.look(CATCH_UP_BYTES):
            self._notice(notice)

    def _notice(self, notice: Notice) -> None:
        if notice.id == "silent":
            self.silent_since = time.monotonic() - self.follower.quiet_s
        elif notice.id == "silent_over":
            self.silent_since = None
        if notice.id in _TOLD:
            self.tell(notice.text)

    # --- signals and the terminal ------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward our signals to the command; those of a terminal reach it directly."""

        def send(number: int, _: object) -> None:
            self.interrupted |= number in (signal.SIGINT, signal.SIGTERM)
            if self.process is None or self.process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if number in _TO_COMMAND:
                    self.process.send_signal(number)
                elif os.getpgid(self.process.pid) != os.getpgrp():
                    os.killpg(os.getpgid(self.process.pid), number)

        before = {number: signal.signal(number, send) for number in (*_TO_GROUP, *_TO_COMMAND)}
        if self.on_terminal:
            before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: _resize(self.pty))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[None]:
        """Put the terminal in raw mode: all keys go to the command, Ctrl-C too."""
        if not (self.on_terminal and sys.stdin.isatty()):
            yield
            return
        keys = sys.stdin.fileno()
        before = termios.tcgetattr(keys)
        tty.setraw(keys, termios.TCSADRAIN)
        try:
            yield
        finally:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _take_terminal(terminal: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _resize(terminal: int | None) -> None:
    """Give a pty the size of our terminal."""
    if terminal is not None:
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


def _write(target: int, data: bytes) -> None:
    """Write all bytes. A full disk or a closed pipe loses them, but not the run."""
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                time.sleep(0.001)


def _kills() -> int:
    """How many processes Linux has killed for memory, on the machine and in this container."""
    count = 0
    for file in KILL_COUNTERS:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    count += int(line.split()[1])
    return count


def shown(command: Sequence[str]) -> str:
    """The command as it would be typed."""
    return shlex.join(command)
