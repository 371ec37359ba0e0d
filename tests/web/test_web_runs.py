"""Runs as the page sees them: thinned but true, live, and never from outside the runs folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_helpers import Running, add_steps, write_run

from oomph.errors import InputError
from oomph.web.events import Tail
from oomph.web.runs import COLUMNS, ROWS, Clock, NoSuchRunError, RunsFolder, read_lines, thinned


def test_the_runs_are_listed_with_their_last_figures(client: httpx.Client) -> None:
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert runs["a"]["state"] == "finished" and runs["b"]["state"] == "running"
    assert (runs["a"]["steps"], runs["a"]["max_iters"]) == (30, 1000)
    assert runs["a"]["loss"] == pytest.approx(10 / 30) and runs["a"]["val_loss"] == pytest.approx(10 / 21)


def test_the_steps_that_were_done_are_told_though_not_every_step_is_logged(tmp_path: Path) -> None:
    def listed() -> int | None:
        (run,) = RunsFolder(tmp_path).listing().runs
        assert RunsFolder(tmp_path).run("a").steps == run.steps
        return run.steps

    path = write_run(tmp_path, 0)
    assert listed() is None
    for step in range(0, 300, 10):  # log_interval 10
        with (path / "metrics.jsonl").open("ab") as file:
            file.write(msgspec.json.encode({"step": step, "loss": 2.0}) + b"\n")
    assert listed() == 291
    (path / "checkpoints").mkdir()
    for at, steps in enumerate((300, 295)):  # after the run was taken up again at an earlier one
        checkpoint = path / "checkpoints" / f"step_{steps:08d}.pt"
        checkpoint.write_bytes(b"")
        os.utime(checkpoint, (at, at))
    assert listed() == 295
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 298, "val_loss": 2.0}\n')  # an evaluation comes before the step of its number
    assert listed() == 298
    (path / "result.json").write_text('{"finished": true, "steps": 300}')
    assert listed() == 300


def test_a_run_has_its_config_plan_figures_and_result(client: httpx.Client) -> None:
    run = client.get("/api/runs/a").json()
    assert run["config"]["n_layer"] == 2 and run["result"]["finished"] and run["plan"]["memory"]["fits"]
    columns = run["metrics"]["columns"]
    assert columns["step"] == list(range(30)) and columns["tokens"][-1] == 30_000
    assert columns["hours"][-1] == pytest.approx(30 * 3.6 / 3600)  # 30 steps of 3.6 s
    assert columns["flops"][-1] == pytest.approx(30_000 * run["plan"]["compute"]["flops_per_token"])
    assert [each["step"] for each in run["metrics"]["evals"]] == [0, 10, 20]


def test_a_run_that_is_not_there_is_a_404_with_the_nearest(client: httpx.Client) -> None:
    reply = client.get("/api/runs/aa")
    assert reply.status_code == 404 and reply.json()["problems"][0]["nearest"] == "a"


@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2f..%2fetc", "a%2f..%2fb", "%00", "a%00b", "\N{WOMAN}"])
def test_no_name_leads_out_of_the_runs_folder(client: httpx.Client, name: str) -> None:
    for address in (f"/api/runs/{name}", f"/api/runs/{name}/events"):
        assert client.get(address).status_code in (404, 405)


def test_the_runs_folder_itself_may_be_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, 3, name="out")
    assert list(RunsFolder(tmp_path / "out").names()) == ["out"]


def test_links_out_of_the_runs_folder_are_not_followed(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "elsewhere", 5, name="secret")
    runs = tmp_path / "runs"
    inside = write_run(runs, 2, name="linked")
    (runs / "jump").symlink_to(outside)
    (inside / "metrics.jsonl").unlink()
    (inside / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    folder = RunsFolder(runs)
    assert "jump" not in folder.names()
    assert folder.run("linked").metrics.count == 0
    assert Tail(inside, 0).more()[0].startswith(b"id: 0\nevent: state")
    with pytest.raises(InputError, match="a link"):
        folder.readable("linked")


def test_a_pipe_in_a_runs_folder_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = write_run(tmp_path, 2)
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    assert RunsFolder(tmp_path).run("a").metrics.count == 0


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRunError):
        RunsFolder(tmp_path).path_of("a")


def test_broken_files_leave_the_rest_readable(tmp_path: Path) -> None:
    path = write_run(tmp_path, 4, finished=True)
    (path / "plan.json").write_text("{")
    (path / "config.toml").write_bytes(b"\xff")
    (path / "result.json").write_text("[1")
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"not json\n\xff\xfe\n" + b"x" * (3 * 2**20) + b'\n{"step": 4, "loss": null}\n{"step": 5, "lo')
    run = RunsFolder(tmp_path).run("a")
    assert (run.plan, run.config, run.result) == (None, None, None)
    assert run.metrics.columns["step"] == [0, 1, 2, 3, 4] and run.metrics.columns["loss"][-1] is None


DEEP = b"[" * 100_000
HUGE = b"1" + b"0" * 400


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("result.json", DEEP),
        ("result.json", b'{"finished": true, "steps": %b}' % HUGE),
        ("plan.json", DEEP),
        ("plan.json", b'{"compute": {"flops_per_token": %b}}' % HUGE),
        ("plan.json", b'{"compute": {"flops_per_token": "inf"}}'),
        ("metrics.jsonl", b'{"step": 3, "loss": 1, "x": %b}\n' % DEEP),
        ("metrics.jsonl", b'{"step": 3, "tokens": %b, "loss": 1}\n' % HUGE),
        ("metrics.jsonl", b'{"step": %b, "loss": 1}\n' % HUGE),
        ("config.toml", b"max_iters = " + DEEP),
    ],
)
def test_a_file_that_no_run_writes_takes_no_other_run_away(tmp_path: Path, file: str, content: bytes) -> None:
    write_run(tmp_path, 3, name="good")
    path = write_run(tmp_path, 3, name="bad")
    (path / file).write_bytes(content)
    folder = RunsFolder(tmp_path)
    for found in (folder.listing(), folder.run("bad")):
        msgspec.json.encode(found)
    assert {run.name for run in folder.listing().runs} == {"good", "bad"}
    assert all(event.startswith(b"id: ") for event in Tail(path, 0).more())


def test_a_folder_whose_name_is_no_text_is_listed_and_read_under_one_that_is(tmp_path: Path) -> None:
    path = write_run(tmp_path, 3)
    path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/b\xffd"))
    (run,) = RunsFolder(tmp_path).listing().runs
    msgspec.json.encode(run)
    assert run.name == r"b\xffd" and RunsFolder(tmp_path).run(run.name).metrics.count == 3


def test_a_run_says_when_it_last_wrote_as_the_list_does(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    (listed,) = RunsFolder(tmp_path).listing().runs
    assert RunsFolder(tmp_path).run("a").updated == listed.updated


def test_a_run_that_goes_on_after_its_result_is_running(tmp_path: Path) -> None:
    path = write_run(tmp_path, 4, finished=True)
    earlier = time.time() - 60
    os.utime(path / "result.json", (earlier, earlier))
    assert RunsFolder(tmp_path).run("a").state == "running"


def test_a_run_long_silent_has_stopped(tmp_path: Path) -> None:
    path = write_run(tmp_path, 4)
    earlier = time.time() - 86400
    os.utime(path / "metrics.jsonl", (earlier, earlier))
    assert RunsFolder(tmp_path).run("a").state == "stopped"


def test_a_long_run_is_thinned_to_real_rows_with_its_spikes() -> None:
    losses = [5.0] * 100_000
    losses[77_777] = 99.0
    lines = (b'{"step": %d, "loss": %f, "step_ms": 10}' % (step, loss) for step, loss in enumerate(losses))
    found = read_lines(lines, Clock(), None)
    columns = found.columns().columns
    assert found.count == 100_000 and len(columns["step"]) <= ROWS
    assert columns["loss"][columns["step"].index(77_777)] == 99.0
    assert (columns["step"][0], columns["step"][-1]) == (0, 99_999)
    assert columns["hours"][-1] == pytest.approx(1000 / 3600)


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=300), st.integers(4, 40))
def test_thinning_keeps_the_ends_the_order_and_the_extremes(losses: list[float | None], most: int) -> None:
    rows = [[at, *[None] * (len(COLUMNS) - 1)] for at in range(len(losses))]
    for row, loss in zip(rows, losses, strict=True):
        row[COLUMNS.index("loss")] = loss
    kept = thinned(rows, most)
    steps = [row[0] for row in kept]
    assert len(kept) <= max(most, 0) and steps == sorted(set(steps))
    if rows:
        assert steps[0] == 0 and steps[-1] == len(rows) - 1
        known = [loss for loss in losses if loss is not None]
        if known and None not in losses:
            shown = [row[COLUMNS.index("loss")] for row in kept]
            assert max(shown) == max(known) and min(shown) == min(known)


def events(reply: httpx.Response) -> Iterator[tuple[str, str, dict[str, object]]]:
    """(id, event, data) as they come."""
    found: dict[str, str] = {}
    for line in reply.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif "data" in found:
            yield found["id"], found["event"], json.loads(found["data"])
            found = {}


def test_a_growing_run_is_streamed_as_it_grows(server: Running) -> None:
    path = write_run(server.runs, 5, name="growing")
    offset = server.client.get("/api/runs/growing").json()["offset"]
    with server.client.stream("GET", f"/api/runs/growing/events?from={offset}") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        stream = events(reply)
        assert next(stream)[1:] == ("state", {"state": "running", "result": None, "steps": None})
        add_steps(path, 5, 8)
        _, kind, data = next(stream)
        assert kind == "metrics" and data["columns"]["step"] == [5, 6, 7]
        assert data["columns"]["hours"][-1] == pytest.approx(8 * 3.6 / 3600)  # the hours before count too
        (path / "result.json").write_text('{"finished": true}')
        _, kind, data = next(stream)
        assert kind == "state" and data["state"] == "finished"


def test_a_stream_goes_on_where_the_last_one_ended(server: Running) -> None:
    path = write_run(server.runs, 3, name="again")
    with server.client.stream("GET", "/api/runs/again/events") as reply:
        last, kind, data = next(events(reply))
        assert kind == "metrics" and data["columns"]["step"] == [0, 1, 2]
    add_steps(path, 3, 5)
    with server.client.stream("GET", "/api/runs/again/events", headers={"last-event-id": last}) as reply:
        _, kind, data = next(events(reply))
        assert kind == "metrics" and data["columns"]["step"] == [3, 4]


@pytest.mark.parametrize("start", ["-1", "x", "9" * 30, "٣"])
def test_a_stream_from_no_byte_is_refused(client: httpx.Client, start: str) -> None:
    assert client.get("/api/runs/a/events", params={"from": start}).status_code == 400


def test_a_file_that_begins_anew_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path, 20)
    tail = Tail(path, (path / "metrics.jsonl").stat().st_size)
    tail.more()
    write_run(tmp_path, 2)
    kinds = [event.split(b"\n")[1] for event in (*tail.more(), *tail.more())]
    assert kinds == [b"event: reset", b"event: metrics"]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = write_run(tmp_path, 0)
    line = msgspec.json.encode({"step": 0, "loss": 1.0}) + b"\n"
    tail = Tail(path, 0)
    with (path / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:9])
        assert not any(b"event: metrics" in event for event in tail.more())
        file.write(line[9:])
    (event,) = tail.more()
    assert b"event: metrics" in event and event.startswith(b"id: %d\n" % len(line))
