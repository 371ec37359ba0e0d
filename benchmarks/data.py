"""`oomph data`: its rate beside one core of tiktoken, its peak memory for small and large inputs, the reader's rate.

    python benchmarks/data.py                      50 MB and 2 GB
    python benchmarks/data.py --large_mb 200       a shorter one

The text is the Python standard library's, repeated, as JSON lines. Rates are the best of several rounds in which both
sides take turns, since the machine may have other work; CPU seconds, which that disturbs less, are counted too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from oomph.data.sources import standard_library
from oomph.data.tokenizer import Gpt2Tokenizer

PREPARE = (
    "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'\n"
    "import sys; from oomph.data import prepare\n"
    "if __name__ == '__main__': prepare([sys.argv[1]], sys.argv[2], workers=int(sys.argv[3]))"
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small_mb", type=int, default=50)
    parser.add_argument("--large_mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where the files go; they are removed at the end")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        small = write(folder / "small.jsonl", options.small_mb)
        compare(small, folder, cores, options.rounds)
        large = write(folder / "large.jsonl", options.large_mb)
        wall, cpu, peak = prepare(large, folder / "large", cores)
        size = text_mb(folder / "large")
        rates = f"{size / wall:6.2f} MB/s wall, {size / cpu:6.2f} MB per CPU second"
        print(f"{size:7.0f} MB  oomph data, {cores} cores, start included: {rates}, peak RSS {peak:4.0f} MiB")
        reader(folder / "large")


def compare(source: Path, folder: Path, cores: int, rounds: int) -> None:
    """Our rate and the library's, in turns."""
    documents = [json.loads(line)["text"] for line in source.open(encoding="utf-8")]
    encoding = Gpt2Tokenizer()._encoding  # built once: the library alone, without its start
    library, ours, peaks = [], [], []
    for turn in range(rounds):
        began, before = time.perf_counter(), time.process_time()
        for text in documents:
            encoding.encode_ordinary(text)
        library.append((time.perf_counter() - began, time.process_time() - before))
        wall, cpu, peak = prepare(source, folder / f"small{turn}", cores)
        ours.append((wall, cpu))
        peaks.append(peak)
    size = text_mb(folder / "small0")
    best = [min(side[kind] for side in rows) for rows in (library, ours) for kind in (0, 1)]
    print(
        f"{size:7.0f} MB  tiktoken, one core: {size / best[0]:6.2f} MB/s wall, {size / best[1]:6.2f} MB per CPU second"
    )
    print(
        f"{size:7.0f} MB  oomph data, {cores} cores, start included: {size / best[2]:6.2f} MB/s wall, "
        f"{size / best[3]:6.2f} MB per CPU second, peak RSS {max(peaks):4.0f} MiB"
    )
    by_cpu = cores * best[1] / best[3]
    print(f"         ratio {best[0] / best[2]:.2f} by the clock, {by_cpu:.2f} by CPU time: what free cores would give")


def prepare(source: Path, out: Path, workers: int) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MiB, over all its processes, of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", PREPARE, str(source), str(out), str(workers)])
    peak = [0.0]
    watch = threading.Thread(target=watch_memory, args=(process, peak))
    watch.start()
    process.wait()
    wall = time.perf_counter() - began
    watch.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        sys.exit(f"oomph data failed with {process.returncode}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak[0]


def watch_memory(process: subprocess.Popen[bytes], peak: list[float]) -> None:
    """The largest sum of resident memory of a process and its children. Shared pages count in each: it errs upwards."""
    while process.poll() is None:
        total = rss_mib(process.pid)
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        except OSError:
            children = []
        peak[0] = max(peak[0], total + sum(rss_mib(int(child)) for child in children))
        time.sleep(0.05)


def rss_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except (OSError, IndexError):
        return 0.0


def reader(folder: Path) -> None:
    """Tokens a second, from the map to arrays and to tensors made in the background."""
    from oomph.data import Batches, Prefetcher

    for order in ("random", "epochs"):
        batches = Batches(folder, batch_size=12, block_size=1024, order=order)
        print(f"reader, {order}, 12 × 1024: {rate(batches):6.0f} M tokens/s")
    with Prefetcher(Batches(folder, batch_size=12, block_size=1024)) as prefetcher:
        print(f"reader, random, prefetched as tensors: {rate(prefetcher):6.0f} M tokens/s")


def rate(batches: object, count: int = 500, rounds: int = 5) -> float:
    best = float("inf")
    next(batches)  # type: ignore[call-overload]
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(count):
            next(batches)  # type: ignore[call-overload]
        best = min(best, time.perf_counter() - began)
    return count * 12 * 1024 / best / 1e6


def write(path: Path, size_mb: int) -> Path:
    """JSON lines with so many megabytes of text."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in standard_library()]
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size_mb * 10**6:
            for line, text in zip(lines, texts, strict=True):
                file.write(line)
                written += len(text)
                if written >= size_mb * 10**6:
                    break
    return path


def text_mb(folder: Path) -> float:
    return float(json.loads((folder / "meta.json").read_bytes())["counts"]["text_bytes"]) / 1e6


if __name__ == "__main__":
    main()
