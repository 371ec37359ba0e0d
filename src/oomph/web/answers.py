"""What the page is told: a question's bytes in, a status and an answer's bytes out. Computed in worker processes."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import traceback
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from oomph import config as configs
from oomph import devices
from oomph.config import KEYS, Override, describe_keys, hugging_face
from oomph.config.load import preset
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.planning.plan import OTHER_TRAINER, Plan, plan, without_returned_logits
from oomph.report.plan import Summary, document, joined, summarise
from oomph.step.build import keys_read
from oomph.web.questions import (
    CompareQuestion,
    ConfigQuestion,
    ExplainQuestion,
    FitQuestion,
    PlanQuestion,
    as_overrides,
    as_problem,
    own_device,
    pasted,
    preset_names,
)
from oomph.web.runs import NoSuchRunError, RunsFolder

FORMATS = (".py", ".toml")
OK, BAD_REQUEST, NOT_FOUND, FAILED = 200, 400, 404, 500
WORTH_PACKING_BYTES = 4096
PARTS = ("plan, asked", "plan, other")  # of a plan's answer, one a trainer: joined before they are compressed
# What every run has around its steps: these keys matter under every program.
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


class ConfigFile(msgspec.Struct, frozen=True):
    """A config as a file."""

    name: str
    text: str


class Answer(msgspec.Struct, frozen=True):
    """A status, and the JSON that goes with it."""

    status: int
    body: bytes
    packed: bool = False  # with gzip

    def plain(self) -> bytes:
        """The JSON itself."""
        return gzip.decompress(self.body) if self.packed else self.body


def pack(status: int, body: bytes) -> Answer:
    """The answer, compressed if it is long enough to be worth it."""
    if len(body) < WORTH_PACKING_BYTES:
        return Answer(status, body)
    return Answer(status, gzip.compress(body, compresslevel=1, mtime=0), packed=True)


def answer(verb: str, body: bytes, runs_folder: str) -> Answer:
    """The answer to one question. Never raises: a fault of ours is an answer too, with a traceback on stderr."""
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
    """Problems as every error of the API carries them. What is not said is absent."""
    told = [vars(problem) | {"where": problem.where.removeprefix("--")} for problem in problems]
    stated = [{name: value for name, value in each.items() if value is not None} for each in told]
    return msgspec.json.encode({"problems": stated})


def _plan(question: PlanQuestion, of_other: bool = False) -> Plan | None:
    """The plan asked for, or that of the other trainer; None where there is no other."""
    loaded, device = question.run()
    if of_other:
        if loaded.config.trainer not in OTHER_TRAINER:
            return None
        loaded = configs.with_trainer(loaded, OTHER_TRAINER[loaded.config.trainer])
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
    """One of the two plans that `/api/plan` answers with: the trainer's asked for, or the other's where it has one."""
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
    """What `/api/plan` answers, from the two parts; the first problem if one has any."""
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
    """The keys that matter under the plan's program: those that its steps read, and under nanoGPT and oomph train every
    key of nanoGPT's."""
    config = found.config
    read = {*OF_EVERY_RUN, *keys_read(config, found.device.kind != "cpu")}
    if "eval_iters" in read:  # it evaluates
        read.add("eval_interval")
    if config.trainer == "nanochat":  # its own script checkpoints nothing
        read.discard("checkpoint_layers")
    if config.trainer in OTHER_TRAINER:
        read.update(key.name for key in describe_keys() if key.whose == "nanogpt")
    return [key for key in KEYS if key in read]


def answer_report(body: bytes, _: Path) -> Any:
    """The report as Markdown, to be pasted elsewhere."""
    from oomph.report.markdown import to_markdown

    question = msgspec.json.decode(body, type=PlanQuestion)
    plans = [found for of_other in (False, True) if (found := _plan(question, of_other))]
    return MarkdownReport(to_markdown(document(plans, summarise(plans, without_returned_logits(plans[0])))))


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
    """The config with changes as a file: the pasted text with the changed lines changed, where there is one."""
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
        return ConfigFile(f"{name}.{question.format}", target.read_bytes().decode("utf-8-sig"))


def _own_file(question: ConfigQuestion, folder: Path) -> tuple[list[str], str]:
    """The pasted config as a file in `folder`, where there is one, and what a file made of it is to be called."""
    if question.config is None:
        return [], (question.preset or "run").rpartition("/")[2]  # of Qwen/Qwen3-0.6B the model's name
    name = Path(pasted(question.config, question.filename).name)
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
        loaded = configs.load([pasted(question.config, question.filename)], confined=True)
        told = [(key, str(getattr(loaded.config, key)), loaded.sources[key]) for key in told_by(loaded)]
    told += as_overrides(question.set, "set")
    run = read(_Paste(question.text.encode("utf-8", "replace")), name="pasted text", overrides=told)
    found = explain(run, question.gpu, with_fixes=question.fixes)
    return found.to_dict() | {"report": to_markdown(document(found))}


def answer_compare(body: bytes, runs_folder: Path) -> Any:
    """`compare --json` of runs in the runs folder."""
    from oomph.runs.compare import compare

    question = msgspec.json.decode(body, type=CompareQuestion)
    folder = RunsFolder(runs_folder)
    return compare([folder.readable(name) for name in question.runs], question.gpu).to_dict()


def answer_runs(_: bytes, runs_folder: Path) -> Any:
    """What runs there are."""
    return RunsFolder(runs_folder).listing()


def answer_run(body: bytes, runs_folder: Path) -> Any:
    """One run: its config, plan, figures and result."""
    return RunsFolder(runs_folder).run(body.decode())


def answer_machine(_: bytes, __: Path) -> Any:
    """This machine's own device, the version that answers, and whether the device has yet to be measured."""
    from oomph import __version__

    own = own_device("cuda")
    unmeasured = own.kind == "cpu" and own.cpu_rates is None
    return ThisMachine(__version__, own, os.fspath(Path.cwd()), unmeasured and devices.may_measure())


def presets() -> list[Preset]:
    """Every preset with the keys that it sets."""
    models = hugging_face.known_models()
    return [
        Preset(name, group, {key: said.value for key, said in layer.values.items()})
        for group, names in preset_names().items()
        for name in names
        if (layer := preset(name) or hugging_face.read(models[name], name))
    ]


def keys() -> list[dict[str, Any]]:
    """Every config key: enough to build a form field and to explain it."""
    renamed = {"kind": lambda key: key.kind.__name__, "help": lambda key: key.description}
    names = ("name", "kind", "default", "allowed", "choices", "ge", "gt", "le", "lt", "optional", "help", "whose")
    return [{name: renamed.get(name, attrgetter(name))(key) for name in names} for key in describe_keys()]


VERBS: dict[str, Callable[[bytes, Path], Any]] = {
    "plan, asked": lambda body, _: answer_part(body, of_other=False),
    "plan, other": lambda body, _: answer_part(body, of_other=True),
    "report": answer_report,
    "fit": answer_fit,
    "config": answer_config,
    "explain": answer_explain,
    "compare": answer_compare,
    "runs": answer_runs,
    "run": answer_run,
    "machine": answer_machine,
}
