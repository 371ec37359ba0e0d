"""How fast logs are read, and in how much memory: MB/s on one core for each kind of log.

    python benchmarks/read_logs.py [--mb 10]

A day's log is about 1 MB; what matters is that memory stays constant. The logs are generated in memory, so no disk is
measured.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator

from oomph.runs.reading.builder import Builder
from oomph.runs.reading.reader import read_stream

LogLine = Callable[[int, random.Random], str]
LINES = 10_000  # generated of each log, and repeated


def nanogpt(step: int, draw: random.Random) -> str:
    """A nanoGPT step; every 500 steps an evaluation."""
    mark = "" if step % 500 else f"step {step}: train loss 3.2100, val loss 3.2345\nsaving checkpoint to out\n"
    return f"{mark}iter {step}: loss {draw.uniform(2, 4):.4f}, time {draw.uniform(3900, 3920):.2f}ms, mfu 12.90%\n"


def labelled(step: int, draw: random.Random) -> str:
    """The same with a launcher's label, colours and Windows line ends."""
    return f"\x1b[32m[rank0]:\x1b[0m iter {step}: loss {draw.uniform(2, 4):.4f}, time 3900.00ms, mfu 12.90%\r\n"


def nanochat(step: int, draw: random.Random) -> str:
    return (
        f"step {step:05d}/21400 ({step / 214:.2f}%) | loss: {draw.uniform(2, 4):.6f} | lrm: 1.00 | dt: 1234.56ms | "
        "tok/sec: 424,675 | bf16_mfu: 47.21 | epoch: 1 pq: 3 rg: 5 | total time: 12.34m | eta: 400.1m\n"
    )


def build_nanogpt(step: int, draw: random.Random) -> str:
    return (
        f"step {step:5d} | loss: {draw.uniform(2, 4):.6f} | lr 6.0000e-04 | norm: 0.3123 | "
        "dt: 335.12ms | tok/sec: 1564480.12\n"
    )


def metrics(step: int, draw: random.Random) -> str:
    line = {"step": step, "tokens": step * 524288, "loss": draw.uniform(2, 4), "lr": 6e-4, "grad_norm": 0.31}
    return json.dumps(line | {"step_ms": 3901.2, "tokens_per_s": 134390.1, "mfu": 0.69, "memory_mib": 4464.0}) + "\n"


def nvidia_smi(step: int, draw: random.Random) -> str:
    head = "timestamp, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%], power.draw [W]\n"
    used = draw.randrange(6000, 7000)
    row = f"2025/11/15 10:00:00.000, NVIDIA GeForce RTX 4070, {used} MiB, 12282 MiB, 97 %, 181.20 W\n"
    return row if step else head + row


def eight_cards(step: int, draw: random.Random) -> str:
    """The same of eight cards, by their numbers, without units."""
    head = "index, memory.used [MiB], memory.total [MiB], utilization.gpu [%]\n"
    row = f"{step % 8}, {draw.randrange(60000, 70000)}, 81559, {draw.randrange(90, 100)}\n"
    return row if step else head + row


def nvidia_smi_table(_step: int, draw: random.Random) -> str:
    """`nvidia-smi -l 1`: a card's rows and a process, between the frames of a table."""
    used, heat = draw.randrange(6000, 7000), draw.randrange(40, 70)
    return (
        "+-----------------------------------------------------------------------------------------+\n"
        "|   0  NVIDIA GeForce RTX 4070        Off |   00000000:01:00.0  On |                  N/A |\n"
        f"|  0%   {heat}C    P2            181W /  200W |    {used}MiB /  12282MiB |     97%      Default |\n"
        "|                                         |                        |                  N/A |\n"
        f"|    0   N/A  N/A         12345      C   python                                 {used - 500}MiB |\n"
    )


def dmon(step: int, draw: random.Random) -> str:
    """`nvidia-smi dmon`, which repeats its heading."""
    head = "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk\n" if step % 30 == 0 else ""
    watts, busy = draw.randrange(100, 200), draw.randrange(90, 100)
    return f"{head}    0    {watts}     52      -     {busy}     20      0      0   5705   1215\n"


def gpustat(_step: int, draw: random.Random) -> str:
    return (
        f"[0] NVIDIA GeForce RTX 4070 | {draw.randrange(40, 70)}°C,  96 % | 6582 / 12282 MB | me:python/12345(6021M)\n"
    )


def csv_steps(step: int, draw: random.Random) -> str:
    """Lightning's metrics.csv: a row of an evaluation leaves the training loss out."""
    head = "epoch,lr,step,train_loss,val_loss\n" if not step else ""
    return head + (
        f"0,,{step},,{draw.uniform(2, 4)}\n" if step % 500 == 499 else f"0,0.0006,{step},{draw.uniform(2, 4)},\n"
    )


def trainer(step: int, draw: random.Random) -> str:
    """The Trainer's dicts."""
    rest = f"'grad_norm': 1.2, 'learning_rate': 4.55e-06, 'epoch': {step / 1000:.3f}"
    return f"{{'loss': {draw.uniform(2, 4):.4f}, {rest}}}\n"


def bars(step: int, draw: random.Random) -> str:
    """A progress bar that is drawn again and again on one line, with a loss."""
    return f"\rEpoch 0:   1%|▏         | {step}/900000 [00:30<45:00,  4.00it/s, loss={draw.uniform(2, 4):.3f}]"


def noise(step: int, draw: random.Random) -> str:
    return f"wandb: WARNING something of no interest at all happened, number {step}, {draw.random():.6f}\n"


KINDS: dict[str, LogLine] = {
    "nanoGPT": nanogpt,
    "nanoGPT, labelled and coloured": labelled,
    "nanochat": nanochat,
    "build-nanogpt": build_nanogpt,
    "metrics.jsonl": metrics,
    "Trainer": trainer,
    "progress bar": bars,
    "metrics.csv": csv_steps,
    "nvidia-smi csv": nvidia_smi,
    "nvidia-smi csv, eight cards": eight_cards,
    "nvidia-smi table": nvidia_smi_table,
    "nvidia-smi dmon": dmon,
    "gpustat": gpustat,
    "noise": noise,
}


class Repeated(io.RawIOBase):
    """A stream that repeats a text until so many bytes are read."""

    def __init__(self, block: bytes, size: int) -> None:
        super().__init__()
        self._source = self._pieces(block, size)
        self.sent = 0

    def _pieces(self, block: bytes, size: int) -> Iterator[bytes]:
        while self.sent < size:
            self.sent += len(block)
            for start in range(0, len(block), 1 << 17):
                yield block[start : start + (1 << 17)]

    def read(self, _size: int = -1) -> bytes:
        return next(self._source, b"")


def measure(line: LogLine, size: int) -> tuple[float, float, int]:
    """(MB/s, MiB of Python objects at the peak, lines that could not be read)."""
    draw = random.Random(0)
    block = "".join(line(step, draw) for step in range(LINES)).encode()
    best = 0.0
    for _ in range(2):
        stream, builder = Repeated(block, size), Builder("benchmark")
        began = time.process_time()
        read_stream(builder, stream, "benchmark")  # type: ignore[arg-type]
        best = max(best, stream.sent / 1e6 / (time.process_time() - began))
    tracemalloc.start()
    read_stream(Builder("benchmark"), Repeated(block, min(size, 10_000_000)), "benchmark")  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return best, peak / 2**20, builder.run.unreadable_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=10.0, help="size of each log in millions of bytes")
    size = int(parser.parse_args().mb * 1e6)
    print(f"{'log':32} {'MB/s':>8} {'peak MiB':>9} {'unread':>7}")
    for name, line in KINDS.items():
        speed, peak, unread = measure(line, size)
        print(f"{name:32} {speed:8.1f} {peak:9.1f} {unread:7,}")


if __name__ == "__main__":
    main()
