"""`oomph evaluate`: the loss, bits per byte and accuracy of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomph.cli.arguments import VerbParser, need_torch, torch_device, whole
from oomph.cli.output import DONE, emit, emit_json
from oomph.errors import InputError, Problem

if TYPE_CHECKING:
    from oomph.training.sample import OpenedModel


def run(argv: list[str]) -> int:
    """Evaluate on each data set and question file, and print."""
    options = _parser().parse_args(argv)
    need_torch("evaluate")
    from oomph.training.sample import open_model

    opened = open_model(Path(options.checkpoint), torch_device(options.device))
    results = [
        _choices(opened, Path(data), options.tokenizer_dir)
        if Path(data).is_file()
        else _split(opened, data, options.split, options.tokens, options.tokenizer_dir)
        for data in options.data or [opened.config.dataset]
    ]
    if options.json:
        emit_json({"checkpoint": options.checkpoint, "results": [{**figures, "data": d} for d, figures, _ in results]})
    else:
        emit("".join(f"{data}: {text}\n" for data, _, text in results))
    return DONE


def _split(
    opened: OpenedModel, data: str, split: str, tokens: int | None, tokenizer_dir: Path | None
) -> tuple[str, dict[str, Any], str]:
    from oomph.data.manifest import find_dataset
    from oomph.data.tokenizer import tokenizer_of
    from oomph.training.evaluate import evaluate_split

    try:
        folder = find_dataset(data)
    except InputError:
        if opened.data_folder is None or data != opened.config.dataset:
            raise
        folder = opened.data_folder
    try:
        tokenizer = tokenizer_of(folder, tokenizer_dir, opened.config.vocab_size)
    except InputError:  # only token files: the loss is known, the bytes are not
        tokenizer = None
    found = evaluate_split(opened.model, folder, split, tokens, tokenizer)
    figures = {
        "split": found.split,
        "tokens": found.tokens,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits per byte"
    text = f"{split} loss {found.loss:.4f}{bits}, perplexity {found.perplexity:,.2f}, over {found.tokens:,} tokens"
    return data, figures, text


def _choices(opened: OpenedModel, path: Path, tokenizer_dir: Path | None) -> tuple[str, dict[str, Any], str]:
    import msgspec

    from oomph.training.evaluate import answer, read_questions
    from oomph.training.sample import tokenizer_of_run

    questions = read_questions(path)
    config = opened.config
    tokenizer = tokenizer_of_run(opened.run, config.dataset, config.vocab_size, tokenizer_dir, opened.data_folder)
    if tokenizer.vocab_size > config.vocab_size:
        what = f"the tokenizer {tokenizer.name} has more tokens than the model"
        raise InputError(Problem(str(path), what, str(tokenizer.vocab_size), f"at most {config.vocab_size}"))
    found = answer(opened.model, questions, tokenizer)
    text = (
        f"{found.accuracy_per_token:.1%} right by the mean over tokens, {found.accuracy:.1%} by the whole ending "
        f"({found.questions:,} questions; guessing: {found.chance:.1%})"
    )
    return str(path), msgspec.to_builtins(found), text


def _parser() -> VerbParser:
    parser = VerbParser(
        "evaluate",
        "How good a trained model is: loss, bits per byte (comparable between tokenizers) and perplexity on a data\n"
        "set; the share of right answers to a multiple choice in a JSON Lines file, with HellaSwag's ctx, endings and\n"
        "label.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's folder (its best checkpoint), a checkpoint of oomph's or nanoGPT's, a Hugging Face GPT-2 folder",
    )
    parser.add_argument(
        "data", metavar="DATA", nargs="*", help="data sets and .jsonl files; default: the data it was trained on"
    )
    parser.add_argument("--split", choices=("val", "train"), default="val", help="of a data set; default %(default)s")
    parser.add_argument("--tokens", type=whole, metavar="N", help="spread evenly over the split; default: all of it")
    parser.add_argument("--tokenizer_dir", type=Path, metavar="DIR", help="where GPT-2's vocab.bpe is, offline")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser
