"""Documents and their renderers: any document reads the same in every medium, and one screen is one screen."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

import oomph
from oomph.checking.check import Check, CheckFigures
from oomph.config.programs import MODEL_TYPES
from oomph.planning.plan import without_returned_logits
from oomph.report import check, compare, explain, fit, heading, plan
from oomph.report import document as doc
from oomph.report.markdown import to_markdown
from oomph.report.terminal import to_text
from oomph.runs.reading.reader import read

sys.path.insert(0, str(Path(__file__).parent.parent / "runs"))
import simulate

SCREEN = 25
RUN_D = {"batch_size": 16, "gradient_accumulation_steps": 32, "max_iters": 20_000}
TABLE = doc.Table(
    (doc.Column("name", words=True), doc.Column("why", words=True, detail=True), doc.Column("MiB", spare=1)),
    (
        ("first", (doc.Row(("a", "because", "1")), doc.Row(("b", "nobody knows", "22"), detail=True))),
        ("second", (doc.Row(("c", "it is so", "333"), detail=True),)),
    ),
)


@pytest.fixture(autouse=True)
def a_plain_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def plan_document(keys: dict[str, object], gpu: str) -> doc.Document:
    asked = oomph.plan(keys, gpu)
    other = oomph.plan(keys | {"trainer": "oomph"}, gpu)
    return plan.document([asked, other], plan.summarise([asked, other], without_returned_logits(asked)))


def explained(log: str) -> doc.Document:
    return explain.document(oomph.explain(read(simulate_file(log), name=log), "RTX 4070"))


def simulate_file(name: str) -> object:
    import io

    file = io.BytesIO(getattr(simulate, f"run_{name}")().encode())
    file.name = name
    return file


def checked(**more: object) -> doc.Document:
    asked = oomph.plan({"n_layer": 2, "n_head": 2, "n_embd": 64}, "RTX 4070")
    figures = CheckFigures(35.7, 40.0, 351.0, 67.4, 0.1, 180.0)
    found = Check(
        asked, figures, figures, (70.6, 80.4), 1, "random tokens", "torch's profiler", notes=("a note",), **more
    )
    return check.document(found)


DOCUMENTS = {
    "plan, does not fit": lambda: plan_document(RUN_D, "RTX 4070"),
    "plan, fits": lambda: plan_document({"n_layer": 2, "dropout": 0.1, "max_iters": 600_000}, "RTX 4090"),
    "plan, warned": lambda: plan_document({"n_embd": 504, "n_head": 12, "vocab_size": 50257}, "T4"),
    "plan, no time": lambda: plan_document({"dtype": "float16"}, "GTX 1660"),
    "compare": lambda: compare.document(
        oomph.compare([read(simulate_file(name), name=name) for name in "bc"], "RTX 4070")
    ),
    "check": checked,
    **{f"explain {name}": lambda name=name: explained(name) for name in "abcd"},
}
SEARCHES = {"fit": "run_d", "fit, largest": "largest"}  # fixtures


def make(name: str, request: pytest.FixtureRequest) -> doc.Document:
    return fit.document(request.getfixturevalue(SEARCHES[name])) if name in SEARCHES else DOCUMENTS[name]()


@pytest.fixture(scope="module", params=[*DOCUMENTS, "fit", pytest.param("fit, largest", marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest) -> doc.Document:
    return make(request.param, request)


def test_the_default_report_is_one_screen(report: doc.Document) -> None:
    lines = to_text(report.then(("oomph fit " + 60 * "x", "does it"), ("--all", report.more))).splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 80


def test_the_whole_report_keeps_to_the_width(report: doc.Document) -> None:
    assert max(map(len, to_text(report, everything=True).splitlines())) <= 80


def test_markdown_has_a_heading_and_no_part_of_one_screen_alone(report: doc.Document) -> None:
    text = to_markdown(report)
    short = [part for part in report.parts if isinstance(part, doc.Facts) and part.shown == "short"]
    assert text.startswith("## ")
    assert not any(sentence in text for part in short for _, sentence in part.facts)


def test_a_detail_is_shown_with_everything_alone() -> None:
    report = doc.Document((doc.Title("t"), doc.Text("long", shown="detail"), doc.Text("brief", shown="short")))
    assert to_text(report).split() == ["t", "brief"]
    assert to_text(report, everything=True).split() == ["t", "long"]
    assert to_markdown(report) == "## t\n\nlong\n"


def test_details_of_a_table_are_columns_rows_and_groups_that_are_left_empty() -> None:
    brief = TABLE.brief()
    assert [column.heading for column in brief.columns] == ["name", "MiB"]
    assert brief.groups == (("", (doc.Row(("a", "1")),)),)


def test_a_column_that_can_be_spared_goes_where_words_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doc.Document((TABLE,))
    assert "MiB" in to_text(report, everything=True)
    monkeypatch.setenv("COLUMNS", "16")
    text = to_text(report, everything=True)
    assert "MiB" not in text
    assert "nobody" in text


def test_the_text_behind_an_items_title_is_a_detail() -> None:
    report = doc.Document((doc.Items("h", (doc.Item("because", "it is so", "warning"),)),))
    assert "because" not in to_text(report)
    assert "! it is so.\n  because" in to_text(report, everything=True)


def test_what_the_user_wrote_cannot_break_a_markdown_table() -> None:
    row = doc.Row(("a|b", "*", "1"))
    table = doc.Table(TABLE.columns, (("", (row,)),))
    assert "| a\\|b | \\* | 1 |" in to_markdown(doc.Document((doc.Title("t"), table)))


def test_parts_are_told_apart_without_colour() -> None:
    named = [glyph for name, (_, glyph) in doc.PARTS.items() if name not in ("workspaces", "inputs")]
    assert len(set(named)) == len(named)


@pytest.mark.slow  # makes every document
def test_every_part_is_rendered(request: pytest.FixtureRequest) -> None:
    kinds = {kind for kind in vars(doc).values() if isinstance(kind, type) and issubclass(kind, doc.Part)} - {doc.Part}
    seen = {
        type(part) for name in (*DOCUMENTS, *SEARCHES) for part in make(name, request).then(("oomph", "does it")).parts
    }
    assert kinds == seen


def test_a_failure_is_the_checks_verdict() -> None:
    assert not any(isinstance(part, doc.Verdict) for part in checked().parts)
    failed = checked(failure="CUDA out of memory", out_of_memory=True)
    assert [part.mark for part in failed.parts if isinstance(part, doc.Verdict)] == ["no"]


def test_every_described_architecture_has_a_name() -> None:
    assert set(heading.ARCHITECTURES) == set(MODEL_TYPES)


@pytest.mark.parametrize("words", [3, 12, 30])
def test_a_command_can_be_copied_however_long_it_is(words: int) -> None:
    command = shlex.join(["oomph", "fit", "--gpu", "RTX 4070", *(f"--key_{n}=a value" for n in range(words))])
    text = to_text(doc.Document((), "").then((command, "does it")))
    shown = text.removeprefix("→ ").partition("does it")[0]
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(command)
    assert all(line.endswith("\\") for line in shown.rstrip().splitlines()[:-1])
    assert max(map(len, text.splitlines())) <= 80
