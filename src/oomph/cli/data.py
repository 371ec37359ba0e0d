"""`oomph data`: text to token files; `oomph data info` and `oomph data check` look at them."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from oomph.cli.arguments import VerbParser
from oomph.cli.output import emit, emit_json
from oomph.data.errors import printable
from oomph.errors import InputError, Problem
from oomph.units import MIB, count, duration

MAX_TAKE = 10**18
EPILOG = """\
sources:
  text.txt, folder/, 'books/*.txt'     plain text: a file is a document, or many with --separator
  rows.jsonl, rows.jsonl.gz, .zst      JSON lines, the text under --text_key
  rows.parquet                         likewise, as a column
  -                                    standard input (--format jsonl where it is JSON lines)
  hf:NAME[:CONFIG[:SPLIT]]             a dataset of the Hugging Face hub, as it streams in
  builtin:python                       the Python standard library's source, about 12 MB, already here

  oomph data builtin:python --out data/python --tokenizer bytes
  oomph data hf:HuggingFaceFW/fineweb-edu:sample-10BT --out data/fineweb --take 3.68B
  oomph data info data/python          what it holds
  oomph data check data/python         sizes, ids, checksums; exit code 1 where something is wrong

Ctrl-C or a crash loses nothing: the same call goes on. With --overwrite it begins anew."""


def run(argv: list[str]) -> int:
    """Prepare a set, or look at one."""
    if argv and argv[0] in ("info", "check"):
        return _look(argv[0], argv[1:])
    options = _options(argv)
    # No linear algebra here; without its threads this process may fork, which shares the tokenizer's tables.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from oomph.data.errors import DataError
    from oomph.data.prepare import prepare
    from oomph.data.sources import ReadOptions

    try:
        done = prepare(
            options.sources,
            options.out,
            tokenizer=options.tokenizer,
            tokenizer_dir=options.tokenizer_dir,
            end_of_text=options.end_of_text,
            take=options.take,
            split=options.split,
            val_fraction=options.val_fraction,
            reading=ReadOptions(options.text_key, options.separator, options.format),
            skip_broken=options.skip_broken,
            overwrite=options.overwrite,
            workers=options.workers,
            say=lambda line: print(line, file=sys.stderr),
            show_progress=True,
        )
    except DataError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        again = (
            "the same command starts over" if options.overwrite else "finished work is kept, the same command resumes"
        )
        print(f"interrupted: {again}", file=sys.stderr)
        return 130
    if options.json:
        emit_json(
            {
                "folder": printable(done.folder),
                "already": done.already,
                "resumed_tokens": done.resumed_tokens,
                "seconds": done.seconds,
                "workers": done.workers,
                "notes": done.notes,
                "manifest": done.manifest,
            }
        )
    else:
        _print_done(done)
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = VerbParser("data", "Text to tokens: train.bin and val.bin as nanoGPT reads them, and a manifest.", EPILOG)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="text: see below")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the set goes, such as data/name")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        metavar="NAME",
        help="gpt2 (default), bytes, chars, bpe:8192, a tokenizer.json or meta.pkl",
    )
    parser.add_argument("--tokenizer_dir", metavar="FOLDER", help="where GPT-2's vocab.bpe or merges.txt lies")
    parser.add_argument("--end_of_text", metavar="TOKEN", help="the token between documents, of a tokenizer.json")
    parser.add_argument(
        "--take", type=_tokens, metavar="TOKENS", help="stop after so many, both splits together: 3.68B, 10M"
    )
    parser.add_argument(
        "--split", choices=("hash", "tail"), help="by a hash of each document, or a single text at its end"
    )
    parser.add_argument(
        "--val_fraction", type=float, metavar="F", help="for validation; default 0.005 by hash, 0.1 by tail"
    )
    parser.add_argument(
        "--separator", type=_escapes, metavar="TEXT", help=r"between documents of plain text: '\n', '<|endoftext|>'"
    )
    parser.add_argument(
        "--text_key", type=_utf8, default="text", metavar="KEY", help="key or column of the text; default text"
    )
    parser.add_argument(
        "--format", choices=("text", "jsonl"), default="text", help="where the name does not tell; default text"
    )
    parser.add_argument("--skip_broken", action="store_true", help="skip rows that are no documents, and count them")
    parser.add_argument("--overwrite", action="store_true", help="start over, replacing what is there")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default one a core")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    options, overrides = parser.parse(argv)
    if overrides:
        problems = [Problem(where, "a config key, which oomph data does not take") for _, _, where in overrides]
        raise InputError(problems)
    return options


def _look(verb: str, argv: list[str]) -> int:
    from oomph.data.inspect import check, info

    parser = VerbParser(
        f"data {verb}", "What a set of token files holds." if verb == "info" else "Whether it is whole."
    )
    parser.add_argument("path", metavar="PATH", help="a folder, or a name below data/")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if verb == "info":
        facts = info(options.path)
        if options.json:
            emit_json(facts)
        else:
            _print_info(facts)
        return 1 if facts.get("damage") else 0
    result = check(options.path)
    if options.json:
        emit_json({"folder": printable(result.folder), "checks": result.checks, "failures": result.failures})
    else:
        for line in result.checks:
            emit(f"ok     {line}\n")
        for line in result.failures:
            emit(f"WRONG  {line}\n")
    return 1 if result.failures else 0


def _print_done(done: Any) -> None:
    if done.already:
        emit(f"{printable(done.folder)} is finished already, from the same sources with the same settings\n")
    _print_info({"folder": printable(done.folder), "state": "finished", **_as_facts(done.manifest)})
    if not done.already:
        rate = done.manifest.counts.text_bytes / MIB / max(done.seconds, 1e-9)
        made = (
            f", after {done.resumed_tokens:,} tokens of earlier calls" if done.resumed_tokens else f", {rate:.1f} MiB/s"
        )
        emit(f"  took       {duration(done.seconds)} with {done.workers} workers{made}\n")
    for note in done.notes:
        print(f"NOTE: {note}", file=sys.stderr)


def _as_facts(manifest: Any) -> dict[str, Any]:
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(manifest)
    return {**facts, "sources": len(facts["recipe"]["sources"])}


def _print_info(facts: dict[str, Any]) -> None:
    emit(f"{facts['folder']}: {facts['state']}\n")
    for line in facts.get("damage", []):
        emit(f"  WRONG      {line}\n")
    for name, split in facts["splits"].items():
        documents = f" in {split['documents']:,} documents" if "documents" in split else ""
        emit(f"  {name:<10} {count(split['tokens'])} tokens ({split['tokens']:,}){documents}\n")
    if tokenizer := facts.get("tokenizer"):
        emit(f"  tokenizer  {tokenizer['name']}, end of text {tokenizer['end_of_text']}\n")
    if "vocab_size" in facts:
        origin = f" ({facts['vocab_size_from']})" if "vocab_size_from" in facts else ""
        emit(f"  vocabulary {facts['vocab_size']:,} ids as {facts['dtype']}{origin}\n")
    if counts := facts.get("counts"):
        sources = f"{facts['sources']:,} sources"
        emit(f"  text       {counts['text_bytes'] / MIB:,.1f} MiB in {counts['documents']:,} documents, {sources}\n")


def _tokens(text: str) -> int:
    """A number of tokens as people write it: 3.68B."""
    import math
    from contextlib import suppress
    from decimal import Decimal

    from oomph.units import parse_count

    number: int | float | Decimal | None = parse_count(text)
    if number is None:
        with suppress(ArithmeticError):
            number = Decimal(text)  # 500000, 500_000, 1e6
    if number is None or not math.isfinite(number) or not 1 <= number <= MAX_TAKE or number != int(number):
        raise argparse.ArgumentTypeError(f"a whole number of tokens such as 500000, 10M or 3.68B; found {text!r}")
    return int(number)


def _utf8(text: str) -> str:
    """An argument that is written to files: a shell may pass bytes that are not text."""
    if printable(text) != text:
        raise argparse.ArgumentTypeError(f"UTF-8 text; found {printable(text)!r}")
    return text


def _escapes(text: str) -> str:
    r"""A separator with \n, \t and \\ interpreted, which are hard to type in a shell."""
    if not _utf8(text):
        raise argparse.ArgumentTypeError("a text of at least one character")
    plain = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}
    import re

    return re.sub(r"\\[ntr\\]", lambda match: plain[match[0]], text)
