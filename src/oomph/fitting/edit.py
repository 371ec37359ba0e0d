"""The text of a config file, nanoGPT's `.py` or TOML, with a key changed in place, and with comments that state a
product of changed keys updated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from oomph.config import TrainConfig
from oomph.config.keys import keys
from oomph.config.reading.documents import toml_value
from oomph.fitting.result import KeyValue

if TYPE_CHECKING:
    import ast

_ENTRY = re.compile(r"""^\s*(["']?)([A-Za-z0-9_]+)\1\s*=\s*""")
_PYTHON_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # as Python's parser splits lines: not at form feeds
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # as its tokenizer and TOML split them
ADDED = "# Set by oomph fit:"

# Comments that state a product, such as "16 * 32 * 1024 = 524,288".
FACTORS = ("batch_size", "gradient_accumulation_steps", "block_size")
_NUMBER = re.compile(r"\d[\d,_]*")
_TIMES = r"(?:[*×·]|(?<=[\s\d])x(?=[\s\d]))"
_TERM = r"[^=≈*×·#\n]*?\d[^=≈*×·#\n]*?"
_RESULT = r"(\d+\.\d+|\d[\d,_]*\d|\d)( ?(?:[kKM]|million)\b)?"  # 524,288 or 0.5M
_PRODUCT = re.compile(rf"({_TERM}(?:{_TIMES}{_TERM})+)([=≈]\s*~?\s*){_RESULT}")
_WORDS = {
    "batch_size": r"batch|sequence",
    "gradient_accumulation_steps": r"accum|micro",
    "block_size": r"block|context",
}


def set_key(
    text: str, toml: bool, key: str, value: KeyValue | None, trainer: str = "nanogpt", through_variable: bool = True
) -> str:
    """The text with the key's value changed in place, or the key added at the end. With `through_variable`, a
    value that is a variable of the file ("batch_size = bs") is changed where the variable is set."""
    span = _toml_span(text, key) if toml else _python_span(text, key, through_variable)
    if span is None:
        return _append(text, entry(key, value, toml, trainer))
    return _put(text, span, _written(text[span[0] : span[1]], value, toml))


def restate(text: str, toml: bool, old: TrainConfig, new: TrainConfig) -> str:
    """The text with comments that state a product of the old values updated to the new ones."""
    before, after = ({key: getattr(config, key) for key in FACTORS} for config in (old, new))
    if before == after:
        return text
    lines = _LINE.findall(text)
    for number, column in _toml_comments(text) if toml else _python_comments(text):
        line = lines[number]
        lines[number] = line[:column] + correct(line[column:], before, after)
    return "".join(lines)


def written(value: KeyValue | None, toml: bool) -> str:
    """A value as the format writes it; None unsets a key."""
    return toml_value(value) if toml else repr(value)


def entry(key: str, value: KeyValue | None, toml: bool, trainer: str) -> str:
    """A new line for the key, with a comment on what it means to the program that runs it."""
    known = keys()[key]
    ours = "" if toml or known.whose == "nanogpt" else "; oomph's key, which nanoGPT passes over"
    how = known.description
    if key == "expandable_segments" and value:
        how = "start the run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if key == "return_logits" and not value and trainer == "nanogpt":
        how = "nanoGPT needs the two-line patch that oomph fit shows"
    return f"{key} = {written(value, toml)}  # {how}{ours}"


def _written(old: str, value: KeyValue | None, toml: bool) -> str:
    """The new value; a product such as "5 * 8" keeps its last factor, the number of devices, if it can."""
    match = re.fullmatch(r"\s*\d+\s*\*\s*(\d+)\s*", old)
    if match and isinstance(value, int) and int(match[1]) and value % int(match[1]) == 0:
        return f"{value // int(match[1])} * {match[1]}"
    return written(value, toml)


def _python_span(text: str, key: str, through_variable: bool) -> tuple[int, int] | None:
    """The span of the key's value in the file, if the last to set it is a plain assignment at the top level."""
    import ast

    from oomph.config.reading.nanogpt import names_read, names_set

    body = ast.parse(text).body
    found, _ = _last_value(body, key)
    if through_variable and isinstance(found, ast.Name) and found.id not in keys():
        value, times = _last_value(body, found.id)
        found = value if times == 1 else found
    if found is None or found.end_lineno is None or found.end_col_offset is None:
        return None
    if names_read(found) & names_set(body) - set(keys()):
        return None  # a variable that nothing reads any more would look like a misspelt key
    lines = _PYTHON_LINE.findall(text)

    def offset(line: int, column_bytes: int) -> int:
        ahead = lines[line - 1].encode()[:column_bytes].decode()  # ast counts bytes
        return sum(map(len, lines[: line - 1])) + len(ahead)

    return offset(found.lineno, found.col_offset), offset(found.end_lineno, found.end_col_offset)


def _last_value(body: list[ast.stmt], name: str) -> tuple[ast.expr | None, int]:
    """What a plain assignment sets the name to, and how many statements set it. None if another kind of statement
    sets it last ("batch_size *= 2", an if, a tuple): then no assignment before it has the value."""
    import ast

    from oomph.config.reading.nanogpt import names_set

    found: ast.expr | None = None
    setting = [node for node in body if name in names_set([node])]
    for node in setting:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        plain = len(targets) == 1 and isinstance(targets[0], ast.Name)
        found = node.value if plain and isinstance(node, ast.Assign | ast.AnnAssign) else None
    return found, len(setting)


def _toml_span(text: str, key: str) -> tuple[int, int] | None:
    start = 0
    for line in _LINE.findall(text):
        match = _ENTRY.match(line)
        if match and match[2] == key:
            value = line[match.end() : _comment_at(line)].rstrip()
            return start + match.end(), start + match.end() + len(value)
        start += len(line)
    return None


def _put(text: str, span: tuple[int, int], value: str) -> str:
    """The text with the value at that span, and a comment after it kept in its column if there is room."""
    start, end = span
    after = text[end:]
    match = re.match(r"( {2,})#", after)
    if match:
        gap = max(2, len(match[1]) + (end - start) - len(value))
        after = " " * gap + after[len(match[1]) :]
    return text[:start] + value + after


def _append(text: str, line: str) -> str:
    if text and not text.endswith("\n"):
        text += "\n"
    head = "" if ADDED in text or not text else f"\n{ADDED}\n"
    return f"{text}{head}{line}\n"


def _python_comments(text: str) -> list[tuple[int, int]]:
    """Line and column of each comment."""
    import io
    import tokenize

    found = tokenize.generate_tokens(io.StringIO(text, newline="\n").readline)
    return [(token.start[0] - 1, token.start[1]) for token in found if token.type == tokenize.COMMENT]


def _toml_comments(text: str) -> list[tuple[int, int]]:
    lines = _LINE.findall(text)
    return [(number, _comment_at(line)) for number, line in enumerate(lines) if _comment_at(line) < len(line)]


def _comment_at(line: str) -> int:
    """The column where a line's comment begins, outside any string; the line's length if there is none."""
    quote = ""
    for column, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote and (quote == "'" or line[column - 1] != "\\") else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#":
            return column
    return len(line)


def correct(comment: str, old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """The comment with each product of the old values replaced by that of the new ones."""
    return _PRODUCT.sub(lambda match: _restate(match, old, new), comment)


def _restate(match: re.Match[str], old: Mapping[str, int], new: Mapping[str, int]) -> str:
    terms, equals, stated, unit = match.groups(default="")
    pieces = re.split(rf"({_TIMES})", terms)
    numbers = [_NUMBER.search(piece) for piece in pieces[::2]]
    values = [_value(number[0]) for number in numbers if number is not None]
    result = _result_like(stated, unit, prod(values))
    if result is None:
        return match[0]  # not a product after all
    changed = _factors(pieces[::2], values, old, new)
    if changed == values:
        return match[0]
    for place, (number, value) in enumerate(zip(numbers, changed, strict=True)):
        if number is not None and value != values[place]:
            piece = pieces[2 * place]
            pieces[2 * place] = piece[: number.start()] + _like(number[0], value) + piece[number.end() :]
    return "".join(pieces) + equals + result(prod(changed)) + unit


def _factors(terms: list[str], values: list[int], old: Mapping[str, int], new: Mapping[str, int]) -> list[int]:
    """The factors with the new values in their places, recognised by the words beside them, else by their size. All
    unchanged if a named one was wrong before: then it is unclear what the comment is about."""
    changed = list(values)
    free = set(range(len(values)))
    for key in FACTORS:
        named = [place for place in sorted(free) if re.search(_WORDS[key], terms[place], re.IGNORECASE)]
        equal = [place for place in sorted(free) if values[place] == old[key]]
        place = next((place for place in [*(each for each in named if each in equal), *named, *equal]), None)
        if place is None:
            continue
        free.discard(place)
        part = key == "gradient_accumulation_steps" and old[key] % max(1, values[place]) == 0
        if values[place] != old[key] and not part:
            return values
        # A factor of an accumulation over several devices, "5 gradaccum * 8 GPUs", grows with the whole.
        scaled, rest = divmod(values[place] * new[key], old[key])
        if rest:
            return values
        changed[place] = scaled
    return changed


def _result_like(stated: str, unit: str, product: int) -> Callable[[int], str] | None:
    """A function that formats a product like the stated one; None if that is not this product. A rounded one, "0.5M",
    keeps its number of decimals, and gets more if it would be more than 5 % off."""
    if not unit:
        return partial(_like, stated) if "." not in stated and _value(stated) == product else None
    if not 0 < product < 10**18:
        return None  # not a plausible batch
    for base in (1000, 1024):  # 524,288 is 524K to some, 512K to others
        scale = base if unit.strip() in "kK" else base**2
        digits = len(stated.partition(".")[2])
        if f"{product / scale:.{digits}f}" == stated:
            return partial(_rounded, scale, digits)
    return None


def _rounded(scale: int, digits: int, value: int) -> str:
    text = f"{value / scale:.{digits}f}"
    return text if abs(float(text) * scale / value - 1) <= 0.05 else _rounded(scale, digits + 1, value)


def _value(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


def _like(text: str, value: int) -> str:
    """The number with the text's separators."""
    return f"{value:,}" if "," in text else f"{value:_}" if "_" in text else str(value)
