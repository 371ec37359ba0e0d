"""Text for terminals with a limited encoding: characters that cannot be encoded are replaced by ones that can."""

from __future__ import annotations

import codecs
import unicodedata

ERRORS = "oomph.plain"  # the name of the handler, for a stream's `errors`
# One character for one, so that bars and columns keep their width.
SIGNS = str.maketrans(
    {
        "✓": "+", "✗": "x", "★": "*", "→": ">", "←": "<", "↑": "^", "×": "x", "−": "-", "–": "-", "—": "-", "·": ".",
        "•": "*", "┃": "|", "┛": "|", "│": "|", "─": "-", "█": "#", "▓": "@", "▒": "=", "░": ".", "▄": "o", "▀": '"',
        "▞": "/", "▚": "%", "▌": "|", "▐": "|", "▁": "_", "▂": "_", "▃": "-", "▅": "=", "▆": "=", "▇": "#", "▖": ",",
        "▗": ",", "▘": "'", "▝": "'", "▙": "&", "▛": "&", "▜": "&", "▟": "$", "’": "'", "“": '"', "”": '"', "≈": "~",
        "≤": "<", "≥": ">", "µ": "u", "μ": "u",
    }
)  # fmt: skip


def _write_plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(SIGNS)
    letters = (unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode() or "?" for sign in text)
    return "".join(letters), error.end


codecs.register_error(ERRORS, _write_plainly)
