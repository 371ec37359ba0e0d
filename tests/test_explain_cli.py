"""`oomph explain` and `oomph compare` as a user calls them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oomph.cli import compare, explain
from oomph.report import svg
from oomph.report.document import Chart, Line, Picture

sys.path.insert(0, str(Path(__file__).parent / "runs"))
import simulate

from refusals import refused

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for name, write in (("a", simulate.run_a), ("b", simulate.run_b), ("c", simulate.run_c), ("d", simulate.run_d)):
        (folder / f"{name}.log").write_text(write())
    return folder


def test_a_run_that_ran_out_of_memory_is_explained_with_its_cure_first(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert explain.run([str(logs / "d.log"), "--gpu", "RTX 4070", "--all"]) == 0
    out = capsys.readouterr().out
    assert "\n✗ " in out
    assert out.index("8 × 64") < out.index("█ parameters")  # the table of fixes stands above that of the memory


def test_memory_is_shown_predicted_beside_seen(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explain.run([str(logs / "a.log"), "--no_fixes", "--all"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "the process, in all" in line)
    said, seen = (int(figure.replace(",", "")) for figure in row.split()[-2:])
    assert (seen, said) == (4464, pytest.approx(4464, rel=0.01))


def test_json_markdown_and_svg(logs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "b.svg"
    explain.run([str(logs / "b.log"), "--gpu=4070", "--no_fixes", "--json", "--svg", str(picture)])
    plain = json.loads(capsys.readouterr().out)
    assert {"run", "plan", "findings", "fixes", "general_fixes"} == plain.keys()
    tree = ElementTree.parse(picture)
    assert len(list(tree.iter(f"{SVG}polyline"))) >= 3
    explain.run([str(logs / "b.log"), "--gpu=4070", "--no_fixes", "--markdown"])
    out = capsys.readouterr().out
    assert "### Memory" in out
    assert "| memory, MiB, at the peak | predicted | seen |" in out


def test_a_picture_of_a_run_without_steps_is_its_memory(logs: Path, tmp_path: Path) -> None:
    explain.run([str(logs / "d.log"), "--gpu=4070", "--no_fixes", "--svg", str(tmp_path / "d.svg"), "--json"])
    tree = ElementTree.parse(tmp_path / "d.svg")
    assert not list(tree.iter(f"{SVG}polyline"))
    assert list(tree.iter(f"{SVG}polygon"))


def test_standard_input_is_read(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = io.BytesIO((logs / "a.log").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin())
    explain.run(["-", "--no_fixes"])
    assert "4,464" in capsys.readouterr().out


def test_several_files_tell_of_one_run(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = tmp_path / "smi.txt"
    screen.write_text(simulate.nvidia_smi(used=9000, process=8400))
    explain.run([str(logs / "b.log"), str(screen), "--no_fixes", "--json"])
    plain = json.loads(capsys.readouterr().out)
    found = next(each for each in plain["findings"] if each["id"] == "memory.predicted")
    assert found["numbers"]["observed_mib"] == 8400
    assert plain["run"]["gpu"]["name"] == "GeForce RTX 4070"


def test_nothing_to_read_and_a_missing_file_are_told(tmp_path: Path) -> None:
    with refused(where="oomph explain", allowed="a log"):
        explain.run([])
    with refused(where="none.log"):
        explain.run([str(tmp_path / "none.log")])
    with refused(where="compare", found="0"):
        compare.run([])


def test_an_empty_log_is_explained_as_telling_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.log").touch()
    assert explain.run([str(tmp_path / "empty.log"), "--json"]) == 0
    assert "log.unknown" in capsys.readouterr().out


def test_two_runs_are_compared(logs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "bc.svg"
    names = [str(logs / "b.log"), str(logs / "c.log")]
    assert compare.run([*names, "--gpu", "4070", "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = [line.split("  ") for line in out.splitlines()]
    winners = {row[0]: row[-1].split(",")[0].strip() for row in rows if len(row) > 1}
    assert (winners["raw speed"], winners["hardware use"], winners["final loss"]) == ("b", "c", "no winner")
    titles = [text.text or "" for text in ElementTree.parse(picture).iter(f"{SVG}text")]
    for axis in ("against tokens", "against hours of steps", "against FLOPs", "throughput"):
        assert any(axis in title for title in titles)
    compare.run([*names, "--gpu", "4070", "--markdown"])
    assert "| figures | b | c |" in capsys.readouterr().out
    compare.run([*names, "--gpu", "4070", "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert {"runs", "differences", "metrics", "losses", "verdicts", "not_comparable"} <= plain.keys()


def test_follow_takes_one_file_and_no_other_output(logs: Path) -> None:
    for arguments in (["-"], [str(logs / "a.log"), str(logs / "b.log")], [str(logs / "a.log"), "--json"]):
        with refused(where="--follow"):
            explain.run([*arguments, "--follow"])


def test_follow_ends_with_a_run_that_failed(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.run([str(logs / "d.log"), "--gpu=4070", "--follow"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[1] == "✗"


def test_follow_leaves_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("step 0: train loss 4.0000, val loss 4.1000\n")
    code = "import sys; from oomph.cli import explain; sys.exit(explain.run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(log), "--follow", "--every=0.05"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert child.stdout is not None
    for _ in range(2):  # the greeting, and the evaluation: now it watches
        assert child.stdout.readline()
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "")
    assert len(out.splitlines()) == 1  # a farewell


def test_ticks_are_round_and_inside() -> None:
    assert svg.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert svg.ticks(3.02, 3.11) == [3.02, 3.04, 3.06, 3.08, 3.1]
    assert svg.log_ticks(1e6, 1e9) == [1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9]
    assert [svg.short(value) for value in (0.5, 1500, 524288, 3e18)] == ["0.5", "1.5k", "524.3k", "3e18"]


def test_names_in_pictures_are_escaped() -> None:
    chart = Chart("<b>", "x", "y & z", (Line("<i>", ((1.0, 1.0), (2.0, 2.0))),))
    ElementTree.fromstring(svg.to_svg(Picture("a < b", "&", charts=(chart,), names=("<i>",))))


def test_a_mistyped_log_names_the_nearest(logs: Path) -> None:
    with refused(where="bb.log", nearest="b.log"):
        explain.run([str(logs / "bb.log")])


def test_a_picture_must_be_an_svg(logs: Path, tmp_path: Path) -> None:
    for verb, names in ((explain, ["b.log"]), (compare, ["b.log", "c.log"])):
        with refused():
            verb.run([*(str(logs / name) for name in names), "--svg", str(tmp_path / "x.txt")])
    assert not (tmp_path / "x.txt").exists()
