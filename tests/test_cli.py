"""The command as a user runs it: what it prints, where, and its exit code."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oomph import __version__
from oomph.cli.completion import script
from oomph.cli.main import VERBS, main
from oomph.cli.plain import ERRORS
from oomph.report.document import PARTS

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "fineweb_124m.py")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "plan" in out
    assert "gpus" in out


def test_help_of_a_verb_is_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "plan"])
    assert "usage: oomph plan" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["n_layer = 3", '{"n_layer": 3}', "n_layer: 3\n"])
def test_a_config_comes_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    _, out, _ = run(capsys, "plan", "-", "--gpu", "RTX 4070", "--json")
    assert json.loads(out)["config"]["n_layer"] == 3


def test_no_verb_shows_the_help_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 2
    assert "usage" in out


def test_a_misspelt_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "paln")
    assert code == 2
    assert err.rstrip().endswith("plan?")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"oomph {__version__}\n")


def test_plan_help_lists_every_config_key(capsys: pytest.CaptureFixture[str]) -> None:
    from oomph.config import TrainConfig

    with pytest.raises(SystemExit) as leaving:
        main(["plan", "--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert all(key in out for key in TrainConfig.__struct_fields__)


def test_a_plan_that_fits_exits_0_and_one_that_does_not_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--batch_size=1")[0] == 0
    assert run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--batch_size=64")[0] == 1


def test_the_report_has_a_verdict_and_a_bar_for_each_program(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--batch_size=64")
    for program in ("nanoGPT", "oomph train"):
        assert f"\n✗ {program} " in f"\n{out}"
        assert f"\n{program:<14}█" in out
    assert "logits and loss" in out


def test_all_shows_what_one_screen_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, short, _ = run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--batch_size=64")
    _, full, _ = run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--batch_size=64", "--all")
    for detail in ("half copies of weights", "likely", "11.40"):  # passes: the batch was quadrupled, so not 2.85
        assert detail not in short
        assert detail in full
    assert "--all" in short
    assert "--all" not in full


def test_the_next_command_is_one_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "gpt2", "--gpu", "RTX 4070", "--batch_size=64", "--n_layer=2")
    line = next(line for line in out.splitlines() if line.startswith("→ oomph"))
    told = shlex.split(line.removeprefix("→ oomph ").partition("  ")[0])
    assert told == ["fit", "gpt2", "--gpu", "RTX 4070", "--batch_size=64", "--n_layer=2"]
    assert run(capsys, *told)[0] == 0


def test_json_is_the_plan_of_the_chosen_trainer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--json", "--trainer=oomph")
    plan = json.loads(out)
    assert plan["config"]["trainer"] == "oomph"
    assert plan["config"]["sources"]["trainer"] == "--trainer=oomph"
    assert plan["config"]["sources"]["batch_size"].endswith("fineweb_124m.py:7")


def test_keys_are_taken_as_nanogpt_takes_them_and_with_a_space_or_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    for spelling in (["--batch_size=3"], ["--batch_size", "3"], ["--batch-size=3"]):
        _, out, _ = run(capsys, "plan", "gpt2", "--gpu", "RTX 4070", "--json", *spelling)
        assert json.loads(out)["config"]["batch_size"] == 3


def test_every_wrong_key_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", "gpt2", "--gpu", "4070", "--batch_sise=3", "--n_heads=2")
    assert (code, out) == (2, "")
    assert "--batch_size?" in err
    assert "--n_head?" in err


def test_every_wrong_value_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "gpt2", "--gpu", "4070", "--batch_size=0", "--n_embd=770", "--dropout=x")
    assert code == 2
    assert "--batch_size=0" in err
    assert "--n_embd=770" in err
    assert "--dropout=x" in err
    assert "Traceback" not in err


def test_a_key_without_a_value_says_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "gpt2", "--compile")
    assert code == 2
    assert "--compile=VALUE" in err


@pytest.mark.parametrize(
    "flag", ["--gpu_mib=0", "--gpu_mib=x", "--gpu_mib=inf", "--reserve_mib=-1", "--step_ms=nan", "--price_kwh=-3"]
)
def test_a_number_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    code, _, err = run(capsys, "plan", "gpt2", flag)
    assert code == 2
    assert flag.split("=")[0] in err


def test_a_gpu_and_device_cpu_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "mps"):
        code, _, err = run(capsys, "plan", "gpt2", "--gpu", "4070", f"--device={device}")
        assert code == 2
        assert f"--device={device}" in err


def test_wrong_keys_files_and_cards_are_all_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "--bach_size=4", "--n_head=0", "nosuch.py", "--gpu", "407000")
    assert code == 2
    assert all(name in err for name in ("bach_size", "--n_head=0", "nosuch.py", "407000"))


def test_a_terminal_without_unicode_still_gets_the_figures() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for arguments in (
        ["plan", "gpt2", "--gpu", "RTX 4090"],
        ["gpus"],
        ["plan", "gpt2", "--gpu", "RTX 4090", "--markdown"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "oomph", *arguments], check=False, capture_output=True, env=environment
        )
        assert done.returncode == 0, done.stderr


def test_markup_in_what_the_user_wrote_is_shown_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "gpt2", "--gpu", "RTX 4090", "--currency=[/b]", "--price_kwh=0.3")
    assert code == 0
    assert "[/b]" in out


def test_an_evaluation_alone_needs_no_memory_for_training(capsys: pytest.CaptureFixture[str]) -> None:
    _, training, _ = run(capsys, "plan", "gpt2-large", "--gpu", "RTX 3090", "--batch_size=8", "--json")
    code, alone, _ = run(
        capsys, "plan", "gpt2-large", "--gpu", "RTX 3090", "--batch_size=8", "--json", "--eval_only=True"
    )
    assert code == 0
    assert json.loads(alone)["memory"]["total_mib"] < json.loads(training)["memory"]["total_mib"] / 3
    assert json.loads(alone)["time"]["hours"] < 1


def test_the_cards_of_a_larger_world_all_draw_power(capsys: pytest.CaptureFixture[str]) -> None:
    one, eight = (
        json.loads(run(capsys, "plan", "gpt2", "--gpu", "A100-SXM4-40GB", "--json", f"--world_size={world}")[1])
        for world in (1, 8)
    )
    assert eight["energy"]["watts"] == pytest.approx(8 * one["energy"]["watts"])
    assert eight["energy"]["kwh"] == pytest.approx(one["energy"]["kwh"], rel=0.1)


def test_an_unknown_card_can_be_given_by_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "plan", "gpt2", "--gpu_mib=48000", "--gpu_tflops=200", "--gpu_gbs=900", "--gpu_watts=300", "--json"
    )
    plan = json.loads(out)
    assert plan["memory"]["fits"] is True
    assert plan["time"]["tokens_per_s"] > 0
    assert plan["energy"]["watts"] == pytest.approx(270)


def test_markdown_has_a_table_for_memory_and_one_for_time(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--markdown")
    assert out.startswith("## GPT")
    assert "| memory, MiB, at the peak | nanoGPT | oomph train |" in out
    assert "| **likely** |" in out


def test_the_svg_is_well_formed_and_sits_beside_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    _, out, _ = run(capsys, "plan", EXAMPLE, "--gpu", "RTX 4070", "--svg", str(picture))
    assert "nanoGPT" in out
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert list(tmp_path.iterdir()) == [picture]


def test_an_svg_that_cannot_be_written_is_said_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, "plan", "gpt2", "--gpu", "RTX 4070", "--svg", str(tmp_path / "no" / "plan.svg"))
    assert code == 2
    assert "plan.svg" in err
    (tmp_path / "folder.svg").mkdir()
    code, _, err = run(capsys, "plan", "gpt2", "--gpu", "RTX 4070", "--svg", str(tmp_path / "folder.svg"))
    assert code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_the_snapshot_is_one_that_the_reader_of_real_ones_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from oomph.step.snapshot import read as snapshot

    path = tmp_path / "plan.pickle"
    _, out, _ = run(capsys, "plan", "gpt2", "--gpu", "RTX 4070", "--batch_size=2", "--json", "--snapshot", str(path))
    recording = snapshot.read(path)
    assert recording.peak_bytes / 2**20 == pytest.approx(
        json.loads(out)["memory"]["allocated_mib"], rel=0.01
    )  # blocks against requests


def test_a_snapshot_of_what_does_not_fit_says_that_its_card_is_roomy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "plan.pickle")
    code, _, err = run(capsys, "plan", "gpt2", "--gpu", "RTX 4070", "--batch_size=40", "--json", "--snapshot", path)
    assert code == 1
    assert "11,837 MiB" in err
    _, _, err = run(capsys, "plan", "gpt2", "--gpu", "RTX 4070", "--batch_size=2", "--json", "--snapshot", path)
    assert "11,837" not in err


def test_gpus_lists_the_catalogue_and_shows_one_card_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    _, table, _ = run(capsys, "gpus")
    assert "GeForce RTX 4070" in table
    _, one, _ = run(capsys, "gpus", "RTX", "4070")
    assert "58.3" in one
    assert "12282" in one.replace(",", "")
    assert "source" in one


def test_an_ambiguous_card_lists_its_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "gpus", "3080")
    assert code == 2
    assert "10GB" in err
    assert "12GB" in err


def test_output_is_plain_when_it_is_not_a_terminal() -> None:
    environment = os.environ | {"COLUMNS": "100"}
    command = [sys.executable, "-m", "oomph", "plan", "gpt2", "--gpu", "RTX 4070"]
    out = subprocess.run(command, check=False, capture_output=True, env=environment).stdout
    assert b"\x1b[" not in out


def test_a_reader_that_leaves_early_is_no_error() -> None:
    for arguments, answer in (("gpus --json", 0), ("plan gpt2 --gpu 4090", 0), ("plan gpt2-xl --gpu 4060 --json", 1)):
        command = f"{sys.executable} -m oomph {arguments} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (answer, "")


def test_an_interrupt_that_comes_while_an_object_is_let_go_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def work(_: list[str]) -> int:
        held = [Held()]
        held.clear()
        time.sleep(5)
        return 0

    monkeypatch.setattr("oomph.cli.gpus.run", work)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back afterwards
    assert main(["gpus"]) == 130


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["pla"], ["plan"]),
        (["plan", "--batch_s"], ["--batch_size="]),
        (["fit", "--larg"], ["--largest"]),
        (["plan", "--gpu", "RTX 4090"], ["RTX\\ 4090\\ D", "RTX\\ 4090", "RTX\\ 4090\\ Laptop\\ GPU"]),
        (["plan", "gpt2-l"], ["gpt2-large"]),
    ],
)
def test_bash_completes_words(words: list[str], found: list[str], completion: Path) -> None:
    line = " ".join(shlex.quote(word) for word in ("oomph", *words))
    show = "printf '%s\\n' \"${COMPREPLY[@]}\""
    ask = f"source {completion}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _oomph; {show}"
    said = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == found and said.stderr == ""


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script that `oomph --completion` prints."""
    path = tmp_path_factory.mktemp("completion") / "oomph.sh"
    path.write_text(script(VERBS))
    return path


def test_a_terminal_without_our_signs_gets_others_of_the_same_width() -> None:
    glyphs = {glyph for _, glyph in PARTS.values()}
    plain = {glyph.encode("ascii", ERRORS) for glyph in glyphs}
    assert len(plain) == len(glyphs) and all(len(each) == 1 for each in plain)
    assert "✓ 12 × 64 – 2⁴ → é".encode("ascii", ERRORS) == b"+ 12 x 64 - 24 > e"


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_a_plain_terminal_of_any_width_is_kept_to(
    columns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    with (tmp_path / "screen").open("w", encoding="ascii") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        assert main(["plan", "gpt2", "--gpu", "RTX 4070", "--n_layer=2"]) == 0
    lines = (tmp_path / "screen").read_text("ascii").splitlines()
    assert max(map(len, lines)) <= int(columns) and (len(lines) <= 25 or columns == "60")
    assert not any("?" in line for line in lines)
