"""What a log does not say, worked out where its numbers determine it, and said to be so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from oomph.config import LoadedConfig, TrainConfig, as_loaded
from oomph.config.keys import keys
from oomph.devices import detect
from oomph.errors import InputError
from oomph.runs import shapes
from oomph.runs.card import Card, identify
from oomph.runs.model import Printed, Run, Setting
from oomph.runs.pace import nanogpt_flops_per_step, pace
from oomph.step import params

_SHAPE = ("n_layer", "n_embd", "vocab_size", "block_size", "bias")
_BATCH = ("batch_size", "gradient_accumulation_steps", "block_size")
HEAD_WIDTH = 64  # what GPT-2 and nearly every run since has
DEFAULT = "nanoGPT's default: nothing that was read sets another"
_SHOWN = 12  # of the choices that are left open


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """A run's settings, complete where that is possible."""

    settings: dict[str, Setting]
    config: LoadedConfig | None  # None where too much is open
    card: Card
    tokens_per_step: int | None
    flops_per_token: float | None  # nanoGPT's formula
    ambiguous: list[dict[str, int | bool]]  # each a way to fill in what is open
    missing: list[str]  # keys that no number determines
    contradictions: list[str]  # settings that the printed counts refute
    notes: list[str]


def infer(run: Run, gpu: str | None = None) -> Inference:
    """The run's config, card and arithmetic. `gpu` is the user's word for the card; raises `InputError` if unknown."""
    work = _Work(run)
    work.shape()
    work.batch()
    work.heads()
    work.defaults()
    config = work.config()
    tokens = work.tokens_per_step()
    flops = work.flops_per_token(config, tokens)
    speed = pace(run)
    workers = work.whole("world_size") or 1
    tflops = flops * tokens / workers / speed.step_ms * 1e-9 if flops and tokens and speed else None
    return Inference(
        settings=work.settings,
        config=config,
        card=_card(run, work, tflops, gpu),
        tokens_per_step=tokens,
        flops_per_token=flops,
        ambiguous=work.ambiguous,
        missing=work.missing,
        contradictions=work.contradictions,
        notes=work.notes,
    )


def _card(run: Run, work: _Work, tflops: float | None, gpu: str | None) -> Card:
    """The card; for a run on a CPU the one of this machine, which a card that is in it too does not change."""
    setting = work.settings.get("device")
    if gpu is None and setting is not None and str(setting.value).startswith("cpu"):
        return Card(detect("cpu", measure=False), "assumed", "this machine's processor: the log names none")
    return identify(run.gpu, tflops, gpu)


class _Work:
    """Settings being filled in, from the firmest to the least firm."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = dict(run.settings)
        self.ambiguous: list[dict[str, int | bool]] = []
        self.missing: list[str] = []
        self.contradictions: list[str] = []
        self.notes: list[str] = []
        # nanoGPT echoes only what differs from its defaults, so that its echo tells every key.
        # So does a config file beside an error message, or a log that lacks its beginning.
        filed = any(source.name.endswith((".py", ".toml")) for source in run.sources)
        self.echoed = (run.program == "nanogpt" and (filed or "config" in run.event_counts)) or (
            filed and run.program is None
        )
        # No echo at all: a run without any setting, or a log that lacks its beginning. Only its counts can tell.
        self.headed = self.echoed or (run.program == "nanogpt" and run.printed.tokens_per_step is not None)

    def whole(self, key: str) -> int | None:
        setting = self.settings.get(key)
        return setting.value if setting is not None and type(setting.value) is int else None

    def put(self, key: str, value: Any, how: Any, where: str) -> None:
        self.settings[key] = Setting(value, how, where)

    # --- the model's shape ------------------------------------------------------------------------

    def shape(self) -> None:
        printed = self.run.printed
        if self.run.program == "nanochat":
            self.notes.append("nanochat's model is not nanoGPT's: its head is untied and it has no position embeddings")
            return
        said = {key: self.settings[key].value for key in _SHAPE if key in self.settings}
        if printed.params is None and printed.decay_params is None:
            if self.echoed and "resume" not in self.run.event_counts:
                self._put_defaults(_SHAPE)
            return
        if self.headed and self._defaults_agree(said, printed):
            return
        found = shapes.solve(printed, self._known(said))
        if not found.shapes:
            found = self._overruling(said, printed)
            if not self._counts_are_firmer(found):
                self._against_the_counts(printed)
                return
            self._contradicted(found, said)
        self._settle(found, said)

    def _defaults_agree(self, said: dict[str, Any], printed: Printed) -> bool:
        """Do nanoGPT's defaults, with what was read, print these counts? Then nothing needs working out."""
        filled = {key: keys()[key].default for key in _SHAPE} | said
        if shapes.solve(printed, self._known(filled)).shapes:
            for key in _SHAPE:
                if key not in said:
                    self.put(key, filled[key], "default", "nanoGPT's default, and the printed counts agree")
            return True
        return False

    def _known(self, said: dict[str, Any]) -> shapes.Known:
        flops, tokens = nanogpt_flops_per_step(self.run), self.run.printed.tokens_per_step
        workers = self.whole("world_size") or 1
        implied = flops * workers / tokens if flops and tokens else None
        return shapes.Known(said, implied)

    def _overruling(self, said: dict[str, Any], printed: Printed) -> shapes.Solution:
        """What was read does not print these counts: a resumed run has its checkpoint's shape. Counts are firmer."""
        found = shapes.solve(printed, self._known({}))
        if not found.shapes:  # the printed MFU may be of several workers that nobody mentions
            found = shapes.solve(printed, shapes.Known(said))
        return found

    def _counts_are_firmer(self, found: shapes.Solution) -> bool:
        """Exact counts that leave one shape are; of a run that was resumed all are, for its config is not its own."""
        if not found.shapes:
            return False
        exact = self.run.printed.decay_params is not None and len(found.shapes) == 1
        return exact or not self.echoed or "resume" in self.run.event_counts

    def _against_the_counts(self, printed: Printed) -> None:
        """No model has these counts, or none likelier than the config's: go by the config, and say so."""
        if self.echoed:
            self._put_defaults(_SHAPE)
        filled = {key: self.settings[key].value for key in _SHAPE if key in self.settings}
        if all(filled.get(key) is not None for key in _SHAPE):
            told = shapes.disagreements(msgspec.convert(filled, shapes.Shape), printed)
            self.contradictions += [f"the config gives {ours}, the log prints {theirs}" for ours, theirs in told]
        else:
            self.contradictions.append(f"no model of nanoGPT's has {_evidence(printed)}")

    def _contradicted(self, found: shapes.Solution, said: dict[str, Any]) -> None:
        for key, value in said.items():
            values = {getattr(shape, key) for shape in found.shapes}
            if value not in values and len(values) == 1:
                setting, counted = self.settings[key], f"the printed counts are those of {values.pop()}"
                given = f"{key} = {value} is taken as given ({setting.where}), though {counted}"
                said_so = f"{setting.where} says {key} = {value}, but {counted}"
                self.contradictions.append(given if setting.how == "given" else said_so)

    def _settle(self, found: shapes.Solution, said: dict[str, Any]) -> None:
        evidence = _evidence(self.run.printed)
        why = f"the only usual shape with {evidence}" if found.odder else f"the only shape with {evidence}"
        for key in _SHAPE:
            values = {getattr(shape, key) for shape in found.shapes}
            given = key in self.settings and self.settings[key].how == "given"
            if len(values) == 1 and said.get(key) not in values and not given:
                self.put(key, values.pop(), "inferred", why)
        if len(found.shapes) > 1:
            self.ambiguous = [msgspec.to_builtins(shape) for shape in found.shapes[:_SHOWN]]
            many = len(found.shapes)
            self.notes.append(f"the printed counts fit {many} usual shapes; give block_size or vocab_size to decide")

    # --- the batch --------------------------------------------------------------------------------

    def tokens_per_step(self) -> int | None:
        if self.run.printed.tokens_per_step is not None:
            return self.run.printed.tokens_per_step
        parts = [self.whole(key) for key in _BATCH]
        if None not in parts:
            batch, accumulation, block = parts
            return (batch or 0) * (accumulation or 0) * (block or 0)
        tokens = self.run.steps.totals["tokens"]
        steps = self.run.steps.totals["step"]
        if tokens.count > 1 and tokens.high > tokens.low and steps.high > steps.low:
            return round((tokens.high - tokens.low) / (steps.high - steps.low))
        return None

    def batch(self) -> None:
        """batch × accumulation × block = tokens a step: two of them give the third."""
        tokens = self.run.printed.tokens_per_step
        if tokens is None:
            if self.echoed:
                self._put_defaults(_BATCH)
            return
        known = {key: value for key in _BATCH if (value := self.whole(key)) is not None}
        product = 1
        for value in known.values():
            product *= value
        missing = [key for key in _BATCH if key not in known]
        if tokens % product:
            workers = self.whole("world_size") or 1
            self.contradictions.append(f"{tokens:,} tokens a step are no multiple of {known} (workers: {workers})")
        elif not missing and tokens != product:
            given = " × ".join(f"{key} {value:,}" for key, value in known.items())
            self.contradictions.append(f"{given} = {product:,} tokens a step, but the log prints {tokens:,}")
        elif len(missing) == 1:
            self.put(missing[0], tokens // product, "inferred", f"{tokens:,} tokens a step leave only this")
        elif missing and self.headed and "block_size" in known:
            self._batch_by_default(tokens, product, missing)

    def _batch_by_default(self, tokens: int, product: int, missing: list[str]) -> None:
        filled = 1
        for key in missing:
            filled *= int(keys()[key].default or 1)
        if product * filled == tokens:
            for key in missing:
                self.put(key, keys()[key].default, "default", "nanoGPT's default, and tokens a step agree")
        elif not self.ambiguous:
            rest = tokens // product
            pairs = [(rest // steps, steps) for steps in range(1, rest + 1) if rest % steps == 0] if rest < 1e6 else []
            self.ambiguous = [
                {"batch_size": size, "gradient_accumulation_steps": steps} for size, steps in pairs[:_SHOWN]
            ]

    # --- what no count tells ----------------------------------------------------------------------

    def heads(self) -> None:
        width = self.whole("n_embd")
        if "n_head" in self.settings or width is None:
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
        self.put("n_head", heads, "assumed", f"heads of {HEAD_WIDTH}, as usual: no printed count depends on it")

    def defaults(self) -> None:
        """Keys that nanoGPT would have echoed had they been set."""
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
        needed = (*_SHAPE, *_BATCH, "n_head")
        self.missing = [key for key in dict.fromkeys(needed) if key not in self.settings]
        if self.run.program == "oomph" and any(s.how == "given" for s in self.settings.values()):
            self.missing = []  # its config.toml names what differs from the defaults
        if self.missing:
            return None
        values = {key: setting.value for key, setting in self.settings.items()}
        try:
            loaded = as_loaded(TrainConfig(**values))  # type: ignore[arg-type]
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
        if config is not None and self.run.program != "nanochat":
            return params.flops_per_token(config.config)
        flops = nanogpt_flops_per_step(self.run)
        return flops / tokens * (self.whole("world_size") or 1) if flops and tokens else None


def _evidence(printed: Printed) -> str:
    parts = []
    if printed.params is not None:
        parts.append(f"{printed.params / 1e6:.2f} M parameters")
    if printed.decay_params is not None and printed.decay_tensors is not None:
        parts.append(f"{printed.decay_params:,} decayed in {printed.decay_tensors} tensors")
    return ", ".join(parts)
