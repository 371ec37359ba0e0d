"""Answers to the page's questions: JSON bytes in, a status and JSON bytes out. Computed in worker processes."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import traceback
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from oomph import config as configs
from oomph import devices
from oomph.config import KEYS, Override, Pasted, describe_keys
from oomph.config.defaults import preset
from oomph.config.reading import hugging_face
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.planning.plan import Plan, other_trainer, plan, without_returned_logits
from oomph.report.plan import Summary, document, joined, summarise
from oomph.step.build import keys_read
from oomph.web.questions import (
    CompareQuestion,
    ConfigQuestion,
    ExplainQuestion,
    FitQuestion,
    MomentQuestion,
    PlanQuestion,
    as_overrides,
    as_problem,
    own_device,
    preset_names,
)
from oomph.web.runs import NoSuchRunError, RunsFolder

FORMATS = (".py", ".toml")
OK, BAD_REQUEST, NOT_FOUND, FAILED = 200, 400, 404, 500
WORTH_PACKING_BYTES = 4096
PARTS = ("plan, asked", "plan, other")  # the parts of a plan's answer, one per trainer; joined before compression
# Keys that matter under every program: they concern the run around its steps.
OF_EVERY_RUN = ("max_iters", "dataset_tokens", "device", "torch_version", "expandable_segments", "seed")


class Preset(msgspec.Struct, frozen=True):
    """A preset and the keys it sets."""

    name: str
    group: str
    config: dict[str, Any]


class PlanPart(msgspec.Struct, frozen=True):
    """One trainer's part of a plan's answer; plan and timeline are passed on as they are."""

    plan: msgspec.Raw
    timeline: msgspec.Raw
    summary: Summary
    keys: list[str]
    read_as: str | None


class ThisMachine(msgspec.Struct, frozen=True):
    """This machine."""

    version: str
    gpu: Device
    folder: str
    measuring: bool  # whether its CPU is being measured: ask again in a few seconds


class MarkdownReport(msgspec.Struct, frozen=True):
    """A report to be pasted elsewhere."""

    markdown: str


class TextFile(msgspec.Struct, frozen=True):
    """A file of text: a config, a picture."""

    name: str
    text: str


class BinaryFile(msgspec.Struct, frozen=True):
    """A file that is not text."""

    name: str
    content: bytes  # base64 in JSON


class Answer(msgspec.Struct, frozen=True):
    """A status, and the JSON that goes with it."""

    status: int
    body: bytes
    packed: bool = False  # gzipped

    def plain(self) -> bytes:
        """The JSON, uncompressed."""
        return gzip.decompress(self.body) if self.packed else self.body


def pack(status: int, body: bytes) -> Answer:
    """The answer, gzipped if it is long enough to be worth it."""
    if len(body) < WORTH_PACKING_BYTES:
        return Answer(status, body)
    return Answer(status, gzip.compress(body, compresslevel=1, mtime=0), packed=True)


def answer(verb: str, body: bytes, runs_folder: str) -> Answer:
    """The answer to one question. Never raises: a bug gives status 500, with its traceback on stderr."""
    try:
        found = msgspec.json.encode(VERBS[verb](body, Path(runs_folder)))
        return Answer(OK, found) if verb in PARTS else pack(OK, found)
    except InputError as error:
        return Answer(NOT_FOUND if isinstance(error, NoSuchRunError) else BAD_REQUEST, problems_json(error.problems))
    except msgspec.ValidationError as error:
        return Answer(BAD_REQUEST, problems_json([as_problem(str(error))]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Answer(BAD_REQUEST, problems_json([Problem("body", "not JSON", found=str(error)[:200])]))
    except (MemoryError, RecursionError):
        return Answer(BAD_REQUEST, problems_json([Problem("body", "too large a run to plan here")]))
    except Exception as error:
        traceback.print_exc()
        what = f"oomph failed: {type(error).__name__}: {error}"[:500]
        return Answer(FAILED, problems_json([Problem("oomph", what)]))


def problems_json(problems: Any) -> bytes:
    """Problems in the form of all the API's errors, without fields that are None."""
    told = [problem._asdict() | {"where": problem.where.removeprefix("--")} for problem in problems]
    stated = [{name: value for name, value in each.items() if value is not None} for each in told]
    return msgspec.json.encode({"problems": stated})


def _plan(question: PlanQuestion, of_other: bool = False) -> Plan | None:
    """The requested plan, or the other trainer's; None if there is no other trainer to compare with."""
    loaded, device = question.run()
    if of_other:
        other = other_trainer(loaded.config)
        if other is None:
            return None
        loaded = configs.with_trainer(loaded, other)
    return plan(
        loaded,
        device,
        reserve_mib=question.reserve_mib,
        step_ms=question.step_ms,
        watts=question.watts,
        price_kwh=question.price_kwh,
        price_hour=question.price_hour,
        currency=question.currency,
    )


def answer_part(body: bytes, of_other: bool) -> Any:
    """One of the two plans in an answer of `/api/plan`: the requested trainer's, or the other's if there is one."""
    from oomph.web.timeline import timeline_of

    question = msgspec.json.decode(body, type=PlanQuestion)
    found = _plan(question, of_other)
    if found is None:
        return None
    return {
        "plan": found.to_dict(),
        "timeline": timeline_of(found),
        "summary": summarise([found], brief=True),
        "keys": _keys_of(found),
        "read_as": question.read_as(),
    }


def join_plans(asked: Answer, other: Answer) -> Answer:
    """The answer of `/api/plan` from its two parts; the first error if one of them failed."""
    if failed := next((part for part in (asked, other) if part.status != OK), None):
        return failed
    mine = msgspec.json.decode(asked.body, type=PlanPart)
    its = msgspec.json.decode(other.body, type=PlanPart | None)
    whole = msgspec.structs.asdict(mine)
    if mine.read_as is None:
        del whole["read_as"]
    if its is not None:
        summary = joined(mine.summary, its.summary)
        whole |= {"other": its.plan, "other_timeline": its.timeline, "summary": summary}
    return pack(OK, msgspec.json.encode(whole))


def _keys_of(found: Plan) -> list[str]:
    """The keys that matter to the plan's program: those its steps read; for nanoGPT and oomph train, all of
    nanoGPT's."""
    config = found.config
    read = {*OF_EVERY_RUN, *keys_read(config, found.device.kind != "cpu")}
    if "eval_iters" in read:  # the program evaluates
        read.add("eval_interval")
    if config.trainer == "nanochat":  # its script has no activation checkpointing
        read.discard("checkpoint_layers")
    if other_trainer(config) is not None:
        read.update(key.name for key in describe_keys() if key.whose == "nanogpt")
    return [key for key in KEYS if key in read]


def answer_report(body: bytes, _: Path) -> Any:
    """The report as Markdown, to paste elsewhere."""
    from oomph.report.markdown import to_markdown

    question = msgspec.json.decode(body, type=PlanQuestion)
    plans = [found for of_other in (False, True) if (found := _plan(question, of_other))]
    return MarkdownReport(to_markdown(document(plans, summarise(plans, without_returned_logits(plans[0])))))


def answer_picture(body: bytes, _: Path) -> Any:
    """`plan --svg`: both programs' memory as an SVG."""
    from oomph.report.plan import picture
    from oomph.report.svg import to_svg

    question = msgspec.json.decode(body, type=PlanQuestion)
    plans = [found for of_other in (False, True) if (found := _plan(question, of_other))]
    return TextFile("plan.svg", to_svg(picture(plans)))


def answer_moment(body: bytes, _: Path) -> Any:
    """What is alive at one operation of the step."""
    from oomph.web.timeline import moment

    question = msgspec.json.decode(body, type=MomentQuestion)
    found = _plan(question)
    assert found is not None
    return moment(found, question.at)


def answer_snapshot(body: bytes, _: Path) -> Any:
    """`plan --snapshot`: the step as a PyTorch memory snapshot."""
    from oomph.predict.allocator.replay import record
    from oomph.step.snapshot.write import write

    found = _plan(msgspec.json.decode(body, type=PlanQuestion))
    assert found is not None
    if found.device.kind == "cpu":
        raise InputError(Problem("gpu", "a snapshot is a picture of a GPU's memory", found.device.name, "a card"))
    with tempfile.TemporaryDirectory(prefix="oomph-") as folder:
        path = Path(folder) / "snapshot.pickle"
        write(record(found.steps, expandable_segments=found.config.expandable_segments), path)
        return BinaryFile(path.name, path.read_bytes())


def answer_fit(body: bytes, _: Path) -> Any:
    """`fit --json`."""
    from oomph.fitting.fit import fit

    question = msgspec.json.decode(body, type=FitQuestion)
    loaded, device = question.run()
    found = fit(
        loaded,
        device,
        reserve_mib=question.reserve_mib,
        tokens=question.tokens_asked(),
        hours=question.hours,
        largest=question.largest,
    )
    return found.to_dict()


def answer_config(body: bytes, __: Path) -> Any:
    """The changed config as a file: the pasted text with those lines edited, or a new file if none was pasted."""
    from oomph.fitting.result import Fit, Option
    from oomph.fitting.space import changes_between
    from oomph.fitting.write import write_config

    question = msgspec.json.decode(body, type=ConfigQuestion)
    asked, _ = question.run()
    changed, device = question.run(question.changes)
    now, wanted = (plan(loaded, device, reserve_mib=question.reserve_mib) for loaded in (asked, changed))
    verdict = summarise([wanted], brief=True).verdicts[0].text
    option = Option(verdict, changes_between(now.config, wanted.config), "same", wanted, 0.0, "", "")
    with tempfile.TemporaryDirectory(prefix="oomph-") as folder:
        own, name = _own_file(question, Path(folder))
        fit = Fit(msgspec.structs.replace(changed, files=own), now, (option,), 0, None, 1, verdict, ())
        target = Path(folder) / f"written.{question.format}"
        write_config(target, fit, option)
        return TextFile(f"{name}.{question.format}", target.read_bytes().decode("utf-8-sig"))


def _own_file(question: ConfigQuestion, folder: Path) -> tuple[list[str], str]:
    """The pasted config as a file in `folder`, if there is one, and the name for a file made from it."""
    if question.config is None:
        return [], (question.preset or "run").rpartition("/")[2]  # Qwen3-0.6B for Qwen/Qwen3-0.6B
    name = Path(Pasted.named(question.config, question.filename).name)
    path = folder / f"pasted{name.suffix if name.suffix in FORMATS else ''}"
    path.write_text(question.config, encoding="utf-8", newline="")
    return [str(path)], name.stem


class _Paste(io.BytesIO):
    name = "pasted text"


def answer_explain(body: bytes, _: Path) -> Any:
    """`explain --json`, and the report as Markdown."""
    from oomph.report.explain import document
    from oomph.report.markdown import to_markdown
    from oomph.runs.explain import explain
    from oomph.runs.reading.reader import read, told_by

    question = msgspec.json.decode(body, type=ExplainQuestion)
    told: list[Override] = []
    if question.config is not None:
        loaded = configs.load([Pasted.named(question.config, question.filename)], confined=True)
        told = [(key, str(getattr(loaded.config, key)), loaded.sources[key]) for key in told_by(loaded)]
    told += as_overrides(question.set, "set")
    run = read(_Paste(question.text.encode("utf-8", "replace")), name="pasted text", overrides=told)
    found = explain(run, question.gpu, with_fixes=question.fixes)
    return found.to_dict() | {"report": to_markdown(document(found))}


@lru_cache(maxsize=1)
def _folder(path: Path) -> RunsFolder:
    """The runs folder, with what earlier questions read of it."""
    return RunsFolder(path)


def answer_compare(body: bytes, runs_folder: Path) -> Any:
    """`compare --json` of runs in the runs folder."""
    from oomph.runs.compare import compare

    question = msgspec.json.decode(body, type=CompareQuestion)
    folder = _folder(runs_folder)
    return compare([folder.readable(name) for name in question.runs], question.gpu).to_dict()


def answer_runs(_: bytes, runs_folder: Path) -> Any:
    """The list of runs."""
    return _folder(runs_folder).listing()


def answer_run(body: bytes, runs_folder: Path) -> Any:
    """One run: config, plan, figures, result."""
    return _folder(runs_folder).run(body.decode())


def answer_machine(_: bytes, __: Path) -> Any:
    """This machine's device, oomph's version, and whether the CPU still has to be measured."""
    from oomph import __version__

    own = own_device("cuda")
    unmeasured = own.kind == "cpu" and own.cpu_rates is None
    return ThisMachine(__version__, own, os.fspath(Path.cwd()), unmeasured and devices.may_measure())


def presets() -> list[Preset]:
    """Every preset with the keys it sets."""
    models = hugging_face.known_models()
    return [
        Preset(name, group, {key: said.value for key, said in layer.values.items()})
        for group, names in preset_names().items()
        for name in names
        if (layer := preset(name) or hugging_face.read(models[name], name))
    ]


def keys() -> list[dict[str, Any]]:
    """Every config key, with what a form field for it needs."""
    renamed = {"kind": lambda key: key.kind.__name__, "help": lambda key: key.description}
    names = ("name", "kind", "default", "allowed", "choices", "ge", "gt", "le", "lt", "optional", "help", "whose")
    return [{name: renamed.get(name, attrgetter(name))(key) for name in names} for key in describe_keys()]


VERBS: dict[str, Callable[[bytes, Path], Any]] = {
    "plan, asked": lambda body, _: answer_part(body, of_other=False),
    "plan, other": lambda body, _: answer_part(body, of_other=True),
    "report": answer_report,
    "picture": answer_picture,
    "moment": answer_moment,
    "snapshot": answer_snapshot,
    "fit": answer_fit,
    "config": answer_config,
    "explain": answer_explain,
    "compare": answer_compare,
    "runs": answer_runs,
    "run": answer_run,
    "machine": answer_machine,
}
