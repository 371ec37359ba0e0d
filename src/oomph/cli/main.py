"""`oomph VERB …`: find the verb, run it, turn what happened into an exit code.

0 done; 1 the answer is no; 2 the input is wrong; 3 it failed while running; 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from oomph.cli import plain
from oomph.cli.output import DONE, FAILED, INTERRUPTED, WRONG_INPUT, emit
from oomph.errors import InputError, Problem, nearest

VERBS = {
    "plan": "does it fit, what fills the memory, how long, what it costs",
    "fit": "the best setting that fits a card; the largest model; which cards do",
    "check": "a few steps for real on this machine: predicted against measured",
    "train": "nanoGPT's training in less memory; resumes exactly",
    "sample": "text from a checkpoint of ours or nanoGPT's",
    "evaluate": "loss, bits per byte and right answers of a trained model",
    "run": "any training command as it is; explained if it fails or stalls",
    "explain": "what happened in a run: from its log, nvidia-smi or an error message",
    "compare": "runs side by side: who wins at what, and why",
    "data": "text to token files that training reads; info and check look at them",
    "serve": "the page in your browser: plan with sliders, fit, explain, watch runs",
    "gpus": "the cards oomph knows, or one of them with the source of each figure",
}

USAGE = """\
usage: oomph VERB [...]

What training a GPT needs, before it runs.

{verbs}

  oomph plan gpt2 --gpu "RTX 4070"           a preset on a card
  oomph plan config.py --gpu 4070 --batch_size=8
                                             a nanoGPT config, one key changed
  oomph plan Qwen/Qwen3-0.6B --gpu 4090 --method=qlora
                                             a model by name, fine-tuned
  oomph fit config.py --gpu 4070             what fits, and what is fastest
  oomph help VERB                            what a verb takes
  source <(oomph --completion)               completes words in bash and zsh
  oomph --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.unraisablehook = _send_again
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=plain.ERRORS)  # a terminal without × gets an x
    try:
        return _run(arguments)
    except InputError as error:
        print("\n".join(f"ERROR: {_printable(str(problem))}" for problem in error.problems), file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("OOMPH_TRACEBACK"):
            raise
        print(
            f"ERROR: oomph failed: {type(error).__name__}: {error}\n"
            "This is a fault of oomph, not of your input. OOMPH_TRACEBACK=1 shows where.",
            file=sys.stderr,
        )
        return FAILED


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """Send a KeyboardInterrupt raised in `__del__` again, a moment later: Python drops it, and buffers are deleted all
    the time."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    import signal
    import threading

    threading.Timer(0.001, signal.raise_signal, (signal.SIGINT,)).start()


def _printable(text: str) -> str:
    """The text with escape codes shown, not executed: the user's input may contain some."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        emit(USAGE.format(verbs="\n".join(f"  {verb:10}{what}" for verb, what in VERBS.items())))
        return DONE if arguments else WRONG_INPUT
    verb = arguments[0]
    if verb in ("-V", "--version"):
        from oomph import __version__

        emit(f"oomph {__version__}\n")
        return DONE
    if verb == "--completion":
        from oomph.cli.completion import script

        emit(script(VERBS))
        return DONE
    if verb not in VERBS:
        raise InputError(
            Problem("oomph", f"unknown verb '{verb}'", allowed=", ".join(VERBS), nearest=nearest(verb, list(VERBS)))
        )
    run: Callable[[list[str]], int] = import_module(f"oomph.cli.{verb}").run
    return run(arguments[1:])
