"""A result as HTML for a notebook: the one-screen report with its pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import singledispatch
from html import escape

from oomph.checking.check import Check
from oomph.fitting.result import Fit
from oomph.planning.plan import Plan
from oomph.report import check, compare, explain, fit, plan
from oomph.report import document as doc
from oomph.report.svg import to_svg
from oomph.runs.compare import Comparison
from oomph.runs.explain import Explanation

MARKS = {"yes": "✓ ", "no": "✗ ", "warning": "⚠ ", "best": "★ ", "info": ""}
COLOURS = {"yes": "#188038", "no": "#d93025", "warning": "#b06000", "best": "#188038", "info": "inherit"}


@singledispatch
def to_html(result: object) -> str:
    """The result's report as one HTML element. Raises `TypeError` for what has no report."""
    raise TypeError(f"{type(result).__name__} has no report")


@to_html.register
def _(result: Plan) -> str:
    return _html(plan.document([result], plan.summarise([result], brief=True)), result.device.name)


@to_html.register
def _(result: Fit) -> str:
    return _html(fit.document(result), result.now.device.name)


@to_html.register
def _(result: Check) -> str:
    return _html(check.document(result))


@to_html.register
def _(result: Explanation) -> str:
    return _html(explain.document(result), result.plan.device.name if result.plan is not None else "")


@to_html.register
def _(result: Comparison) -> str:
    return _html(compare.document(result)) + _image(compare.picture(result))


def _html(document: doc.Document, device: str = "") -> str:
    """The parts of the one-screen report, one below the other."""
    return f"<div>{''.join(_part(part, device) for part in document.parts if part.shown != 'detail')}</div>"


def _part(part: doc.Part, device: str) -> str:
    """One part; "" for what only a terminal shows."""
    match part:
        case doc.Title():
            return f"<p><b>{escape(part.text)}</b><br>{'<br>'.join(map(escape, part.lines))}</p>"
        case doc.Verdict():
            style = f"color:{COLOURS[part.mark]};font-weight:600"
            return f'<p style="{style}">{MARKS[part.mark]}{escape(part.text)}.</p>'
        case doc.Bars():
            return _image(doc.Picture("Memory at the peak", "MiB", bars=part, device=device))
        case doc.Table():
            return _table(part.brief())
        case doc.Items():
            return _titled(part.heading, f"<ul>{''.join(f'<li>{_item(item)}</li>' for item in part.items)}</ul>")
        case doc.Facts():
            return "".join(f"<p><b>{escape(name)}</b> {escape(sentence)}.</p>" for name, sentence in part.facts)
        case doc.Code():
            return _titled(part.heading, f"<pre>{escape(part.lines)}</pre><p>{escape(part.text)}</p>")
        case doc.Text():
            return _titled(part.heading, f"<p>{escape(part.text)}</p>")
    return ""


def _titled(heading: str, body: str) -> str:
    return f"<p><b>{escape(heading)}</b></p>{body}" if heading else body


def _item(item: doc.Item) -> str:
    title = f"<b>{MARKS[item.mark]}{escape(item.title)}.</b> " if item.title else ""
    return f"{title}{escape(item.text)}"


def _table(table: doc.Table) -> str:
    rows = [_row([column.heading for column in table.columns], table.columns, "th")]
    for heading, group in table.groups:
        if heading:
            rows.append(f'<tr><th colspan="{len(table.columns)}" style="text-align:left">{escape(heading)}</th></tr>')
        rows += [_row(row.cells, table.columns, "td", row.look in ("strong", "good")) for row in group]
    return f"<table>{''.join(rows)}</table>"


def _row(cells: Sequence[str], columns: Sequence[doc.Column], tag: str, strong: bool = False) -> str:
    weight = ";font-weight:600" if strong else ""
    row = [
        f'<{tag} style="text-align:{"left" if column.words else "right"}{weight}">{escape(cell)}</{tag}>'
        for cell, column in zip(cells, columns, strict=True)
    ]
    return f"<tr>{''.join(row)}</tr>"


def _image(picture: doc.Picture) -> str:
    """The picture as a separate image, so that its style sheet does not leak."""
    drawn = b64encode(to_svg(picture).encode()).decode()
    return f'<img alt="{escape(picture.tip or picture.title)}" src="data:image/svg+xml;base64,{drawn}">'
