"""Runs as the page sees them: thinned but true, live, and never from outside the runs folder."""

from __future__ import annotations

import asyncio
import contextlib
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
from starlette.requests import Request
from web_helpers import Running, add_steps, write_run

from oomph.errors import InputError
from oomph.web import runs
from oomph.web.app import Web
from oomph.web.events import MAX_STREAMS, Tail
from oomph.web.metrics import COLUMNS, ROWS, Clock, Figures, position, read_lines, read_position, thinned
from oomph.web.runs import NoSuchRunError, RunsFolder


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
    for address in (f"/api/runs/{name}", f"/api/events?run={name}"):
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
    assert [kind for kind, _ in Tail(inside, 0).more()] == ["state"]
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
    msgspec.json.encode(Tail(path, 0).more())


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
    clock = Clock()
    lines = [b'{"step": %d, "loss": %f, "step_ms": 10}' % (step, loss) for step, loss in enumerate(losses)]
    found = Figures()
    for first in range(0, len(lines), 7_000):  # as a file is read: piece by piece
        read_lines(b"\n".join(lines[first : first + 7_000]), clock, None, found)
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
    start = server.client.get("/api/runs/growing").json()["position"]
    with server.client.stream("GET", "/api/events", params={"run": "growing", "from": start}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        stream = events(reply)
        state = {"state": "running", "reason": None, "result": None, "steps": None}
        assert next(stream)[1:] == ("state", {"run": 0, "data": state})
        add_steps(path, 5, 8)
        _, kind, found = next(stream)
        assert kind == "metrics" and found["data"]["columns"]["step"] == [5, 6, 7]
        assert found["data"]["columns"]["hours"][-1] == pytest.approx(8 * 3.6 / 3600)  # the hours before count too
        (path / "result.json").write_text('{"finished": true}')
        _, kind, found = next(stream)
        assert kind == "state" and found["data"]["state"] == "finished"


def test_a_stream_of_two_runs_goes_on_where_the_last_one_ended(server: Running) -> None:
    paths = [write_run(server.runs, 3, name=name) for name in ("one", "two")]
    asked = {"run": ["one", "two"]}
    with server.client.stream("GET", "/api/events", params=asked) as reply:
        stream = (event for event in events(reply) if event[1] == "metrics")
        assert [(next(stream)[2]["run"], next(stream)[2]["run"])] == [(0, 1)]
        add_steps(paths[1], 3, 4)
        last, _, _ = next(stream)
    for path in paths:
        add_steps(path, 4, 6)
    with server.client.stream("GET", "/api/events", params=asked, headers={"last-event-id": last}) as reply:
        stream = (event for event in events(reply) if event[1] == "metrics")
        found = [next(stream)[2] for _ in paths]
    assert [each["data"]["columns"]["step"] for each in found] == [[4, 5], [4, 5]]
    assert [each["data"]["columns"]["hours"][-1] for each in found] == pytest.approx([6 * 3.6 / 3600] * 2)


@pytest.mark.parametrize(
    "asked", [{}, {"run": "a", "from": "-1"}, {"run": "a", "from": "x"}, {"run": "a", "from": "9" * 30},
              {"run": "a", "from": "٣"}, {"run": "a", "from": "0,0"}, {"run": ["a"] * 65}],
)  # fmt: skip
def test_a_stream_from_nowhere_is_refused(client: httpx.Client, asked: dict[str, object]) -> None:
    assert client.get("/api/events", params=asked).status_code == 400


@given(st.integers(0, 10**15 - 1), st.floats(0, 1e6), st.integers(-1, 10**18 - 1))
def test_a_position_reads_back(offset: int, hours: float, step: int) -> None:
    clock = Clock(hours, step)
    assert read_position(position(offset, clock)) == (offset, clock if offset else Clock())


def test_places_for_streams_are_taken_before_the_answer_and_given_back(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    web = Web(tmp_path)

    async def ask() -> tuple[int, int, int]:
        scope = {"type": "http", "method": "GET", "headers": [], "query_string": b"run=a", "path": "/api/events"}
        answers = [await web.events(Request(scope)) for _ in range(MAX_STREAMS + 1)]

        async def gone() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def send(_: object) -> None:
            raise OSError  # the reader left before the first byte

        held = web.streams.open
        with contextlib.suppress(OSError, BaseExceptionGroup):
            await answers[0](scope, gone, send)
        return held, web.streams.open, answers[-1].status_code

    assert asyncio.run(ask()) == (MAX_STREAMS, MAX_STREAMS - 1, 429)


def test_a_file_that_begins_anew_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path, 20)
    tail = Tail(path, (path / "metrics.jsonl").stat().st_size)
    tail.more()
    write_run(tmp_path, 2)
    assert [kind for kind, _ in (*tail.more(), *tail.more())] == ["reset", "metrics"]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = write_run(tmp_path, 0)
    line = msgspec.json.encode({"step": 0, "loss": 1.0}) + b"\n"
    tail = Tail(path, 0)
    with (path / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:9])
        assert not any(kind == "metrics" for kind, _ in tail.more())
        file.write(line[9:])
    ((kind, _),) = tail.more()
    assert kind == "metrics" and tail.offset == len(line)


def test_a_run_read_again_reads_only_what_is_new_and_tells_the_same(tmp_path: Path) -> None:
    path = write_run(tmp_path, 7)
    folder = RunsFolder(tmp_path)
    for first in (7, 9):
        folder.run("a")
        add_steps(path, first, first + 2)
        again, fresh = folder.run("a"), RunsFolder(tmp_path).run("a")
        assert again == fresh and again.metrics.columns["step"] == list(range(first + 2))
    write_run(tmp_path, 30, loss=3.0)  # another run under the same name, and longer
    assert folder.run("a") == RunsFolder(tmp_path).run("a")


def test_a_listing_reads_no_run_again_that_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_run(tmp_path, 3, name=name) for name in "ab"]
    folder = RunsFolder(tmp_path)
    folder.listing()
    looked: list[Path] = []
    look = runs._look
    monkeypatch.setattr(runs, "_look", lambda path: looked.append(path) or look(path))
    add_steps(paths[1], 3, 4)
    assert {run.name: run.steps for run in folder.listing().runs} == {"a": 3, "b": 4}
    assert looked == [paths[1]]


@pytest.mark.parametrize("event", ["not finite", "failed"])
def test_a_run_that_failed_says_why(tmp_path: Path, event: str) -> None:
    path = write_run(tmp_path, 3)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode({"step": 3, "event": event, "reason": "the loss is nan"}) + b"\n")
    (listed,) = RunsFolder(tmp_path).listing().runs
    assert (listed.state, listed.reason) == ("failed", f"{event}: the loss is nan")
    add_steps(path, 3, 4)  # it was taken up again
    assert RunsFolder(tmp_path).run("a").state == "running"


def test_a_run_whose_process_is_gone_has_failed_and_one_that_is_locked_runs_however_silent(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = write_run(tmp_path, 3)
    os.utime(path / "metrics.jsonl", (0, 0))
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunsFolder(tmp_path).run("a").state == "running"
    found = RunsFolder(tmp_path).run("a")
    assert found.state == "failed" and found.reason is not None
