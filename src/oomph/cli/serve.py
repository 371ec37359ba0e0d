"""`oomph serve`: the page where people plan and watch."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from oomph.cli.arguments import VerbParser
from oomph.cli.output import emit, emit_json
from oomph.errors import InputError, Problem

if TYPE_CHECKING:
    from oomph.web.server import Address


def run(argv: list[str]) -> int:
    """Serve until interrupted."""
    options = _parser().parse_args(argv)
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InputError(Problem("oomph serve", f"needs {' and '.join(missing)}; try: pip install 'oomph[web]'"))
    folder = Path(options.runs)
    if folder.exists() and not folder.is_dir():
        raise InputError(Problem("--runs", "not a folder", options.runs, "the folder that holds your runs"))
    from oomph.web.server import serve

    serve(options.host, options.port, folder.absolute(), lambda address: _say(options, address))
    return 0


def _say(options: argparse.Namespace, address: Address) -> None:
    if options.json:
        emit_json({"url": address.url, "host": address.host, "port": address.port, "token": address.token})
    else:
        emit(f"oomph is at {address.url}\nCtrl-C ends it.\n")
        if address.token is not None:
            emit("Others can reach it: whoever has this address can read your runs. It is not encrypted.\n")
    if not options.no_browser:
        Thread(target=_open, args=(address.url,), daemon=True).start()  # some browsers block their caller


def _open(url: str) -> None:
    """Open the page if there is a display: a browser in the terminal would take it over."""
    import webbrowser

    has_screen = sys.platform in ("win32", "darwin") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_screen or not webbrowser.open(url):
        print("no browser could be opened: open the address yourself", file=sys.stderr)


def port_number(text: str) -> int:
    """A port; 0 for any free one."""
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, found {text!r}")
    return int(text)


def _parser() -> VerbParser:
    parser = VerbParser(
        "serve", "A page in your browser: plan with sliders, fit, explain, and watch runs. Nothing leaves this machine."
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen; any but this machine's own needs the token that is printed; default %(default)s",
    )
    parser.add_argument(
        "--port", type=port_number, metavar="N", help="default 8642, or a free one where that is taken; 0 for any"
    )
    parser.add_argument("--runs", default="out", metavar="PATH", help="the folder of your runs; default %(default)s")
    parser.add_argument("--no_browser", action="store_true", help="do not open a browser")
    parser.add_argument("--json", action="store_true", help="the address as JSON")
    return parser
