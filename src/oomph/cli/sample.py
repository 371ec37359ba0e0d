"""`oomph sample`: text from a trained model, ours or nanoGPT's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oomph.cli.arguments import VerbParser, need_torch, not_negative, positive, torch_device, whole
from oomph.cli.output import DONE, FAILED, emit, emit_json
from oomph.errors import InputError, Problem

if TYPE_CHECKING:
    from oomph.data.tokenizer import Tokenizer
    from oomph.training.model import GPT

DEFAULT_PROMPT = "\n"  # nanoGPT's
_COLDEST = 1e-6  # a lower temperature takes the most likely token anyway, and overflows


def run(argv: list[str]) -> int:
    """Generate and print."""
    options = _parser().parse_args(argv)
    _check(options)
    need_torch("sample")
    from oomph.data.manifest import find_dataset
    from oomph.data.tokenizer import tokenizer_of
    from oomph.training.errors import is_out_of_memory
    from oomph.training.sample import open_model, prompt_tokens, tokenizer_of_run

    opened = open_model(Path(options.run), torch_device(options.device))
    vocab_size = opened.config.vocab_size
    if options.dataset is not None:
        tokenizer = tokenizer_of(find_dataset(options.dataset), options.tokenizer_dir, vocab_size)
    else:
        dataset = opened.config.dataset
        tokenizer = tokenizer_of_run(opened.run, dataset, vocab_size, options.tokenizer_dir, opened.data_folder)
    prompt = _prompt(options)
    tokens = prompt_tokens(prompt, tokenizer, vocab_size)
    try:
        texts, lengths = _speak(opened.model, tokenizer, prompt, tokens, options)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print("ERROR: no memory is left for the keys and values: fewer --samples would fit", file=sys.stderr)
        return FAILED
    if options.json:
        emit_json({"prompt": prompt, "tokenizer": tokenizer.name, "samples": texts, "tokens": lengths})
    if options.save:
        _save(opened.run, options.seed, "".join(_shown(prompt, text) for text in texts))
    return DONE


def _speak(
    model: GPT, tokenizer: Tokenizer, prompt: str, tokens: list[int], options: argparse.Namespace
) -> tuple[list[str], list[int]]:
    """The texts and their lengths in tokens; printed as they come, unless JSON is requested."""
    from oomph.training.sample import Sampling, generate_groups

    sampling = Sampling(options.temperature, options.top_k or None, options.top_p, options.seed)
    stop = tokenizer.end_of_text if options.stop else None
    texts: list[str] = []
    lengths: list[int] = []
    for group in generate_groups(model, tokens, options.tokens, sampling, options.samples, stop):
        new = [tokenizer.decode(sample) for sample in group]
        if not options.json:
            emit("".join(_shown(prompt, text) for text in new))
        if options.json or options.save:
            texts += new
            lengths += map(len, group)
    return texts, lengths


def _shown(prompt: str, text: str) -> str:
    return f"{prompt}{text}\n{'-' * 40}\n"


def _save(run: Path, seed: int, text: str) -> None:
    """Save the text in the folder of the checkpoint's run."""
    from oomph.files import write_whole

    folder = run / "samples"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(Problem(str(folder), "cannot be made", found=error.strerror)) from None
    write_whole(folder / f"seed_{seed}.txt", text.encode(errors="replace"))


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt_file is None:
        prompt: str = DEFAULT_PROMPT if options.prompt is None else options.prompt
        return prompt
    try:
        return Path(options.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(Problem(options.prompt_file, "cannot be read", found=str(error)[:120])) from None


def _check(options: argparse.Namespace) -> None:
    problems = []
    if options.top_p is not None and options.top_p > 1:
        problems.append(Problem("--top_p", "a probability", found=str(options.top_p), allowed="above 0, at most 1"))
    if 0 < options.temperature < _COLDEST:
        problems.append(
            Problem(
                "--temperature",
                "too cold to compute with",
                found=str(options.temperature),
                allowed=f"0 for the likeliest, or at least {_COLDEST}",
            )
        )
    if not -(2**63) <= options.seed < 2**64:
        problems.append(Problem("--seed", "too large", found=str(options.seed)[:40], allowed="at most 2⁶⁴ - 1"))
    if options.prompt is not None and any("\ud800" <= letter <= "\udfff" for letter in options.prompt):
        what = "holds bytes that are no text"
        problems.append(Problem("--prompt", what, found=ascii(options.prompt)[:40], allowed="UTF-8"))
    if options.prompt is not None and options.prompt_file is not None:
        problems.append(Problem("--prompt_file", "cannot go with --prompt", allowed="one of the two"))
    if problems:
        raise InputError(problems)


def whole_or_none(text: str) -> int:
    """A whole number of at least one, or 0 for none."""
    return 0 if text == "0" else whole(text)


def _parser() -> VerbParser:
    parser = VerbParser("sample", "Text from a trained model: a run's folder, a checkpoint of oomph's or of nanoGPT's.")
    parser.add_argument("run", metavar="RUN", help="a run's folder (its best checkpoint) or a checkpoint")
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with; default: a line break")
    parser.add_argument("--prompt_file", metavar="FILE", help="the same from a file")
    parser.add_argument("--samples", type=whole, default=1, metavar="N", help="how many texts; default %(default)s")
    parser.add_argument("--tokens", type=whole, default=200, metavar="N", help="at most; default %(default)s")
    parser.add_argument(
        "--temperature", type=not_negative, default=0.8, metavar="T", help="0 takes the likeliest; default %(default)s"
    )
    parser.add_argument(
        "--top_k",
        type=whole_or_none,
        default=200,
        metavar="K",
        help="of the K likeliest; 0: of all; default 200",
    )
    parser.add_argument("--top_p", type=positive, metavar="P", help="of the likeliest that together have this share")
    parser.add_argument("--seed", type=int, default=1337, help="of the random numbers; default %(default)s")
    parser.add_argument("--no_stop", dest="stop", action="store_false", help="go on after an end-of-text")
    parser.add_argument("--dataset", metavar="NAME", help="whose tokenizer; default: the one trained on")
    parser.add_argument("--tokenizer_dir", type=Path, metavar="DIR", help="where GPT-2's vocab.bpe is, offline")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--save", action="store_true", help="keep the text in the run's folder too, under samples/")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser
