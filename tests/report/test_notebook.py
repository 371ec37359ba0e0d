"""Results in a console and in a notebook."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

import oomph
from oomph.fitting.result import Fit
from oomph.report.notebook import to_html

EXAMPLES = Path(__file__).parents[2] / "examples"
CARD = "RTX 4070"


class Tags(HTMLParser):
    """Counts tags, and notes those that are closed in another order than they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.seen.append(tag)
        if tag not in ("br", "img", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    return tags


@pytest.fixture(scope="module")
def plan() -> oomph.Plan:
    return oomph.plan("gpt2", gpu=CARD, batch_size=8, n_layer=2)


def test_config_keys_are_keyword_arguments(plan: oomph.Plan) -> None:
    assert (plan.config.batch_size, plan.config.n_layer) == (8, 2)


def test_a_key_over_a_config_that_is_planned_keeps_the_rest(plan: oomph.Plan) -> None:
    assert oomph.plan(plan.loaded, CARD, batch_size=4).config.n_layer == 2


def test_a_wrong_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(oomph.InputError) as error:
        oomph.plan("gpt2", gpu=CARD, batch_sise=8)
    assert error.value.problems[0].nearest == "batch_size"


def test_a_plan_is_one_line_in_a_console(plan: oomph.Plan) -> None:
    assert f"{plan.memory.total_mib:,.0f}" in repr(plan)
    assert len(repr(plan)) < 160


def test_a_plan_shows_its_bar_in_a_notebook(plan: oomph.Plan) -> None:
    tags = parsed(plan._repr_html_())
    assert tags.seen.count("img") == 1
    assert f"{plan.memory.total_mib / 1024:,.1f} of" in tags.text


def test_a_fit_shows_its_options_in_a_notebook(run_d: Fit) -> None:
    assert len(repr(run_d)) < 240
    assert parsed(run_d._repr_html_()).seen.count("table") == 1


def test_an_explanation_shows_itself_in_a_notebook() -> None:
    explanation = oomph.explain(EXAMPLES / "out_of_memory.log", CARD, with_fixes=False)
    assert explanation.findings[0].title in repr(explanation)
    assert explanation.findings[0].title in parsed(explanation._repr_html_()).text


def test_text_is_escaped(plan: oomph.Plan) -> None:
    odd = replace(plan, device=replace(plan.device, name="<script>"))
    assert "script" not in parsed(odd._repr_html_()).seen


def test_what_has_no_report_is_refused() -> None:
    with pytest.raises(TypeError):
        to_html(1)


def test_the_api_is_listed() -> None:
    assert dir(oomph) == sorted(oomph.__all__)
    assert {"plan", "fit", "check", "explain", "compare", "train", "trace"} <= set(dir(oomph))


@pytest.mark.slow
def test_the_example_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    cells = json.loads((EXAMPLES / "first_plan.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for source in code:
        exec(compile(source, "first_plan.ipynb", "exec"), names)
    assert isinstance(names["plan"], oomph.Plan)
    assert isinstance(names["fit"], oomph.Fit)
