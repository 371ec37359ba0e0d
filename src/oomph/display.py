"""`Displayed`: results that a notebook shows as their report.

Results must not import reports, so the renderer is looked up by name when a notebook asks for it.
"""

from __future__ import annotations

from importlib import import_module


class Displayed:
    """Mixed into what `oomph.plan`, `fit`, `check`, `explain` and `compare` return."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The one-screen report with its pictures, as Jupyter asks for it."""
        html: str = import_module("oomph.report.notebook").to_html(self)
        return html
