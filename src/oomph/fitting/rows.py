"""The options people are told to try, each as a change to the config: so that a table can say what each buys."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from oomph.config import TrainConfig
from oomph.fitting.result import Kind, Value
from oomph.fitting.shapes import HEAD_SIZE
from oomph.fitting.space import Program, batches

SMALLER = {2: "half the micro-batch", 4: "a quarter of the micro-batch", 8: "an eighth of the micro-batch"}

ARITHMETIC = ("optimizer", "dtype", "autocast")  # what a nearly equal training may change

SAME = "none: rounding alone differs"


class Row(msgspec.Struct, frozen=True):
    """A change to try."""

    name: str
    program: str  # key of the program that would run it
    changes: dict[str, Value]  # to that program's config
    kind: Kind
    effect: str


def same_rows(programs: dict[str, Program], asked: str) -> Iterator[Row]:
    """What leaves the mathematics as it is; the program asked for first."""
    for key in (asked, *(other for other in programs if other != asked)):
        config = programs[key].settled
        yield Row("as it is", key, {}, "same", SAME)
        if key == asked:
            yield from _ladder(programs[key])
            if config.compile:
                yield Row("not compiled", key, {"compile": False}, "same", SAME)
            elif True in programs[key].compile:
                yield Row("compiled", key, {"compile": True}, "same", SAME)
            if not config.expandable_segments and True in programs[key].expandable_segments:
                yield Row("expandable segments", key, {"expandable_segments": True}, "same", SAME)
        if key == "oomph" and config.checkpoint_layers < config.n_layer:
            every: dict[str, Value] = {"checkpoint_layers": config.n_layer}
            yield Row("every block checkpointed", key, every, "same", "none: activations are computed twice")


def _ladder(program: Program) -> Iterator[Row]:
    """Smaller micro-batches, more of them: the classical cure."""
    config = program.settled
    allowed = dict(batches(config))
    for part, name in SMALLER.items():
        size, rest = divmod(config.batch_size, part)
        if rest == 0 and size in allowed:
            changes: dict[str, Value] = {"batch_size": size, "gradient_accumulation_steps": allowed[size]}
            yield Row(name, program.key, changes, "same", SAME)


def nearly_rows(programs: dict[str, Program], asked: str, has_bf16: bool) -> Iterator[Row]:
    """What changes the arithmetic a little: other number formats, an optimizer with a smaller state."""
    ours = programs["oomph"].settled
    half = "bfloat16" if has_bf16 else "float16"
    if ours.dtype == "float32":
        effect = "products are rounded to 8 or 11 significant bits; losses differ in the third digit"
        yield Row(f"{half} autocast", asked, {"dtype": half}, "nearly", effect)
    if ours.optimizer == "adamw":
        effect = "Adam's moments in 8 bits, block by block; on par in its authors' runs (arXiv 2110.02861)"
        yield Row("8-bit Adam", "oomph", {"optimizer": "adamw8bit"}, "nearly", effect)
    if ours.autocast and has_bf16 and ours.dtype != "float32":
        effect = "weights keep 8 significant bits: small updates are lost late in the run, so the final loss is worse"
        yield Row("bfloat16 throughout", "oomph", {"dtype": "bfloat16", "autocast": False}, "nearly", effect)


def different_rows(program: Program) -> Iterator[Row]:
    """What makes another training of it: the last resort."""
    config, key = program.settled, program.key
    if config.batch_size > 1:
        size = config.batch_size // 2
        name = "half the batch" if 2 * size == config.batch_size else "a smaller batch"
        sequences = size * config.gradient_accumulation_steps
        effect = (
            f"noisier gradients ({sequences} sequences a step) and {_tokens(size, config.batch_size)} in as many steps"
        )
        yield Row(name, key, {"batch_size": size}, "different", effect)
    fewer = config.n_layer * 3 // 4
    if 0 < fewer < config.n_layer:
        yield Row("fewer layers", key, shallower(config, fewer), "different", "a smaller model: it learns less")
    narrower = config.n_embd * 2 // 3 // HEAD_SIZE * HEAD_SIZE
    if 0 < narrower < config.n_embd:
        effect = "a smaller model: it learns less"
        yield Row("narrower", key, {"n_embd": narrower, "n_head": narrower // HEAD_SIZE}, "different", effect)
    if config.block_size >= 2:
        block = config.block_size // 2
        effect = f"sees {block} tokens back, and {_tokens(block, config.block_size)} in as many steps"
        yield Row("half the context", key, {"block_size": block}, "different", effect)


def _tokens(part: int, whole: int) -> str:
    """How many a step is left with: an odd number has no half."""
    return "half the tokens" if 2 * part == whole else f"{part}/{whole} of the tokens"


def shallower(config: TrainConfig, layers: int) -> dict[str, Value]:
    """The change to fewer layers; no more of them can be checkpointed than there are."""
    changes: dict[str, Value] = {"n_layer": layers}
    if config.checkpoint_layers > layers:
        changes["checkpoint_layers"] = layers
    return changes
