"""`oomph run -- COMMAND`: a training command as it is, with an explanation after it if it ends badly."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oomph.cli.arguments import VerbParser
from oomph.errors import InputError, Problem
from oomph.runs import health

if TYPE_CHECKING:
    from oomph.runs.launch import Outcome
    from oomph.runs.run import LoggedRun

CONFIGS = (".py", ".toml", ".json", ".yaml", ".yml")
LEAST_KEYS = 3  # a file of the command must set this many to count as the run's config
CANNOT_START = 127  # a shell's code for a missing command


def run(argv: list[str]) -> int:
    """Start the command, pass everything through, explain what went wrong; returns the command's exit code."""
    before, command = _split(argv)
    options, _ = _parser().parse(before)
    if not command:
        raise InputError(Problem("oomph run", "no command", allowed="oomph run -- python train.py …"))
    log = Path(options.log) if options.log else _unused(f"oomph-run-{time.strftime('%Y%m%d-%H%M%S')}")
    from oomph.devices.nvml import sampler
    from oomph.runs.follow import Follower
    from oomph.runs.launch import launch

    try:
        follower = Follower(log, sampler())
        outcome = launch(command, follower, _tell)
    except OSError as error:
        where = str(log) if error.filename == str(log) else command[0]
        if log.is_file() and not log.stat().st_size:
            log.unlink()
        _tell(f"{where}: {error.strerror or type(error).__name__}")
        return CANNOT_START
    if _went_badly(outcome, follower.run):
        _explain(command, outcome, follower.run, options.gpu)
    _tell(f"the log is kept in {log}")
    return outcome.code


def _unused(stem: str) -> Path:
    """An unused path for a log: several runs may start in the same second."""
    for tail in itertools.chain(("",), (f"-{number}" for number in itertools.count(2))):
        path = Path(f"{stem}{tail}.log")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        except OSError:  # reported when it is opened
            pass
        return path
    raise AssertionError


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after the first "--"."""
    if "--" not in argv:
        first = next((place for place, each in enumerate(argv) if not each.startswith("-")), len(argv))
        return argv[:first], argv[first:]
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _tell(text: str) -> None:
    end = "\r\n" if sys.stderr.isatty() else "\n"
    sys.stderr.write(f"oomph: {text}{end}")
    sys.stderr.flush()


def _went_badly(outcome: Outcome, seen: LoggedRun) -> bool:
    lost = health.not_finite(seen)
    if seen.ooms or (lost is not None and lost.stays) or outcome.silent_s is not None:
        return True
    return outcome.code != 0 and not outcome.interrupted


def _explain(command: Sequence[str], outcome: Outcome, seen: LoggedRun, gpu: str | None) -> None:
    """Print the one-screen explanation of the log on standard error."""
    from oomph.report.explain import document
    from oomph.report.terminal import to_text
    from oomph.runs.explain import explain
    from oomph.runs.reading.reader import read

    try:
        found = read(_Command(command), *_configs(command), outcome.log, name=outcome.log.stem)
        found.gpus = seen.gpus | found.gpus
        found.processes = seen.processes | found.processes
        _add_end(outcome, found)
        report = document(explain(found, gpu)).then(("oomph explain " + str(outcome.log) + " --all", "everything"))
        sys.stderr.write("\n" + to_text(report))
    except InputError as error:
        _tell(f"no explanation: {error}")
    except Exception as error:  # must not change the run's own exit code
        _tell(f"no explanation: {type(error).__name__}: {error}")


def _add_end(outcome: Outcome, found: LoggedRun) -> None:
    """Add what the log does not show: a signal, the kernel's OOM killer, silence."""
    from oomph.runs.run import Crash, LogEvent, Oom
    from oomph.units import duration

    if outcome.signal == 9 and outcome.memory_killer and not found.ooms:
        found.ooms.append(
            Oom(where="the kernel's count", library="the kernel", memory="machine", after_step=found.last_step)
        )
    elif outcome.signal is not None and found.crash is None:
        name = "killed by SIGKILL" if outcome.signal == 9 else f"signal {outcome.signal}"
        found.crash = Crash(name, "its exit code")
    elif outcome.code and found.crash is None and not found.ooms:
        found.crash = Crash(f"exit code {outcome.code}", "its exit code")
    if outcome.silent_s is not None:
        text = f"nothing was printed for {duration(outcome.silent_s)}"
        found.events.append(LogEvent("stalled", "oomph run", text, found.last_step))
        found.event_counts["stalled"] = 1


class _Command(io.BytesIO):
    """The command as a source of settings."""

    name = "the command"

    def __init__(self, command: Sequence[str]) -> None:
        from oomph.runs.launch import shown

        super().__init__(f"{shown(command)} \n".encode())


def _configs(command: Sequence[str]) -> list[str]:
    """The files in the command that are training configs."""
    from oomph.config import load

    found = []
    for word in command[1:]:
        if not word.endswith(CONFIGS) or not Path(word).is_file():
            continue
        try:
            loaded = load([word], confined=True)
        except InputError:
            continue
        if sum(loaded.said(key) for key in loaded.sources) >= LEAST_KEYS:
            found.append(word)
    return found


def _parser() -> VerbParser:
    parser = VerbParser(
        "run",
        "Starts a training command as it is: terminal, signals, progress bars and exit code pass through. Keeps the "
        "log, watches the card, and explains an out-of-memory error, NaN, a stall or a crash after it.\n\n"
        "  oomph run -- python train.py config/run.py --batch_size=8",
    )
    parser.add_argument("--log", metavar="FILE", help="keep the output there; else oomph-run-DATE.log")
    parser.add_argument("--gpu", metavar="NAME", help="the card, where neither the driver nor the log names it")
    return parser
