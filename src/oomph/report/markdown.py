"""A document as GitHub-flavoured Markdown, with every detail: for an issue, a note or a pull request."""

from __future__ import annotations

from oomph.report import document as doc

MARKS = {"yes": "✅ ", "no": "❌ ", "warning": "⚠️ ", "best": "★ ", "info": "", "maybe": "❔ "}


def to_markdown(document: doc.Document) -> str:
    """The document as Markdown. Its first part is the heading."""
    first, *rest = (part for part in document.parts if part.shown != "short")
    blocks = [_heading(first)]
    for before, part in zip([first, *rest], rest, strict=False):
        text = _block(part)
        if isinstance(before, doc.Verdict) and isinstance(part, doc.Verdict):
            blocks[-1] += f"\n{text}"
        elif text:
            blocks.append(text)
    return "\n\n".join(blocks) + "\n"


def _heading(part: doc.Part) -> str:
    if isinstance(part, doc.Title):
        return "\n\n".join(filter(None, (f"## {part.text}", "  \n".join(part.lines))))
    assert isinstance(part, doc.Verdict)
    return f"## {MARKS[part.mark]}{part.text}."


def _block(part: doc.Part) -> str:
    """One part below the heading; "" for what only a terminal shows."""
    match part:
        case doc.Title():
            return "  \n".join((part.text, *part.lines))
        case doc.Verdict():
            return f"- {MARKS[part.mark] or '• '}**{part.text}.**"
        case doc.Table():
            return "\n\n".join(_titled(heading, _table(part, rows)) for heading, rows in part.groups)
        case doc.Items():
            return _titled(part.heading, "\n".join(_item(item) for item in part.items))
        case doc.Facts():
            return "\n".join(f"- **{heading}**: {sentence}." for heading, sentence in part.facts)
        case doc.Code():
            return _titled(part.heading, f"```\n{part.lines}```\n\n{part.text}")
        case doc.Text():
            return _titled(part.heading, part.text)
    return ""


def _titled(heading: str, text: str) -> str:
    return f"### {heading[0].upper()}{heading[1:]}\n\n{text}" if heading else text


def _item(item: doc.Item) -> str:
    text = item.text if item.text.endswith(".") or not item.text else f"{item.text}{':' if item.code else '.'}"
    code = "".join(f"  \n  `{line}`" for line in item.code)
    return (f"- {MARKS[item.mark]}**{item.title}.** {text}".rstrip() if item.title else f"- {text}") + code


def _table(table: doc.Table, rows: tuple[doc.Row, ...]) -> str:
    lines = [
        [column.heading for column in table.columns],
        ["---" if column.words else "---:" for column in table.columns],
        *([_cell(cell, row.look == "strong") for cell in row.cells] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str, strong: bool) -> str:
    escaped = text.replace("|", "\\|").replace("*", "\\*")
    return f"**{escaped}**" if strong and text else escaped or " "
