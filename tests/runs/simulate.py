"""Writes what training programs, nvidia-smi and PyTorch print, for a config and some figures. Only the tests use it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from oomph.config import TrainConfig
from oomph.runs.curves import interpolate
from oomph.step import parameters as params

NVIDIA_SMI = """\
Sat Nov 15 10:00:00 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  {name:<27}    Off |   00000000:01:00.0  On |                  N/A |
| 30%   58C    P2             {watts:3d}W /  {limit:3d}W | {used:7d}MiB / {total:6d}MiB |     97%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A      2143      G   /usr/lib/xorg/Xorg                            {desktop:4d}MiB |
|    0   N/A  N/A     31872      C   python                                      {process:6d}MiB |
+-----------------------------------------------------------------------------------------+
"""

OOM_MESSAGES = {
    "cached": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.54 GiB (GPU 0; 11.62 GiB total capacity; "
        "9.25 GiB already allocated; 1.06 GiB free; 512.00 MiB cached)"
    ),
    "reserved": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB (GPU 0; 11.62 GiB total capacity; "
        "9.25 GiB already allocated; 1.06 GiB free; 9.75 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory "
        "Management and PYTORCH_CUDA_ALLOC_CONF"
    ),
    "2.1": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacty of "
        "11.62 GiB of which 1.06 GiB is free. Process 31872 has 10.25 GiB memory in use. Of the allocated memory "
        "9.25 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  See documentation for "
        "Memory Management and PYTORCH_CUDA_ALLOC_CONF"
    ),
    "2.5": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of "
        "11.62 GiB of which 1.06 GiB is free. Process 2143 has 300.00 MiB memory in use. Including non-PyTorch "
        "memory, this process has 10.25 GiB memory in use. Of the allocated memory 9.25 GiB is allocated by PyTorch, "
        "with 32.00 MiB allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    ),
}

EVALUATION_TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/nanoGPT/train.py", line 263, in <module>
    losses = estimate_loss()
  File "/home/me/venv/lib/python3.11/site-packages/torch/utils/_contextlib.py", line 116, in decorate_context
    return func(*args, **kwargs)
  File "/home/me/nanoGPT/train.py", line 224, in estimate_loss
    logits, loss = model(X, Y)
  File "/home/me/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1736, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
"""

BACKWARD_TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/nanoGPT/train.py", line 307, in <module>
    scaler.scale(loss).backward()
  File "/home/me/venv/lib/python3.11/site-packages/torch/_tensor.py", line 581, in backward
    torch.autograd.backward(
"""


def nvidia_smi(
    name: str = "NVIDIA GeForce RTX 4070",
    used: int = 6582,
    total: int = 12282,
    process: int = 4464,
    desktop: int = 300,
    limit: int = 200,
) -> str:
    """A screen of nvidia-smi."""
    return NVIDIA_SMI.format(
        name=name, used=used, total=total, process=process, desktop=desktop, watts=limit - 20, limit=limit
    )


def preamble(config: TrainConfig, said: Sequence[str] = (), echo: str = "config/run.py") -> Iterator[str]:
    """nanoGPT's first lines. `said` are the keys that its config file sets."""
    yield f"Overriding config with {echo}:"
    yield "# a run"
    for key in said:
        yield f"{key} = {getattr(config, key)!r}"
    yield ""
    tokens = config.batch_size * config.block_size * config.gradient_accumulation_steps
    yield f"tokens per iteration will be: {tokens:,}"
    if config.vocab_size == 50304:
        yield from _from_scratch()
    else:
        yield f"found vocab_size = {config.vocab_size} (inside data/text/meta.pkl)"
        yield "Initializing a new model from scratch"
    yield from counts(config)
    yield f"using fused AdamW: {config.device.startswith('cuda')}"
    if config.compile:
        yield "compiling the model... (takes a ~minute)"


def _from_scratch() -> Iterator[str]:
    yield "Initializing a new model from scratch"
    yield "defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)"


def counts(config: TrainConfig) -> Iterator[str]:
    """The counts that nanoGPT prints of its model."""
    every = params.parameters(config)
    yield f"number of parameters: {params.count_nanogpt(config) / 1e6:.2f}M"
    for label, chosen in (("", [p for p in every if p.decayed]), ("non-", [p for p in every if not p.decayed])):
        size = sum(p.numel for p in chosen)
        yield f"num {label}decayed parameter tensors: {len(chosen)}, with {size:,} parameters"


def steps(
    config: TrainConfig, count: int, ms: float, first: int = 0, vals: dict[int, float] | None = None, seed: int = 0
) -> Iterator[str]:
    """nanoGPT's training loop: its steps, each `ms` long give or take 0.3 %, with its running MFU, and evaluations."""
    draw = random.Random(seed)
    tokens = config.batch_size * config.block_size * config.gradient_accumulation_steps
    running = -1.0
    for index in range(count):
        step = first + index
        evaluated = step in (vals or {}) or step % config.eval_interval == 0
        if evaluated:
            val = (vals or {}).get(step, 11.0 * (step + 1) ** -0.15)
            yield f"step {step}: train loss {val - 0.01:.4f}, val loss {val:.4f}"
            if step > 0:
                yield f"saving checkpoint to {config.out_dir}"
        took = ms * draw.uniform(0.997, 1.003) + (28_000 if index == 0 and config.compile else 0)
        took += 15 * ms if evaluated else 0
        if index >= 5:
            mfu = params.flops_per_token(config) * tokens / (took / 1e3) / 312e12
            running = mfu if running == -1.0 else 0.9 * running + 0.1 * mfu
        if step % config.log_interval == 0:
            loss = _level(step, vals) + draw.gauss(0, 0.02)
            yield f"iter {step}: loss {loss:.4f}, time {took:.2f}ms, mfu {running * 100:.2f}%"


def _level(step: int, vals: dict[int, float] | None) -> float:
    """The loss to print at a step: between the validation losses given, or along a power law."""
    points = [(max(1, at), loss) for at, loss in sorted((vals or {}).items())]
    if len(points) < 2:
        return 11.0 * (step + 1) ** -0.15
    return interpolate(points, min(max(step, 1), points[-1][0]))


# --- the measured runs -----------------------------------------------------------------------------

A = TrainConfig(
    n_layer=6, n_head=6, n_embd=384, block_size=512, batch_size=16, gradient_accumulation_steps=4, dtype="float16"
)
B = TrainConfig(
    n_layer=12,
    n_head=12,
    n_embd=384,
    block_size=1024,
    batch_size=16,
    gradient_accumulation_steps=32,
    max_iters=20000,
    lr_decay_iters=20000,
    warmup_iters=500,
    eval_interval=500,
    learning_rate=1e-3,
    dataset="fineweb",
)
C = TrainConfig(
    block_size=1024,
    batch_size=8,
    gradient_accumulation_steps=64,
    max_iters=20000,
    lr_decay_iters=20000,
    warmup_iters=500,
    eval_interval=500,
    learning_rate=3e-4,
    dataset="fineweb",
)
D = TrainConfig(
    block_size=1024,
    batch_size=16,
    gradient_accumulation_steps=32,
    max_iters=20000,
    lr_decay_iters=20000,
    warmup_iters=500,
    eval_interval=500,
    dataset="fineweb",
)
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps")
RUN = (*SHAPE, "max_iters", "lr_decay_iters", "warmup_iters", "eval_interval", "learning_rate", "dataset")


def run_a() -> str:
    """6 layers × 384 on an RTX 4070: the log up to its first step, and nvidia-smi beside it; its pace is not known."""
    return text(preamble(A, (*SHAPE, "dtype")), ["step 0: train loss 10.9800, val loss 10.9790"]) + nvidia_smi()


def run_b() -> str:
    """12 layers × 384, 16 × 32: 3.91 s a step; val 5.5328 at step 500, 4.4593 at 1000."""
    return text(preamble(B, RUN), steps(B, 1010, 3910.0, vals={0: 10.98, 500: 5.5328, 1000: 4.4593}))


def run_c() -> str:
    """12 layers × 768, 8 × 64: 9.34 s a step; val 5.5194 at step 500."""
    return text(preamble(C, RUN), steps(C, 810, 9340.0, vals={0: 10.99, 500: 5.5194}))


def run_d() -> str:
    """As C with 16 × 32: out of memory in the first backward."""
    failed = OOM_MESSAGES["2.5"].replace("1.54 GiB", "3.07 GiB")
    return text(preamble(D, RUN), ["step 0: train loss 10.9900, val loss 10.9912"]) + BACKWARD_TRACEBACK + failed + "\n"


def text(*parts: Iterator[str] | Sequence[str]) -> str:
    """Lines as a text."""
    return "".join(f"{line}\n" for part in parts for line in part)
