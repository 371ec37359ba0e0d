"""What the page is told: a question's bytes in, a status and an answer's bytes out. Runs in the worker processes."""

from __future__ import annotations

import io
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from oomph import config as configs
from oomph import devices
from oomph.config import LoadedConfig, Override
from oomph.devices import Device
from oomph.errors import InputError, Problem
from oomph.planner import Plan, plan
from oomph.web.folders import NoSuchRunError, RunsFolder
from oomph.web.questions import (
    CompareQuestion,
    ConfigQuestion,
    ExplainQuestion,
    FitQuestion,
    PlanQuestion,
    as_overrides,
    own_device,
    pasted,
)
from oomph.web.words import in_words

OTHER_TRAINER = {"nanogpt": "oomph", "oomph": "nanogpt"}
FORMATS = (".py", ".toml")
OK, BAD_REQUEST, NOT_FOUND, FAILED = 200, 400, 404, 500


def answer(verb: str, body: bytes, runs_folder: str) -> tuple[int, bytes]:
    """The answer to one question. Never raises: a fault of ours is an answer too, with a traceback on stderr."""
    try:
        return OK, msgspec.json.encode(VERBS[verb](body, Path(runs_folder)))
    except InputError as error:
        return NOT_FOUND if isinstance(error, NoSuchRunError) else BAD_REQUEST, problems_json(error.problems)
    except msgspec.ValidationError as error:
        return BAD_REQUEST, problems_json([in_words(str(error))])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BAD_REQUEST, problems_json([Problem("body", "not JSON", found=str(error)[:200])])
    except (MemoryError, RecursionError):
        return BAD_REQUEST, problems_json([Problem("body", "too large a run to plan here")])
    except Exception as error:
        traceback.print_exc()
        what = f"oomph failed: {type(error).__name__}: {error}"[:500]
        return FAILED, problems_json([Problem("oomph", what)])


def problems_json(problems: Any) -> bytes:
    """Problems as every error of the API carries them. What is not said is absent."""
    told = [vars(problem) | {"where": problem.where.removeprefix("--")} for problem in problems]
    stated = [{name: value for name, value in each.items() if value is not None} for each in told]
    return msgspec.json.encode({"problems": stated})


def _plans(question: PlanQuestion) -> tuple[Plan, Plan]:
    """The plan asked for, and that of the other trainer."""
    run = question.run()
    return _plan(question, run), _plan(question, run, of_other=True)


def _plan(question: PlanQuestion, run: tuple[LoadedConfig, Device], of_other: bool = False) -> Plan:
    loaded, device = run
    if of_other:
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


def answer_plan(body: bytes, _: Path) -> Any:
    """Both trainers' plans, the memory over a step, and the report's words."""
    from oomph.report.summary import summarise
    from oomph.web.timeline import timeline_of

    asked, other = _plans(msgspec.json.decode(body, type=PlanQuestion))
    return {
        "plan": asked.to_dict(),
        "other": other.to_dict(),
        "timeline": timeline_of(asked),
        "other_timeline": timeline_of(other),
        "summary": summarise([asked, other], brief=True),
    }


def answer_half(body: bytes, of_other: bool) -> Any:
    """One of the two plans, for a server that has the other made at the same time."""
    from oomph.report.summary import summarise
    from oomph.web.timeline import timeline_of

    question = msgspec.json.decode(body, type=PlanQuestion)
    found = _plan(question, question.run(), of_other)
    return {"plan": found.to_dict(), "timeline": timeline_of(found), "summary": summarise([found], brief=True)}


def answer_report(body: bytes, _: Path) -> Any:
    """The report as Markdown, to be pasted elsewhere."""
    from oomph.report.markdown import to_markdown
    from oomph.report.summary import summarise

    return {"markdown": to_markdown(summarise(_plans(msgspec.json.decode(body, type=PlanQuestion))))}


def answer_fit(body: bytes, _: Path) -> Any:
    """`fit --json`."""
    from oomph.fitting import fit

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
    from oomph.report.summary import summarise

    question = msgspec.json.decode(body, type=ConfigQuestion)
    asked, _ = question.run()
    changed, device = question.run(question.changes)
    now, wanted = (plan(loaded, device, reserve_mib=question.reserve_mib) for loaded in (asked, changed))
    verdict = summarise([wanted]).verdicts[0].text
    option = Option(verdict, changes_between(now.config, wanted.config), "same", wanted, 0.0, "", "")
    with tempfile.TemporaryDirectory(prefix="oomph-") as folder:
        own, name = _own_file(question, Path(folder))
        fit = Fit(msgspec.structs.replace(changed, files=own), now, (option,), 0, None, 1, verdict, ())
        target = Path(folder) / f"written.{question.format}"
        write_config(target, fit, option)
        return {"name": f"{name}.{question.format}", "text": target.read_bytes().decode("utf-8-sig")}


def _own_file(question: ConfigQuestion, folder: Path) -> tuple[list[str], str]:
    """The pasted config as a file in `folder`, where there is one, and what a file made of it is to be called."""
    if question.config is None:
        return [], question.preset or "run"
    name = Path(pasted(question.config, question.filename).name)
    path = folder / f"pasted{name.suffix if name.suffix in FORMATS else ''}"
    path.write_text(question.config, encoding="utf-8", newline="")
    return [str(path)], name.stem


class _Paste(io.BytesIO):
    name = "pasted text"


def answer_explain(body: bytes, _: Path) -> Any:
    """`explain --json`, and the report as Markdown."""
    from oomph.report.explain_markdown import explanation_to_markdown
    from oomph.report.explain_summary import summarise_explanation
    from oomph.runs.explain import explain
    from oomph.runs.reader import read

    question = msgspec.json.decode(body, type=ExplainQuestion)
    told: list[Override] = []
    if question.config is not None:
        loaded = configs.load([pasted(question.config, question.filename)], confined=True)
        told = [
            (key, str(getattr(loaded.config, key)), where) for key, where in loaded.sources.items() if loaded.said(key)
        ]
    told += as_overrides(question.set, "set")
    run = read(_Paste(question.text.encode("utf-8", "replace")), name="pasted text", overrides=told)
    found = explain(run, question.gpu, with_fixes=question.fixes)
    return found.to_dict() | {"report": explanation_to_markdown(summarise_explanation(found))}


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
    found = {"version": __version__, "gpu": own, "folder": os.fspath(Path.cwd())}
    return found | {"measuring": own.kind == "cpu" and own.cpu_rates is None and devices.may_measure()}


def answer_warm(_: bytes, runs_folder: Path) -> Any:
    """A small plan, so that everything a plan needs is loaded before anybody waits for one."""
    return answer_plan(b'{"gpu": "RTX 4070", "set": {"n_layer": 1}}', runs_folder)


VERBS: dict[str, Callable[[bytes, Path], Any]] = {
    "plan": answer_plan,
    "plan, asked": lambda body, _: answer_half(body, of_other=False),
    "plan, other": lambda body, _: answer_half(body, of_other=True),
    "report": answer_report,
    "fit": answer_fit,
    "config": answer_config,
    "explain": answer_explain,
    "compare": answer_compare,
    "runs": answer_runs,
    "run": answer_run,
    "machine": answer_machine,
    "warm": answer_warm,
}
