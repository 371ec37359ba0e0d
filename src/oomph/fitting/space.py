"""What a search may try: the settings that leave the training mathematically the same, for each program that could run
it, and the changes that people commonly try."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TypeVar

import msgspec

from oomph import config as configs
from oomph.config import LoadedConfig, TrainConfig
from oomph.config.programs import EAGER, MIXTURES, OWN_CLASSES, TRANSFORMERS
from oomph.config.settle import decided, follows, left_open
from oomph.config.sharing import trains_parts, untimed_keys
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.fitting.estimate import period_of
from oomph.fitting.result import Fidelity, KeyValue
from oomph.step.build import keys_read
from oomph.units import counted

# Tokens; 0, all at once, is tried too. By the clock, over 1,600 drawn models, cards and amounts of room, the fastest
# setting with these is 0.07 % slower in the mean than with 256, 16384 and 32768 beside them, and 1 % in the worst
# hundredth; without 4096 it is 0.16 % and 2 %.
LOSS_CHUNKS = (512, 1024, 2048, 4096, 8192)
MOST_CHUNKS = 64  # per micro-step: by then a chunk is negligible, and more only cost time
COMPILE_CAPABILITY = 7.0  # needed by torch.compile's GPU back end
_FIRST = ("trainer", "n_layer", "n_head", "n_embd", "block_size", "batch_size")  # in the usual order
FIT = "oomph fit"  # the source of a value that a fit chose
HEAD_SIZE = 64  # every GPT-2 has it; a multiple of what tensor cores load, and flash attention's fastest
SMALLER = {2: "half the micro-batch", 4: "a quarter of the micro-batch", 8: "an eighth of the micro-batch"}

ARITHMETIC = (
    "optimizer",
    "dtype",
    "autocast",
    "method",
    "quantization",
    "upcast",
    "double_quantization",
    "adapter_dtype",
)  # keys that a nearly equal training may change

SAME = "none: rounding alone differs"


T = TypeVar("T")


Sharing = tuple[str | None, str | None]  # parallel, reshard_after_forward
# Choices of programs that shard by fully_shard: people's own loops, transformers' and torchtitan.
_FULLY_SHARDED = (*TRANSFORMERS, "torchtitan", "oomph")  # programs with FSDP2
SHARINGS: tuple[Sharing, ...] = (("ddp", None), ("fsdp", None), ("fsdp", "false"))


class TrainingProgram(msgspec.Struct, frozen=True):
    """A program that could run the config, and what it can set without changing the mathematics."""

    key: str  # "nanogpt", "patched" or "oomph"
    loaded: LoadedConfig  # the run under this program, not yet settled
    settled: TrainConfig
    compile: tuple[bool, ...]
    loss_chunk: tuple[int, ...]
    checkpoint_layers: tuple[int, ...]
    optimizer_loop: tuple[str, ...]
    expandable_segments: tuple[bool, ...]
    sharing: tuple[Sharing, ...]  # how several devices share the work


class Ladder(msgspec.Struct, frozen=True):
    """Settings that differ only in their checkpointed blocks and in the allocator's segments.

    Each further block takes more time. Most take less memory too, so a search need not try every rung: see
    `strands`.
    """

    config: TrainConfig  # of the lowest rung
    counts: tuple[int, ...]  # of checkpointed blocks, increasing
    expandable_segments: tuple[bool, ...]  # the config's own first: they take the same time
    left_open: tuple[str, ...] = ()  # keys that the program decides on every rung

    def at(self, rung: int) -> TrainConfig:
        """The setting on a rung, with the kind of segments that is tried first."""
        config = msgspec.structs.replace(self.config, checkpoint_layers=self.counts[rung])
        return decided(config, self.left_open) if self.left_open else config

    def both(self, rung: int) -> list[TrainConfig]:
        """The settings on a rung, one for each kind of segments."""
        config = self.at(rung)
        return [msgspec.structs.replace(config, expandable_segments=each) for each in self.expandable_segments]

    def strands(self) -> list[list[int]]:
        """Groups of rungs in which peak memory falls from each to the next.

        With no block checkpointed the first one is like the others, and with all of them the last one's backward pass
        meets the loss's: both may reverse the order, so each is its own group. Between them compiled blocks alternate
        in whose buffers they reuse, so every second one decreases. Compiled plain attention has no order: inductor
        computes the scores of several blocks together.
        """
        if self.config.compile and self.config.attention == "math":
            return [[rung] for rung in range(len(self.counts))]
        groups: dict[int, list[int]] = {}
        period = period_of(self.config)
        for rung, count in enumerate(self.counts):
            ends = {0: -1, self.config.n_layer: -2}
            groups.setdefault(ends.get(count, count % period), []).append(rung)
        return list(groups.values())

    @property
    def settings(self) -> int:
        """The number of settings."""
        return len(self.counts) * len(self.expandable_segments)


def programs(loaded: LoadedConfig, device: Device) -> dict[str, TrainingProgram]:
    """nanoGPT as published, nanoGPT with a training step that returns only the loss, and oomph train.

    A model that neither trains is run only by its own program. The last one can set the most. Raises `InputError` if
    no time is known to rank settings by.
    """
    if untimed := untimed_keys(loaded.config):
        what, allowed = "a search ranks settings by a time that is not modelled", "to leave it out, or oomph plan"
        found = [(key, f"{key} = {getattr(loaded.config, key)}") for key in untimed]
        raise InputError([Problem(loaded.sources[key], what, said, allowed) for key, said in found])
    on_gpu = device.kind in ("cuda", "rocm")
    compiles = device.compute_capability is None or device.compute_capability >= COMPILE_CAPABILITY
    # Adapters and DeepSpeed are modelled only eagerly.
    compiles = compiles and loaded.config.method == "full" and loaded.config.deepspeed == "off"
    result = {}
    for key, each in _runners(loaded):
        settled = configs.settle(each, device).config
        ours = key == "oomph"
        own = (settled.loss_chunk or 0, settled.checkpoint_layers)
        compiling = (settled.compile,) if each.model is not None else (True, False)  # each would need another trace
        result[key] = TrainingProgram(
            key=key,
            loaded=each,
            settled=settled,
            compile=_own_first(settled.compile, compiling) if compiles and key not in EAGER else (False,),
            loss_chunk=_own_first(own[0], (0, *LOSS_CHUNKS)) if ours and not settled.return_logits else own[:1],
            checkpoint_layers=_own_first(own[1], _counts(key, settled.n_layer, each)),
            optimizer_loop=_own_first(settled.optimizer_loop or "fused", ("fused",) if ours else ()),
            expandable_segments=_own_first(settled.expandable_segments, (False, True) if on_gpu else ()),
            sharing=_sharings(settled),
        )
    return result


def _sharings(settled: TrainConfig) -> tuple[Sharing, ...]:
    """The ways devices may share the work: only the config's own on one device and in programs that only have DDP."""
    own = (settled.parallel, settled.reshard_after_forward)
    if settled.world_size == 1 or settled.deepspeed != "off" or settled.trainer not in _FULLY_SHARDED:
        return (own,)
    if settled.trainer == "oomph" and not trains_parts(settled):
        return (own,)
    others = SHARINGS if settled.trainer != "torchtitan" else SHARINGS[1:]
    return _own_first(own, others)


def _counts(key: str, layers: int, loaded: LoadedConfig) -> Sequence[int]:
    """How many blocks a program can checkpoint: transformers' models and torchtune's all or none. A model from a Python
    file checkpoints as it does."""
    if loaded.model is not None:
        return (0, layers) if loaded.traces_transformers else ()
    return (
        range(layers + 1)
        if key == "oomph"
        else (0, layers)
        if key in (*TRANSFORMERS, "torchtune", "torchtitan")
        else ()
    )


def _runners(loaded: LoadedConfig) -> list[tuple[str, LoadedConfig]]:
    """The programs that can run the model, by their keys."""
    config = loaded.config
    if config.trainer not in ("nanogpt", "oomph") or config.method != "full" or loaded.model is not None:
        return [(loaded.config.trainer, loaded)]
    published = _under(loaded, "nanogpt")
    patched = with_changes(published, {"return_logits": False})
    return [("nanogpt", published), ("patched", patched), ("oomph", _under(loaded, "oomph"))]


def asked_of(found: dict[str, TrainingProgram], loaded: LoadedConfig) -> str:
    """The key of the requested program: nanoGPT whose step returns no logits is the patched one."""
    patched = loaded.config.trainer == "nanogpt" and found["nanogpt"].settled.return_logits is False
    return "patched" if patched else loaded.config.trainer


def _own_first(own: T, others: Iterable[T]) -> tuple[T, ...]:
    """The values to try, the config's own in front: of equally good settings the one that changes least is taken."""
    return tuple(dict.fromkeys((own, *others)))


def _under(loaded: LoadedConfig, trainer: str) -> LoadedConfig:
    """The run under a program; keys that only oomph supports are dropped for the others."""
    if loaded.config.trainer == trainer:
        return loaded
    other = configs.with_trainer(loaded, trainer)
    if trainer == "oomph":
        return other
    plain = TrainConfig()
    names = ("return_logits", "loss_chunk", "checkpoint_layers", "optimizer", "optimizer_loop", "autocast")
    return with_changes(other, {name: getattr(plain, name) for name in names})


def with_changes(loaded: LoadedConfig, changes: dict[str, KeyValue]) -> LoadedConfig:
    """The config with those keys set, and the fit as their source."""
    config = msgspec.structs.replace(loaded.config, **changes)
    sources = {key: FIT if value is not None else "default" for key, value in changes.items()}
    return msgspec.structs.replace(loaded, config=config, sources=loaded.sources | sources)


def divisors(number: int) -> list[int]:
    """Every divisor, the largest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)


def batches(config: TrainConfig) -> list[tuple[int, int]]:
    """Every (batch_size, gradient_accumulation_steps) with the same sequences per step, the largest batch first.

    The micro-steps are divided among the devices, so each must get a whole number of them.
    """
    sequences = config.batch_size * config.gradient_accumulation_steps
    return [
        (size, sequences // size) for size in divisors(sequences) if sequences // size % max(1, config.world_size) == 0
    ]


def ladders(program: TrainingProgram) -> Iterator[Ladder]:
    """Every setting of a program that keeps the mathematics, as settled configs; those that change least first."""
    base = program.settled
    counts = tuple(sorted(program.checkpoint_layers))
    for size, micro_steps in batches(base):
        rows = size * base.block_size
        chunks = [each for each in program.loss_chunk if _sensible(each, rows) or each == base.loss_chunk]
        for compiled, chunk, loop, shared in product(program.compile, chunks, program.optimizer_loop, program.sharing):
            own = (compiled, chunk) == (program.compile[0], chunks[0])
            if shared != program.sharing[0] and not own:  # what else pays does so however the work is shared
                continue
            lowest = msgspec.structs.replace(
                base,
                batch_size=size,
                gradient_accumulation_steps=micro_steps,
                compile=compiled,
                loss_chunk=chunk,
                checkpoint_layers=counts[0],
                optimizer_loop=loop,
                parallel=shared[0],
                reshard_after_forward=shared[1],
            )
            yield Ladder(lowest, counts, program.expandable_segments, left_open(program.loaded))


def variant(program: TrainingProgram, changes: dict[str, KeyValue], device: Device) -> TrainingProgram:
    """The program running the config with those keys changed, everything else still free to be set."""
    loaded = with_changes(program.loaded, changes)
    settled = configs.settle(loaded, device).config
    compiles = program.compile if settled.method == "full" else (False,)
    shared = _sharings(settled)
    return msgspec.structs.replace(program, loaded=loaded, settled=settled, compile=compiles, sharing=shared)


def resized(program: TrainingProgram, changes: dict[str, KeyValue], device: Device) -> TrainingProgram:
    """The program running a model of another size, with that model's number of blocks to checkpoint."""
    other = variant(program, changes, device)
    possible = _counts(program.key, other.settled.n_layer, other.loaded)
    counts = _own_first(other.settled.checkpoint_layers, possible)
    return msgspec.structs.replace(other, checkpoint_layers=counts)


def _sensible(chunk: int, rows: int) -> bool:
    return chunk == 0 or chunk < rows <= MOST_CHUNKS * chunk


def changes_between(
    asked: TrainConfig, chosen: TrainConfig, states: Callable[[str], bool] = lambda _: False
) -> dict[str, KeyValue]:
    """The keys whose values differ, with the chosen ones. Both are settled, so that no value is None.

    A value that follows from the model's other sizes in both is not a change, unless the config `states` it.
    """
    names = [*_FIRST, *(name for name in asked.__struct_fields__ if name not in _FIRST)]
    differ = [name for name in names if getattr(asked, name) != getattr(chosen, name)]
    following = {name for name in differ if follows(asked, name) and follows(chosen, name) and not states(name)}
    return {name: getattr(chosen, name) for name in differ if name not in following}


class SearchRow(msgspec.Struct, frozen=True):
    """A change to try."""

    name: str
    program: str  # key of the program that would run it
    changes: dict[str, KeyValue]  # to that program's config
    kind: Fidelity
    effect: str


def same_rows(programs: dict[str, TrainingProgram], asked: str) -> Iterator[SearchRow]:
    """Changes that keep the mathematics; those of the requested program first."""
    for key in (asked, *(other for other in programs if other != asked)):
        config = programs[key].settled
        yield SearchRow("as it is", key, {}, "same", SAME)
        if key == asked:
            yield from _ladder(programs[key])
            if config.compile:
                yield SearchRow("not compiled", key, {"compile": False}, "same", SAME)
            elif True in programs[key].compile:
                yield SearchRow("compiled", key, {"compile": True}, "same", SAME)
            for parallel, reshard in programs[key].sharing[1:]:
                name = {None: "resharded", "false": "not resharded"}[reshard] if parallel == "fsdp" else "replicated"
                changes: dict[str, KeyValue] = {"parallel": parallel or "none"}
                changes |= {"reshard_after_forward": reshard} if reshard else {}
                yield SearchRow(f"{parallel}, {name}", key, changes, "same", SAME)
            if not config.expandable_segments and True in programs[key].expandable_segments:
                yield SearchRow("expandable segments", key, {"expandable_segments": True}, "same", SAME)
        if config.checkpoint_layers < config.n_layer in programs[key].checkpoint_layers:
            every: dict[str, KeyValue] = {"checkpoint_layers": config.n_layer}
            yield SearchRow("every block checkpointed", key, every, "same", "none: activations are computed twice")


def _ladder(program: TrainingProgram) -> Iterator[SearchRow]:
    """Smaller micro-batches and more of them: the classic remedy."""
    config = program.settled
    allowed = dict(batches(config))
    for part, name in SMALLER.items():
        size, rest = divmod(config.batch_size, part)
        if rest == 0 and size in allowed:
            changes: dict[str, KeyValue] = {"batch_size": size, "gradient_accumulation_steps": allowed[size]}
            yield SearchRow(name, program.key, changes, "same", SAME)


def nearly_rows(programs: dict[str, TrainingProgram], asked: str, has_bf16: bool) -> Iterator[SearchRow]:
    """Changes that alter the arithmetic a little: other number formats, an optimizer with a smaller state."""
    last, program = list(programs.items())[-1]
    ours = program.settled
    dtype = "bfloat16" if has_bf16 else "float16"
    if ours.dtype == "float32":
        effect = "products are rounded to 8 or 11 significant bits; losses differ in the third digit"
        yield SearchRow(f"{dtype} autocast", asked, {"dtype": dtype}, "nearly", effect)
    if ours.optimizer == "adamw":
        effect = "Adam's moments in 8 bits, block by block; on par in its authors' runs (arXiv 2110.02861)"
        yield SearchRow("8-bit Adam", last, {"optimizer": "adamw8bit"}, "nearly", effect)
    if ours.method != "full":
        yield from _adapters(program)
        return
    casts = program.loaded.model is not None or "autocast" in keys_read(ours)
    if ours.autocast and has_bf16 and ours.dtype != "float32" and casts:
        effect = "weights keep 8 significant bits: small updates are lost late in the run, so the final loss is worse"
        yield SearchRow("bfloat16 throughout", last, {"dtype": "bfloat16", "autocast": False}, "nearly", effect)


def _adapters(program: TrainingProgram) -> Iterator[SearchRow]:
    """Changes that alter a fine-tuning's arithmetic a little: adapters of lower precision, a quantized base."""
    config, key = program.settled, program.key
    if key == "oomph":  # its adapters are float32, on a base that is not quantized
        return
    if config.adapter_dtype == "float32" and config.dtype == "bfloat16":
        effect = "adapters keep 8 significant bits: small updates are lost late in the run"
        yield SearchRow("adapters in bfloat16", key, {"adapter_dtype": "bfloat16"}, "nearly", effect)
    if config.method == "lora" and config.quantization == "off" and config.model_type not in MIXTURES:
        effect = "the base in 4 bits (NF4, its scales quantized too); on par in its authors' runs (arXiv 2305.14314)"
        yield SearchRow("QLoRA", key, {"method": "qlora"}, "nearly", effect)


def together(rows: Sequence[SearchRow]) -> SearchRow | None:
    """The combination that saves most on weights and optimizer state; None if only one of them can be changed."""
    both = [row for row in rows if row.changes.get("autocast") is False or "optimizer" in row.changes]
    if len(both) < 2:
        return None
    changes = {key: value for row in both for key, value in row.changes.items()}
    name, effect = " and ".join(row.name for row in both), "; ".join(row.effect for row in both)
    return SearchRow(name, both[0].program, changes, "nearly", effect)


def different_rows(program: TrainingProgram) -> Iterator[SearchRow]:
    """Changes that make it another training: the last resort."""
    config, key = program.settled, program.key
    if config.batch_size > 1:
        size = config.batch_size // 2
        name = "half the batch" if 2 * size == config.batch_size else "a smaller batch"
        sequences = size * config.gradient_accumulation_steps
        fewer = f"{_tokens(size, config.batch_size)} in as many steps"
        effect = f"noisier gradients ({counted(sequences, 'sequence')} a step) and {fewer}"
        yield SearchRow(name, key, {"batch_size": size}, "different", effect)
    if program.loaded.model is None:
        yield from _other_models(program)
    if config.block_size >= 2:
        block = config.block_size // 2
        effect = f"sees {counted(block, 'token')} back, and {_tokens(block, config.block_size)} in as many steps"
        yield SearchRow("half the context", key, {"block_size": block}, "different", effect)


def _other_models(program: TrainingProgram) -> Iterator[SearchRow]:
    """Adapters, and smaller models."""
    config, key = program.settled, program.key
    if config.method != "full":
        if config.lora_rank > 1:
            effect = "smaller adapters: they can learn less"
            yield SearchRow("half the rank", key, {"lora_rank": config.lora_rank // 2}, "different", effect)
    elif key in (*TRANSFORMERS, *OWN_CLASSES) and config.model_type not in MIXTURES:
        effect = "all but small adapters stays as it is loaded: a fine-tuning"
        for method, name in (("lora", "LoRA"), ("qlora", "QLoRA")):
            changes: dict[str, KeyValue] = {"method": method, "compile": False}
            yield SearchRow(name, key, changes, "different", effect)
    layers = config.n_layer * 3 // 4 if config.method == "full" else 0
    if 0 < layers < config.n_layer:
        yield SearchRow("fewer layers", key, shallower(config, layers), "different", "a smaller model: it learns less")
    narrower = config.n_embd * 2 // 3 // HEAD_SIZE * HEAD_SIZE
    if 0 < narrower < config.n_embd and config.method == "full":
        effect = "a smaller model: it learns less"
        yield SearchRow("narrower", key, of_width(config, narrower), "different", effect)


def _tokens(part: int, whole: int) -> str:
    """How many tokens a step is left with: an odd number has no half."""
    return "half the tokens" if 2 * part == whole else f"{part}/{whole} of the tokens"


def shallower(config: TrainConfig, layers: int) -> dict[str, KeyValue]:
    """The change to fewer layers, with at most as many of them checkpointed."""
    changes: dict[str, KeyValue] = {"n_layer": layers}
    if config.checkpoint_layers > layers:
        changes["checkpoint_layers"] = layers
    return changes


def of_width(config: TrainConfig, width: int) -> dict[str, KeyValue]:
    """The change to another width, with heads of `HEAD_SIZE`; or, if the model sets its head size, with as many heads
    per width as before. Queries per key and the MLP's ratio to the width stay as close as possible."""
    own_size = config.head_dim is not None and config.head_dim * config.n_head != config.n_embd
    group = config.n_head // (config.num_key_value_heads or config.n_head)
    heads = group * max(1, round(width * config.n_head / config.n_embd / group)) if own_size else width // HEAD_SIZE
    changes: dict[str, KeyValue] = {"n_embd": width, "n_head": heads}
    if config.head_dim is not None and not own_size:
        changes["head_dim"] = HEAD_SIZE
    if config.num_key_value_heads is not None:
        changes["num_key_value_heads"] = min(divisors(heads), key=lambda size: abs(math.log(size * group / heads)))
    if config.intermediate_size is not None and config.model_type != "gpt2":  # GPT-2's follows from the width
        multiple = math.gcd(config.intermediate_size, HEAD_SIZE)
        changes["intermediate_size"] = multiple * round(width * config.intermediate_size / config.n_embd / multiple)
    return changes
