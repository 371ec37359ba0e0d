"""`oomph serve` under load: plan requests, many at once.

    python benchmarks/serve_load.py [--requests 1000] [--at_once 16] [--url http://127.0.0.1:8642] [--json]
    python benchmarks/serve_load.py --opening 200   # MiB

Without --url it starts a server of its own. Three loads: `same`, one question again and again; `sliders`, moved back
and forth over a hundred settings; and `distinct`, every question new, so that none is answered from what is kept.
`--opening` asks distinct questions twice: alone, and while two runs with a metrics.jsonl of that size are opened again
and again, each time after it was written to anew.

Beside the times stands the CPU that the server and its workers had for a request: on a machine that others use too it
varies less than the times do, though it varies.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

CARDS = ("RTX 4070", "RTX 3090", "RTX 4090", "A100 SXM4 80GB", "T4")
SHAPES = ((4, 4, 256), (6, 6, 384), (12, 12, 768))  # layers, heads, width: what people train on one card


def same(count: int) -> Iterator[dict[str, object]]:
    """One question."""
    for _ in range(count):
        yield {"preset": "gpt2", "gpu": "RTX 4070", "set": {"batch_size": 8, "gradient_accumulation_steps": 64}}


def sliders(count: int) -> Iterator[dict[str, object]]:
    """A few people moving sliders: a hundred settings, each come back to."""
    drawn = random.Random(1)
    settings = list(distinct(100, seed=2))
    for _ in range(count):
        yield drawn.choice(settings)


def distinct(count: int, seed: int = 3) -> Iterator[dict[str, object]]:
    """Never the same question twice."""
    drawn = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        layers, heads, width = drawn.choice(SHAPES)
        question: dict[str, object] = {
            "gpu": drawn.choice(CARDS),
            "set": {
                "n_layer": layers,
                "n_head": heads,
                "n_embd": width,
                "batch_size": drawn.randint(1, 64),
                "gradient_accumulation_steps": drawn.choice((1, 4, 16, 64)),
                "block_size": drawn.choice((256, 512, 1024, 2048)),
                "dropout": drawn.choice((0.0, 0.1)),
            },
        }
        key = json.dumps(question)
        if key not in seen:
            seen.add(key)
            yield question


def others(count: int) -> Iterator[dict[str, object]]:
    """Never the same question twice, and none of `distinct`."""
    return distinct(count, seed=4)


LOADS = {"same": same, "sliders": sliders, "distinct": distinct, "others": others}


async def client(host: str, port: int, questions: Iterator[dict[str, object]], times_ms: list[float]) -> int:
    """Ask until the questions are used up, over one connection; how many answers were not 200."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**22)
    failed = 0
    for question in questions:
        body = json.dumps(question).encode()
        head = f"POST /api/plan HTTP/1.1\r\nHost: {host}:{port}\r\nAccept-Encoding: gzip\r\n"
        head += "Content-Type: application/json\r\n"
        began = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        reply = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(reply.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        await reader.readexactly(length)
        times_ms.append((time.perf_counter() - began) * 1e3)
        failed += b" 200 " not in reply.split(b"\r\n", 1)[0]
    writer.close()
    return failed


def write_run(folder: Path, mib: float) -> None:
    """A run with a metrics.jsonl of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in itertools.count():
            figures = {"loss": 3 + 1 / (step + 1), "lr": 6e-4, "grad_norm": 0.5123, "step_ms": 310.1 + step % 7}
            figures |= {"tokens_per_s": 1690543.2, "mfu": 0.3123, "memory_mib": 10123.5}
            file.write(json.dumps({"step": step, "tokens": step * 524288, **figures}) + "\n")
            if file.tell() >= mib * 2**20:
                return


async def open_runs(url: str, folders: list[Path]) -> None:
    """Open the runs at the same time, again and again; another file in its place makes each one new to the server."""

    def get(name: str) -> None:
        with urlopen(f"{url}/api/runs/{name}") as reply:
            reply.read()

    while True:
        await asyncio.gather(*(asyncio.to_thread(get, folder.name) for folder in folders))
        for folder in folders:
            with (folder / "metrics.jsonl").open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(size - 20)
                file.write(os.urandom(8).hex().encode())


async def measure_opening(url: str, folders: list[Path], requests: int, at_once: int) -> list[dict[str, object]]:
    """Distinct questions alone, and while the runs are opened."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    found = [await measure(host, port, "distinct", requests, at_once)]
    opening = asyncio.create_task(open_runs(url.rstrip("/"), folders))
    found.append(await measure(host, port, "others", requests, at_once) | {"load": "opening"})
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    return found


def cpu_s(pid: int) -> float | None:
    """Seconds of CPU that a process and its children have had; None where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return own + sum(cpu_s(int(child)) or 0.0 for child in children)
    except (OSError, ValueError, IndexError):
        return None


async def measure(
    host: str, port: int, load: str, requests: int, at_once: int, server: int | None = None
) -> dict[str, object]:
    """One load: how long its requests took, and the CPU of the server with that process id."""
    questions = LOADS[load](requests)
    times_ms: list[float] = []
    before = cpu_s(server) if server is not None else None
    began = time.perf_counter()
    failed = sum(await asyncio.gather(*(client(host, port, questions, times_ms) for _ in range(at_once))))
    took_s = time.perf_counter() - began
    after = cpu_s(server) if server is not None else None
    ordered = sorted(times_ms)
    return {
        "load": load,
        "requests": len(ordered),
        "at_once": at_once,
        "failed": failed,
        "median_ms": round(ordered[len(ordered) // 2], 1),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)], 1),
        "worst_ms": round(ordered[-1], 1),
        "requests_per_s": round(len(ordered) / took_s, 1),
        "cpu_ms": None if before is None or after is None else round((after - before) / len(ordered) * 1e3, 1),
        "load_average": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at_once", type=int, default=16)
    parser.add_argument("--load", choices=(*LOADS, "all"), default="all")
    parser.add_argument("--opening", type=float, metavar="MIB")
    parser.add_argument("--url")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / "one", Path(folder) / "two"]
        for run in runs if options.opening else []:
            write_run(run, options.opening)
        server, url = (None, options.url) if options.url else start(folder)
        try:
            for found in results(options, url, runs, server.pid if server else None):
                print(json.dumps(found) if options.json else LINE.format(**found))
        finally:
            if server is not None:
                server.terminate()
                server.wait()
    return 0


LINE = (
    "{load:>9}: {requests} requests, {at_once} at once, {failed} failed; median {median_ms} ms, p99 {p99_ms} ms, "
    "worst {worst_ms} ms; {requests_per_s} a second, {cpu_ms} ms of CPU each; load average {load_average}"
)


def start(runs_folder: str) -> tuple[subprocess.Popen[str], str]:
    """A server of our own, and its address."""
    command = [sys.executable, "-m", "oomph", "serve", "--no_browser", "--json", "--port", "0", "--runs", runs_folder]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")["url"]


def results(options: argparse.Namespace, url: str, runs: list[Path], server: int | None) -> Iterator[dict[str, object]]:
    """One result a load."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    asyncio.run(measure(host, port, "same", 1, 1))  # its start is not what is measured
    if options.opening:
        yield from asyncio.run(measure_opening(url, runs, options.requests, options.at_once))
        return
    for load in ("same", "sliders", "distinct") if options.load == "all" else [options.load]:
        yield asyncio.run(measure(host, port, load, options.requests, options.at_once, server))


if __name__ == "__main__":
    sys.exit(main())
