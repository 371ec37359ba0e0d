"""CPU seconds that a plan of real models takes: described, and traced the first time and after that.

    OMP_NUM_THREADS=1 python benchmarks/models.py [--compile] [--described] [NAME ...]

Every question is a process of its own, with Python's start and all imports in its time. Templates are kept in a
temporary folder. Sizes are those of the models' published configs. Goals: described 0.2 s up to 1 B parameters and 1 s
above, without torch; traced 4 s eager and 20 s compiled the first time, 0.3 s after that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def _gpt2(layers: int, heads: int, width: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": 50257}


def _neox(layers: int, heads: int, width: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width, "vocab_size": 50304}
    return {"model_type": "gpt_neox", "intermediate_size": 4 * width, "max_position_embeddings": 2048, **sizes}


def _opt(layers: int, heads: int, width: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width, "vocab_size": 50272}
    return {"model_type": "opt", "ffn_dim": 4 * width, "word_embed_proj_dim": width, **sizes}


def _llama(
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    ffn: int,
    vocab: int,
    tie: bool,
    kind: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": tie,
        "max_position_embeddings": 8192, **more,
    }  # fmt: skip


# name: (parameters in millions, config)
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (124, _gpt2(12, 12, 768)),
    "gpt2-medium": (355, _gpt2(24, 16, 1024)),
    "gpt2-large": (774, _gpt2(36, 20, 1280)),
    "gpt2-xl": (1558, _gpt2(48, 25, 1600)),
    "opt-125m": (125, _opt(12, 12, 768)),
    "opt-1.3b": (1316, _opt(24, 32, 2048)),
    "opt-6.7b": (6658, _opt(32, 32, 4096)),
    "pythia-160m": (162, _neox(12, 12, 768)),
    "pythia-1.4b": (1415, _neox(24, 16, 2048)),
    "pythia-6.9b": (6857, _neox(32, 32, 4096)),
    "smollm2-135m": (135, _llama(30, 9, 3, 576, 1536, 49152, True)),
    "tinyllama-1.1b": (1100, _llama(22, 32, 4, 2048, 5632, 32000, False)),
    "llama-3.2-1b": (1236, _llama(16, 32, 8, 2048, 8192, 128256, True)),
    "llama-3.2-3b": (3213, _llama(28, 24, 8, 3072, 8192, 128256, True, head_dim=128)),
    "llama-2-7b": (6738, _llama(32, 32, 32, 4096, 11008, 32000, False)),
    "llama-3.1-8b": (8030, _llama(32, 32, 8, 4096, 14336, 128256, False)),
    "mistral-7b": (7248, _llama(32, 32, 8, 4096, 14336, 32768, False, "mistral", sliding_window=None)),
    "qwen2.5-0.5b": (494, _llama(24, 14, 2, 896, 4864, 151936, True, "qwen2")),
    "qwen3-0.6b": (596, _llama(28, 16, 8, 1024, 3072, 151936, True, "qwen3", head_dim=128)),
    "qwen3-4b": (4022, _llama(36, 32, 8, 2560, 9728, 151936, True, "qwen3", head_dim=128)),
}


# Described alone: a trace of experts is not needed to know that they take no longer.
DESCRIBED: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral-8x7b": (46703, _llama(32, 32, 8, 4096, 14336, 32000, False, "mixtral", num_local_experts=8)),
}
KEYS = ("--block_size=1024", "--gradient_accumulation_steps=4", "--gpu", "A100 SXM4 80GB", "--json")
_NO_TORCH = "import sys; sys.modules['torch'] = None; from oomph.cli.main import main; sys.exit(main(sys.argv[1:]))"


def ask(command: list[str], cache: str) -> tuple[float, dict[str, Any]]:
    """CPU seconds that one question takes, which others on the machine change less than its seconds, and its answer."""
    # An installed package is compiled to bytecode once, whatever the environment says here.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], capture_output=True, env=environment | {"XDG_CACHE_HOME": cache})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, json.loads(done.stdout) if done.stdout else {"error": done.stderr.decode()[-300:]}


def row(name: str, compiled: bool, traced: bool) -> str:
    """A model's line: parameters, seconds described, traced for the first time, and after that with another batch."""
    about = {**MODELS, **DESCRIBED}[name][1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(about))
        keys = [f"--compile={compiled}", *KEYS]
        described, answer = ask(["-c", _NO_TORCH, "plan", str(config), "--batch_size=4", *keys], folder)
        params = answer["model"]["params"] / 1e6 if "model" in answer else 0
        line = f"{name:16} {params:9,.0f} {described:11.2f}"
        if answer.get("source") != "described":
            line += f"  {answer}"
        if not traced or name in DESCRIBED:
            return line
        first, later = (
            ask(["-m", "oomph", "plan", "--model", str(config), f"--batch_size={batch}", *keys], folder)
            for batch in (4, 4 if compiled else 8)
        )
    return f"{line} {first[0]:8.1f} {later[0]:8.2f}  {later[1].get('source') or later[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds that plans of real models take.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*MODELS, *DESCRIBED)))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--described", action="store_true", help="trace nothing")
    options = parser.parse_args()
    print(f"{'model':16} {'M params':>9} {'described s':>11} {'first s':>8} {'after s':>8}  traced")
    row("gpt2", options.compile, traced=False)  # for the bytecode
    for name in options.names or (*MODELS, *DESCRIBED):
        print(row(name, options.compile, not options.described), flush=True)


if __name__ == "__main__":
    main()
