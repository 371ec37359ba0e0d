"""`oomph run`: nothing of a command is lost or changed, and what went wrong is explained after it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomph.cli.main import main
from oomph.runs.follow import Follower, WallClock
from oomph.runs.launch import launch

RUN = [sys.executable, "-m", "oomph", "run", "--log", "run.log", "--"]
OOM = (
    "CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of 11.62 GiB of which 1.06 GiB is free."
    " Process 2143 has 5.00 GiB memory in use. Including non-PyTorch memory, this process has 5.25 GiB memory in use. "
    "Of the allocated memory 4.25 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


def oomph_run(folder: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*RUN, *command], cwd=folder, capture_output=True, timeout=120)


def python(folder: Path, code: str) -> subprocess.CompletedProcess[bytes]:
    return oomph_run(folder, sys.executable, "-u", "-c", code)


def test_output_streams_and_exit_code_pass_through(tmp_path: Path) -> None:
    found = python(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert found.returncode == 7
    assert found.stdout == b"out\n"
    assert found.stderr.startswith(b"err\n")
    assert sorted((tmp_path / "run.log").read_bytes().split()) == [b"err", b"out"]


def test_a_run_that_ends_well_is_not_explained(tmp_path: Path) -> None:
    found = python(tmp_path, "print('iter 0: loss 3.0, time 5.00ms, mfu 1.00%')")
    assert (found.returncode, found.stderr) == (0, b"oomph: the log is kept in run.log\n")


def test_an_out_of_memory_error_is_explained_after_its_traceback(tmp_path: Path) -> None:
    found = python(tmp_path, f"raise RuntimeError({OOM!r})")
    error = found.stderr.decode()
    assert found.returncode == 1
    assert error.index("Traceback") < error.index("Other processes hold 5.31 GiB") < error.index("kill 2143")


def test_sigkill_is_said_and_its_code_kept(tmp_path: Path) -> None:
    found = python(tmp_path, "import os; print('last', flush=True); os.kill(os.getpid(), 9)")
    assert found.returncode == 137
    assert b"SIGKILL" in found.stderr
    assert (tmp_path / "run.log").read_bytes() == b"last\n"


def test_a_nan_loss_is_explained_though_the_command_ends_well(tmp_path: Path) -> None:
    code = "for n in range(9): print(f'iter {n}: loss {3.0 if n < 5 else float(\"nan\")}, time 5.00ms, mfu 1.00%')"
    found = python(tmp_path, code)
    assert found.returncode == 0
    assert b"NaN from step 5 on" in found.stderr


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = oomph_run(tmp_path, "no-such-command")
    assert found.returncode == 127
    assert b"no-such-command" in found.stderr
    assert not (tmp_path / "run.log").exists()


def test_a_signal_reaches_the_command(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def stop(*_):\n    print('stopped', flush=True); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, stop); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([*RUN, sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3
        assert process.stdout.read() == b"stopped\n"


def test_a_closed_pipe_does_not_stop_the_command(tmp_path: Path) -> None:
    code = "for n in range(20000): print(n)\nopen('done', 'w').close()"
    process = subprocess.Popen([*RUN, sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(60)
    assert (tmp_path / "done").exists()
    assert (tmp_path / "run.log").read_bytes().endswith(b"19999\n")


def test_on_a_terminal_the_command_has_one_too(tmp_path: Path) -> None:
    code = "import sys, os; print(sys.stdout.isatty(), os.get_terminal_size().columns, input())"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*RUN, sys.executable, "-c", code])
    os.write(terminal, b"typed\n")
    seen = b""
    while True:
        try:
            data = os.read(terminal, 1024)
        except OSError:
            break
        seen += data
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"True 80 typed" in seen or b"True 0 typed" in seen


@pytest.mark.slow
def test_100_mb_of_output_are_kept_to_the_byte(tmp_path: Path) -> None:
    found = python(tmp_path, "import sys\nline = 'x' * 99\nfor n in range(1_000_000): sys.stdout.write(line + '\\n')")
    assert found.returncode == 0
    assert len(found.stdout) == 100_000_000
    assert (tmp_path / "run.log").stat().st_size == 100_000_000


def test_a_command_that_hangs_is_noticed_and_left_alone(tmp_path: Path) -> None:
    """With a clock that runs a thousand times as fast."""
    clock = WallClock(now=lambda: 1000 * time.monotonic())
    follower = Follower(tmp_path / "hang.log", clock=clock)
    said: list[str] = []
    command = [sys.executable, "-c", "import time; print('iter 0: loss 3.0, time 5.00ms', flush=True); time.sleep(1.5)"]
    outcome = launch(command, follower, said.append, every_s=0.1)
    assert outcome.code == 0
    assert outcome.silent_s is not None
    assert len(said) == 1


def test_runs_of_one_second_keep_a_log_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20261117-120000")
    for _ in range(2):
        assert main(["run", "--", "true"]) == 0
    assert len(list(tmp_path.glob("oomph-run-*.log"))) == 2
