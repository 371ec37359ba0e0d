"""nanoGPT's recipe and the modern one on the same text: tokens and processor time to the same validation loss.

    python benchmarks/time_to_loss.py [--results FILE] [--size 1M] [--seeds 2] [--hours 1]   # runs what is missing
    python benchmarks/time_to_loss.py --results FILE --table [--svg docs/time-to-loss.svg]   # says what it has

Both train a GPT of the same shape, parameters and batch with `oomph train`'s own steps on one thread. The modern recipe
gets half the steps, and so ends its schedule there; then once more without each of its parts, and with parts that it
does not have. A run's figures are its validation losses by tokens read and by processor time spent in steps, which
other programs on the machine change little. Every run is a line of the results, written when it ends: a stopped
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph import config as configs
from oomph.devices import detect
from oomph.report.document import Chart, Line, Picture
from oomph.report.svg import to_svg
from oomph.training.feed import Feed
from oomph.training.model import GPT, Block
from oomph.training.optimizer import make_optimizer
from oomph.training.ranks.group import Ranks
from oomph.training.ranks.sharing import share
from oomph.training.trainer import Trainer

BOTH = {"nanogpt": "nanoGPT's recipe", "modern": "the modern one"}
TOKENIZERS = {"bytes": "bytes", "bpe": "bpe:4096"}
SIZES: dict[str, dict[str, int]] = {
    "0.2M": {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 128, "batch_size": 16, "max_iters": 300},
    "1M": {"n_layer": 5, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 16, "max_iters": 400},
    "10M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 16, "max_iters": 400},
}
EVALUATIONS = 20  # of a run
EVAL_TOKENS = 64 * 128
# nanoGPT's recipe for small models (its config/train_shakespeare_char.py) with the learning rate that did best here.
NANOGPT = {"learning_rate": 2e-3, "min_lr": 2e-4, "beta2": 0.99}
NANOGPT_RATES = (4e-3,)  # also tried
LEFT_OUT: dict[str, dict[str, Any]] = {
    "without Muon": {"optimizer": "adamw", "learning_rate": NANOGPT["learning_rate"]},
    "without rotary positions": {"position_embedding_type": "absolute"},
    "without QK-norm": {"use_qk_norm": False},
    "without SwiGLU": {"is_gated_act": False, "hidden_act": "gelu"},
    "without the level schedule": {"lr_scheduler_type": "cosine", "min_lr": 3e-4},
    "without zero projections": {"zero_init": False},
    "without RMSNorm": {"norm_type": "layernorm"},
}
TRIED: dict[str, dict[str, Any]] = {
    "with ReLU²": {"is_gated_act": False, "hidden_act": "relu2"},
    "with grouped queries": {"num_key_value_heads": 2},
    "with an untied head": {"tie_weights": False},
}


def soft_cap(model: GPT, _steps: int) -> None:
    """Logits in (−15, 15), as the speed-runs cap them."""

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = 15 * torch.tanh(model.lm_head(model.trunk(tokens)) / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model.forward = forward  # type: ignore[method-assign]


def residual_scalings(model: GPT, _steps: int) -> None:
    """Before each block a learned mixture of the stream (at first 1) and the embeddings (at first 0)."""
    blocks = len(model.blocks())
    kept, added = nn.Parameter(torch.ones(blocks)), nn.Parameter(torch.zeros(blocks))
    model.kept, model.added = kept, added

    def trunk(tokens: Tensor) -> Tensor:
        embedded = x = model._embed(tokens, 0)
        for block, old, first in zip(model.blocks(), kept, added, strict=True):
            x = block(old * x + first * embedded, model._rotary(0, tokens.size(1)))
        hidden: Tensor = model.transformer["ln_f"](x)
        return hidden

    model.trunk = trunk  # type: ignore[method-assign]


def value_embeddings(model: GPT, _steps: int) -> None:
    """A table of values by token for the first and last block, one for the second and last but one; half and half."""
    blocks = [cast(Block, block) for block in model.blocks()]
    width = blocks[0].attn.widths[2]
    pairs = [(blocks[0], blocks[-1]), (blocks[1], blocks[-2])]
    tables = nn.Embedding(model.config.vocab_size, width * len(pairs))
    nn.init.normal_(tables.weight, std=0.02)
    own, theirs = (nn.Parameter(torch.full((2 * len(pairs),), 0.5)) for _ in range(2))
    model.tables, model.own, model.theirs = tables, own, theirs
    looked_up: list[Tensor] = []
    plain = model.trunk

    def trunk(tokens: Tensor) -> Tensor:
        looked_up[:] = tables(tokens).chunk(len(pairs), dim=-1)
        return plain(tokens)

    def mixed(at: int, pair: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
            values = own[at] * out[..., -width:] + theirs[at] * looked_up[pair]
            return torch.cat([out[..., :-width], values], dim=-1)

        return hook

    for pair, both in enumerate(pairs):
        for side, block in enumerate(both):
            block.attn.c_attn.register_forward_hook(mixed(2 * pair + side, pair))
    model.trunk = trunk  # type: ignore[method-assign]


def length_warm_up(model: GPT, steps: int) -> None:
    """In the first third of the steps windows of half the length, twice as many."""
    plain, taken = model.forward, 0

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal taken
        taken += model.training
        if model.training and taken <= steps // 3:
            half = tokens.size(1) // 2
            return plain(tokens.reshape(-1, half), targets.reshape(-1, half))
        return plain(tokens, targets)

    model.forward = forward  # type: ignore[method-assign]


# What oomph train does not have, tried on its model from outside.
TRIED_OUTSIDE: dict[str, Callable[[GPT, int], None]] = {
    "with a soft cap of 15": soft_cap,
    "with residual scalings": residual_scalings,
    "with value embeddings": value_embeddings,
    "with length warm-up": length_warm_up,
}


class Run(NamedTuple):
    """One run of the benchmark."""

    size: str
    tokenizer: str
    name: str  # nanogpt, modern, or what is left out or added
    seed: int

    def keys(self) -> dict[str, Any]:
        """Its config."""
        shape = dict(SIZES[self.size])
        given: dict[str, Any] = {
            "device": "cpu", "compile": False, "gradient_accumulation_steps": 1, "eval_tokens": EVAL_TOKENS,
            "seed": self.seed, "vocab_size": 4096 if self.tokenizer == "bpe" else 257,
        }  # fmt: skip
        if self.name.startswith("nanogpt"):
            steps = shape["max_iters"]
            given |= {"trainer": "oomph", "warmup_iters": steps // 20, "lr_decay_iters": steps, **NANOGPT}
            if rate := float(self.name.partition(" ")[2] or 0):
                given |= {"learning_rate": rate, "min_lr": rate / 10}
            return shape | given
        shape["max_iters"] //= 2
        return shape | given | {"recipe": "modern"} | {**LEFT_OUT, **TRIED}.get(self.name, {})


def wanted(size: str, seeds: int) -> list[Run]:
    """Every run, the most telling first."""
    both = [
        Run(size, text, name, seed) for seed in range(seeds) for text in TOKENIZERS for name in ("nanogpt", "modern")
    ]
    parts = [Run(size, "bytes", name, seed) for name in (*LEFT_OUT, *TRIED, *TRIED_OUTSIDE) for seed in range(seeds)]
    rates = [Run(size, "bytes", f"nanogpt {rate:g}", 0) for rate in NANOGPT_RATES]
    return [*both, *rates, *parts]


def measure(run: Run, data: Path) -> dict[str, Any]:
    """Train it: parameters, and (tokens, validation loss, processor seconds, seconds) of each evaluation."""
    config = configs.settle(configs.as_loaded(run.keys()), detect("cpu")).config
    torch.manual_seed(config.seed)
    ranks, device = Ranks(), torch.device("cpu")
    feed = Feed(data, config, ranks, device)
    model = GPT(config)
    if change := TRIED_OUTSIDE.get(run.name):
        change(model, config.max_iters)
    trainer = Trainer(config, share(model, config, ranks, device), make_optimizer(model, config), feed)
    curve, spent = [], [0.0, 0.0]
    every = max(1, config.max_iters // EVALUATIONS)
    for step in range(1, config.max_iters + 1):
        began = time.process_time(), time.perf_counter()
        trainer.train_step()
        spent[0] += time.process_time() - began[0]
        spent[1] += time.perf_counter() - began[1]
        if step % every == 0 or step == config.max_iters:
            loss = trainer.evaluate(data, "val")
            curve.append([step * config.batch_size * config.block_size, round(loss, 5), *(round(s, 2) for s in spent)])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {**run._asdict(), "parameters": parameters, "curve": curve}


def prepare(folder: Path) -> dict[str, Path]:
    """The text, made into tokens by each tokenizer, if it is not there yet."""
    for name, tokenizer in TOKENIZERS.items():
        if not (folder / name / "val.bin").is_file():
            command = [sys.executable, "-m", "oomph", "data", "builtin:python", "--tokenizer", tokenizer]
            subprocess.run([*command, "--val_fraction", "0.05", "--out", str(folder / name)], check=True)
    return {name: folder / name for name in TOKENIZERS}


def read(results: Path) -> list[dict[str, Any]]:
    """The runs that have ended."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def reached(curve: list[list[float]], loss: float) -> list[float] | None:
    """The first evaluation at or below the loss."""
    return next((point for point in curve if point[1] <= loss), None)


def table(found: list[dict[str, Any]]) -> list[str]:
    """What the runs show, as lines of Markdown."""
    lines = []
    for size, text in dict.fromkeys((each["size"], each["tokenizer"]) for each in found):
        own = [each for each in found if (each["size"], each["tokenizer"]) == (size, text)]
        bases = {each["seed"]: each["curve"][-1] for each in own if each["name"] == "nanogpt"}
        lines += ["", f"{size}, {text}", "", "| run | seeds | parameters | final loss | tokens | processor time |"]
        lines += ["|---|---|---|---|---|---|"]
        for name in dict.fromkeys(each["name"] for each in own):
            runs = [each for each in own if each["name"] == name and each["seed"] in bases]
            if not runs:
                continue
            shares = [_shares(each["curve"], bases[each["seed"]]) for each in runs]
            final = mean(each["curve"][-1][1] for each in runs)
            told = (
                ["not reached"] * 2 if None in shares else [f"{mean(s[i] for s in shares if s):.2f} ×" for i in (0, 1)]
            )
            lines.append(f"| {name} | {len(runs)} | {runs[0]['parameters']:,} | {final:.3f} | {' | '.join(told)} |")
    return lines[1:]


def _shares(curve: list[list[float]], base: list[float]) -> tuple[float, float] | None:
    """Tokens and processor time to the base's final loss, as shares of the base's; None if it is not reached."""
    point = reached(curve, base[1])
    return None if point is None else (point[0] / base[0], point[2] / base[2])


def picture(found: list[dict[str, Any]], size: str, tokenizer: str) -> Picture:
    """Validation loss by tokens and by processor time, of both recipes' first runs."""
    shown = [
        each
        for each in found
        if (each["size"], each["tokenizer"], each["seed"]) == (size, tokenizer, 0) and each["name"] in BOTH
    ]
    names = tuple(BOTH[each["name"]] for each in shown)
    charts = []
    for title, column, unit in (("by tokens", 0, 1e6), ("by processor time", 2, 1.0)):
        lines = tuple(
            Line(name, tuple((point[column] / unit, point[1]) for point in each["curve"]), index)
            for index, (name, each) in enumerate(zip(names, shown, strict=True))
        )
        charts.append(Chart(f"validation loss {title}", "million tokens" if not column else "seconds", "nats", lines))
    title = f"{size} parameters, {'bytes' if tokenizer == 'bytes' else 'BPE of 4,096'}"
    return Picture(title, "oomph train on one thread of a CPU", charts=tuple(charts), names=names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("time_to_loss.jsonl"))
    parser.add_argument("--data", type=Path, default=Path("data/time_to_loss"))
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument("--text", choices=TOKENIZERS, help="of these tokens alone")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    if not options.table:
        data = prepare(options.data)
        done = {(each["size"], each["tokenizer"], each["name"], each["seed"]) for each in read(options.results)}
        for run in wanted(options.size, options.seeds):
            if options.text not in (None, run.tokenizer):
                continue
            if tuple(run) not in done and time.monotonic() - began < options.hours * 3600:
                with options.results.open("a") as file:
                    file.write(json.dumps(measure(run, data[run.tokenizer])) + "\n")
    print("\n".join(table(read(options.results))))
    if options.svg:
        found = read(options.results)
        options.svg.write_text(to_svg(*(picture(found, options.size, tokens) for tokens in TOKENIZERS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
