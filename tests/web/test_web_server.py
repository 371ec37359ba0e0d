"""The server itself: its port, its workers, its end, and the page it ships."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from web_helpers import Running, running, write_run

from oomph.cli.main import main
from oomph.web.answers import Answer
from oomph.web.app import KEPT_ANSWERS, AnswerCache
from oomph.web.server import DEFAULT_PORT, Address, DeadlineProtocol, is_loopback, listen
from oomph.web.static import Static
from oomph.web.workers import TooBusyError, TooLongError, WorkerPool, ask_plan

FIRST_LOAD_BYTES = 300_000


def children(pid: int) -> list[int]:
    """The workers that a server started: its children but Python's resource tracker."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [int(line.split()[0]) for line in found.splitlines() if "resource_tracker" not in line]


def wait_until_gone(workers: list[int]) -> None:
    """Fail where a process is still there after some seconds: an orphan's end is init's to collect."""
    for _ in range(100):
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived its server")


def test_ctrl_c_ends_it_at_once_even_with_a_stream_open_and_leaves_no_process(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    with running(tmp_path) as server, server.client.stream("GET", "/api/events?run=a") as reply:
        next(reply.iter_lines())
        workers = children(server.process.pid)
        began = time.monotonic()
        assert server.interrupt() == 130
        assert time.monotonic() - began < 10
    assert len(workers) >= 2
    wait_until_gone(workers)


def test_workers_end_when_the_server_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.client.get("/api/runs")
        workers = children(server.process.pid)
        server.process.kill()
        server.process.wait()
        wait_until_gone(workers)


def test_where_our_port_is_taken_another_is_chosen() -> None:
    with listen("127.0.0.1", None) as first:
        first.listen()
        with listen("127.0.0.1", None) as second:
            assert second.getsockname()[1] not in (first.getsockname()[1], DEFAULT_PORT)


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--no_browser", "--port", str(port)]) == 2
    assert f"--port {port}: cannot be listened at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--port", "99999"], ["--port", "x"], ["--host", "no.such.host.invalid"], ["--runs", __file__], ["x"]]
)
def test_wrong_arguments_are_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--no_browser", *arguments]) == 2
    assert capsys.readouterr().err.startswith("ERROR: ")


def test_a_host_that_is_none_is_not_blamed_on_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--no_browser", "--host", "no.such.host.invalid", "--port", "0"]) == 2
    assert "--host no.such.host.invalid" in capsys.readouterr().err


def test_planning_through_the_server_never_imports_torch() -> None:
    code = """
import sys
import oomph.web.server
from oomph.web.answers import answer
for verb, body in (("report", b'{"gpu": "T4"}'), ("explain", b'{"text": "iter 1: loss 2", "fixes": false}')):
    assert answer(verb, body, ".").status == 200
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_which_addresses_only_this_machine_reaches(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_the_address_to_open_names_the_machine_and_the_token() -> None:
    assert Address("::1", 80, None).url == "http://[::1]:80/"
    assert Address("0.0.0.0", 80, "t").url == f"http://{socket.gethostname()}:80/?token=t"


def test_the_same_question_is_answered_once_and_kept(server: Running) -> None:
    question = {"gpu": "RTX 4070", "set": {"n_layer": 5, "n_embd": 120, "n_head": 5}}
    replies: list[bytes] = []
    asking = [
        threading.Thread(
            target=lambda: replies.append(httpx.post(f"{server.url}/api/plan", json=question, timeout=60).content)
        )
        for _ in range(6)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(replies) == 6 and len(set(replies)) == 1


def test_a_long_answer_is_compressed_for_who_can_read_that(client: httpx.Client) -> None:
    question = {"gpu": "RTX 4070", "set": {"n_layer": 3}}
    packed = client.post("/api/plan", json=question)
    plain = client.post("/api/plan", json=question, headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    refusing = client.post("/api/plan", json=question, headers={"accept-encoding": "gzip;q=0, br"})
    assert "content-encoding" not in refusing.headers
    assert int(packed.headers["content-length"]) < len(plain.content) / 2 and packed.json() == plain.json()


def test_kept_answers_are_bounded() -> None:
    answers = AnswerCache()
    for at in range(KEPT_ANSWERS + 10):
        answers.put(("plan", b"%d" % at), Answer(200, b"x" * 1000))
    assert answers.get(("plan", b"0")) is None and answers.get(("plan", b"%d" % KEPT_ANSWERS)) is not None
    answers.put(("fit", b""), Answer(200, b"x" * 70 * 2**20))
    assert answers.get(("fit", b"")) is None


def test_a_question_that_takes_too_long_is_ended_and_the_next_is_answered(tmp_path: Path) -> None:
    async def scene() -> None:
        pool = WorkerPool(2, str(tmp_path))
        await pool.start()
        try:
            with pytest.raises(TooLongError):
                await pool.ask("fit", b'{"gpu": "RTX 4070", "preset": "gpt2-xl"}', 0.05)
            assert (await pool.ask("runs", b"", 60)).status == 200
        finally:
            await pool.close()

    asyncio.run(scene())


def test_searches_leave_plans_their_workers(server: Running) -> None:
    question = {"gpu": "RTX 4070", "preset": "gpt2-xl"}

    async def scene() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {**question, "set": {"n_layer": 96}}
            searches = [
                asyncio.create_task(client.post("/api/fit", json={**body, "reserve_mib": at})) for at in range(3)
            ]
            await asyncio.sleep(0.3)
            assert (await client.post("/api/plan", json={"gpu": "T4"})).status_code == 200
            assert not any(search.done() for search in searches)
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)

    asyncio.run(scene())


def test_a_question_after_one_that_was_given_up_gets_its_own_answer(tmp_path: Path) -> None:
    def question(batch_size: int) -> bytes:
        keys = {"n_layer": 4, "n_embd": 64, "n_head": 4, "batch_size": batch_size}
        return json.dumps({"gpu": "RTX 4070", "set": keys}).encode()

    async def scene() -> None:
        pool = WorkerPool(2, str(tmp_path))
        await pool.start()
        try:
            await pool.ask("runs", b"", 60)
            for at, pause_s in enumerate((0.0, 0.0005, 0.002, 0.01, 0.03) * 3):
                given_up = asyncio.create_task(ask_plan(pool, question(100 + at), 60))
                await asyncio.sleep(pause_s)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                answer = await ask_plan(pool, question(1 + at), 60)
                found = json.loads(answer.plain())
                assert answer.status == 200
                assert [found[name]["config"]["batch_size"] for name in ("plan", "other")] == [1 + at] * 2
        finally:
            await pool.close()

    asyncio.run(scene())


def test_cancelled_again_and_again_a_worker_is_free_only_once_its_answer_is_read(tmp_path: Path) -> None:
    async def scene() -> None:
        pool = WorkerPool(1, str(tmp_path))
        await pool.start()
        try:
            assert (await pool.ask("runs", b"", 60)).status == 200
            given_up = asyncio.create_task(pool.ask("fit", json.dumps(LONG).encode(), 60))
            await asyncio.sleep(0.1)
            while not given_up.done():
                given_up.cancel()
                await asyncio.sleep(0)
            assert given_up.cancelled()
            assert json.loads((await pool.ask("runs", b"", 60)).plain())["runs"] == []
        finally:
            await pool.close()

    asyncio.run(scene())


def test_a_connection_that_does_not_ask_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomph.web.server.HEADER_SECONDS", 0.3)
    whole = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.6)  # longer than a head may take: an answer has all the time it needs
        await Response(b"here")(scope, receive, send)

    async def until_closed(port: int, *pieces: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def scene() -> None:
        with listen("127.0.0.1", 0) as listening:
            port = listening.getsockname()[1]
            config = uvicorn.Config(
                slow, http=DeadlineProtocol, lifespan="off", log_level="error", timeout_keep_alive=1
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            assert await until_closed(port) == b""
            assert await until_closed(port, whole[:9]) == b""
            assert (await until_closed(port, whole)).endswith(b"here")
            assert (await until_closed(port, whole, whole[:9])).endswith(b"here")
            server.should_exit = True
            await serving

    asyncio.run(scene())


def test_too_long_a_line_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomph.web.workers.MAX_WAITING", 1)

    async def scene() -> None:
        pool = WorkerPool(2, str(tmp_path))
        await pool.start()
        try:
            waiting = asyncio.create_task(pool.ask("runs", b"", 60))
            await asyncio.sleep(0)
            with pytest.raises(TooBusyError):
                await pool.ask("runs", b"", 60)
            assert (await waiting).status == 200
        finally:
            await pool.close()

    asyncio.run(scene())


LONG = {"gpu": "RTX 4070", "preset": "gpt2-xl", "set": {"n_layer": 96}}  # a search of many seconds


def test_work_that_nobody_waits_for_is_ended_and_the_next_question_is_answered(tmp_path: Path) -> None:
    async def scene() -> None:
        pool = WorkerPool(1, str(tmp_path))
        await pool.start()
        try:
            assert (await pool.ask("runs", b"", 60)).status == 200
            long = asyncio.create_task(pool.ask("fit", json.dumps(LONG).encode(), 120))
            await asyncio.sleep(0.5)
            waiting = asyncio.create_task(pool.ask("runs", b"", 60))
            overtaken = asyncio.create_task(pool.ask("fit", b"{}", 60))
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in (long, waiting, overtaken))
            overtaken.cancel()
            long.cancel()
            assert (await waiting).status == 200
            assert (await ask_plan(pool, b'{"gpu": "T4"}', 60)).status == 200  # no answer is mixed up
        finally:
            await pool.close()

    asyncio.run(scene())


def test_whoever_leaves_takes_the_question_along_unless_another_waits_for_it(server: Running) -> None:
    def ask(seconds: float) -> None:
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{server.url}/api/fit", json=LONG, timeout=seconds)

    workers = children(server.process.pid)
    before = cpu_s(workers)
    leaving = [threading.Thread(target=ask, args=(seconds,)) for seconds in (0.4, 1.2)]
    for thread in leaving:
        thread.start()
    leaving[0].join()
    time.sleep(0.3)
    between = cpu_s(workers)
    leaving[1].join()
    assert before < between  # worked on while one of them waited
    time.sleep(3.0)  # its worker is ended, another starts
    workers = children(server.process.pid)
    after = cpu_s(workers)
    time.sleep(1.0)
    assert cpu_s(workers) - after < 0.2  # and not when both had left


def cpu_s(pids: list[int]) -> float:
    """Seconds of CPU that these processes have had."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def test_a_worker_that_dies_is_started_again(server: Running) -> None:
    workers = children(server.process.pid)
    for worker in workers:
        subprocess.run(["kill", "-9", str(worker)], check=True)
    time.sleep(0.2)
    statuses = [server.client.get("/api/runs").status_code for _ in range(4)]
    assert statuses[-1] == 200


def test_the_page_loads_in_less_than_300_kb_and_from_nowhere_else(client: httpx.Client) -> None:
    page = client.get("/", headers={"accept-encoding": "identity"})
    assert page.headers["content-type"].startswith("text/html")
    sent = 0
    for name in Static().names():
        if Path(name).suffix in (".html", ".js", ".css", ".svg", ".woff2"):
            with client.stream("GET", f"/static/{name}", headers={"accept-encoding": "gzip"}) as reply:
                assert reply.status_code == 200
                sent += len(b"".join(reply.iter_raw()))
    assert sent < FIRST_LOAD_BYTES


def test_the_pages_inline_scripts_are_allowed_by_their_hash_alone(client: httpx.Client) -> None:
    page = client.get("/")
    inline = re.findall(r"<script(?![^>]*\bsrc=)[^>]*>", page.text)
    assert page.headers["content-security-policy"].count("'sha256-") == len(inline)


def test_a_file_that_has_not_changed_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/")
    again = client.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("one")
    static = Static(tmp_path)
    assert static.serve("a.js", httpx.Headers()).body == b"one"
    (tmp_path / "a.js").write_text("two two")
    packed = static.serve("a.js", httpx.Headers({"accept-encoding": "gzip"}))
    assert gzip.decompress(packed.body) == b"two two"
    (tmp_path / "a.js").unlink()
    assert static.serve("a.js", httpx.Headers()).status_code == 404


@pytest.mark.slow
def test_a_cpu_is_measured_beside_the_server_which_goes_on_planning(tmp_path: Path) -> None:
    runs, kept = tmp_path / "out", tmp_path / "cache"
    never_measured = {"OOMPH_MEASURE": "1", "XDG_CACHE_HOME": str(kept), "CUDA_VISIBLE_DEVICES": ""}
    with running(runs, environment=never_measured) as server:
        first = server.client.get("/api/machine").json()
        assert first["measuring"] and first["gpu"].get("cpu_rates") is None
        plan = server.client.post("/api/plan", json={"gpu": "RTX 4070", "set": {"n_layer": 2}})
        assert plan.status_code == 200 and server.client.get("/api/machine").json()["measuring"]
        assert "time" not in server.client.post("/api/plan", json={}).json()["plan"]
        deadline = time.monotonic() + 100
        while server.client.get("/api/machine").json()["measuring"]:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        kept_rates = (kept / "oomph" / "cpu.json").exists()  # a busy machine's are not kept
        assert ("time" in server.client.post("/api/plan", json={}).json()["plan"]) is kept_rates
