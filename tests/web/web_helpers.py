"""A real server in a process of its own, and runs for it to show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

import oomph


@dataclass
class Running:
    """A server, and a client that asks it as its own page would."""

    process: subprocess.Popen[str]
    url: str
    token: str | None
    runs: Path
    client: httpx.Client

    def interrupt(self) -> int:
        """Ctrl-C, and the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


@contextmanager
def running(
    runs: Path, *arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    """`oomph serve` on a free port, until the end of the block."""
    options = [] if "--port" in arguments else ["--port", "0"]
    command = [sys.executable, "-m", "oomph", "serve", "--json", "--no_browser", "--runs", str(runs), *options]
    found = {**os.environ, **(environment or {})}
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=found, cwd=cwd)
    try:
        assert process.stdout is not None
        said = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        url = f"http://127.0.0.1:{said['port']}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Running(process, url, said["token"], runs, client)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def write_run(folder: Path, steps: int, *, name: str = "a", finished: bool = False, loss: float = 10.0) -> Path:
    """A run's folder as `oomph train` leaves it, with figures of so many steps."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    plan = oomph.plan({"n_layer": 2, "n_head": 2, "n_embd": 64, "max_iters": 1000, "trainer": "oomph"}, "RTX 4070")
    (path / "plan.json").write_bytes(msgspec.json.encode(plan.to_dict()))
    (path / "config.toml").write_text(oomph.config.to_toml(plan.config))
    (path / "metrics.jsonl").write_bytes(b"")
    add_steps(path, 0, steps, loss)
    if finished:
        (path / "result.json").write_text(json.dumps({"finished": True, "steps": steps}))
    return path


def add_steps(path: Path, first: int, last: int, loss: float = 10.0) -> None:
    """More lines, an evaluation every tenth step."""
    with (path / "metrics.jsonl").open("ab") as file:
        for step in range(first, last):
            figures = {"step": step, "tokens": (step + 1) * 1000, "loss": loss / (step + 1), "lr": 1e-3}
            figures |= {"step_ms": 3600.0, "tokens_per_s": 278.0, "memory_mib": 500.0}
            file.write(msgspec.json.encode(figures) + b"\n")
            if step % 10 == 0:
                values = {"step": step, "tokens": step * 1000, "train_loss": 1.0, "val_loss": loss / (step + 1)}
                file.write(msgspec.json.encode(values) + b"\n")
