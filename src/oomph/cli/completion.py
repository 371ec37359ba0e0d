"""`oomph --completion`: a script that makes bash and zsh complete verbs, options, config keys, presets and cards.

Everything it needs is in the script: completing a word starts no Python.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterable
from importlib import import_module

from oomph import devices
from oomph.config import KEYS, PRESETS

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_]*")

SCRIPT = """\
# oomph for bash and zsh. Add to ~/.bashrc or ~/.zshrc: source <(oomph --completion)
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_oomph() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{verbs}" -- "$word")); return; fi
  if [ "$before" = --gpu ]; then
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W {cards} -- "$word"))
    COMPREPLY=("${{COMPREPLY[@]// /\\\\ }}")
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$word"))
      case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac ;;
    *) COMPREPLY=($(compgen -f -- "$word") $(compgen -W "{presets}" -- "$word")) ;;
  esac
}}
complete -o filenames -F _oomph oomph
"""


def script(verbs: Iterable[str]) -> str:
    """The script, for these verbs."""
    cards = shlex.quote("\n".join(card.name.removeprefix("GeForce ") for card in devices.all_devices()))
    cases = "\n".join(f'    {verb}) words="{" ".join(options_of(verb))}" ;;' for verb in verbs)
    return SCRIPT.format(verbs=" ".join(verbs), cards=f"${cards}", cases=cases, presets=" ".join(PRESETS))


def options_of(verb: str) -> list[str]:
    """The options of a verb as its --help lists them, config keys included."""
    run: Callable[[list[str]], int] = import_module(f"oomph.cli.{verb}").run
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        run(["--help"])
    text = said.getvalue()
    keys = [f"--{key}=" for key in KEYS if re.search(rf"\b{key}\b", text)] if "batch_size" in text else []
    return sorted({*_OPTION.findall(text), *keys} - {key.rstrip("=") for key in keys})
