"""Infer the settings that a log does not state from the numbers that it prints, recording why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from oomph.config import LoadedConfig, TrainConfig, as_loaded, from_dict
from oomph.config.keys import keys
from oomph.config.programs import UNSLOTH_FAMILIES
from oomph.devices import detect
from oomph.errors import InputError
from oomph.runs.card import Card, identify
from oomph.runs.model_shape import KnownShape, ModelShape, ShapeMatches, disagreements, solve
from oomph.runs.pace import nanogpt_flops_per_step, step_pace
from oomph.runs.run import KnownSetting, LoggedRun, PrintedCounts
from oomph.step import parameters as params

_SHAPE = ("n_layer", "n_embd", "vocab_size", "block_size", "bias")
_BATCH = ("batch_size", "gradient_accumulation_steps", "block_size")
HEAD_WIDTH = 64  # as in GPT-2 and most models since
DEFAULT = "nanoGPT's default; the log sets no other"
_SHOWN = 12  # ambiguous choices kept
MOST_BY_MFU = 8  # processes; above, every ratio is near some whole number
WHOLE = 0.04  # how near a ratio must be to a whole number: the printed MFU is a running mean


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """A run's settings, complete where possible."""

    settings: dict[str, KnownSetting]
    config: LoadedConfig | None  # None if too much is unknown
    card: Card
    tokens_per_step: int | None
    flops_per_token: float | None  # nanoGPT's formula
    ambiguous: list[dict[str, int | bool]]  # alternatives for the missing settings
    missing: list[str]  # keys that could not be inferred
    contradictions: list[str]  # between settings and printed counts
    notes: list[str]


def infer(run: LoggedRun, gpu: str | None = None) -> Inference:
    """The run's config, card and FLOPs. `gpu` is the card that the user gave; raises `InputError` if unknown."""
    inferrer = _Inferrer(run)
    inferrer.workers_seen()
    inferrer.shape()
    inferrer.batch()
    inferrer.heads()
    inferrer.defaults()
    config = inferrer.config()
    tokens = inferrer.tokens_per_step()
    flops = inferrer.flops_per_token(config, tokens)
    if config is not None and flops and tokens and inferrer.workers_by_mfu(flops * tokens):
        config = inferrer.config()
    speed = step_pace(run)
    workers = inferrer.whole("world_size") or 1
    tflops = flops * tokens / workers / speed.step_ms * 1e-9 if flops and tokens and speed else None
    return Inference(
        settings=inferrer.settings,
        config=config,
        card=_card(run, inferrer, tflops, gpu),
        tokens_per_step=tokens,
        flops_per_token=flops,
        ambiguous=inferrer.ambiguous,
        missing=inferrer.missing,
        contradictions=inferrer.contradictions,
        notes=inferrer.notes,
    )


def _card(run: LoggedRun, inferrer: _Inferrer, tflops: float | None, gpu: str | None) -> Card:
    """The card; for a run with device = cpu, this machine's processor."""
    setting = inferrer.settings.get("device")
    if gpu is None and setting is not None and str(setting.value).startswith("cpu"):
        return Card(detect("cpu", measure=False), "assumed", "this machine's processor, as the log names none")
    return identify(run.gpu, tflops, gpu)


class _Inferrer:
    """Fills in settings, the most certain first."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run
        self.settings = dict(run.settings)
        self.ambiguous: list[dict[str, int | bool]] = []
        self.missing: list[str] = []
        self.contradictions: list[str] = []
        self.notes: list[str] = []
        self._as_unsloth()
        # The config names another program, with its own defaults: nanoGPT's do not apply.
        trainer = self.settings.get("trainer")
        self.own_defaults = trainer is not None and trainer.value not in ("nanogpt", "oomph")
        # nanoGPT echoes what differs from its defaults, so its echo determines every key. So does a config file given
        # together with an error message or with a log that lacks its start.
        filed = any(source.name.endswith((".py", ".toml")) for source in run.sources)
        self.echoed = not self.own_defaults and (
            (run.program == "nanogpt" and (filed or "config" in run.event_counts)) or (filed and run.program is None)
        )
        # Without an echo the run has no settings of its own, or the log lacks its start: only the counts can tell.
        self.headed = self.echoed or (run.program == "nanogpt" and run.printed.tokens_per_step is not None)

    def whole(self, key: str) -> int | None:
        setting = self.settings.get(key)
        return setting.value if setting is not None and type(setting.value) is int else None

    def put(self, key: str, value: Any, how: Any, where: str) -> None:
        self.settings[key] = KnownSetting(value, how, where)

    def _as_unsloth(self) -> None:
        """A model that is given by name, without a program, beside a log of Unsloth is trained by Unsloth."""
        trainer, family = self.settings.get("trainer"), self.settings.get("model_type")
        if self.run.program != "unsloth" or trainer is None or family is None:
            return
        if trainer.where.startswith("default: ") and family.value in UNSLOTH_FAMILIES:
            self.put("trainer", "unsloth", "inferred", "the log is Unsloth's")

    # --- how many processes -----------------------------------------------------------------------

    def workers_seen(self) -> None:
        """The number of processes if no line states it: from labels, repeated lines, cards with Python on them."""
        if "world_size" in self.settings:
            return
        run = self.run
        cards = {p.gpu for p in run.processes.values() if "python" in p.name.lower() and p.kind != "G"}
        seen = (
            (max(run.ranks, default=0) + 1, "lines are labelled with ranks up to {}"),
            (run.copies, "every step is printed {} times, with the same loss"),
            (len(cards) if run.has_happened else 0, "Python runs on {} cards"),
        )
        for number, why in seen:
            if number > 1:
                self.put("world_size", number, "inferred", why.format(number - 1 if "up to" in why else number))
                return

    def workers_by_mfu(self, flops_per_step: float) -> bool:
        """nanoGPT's MFU is of one process, its tokens are of all: their ratio is the number of processes."""
        of_one = nanogpt_flops_per_step(self.run)
        if ("world_size" in self.settings and self.settings["world_size"].how != "default") or not of_one:
            return False
        ratio = flops_per_step / of_one
        number = round(ratio)
        shared = (self.whole("gradient_accumulation_steps") or 0) % max(number, 1) == 0  # as nanoGPT requires
        if not 2 <= number <= MOST_BY_MFU or abs(ratio - number) > min(WHOLE * number, 0.25) or not shared:
            return False
        why = f"a step's FLOPs are {number} times those that the printed MFU counts for one process"
        self.put("world_size", number, "inferred", why)
        return True

    # --- the model's shape ------------------------------------------------------------------------

    def shape(self) -> None:
        printed = self.run.printed
        if self.own_defaults:
            return
        if self.run.program == "nanochat":
            self.notes.append(
                "nanochat's model differs from nanoGPT's: its head is untied and it has no position embeddings"
            )
            return
        stated = {key: self.settings[key].value for key in _SHAPE if key in self.settings}
        if printed.params is None and printed.decay_params is None:
            if self.echoed and "resume" not in self.run.event_counts:
                self._put_defaults(_SHAPE)
            return
        if self.headed and self._defaults_agree(stated, printed):
            return
        found = solve(printed, self._known(stated))
        if not found.shapes:
            found = self._overruling(stated, printed)
            if not self._counts_win(found):
                self._config_wins(printed)
                return
            self._contradicted(found, stated)
        self._settle(found, stated)

    def _defaults_agree(self, stated: dict[str, Any], printed: PrintedCounts) -> bool:
        """Fill in nanoGPT's defaults if they give the printed counts; False if they do not."""
        filled = {key: keys()[key].default for key in _SHAPE} | stated
        if solve(printed, self._known(filled)).shapes:
            for key in _SHAPE:
                if key not in stated:
                    self.put(key, filled[key], "default", "nanoGPT's default; the printed counts agree")
            return True
        return False

    def _known(self, stated: dict[str, Any]) -> KnownShape:
        flops, tokens = nanogpt_flops_per_step(self.run), self.run.printed.tokens_per_step
        workers = self.whole("world_size") or 1
        implied = flops * workers / tokens if flops and tokens else None
        return KnownShape(stated, implied)

    def _overruling(self, stated: dict[str, Any], printed: PrintedCounts) -> ShapeMatches:
        """The shapes from the counts alone: a resumed run has its checkpoint's shape, not its config's."""
        found = solve(printed, self._known({}))
        if not found.shapes:  # the printed MFU may be that of several workers
            found = solve(printed, KnownShape(stated))
        return found

    def _counts_win(self, found: ShapeMatches) -> bool:
        """Whether the counts win over the config: exact counts with one shape do, and any counts of a resumed run."""
        if not found.shapes:
            return False
        exact = self.run.printed.decay_params is not None and len(found.shapes) == 1
        return exact or not self.echoed or "resume" in self.run.event_counts

    def _config_wins(self, printed: PrintedCounts) -> None:
        """Use the config although its counts differ, and record how."""
        if self.echoed:
            self._put_defaults(_SHAPE)
        filled = {key: self.settings[key].value for key in _SHAPE if key in self.settings}
        if all(filled.get(key) is not None for key in _SHAPE):
            differences = disagreements(msgspec.convert(filled, ModelShape), printed)
            self.contradictions += [f"the config gives {ours}, the log prints {theirs}" for ours, theirs in differences]
        elif self.run.program == "nanogpt":
            self.contradictions.append(f"no nanoGPT model has {_evidence(printed)}")

    def _contradicted(self, found: ShapeMatches, stated: dict[str, Any]) -> None:
        for key, value in stated.items():
            values = {getattr(shape, key) for shape in found.shapes}
            if value not in values and len(values) == 1:
                setting, counted = self.settings[key], f"the printed counts are those of {values.pop()}"
                given = f"{key} = {value} is used as given ({setting.where}), although {counted}"
                read_so = f"{setting.where} says {key} = {value}, but {counted}"
                self.contradictions.append(given if setting.how == "given" else read_so)

    def _settle(self, found: ShapeMatches, stated: dict[str, Any]) -> None:
        evidence = _evidence(self.run.printed)
        why = f"the only usual shape with {evidence}" if found.unusual else f"the only shape with {evidence}"
        for key in _SHAPE:
            values = {getattr(shape, key) for shape in found.shapes}
            given = key in self.settings and self.settings[key].how == "given"
            if len(values) == 1 and stated.get(key) not in values and not given:
                self.put(key, values.pop(), "inferred", why)
        if len(found.shapes) > 1:
            self.ambiguous = [msgspec.to_builtins(shape) for shape in found.shapes[:_SHOWN]]
            many = len(found.shapes)
            self.notes.append(f"the printed counts fit {many} usual shapes; give block_size or vocab_size to choose")

    # --- the batch --------------------------------------------------------------------------------

    def tokens_per_step(self) -> int | None:
        if self.run.printed.tokens_per_step is not None:
            return self.run.printed.tokens_per_step
        parts = [self.whole(key) for key in _BATCH]
        if None not in parts:
            batch, accumulation, block = parts
            together = self.run.program in (None, "nanogpt", "oomph")
            workers = 1 if together else self.whole("world_size")
            return (batch or 0) * (accumulation or 0) * (block or 0) * workers if workers else None
        tokens = self.run.steps.totals["tokens"]
        steps = self.run.steps.totals["step"]
        if tokens.count > 1 and tokens.high > tokens.low and steps.high > steps.low:
            return round((tokens.high - tokens.low) / (steps.high - steps.low))
        return None

    def batch(self) -> None:
        """batch × accumulation × block = tokens per step: two of them give the third."""
        tokens = self.run.printed.tokens_per_step
        if tokens is None:
            if self.echoed:
                self._put_defaults(_BATCH)
            return
        known = {key: value for key in _BATCH if (value := self.whole(key)) is not None}
        # nanoGPT's accumulation counts the micro-steps of all processes together; other programs' that of each.
        together = self.run.program == "nanogpt" or self.headed
        workers = 1 if together else self.whole("world_size")
        product = workers or 1
        for value in known.values():
            product *= value
        missing = [key for key in _BATCH if key not in known]
        if workers is None:
            return  # a factor is unknown
        if tokens % product:
            self.contradictions.append(f"{tokens:,} tokens per step are not a multiple of {known} (workers: {workers})")
        elif not missing and tokens != product:
            given = " × ".join(f"{key} {value:,}" for key, value in known.items())
            self.contradictions.append(f"{given} = {product:,} tokens per step, but the log prints {tokens:,}")
        elif len(missing) == 1:
            self.put(missing[0], tokens // product, "inferred", f"follows from {tokens:,} tokens per step")
        elif missing and self.headed and "block_size" in known:
            self._batch_by_default(tokens, product, missing)

    def _batch_by_default(self, tokens: int, product: int, missing: list[str]) -> None:
        filled = 1
        for key in missing:
            filled *= int(keys()[key].default or 1)
        if product * filled == tokens:
            for key in missing:
                self.put(key, keys()[key].default, "default", "nanoGPT's default; the tokens per step agree")
        elif not self.ambiguous:
            rest = tokens // product
            pairs = [(rest // steps, steps) for steps in range(1, rest + 1) if rest % steps == 0] if rest < 1e6 else []
            self.ambiguous = [
                {"batch_size": size, "gradient_accumulation_steps": steps} for size, steps in pairs[:_SHOWN]
            ]

    # --- what no count shows ----------------------------------------------------------------------

    def heads(self) -> None:
        width = self.whole("n_embd")
        if self.own_defaults or "n_head" in self.settings or width is None:
            return
        default = keys()["n_head"].default
        if (
            self.echoed
            and self.settings["n_embd"].how in ("read", "given", "default")
            and width % int(default or 1) == 0
        ):
            self.put("n_head", default, "default", DEFAULT)
            return
        heads = width // HEAD_WIDTH if width % HEAD_WIDTH == 0 else 1
        self.put("n_head", heads, "assumed", f"heads of {HEAD_WIDTH}, as usual; no printed count depends on it")

    def defaults(self) -> None:
        """Keys that nanoGPT would have echoed if they had been set."""
        if self.echoed:
            worked_out = (*_SHAPE, *_BATCH, "n_head")
            self._put_defaults(
                [name for name, key in keys().items() if name not in worked_out and key.whose == "nanogpt"]
            )

    def _put_defaults(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.settings:
                self.put(name, keys()[name].default, "default", DEFAULT)

    def config(self) -> LoadedConfig | None:
        needed = ("batch_size", "block_size") if self.own_defaults else (*_SHAPE, *_BATCH, "n_head")
        self.missing = [key for key in dict.fromkeys(needed) if key not in self.settings]
        if self.run.program == "oomph" and any(s.how == "given" for s in self.settings.values()):
            self.missing = []  # its config.toml has what differs from the defaults
        if self.missing or (self.run.program == "nanochat" and not self.own_defaults):
            return None
        values = {key: setting.value for key, setting in self.settings.items()}
        try:
            loaded = from_dict(values) if self.own_defaults else as_loaded(msgspec.convert(values, TrainConfig))
        except InputError as error:
            self.contradictions.extend(map(str, error.problems))
            return None
        sources = {
            key: f"{setting.how}: {setting.where}" if setting.how != "read" else setting.where
            for key, setting in self.settings.items()
        }
        return LoadedConfig(loaded.config, loaded.sources | sources, loaded.notes, [s.name for s in self.run.sources])

    def flops_per_token(self, config: LoadedConfig | None, tokens: int | None) -> float | None:
        if self.run.printed.flops_per_token is not None:
            return self.run.printed.flops_per_token
        if config is not None:
            return params.flops_per_token(config.config)
        flops = nanogpt_flops_per_step(self.run)
        return flops / tokens * (self.whole("world_size") or 1) if flops and tokens else None


def _evidence(printed: PrintedCounts) -> str:
    parts = []
    if printed.params is not None:
        parts.append(f"{printed.params / 1e6:.2f} M parameters")
    if printed.decay_params is not None and printed.decay_tensors is not None:
        parts.append(f"{printed.decay_params:,} decayed in {printed.decay_tensors} tensors")
    return ", ".join(parts)
