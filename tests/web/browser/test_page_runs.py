"""Runs in the browser: a real training appears and grows while one watches; runs beside each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser_helpers import OpenPage
from playwright.sync_api import Page, expect
from web_helpers import add_steps, running, write_run

pytestmark = pytest.mark.slow
MANY = 1_000_000
KEYS = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 8, "gradient_accumulation_steps": 1}


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`oomph train` on a little text, in a process of its own, for as long as it is let."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(4000)))
    make = [sys.executable, "-m", "oomph", "data", str(text), "--out", str(folder / "data"), "--tokenizer", "bytes"]
    subprocess.run(make, check=True, capture_output=True)
    keys = {
        **KEYS,
        "max_iters": MANY,
        "lr_decay_iters": MANY,
        "warmup_iters": 5,
        "eval_interval": 50,
        "eval_iters": 2,
    }
    keys |= {
        "log_interval": 2,
        "device": "cpu",
        "dataset": str(folder / "data"),
        "out_dir": str(folder / "out" / "live"),
    }
    command = [sys.executable, "-m", "oomph", "train", *(f"--{key}={value}" for key, value in keys.items())]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    process = subprocess.Popen(command, **quiet)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def last_step(page: Page) -> int:
    """The step the page says the run is at."""
    return int(page.locator(".run-head").get_attribute("data-step") or 0)


def test_a_training_appears_by_itself_and_grows(open_page: OpenPage, tmp_path: Path) -> None:
    with running(tmp_path / "out") as server:
        page = open_page("#runs", url=server.url)
        expect(page.locator(".run-list")).to_contain_text("None yet")
        with training(tmp_path) as process:
            expect(page.locator("[data-run=live]")).to_be_visible(timeout=90_000)
            expect(page.locator(".run-head .state")).to_have_text("running", timeout=60_000)
            page.locator(".plot canvas").first.wait_for()
            seen = last_step(page)
            page.wait_for_function("seen => document.querySelector('.run-head').dataset.step > seen", arg=seen)
            expect(page.locator(".tiles")).to_contain_text("left")  # how long, at this pace
            process.send_signal(signal.SIGINT)
            process.wait(60)
            expect(page.locator(".run-head .state")).to_have_text("stopped", timeout=30_000)
        page.close()  # before its server is gone


def test_a_run_that_had_stopped_grows_again_when_it_goes_on(open_page: OpenPage, tmp_path: Path) -> None:
    path = write_run(tmp_path, 5)
    (path / "result.json").write_text('{"finished": false, "steps": 5}')
    earlier = time.time() - 3600  # and silent for long
    for name in ("metrics.jsonl", "result.json"):
        os.utime(path / name, (earlier, earlier))
    with running(tmp_path) as server:
        page = open_page("#runs?run=a", url=server.url)
        expect(page.locator(".run-head .state")).to_have_text("stopped")
        for first in (5, 7):
            add_steps(path, first, first + 2)
            expect(page.locator(".run-head .state")).to_have_text("running")
            expect(page.locator(".run-head")).to_have_attribute("data-step", str(first + 2))
        page.close()


def test_seven_live_runs_in_two_tabs_leave_the_site_answering(open_page: OpenPage, tmp_path: Path) -> None:
    names = [f"run{number}" for number in range(7)]
    paths = [write_run(tmp_path, 3, name=name) for name in names]
    with running(tmp_path) as server:
        page = open_page(f"#runs?{'&'.join(f'run={name}' for name in names)}", url=server.url)
        page.locator(".plot canvas").first.wait_for()
        other = page.context.new_page()
        other.goto(f"{server.url}/#runs?run=run3")
        expect(other.locator(".run-head .state")).to_have_text("running")
        legend = page.locator(".plot").first.locator(".legend")
        for path in paths:
            add_steps(path, 3, 5)
        expect(other.locator(".run-head")).to_have_attribute("data-step", "5")
        for name in names:
            expect(legend).to_contain_text(f"{name} 2.0000")  # the loss of step 4
        other.goto(f"{server.url}/#plan?preset=gpt2&gpu=RTX+4070&n_layer=2")
        expect(other.locator(".verdict")).to_have_count(2)
        other.close()
        page.close()


def test_a_run_that_became_nan_is_shown_as_failed_with_its_reason(open_page: OpenPage, tmp_path: Path) -> None:
    path = write_run(tmp_path, 5)
    with running(tmp_path) as server:
        page = open_page("#runs?run=a", url=server.url)
        expect(page.locator(".run-head .state")).to_have_text("running")
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "event": "spike", "reason": "the loss is 9.1"}) + "\n")
            file.write(json.dumps({"step": 5, "event": "not finite", "reason": "the loss is nan"}) + "\n")
        expect(page.locator(".run-head .state")).to_have_text("failed")
        expect(page.locator(".alarms .problem")).to_contain_text("the loss is nan")
        expect(page.locator(".alarms summary")).to_contain_text("2 alarms")
        expect(page.locator("[data-run=a] .state")).to_have_text("failed")
        page.close()


def test_a_zoom_stays_while_the_run_grows(open_page: OpenPage, tmp_path: Path) -> None:
    path = write_run(tmp_path, 30)
    with running(tmp_path) as server:
        page = open_page("#runs?run=a", url=server.url)
        chart = page.locator(".plot").first.locator(".u-over")
        box = chart.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50, steps=4)
        page.mouse.up()

        def last_in_sight() -> float:
            chart.hover(position={"x": box["width"] - 2, "y": 50})
            return float(page.locator(".plot").first.locator(".where").inner_text().removeprefix("step "))

        assert 12 <= last_in_sight() <= 17
        add_steps(path, 30, 60)
        expect(page.locator(".run-head")).to_have_attribute("data-step", "60")
        assert 12 <= last_in_sight() <= 17
        chart.dblclick()
        assert last_in_sight() >= 57
        page.close()


def test_step_throughput_and_time_left_are_of_the_same_steps(open_page: OpenPage, tmp_path: Path) -> None:
    path = write_run(tmp_path, 0)
    lines = [{"step": step, "tokens": 1000 * (step + 1), "loss": 1.0} for step in range(50)]
    for line in lines:
        line |= {"step_ms": 100.0 if line["step"] < 40 else 500.0}  # the last ten are slow
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with running(tmp_path) as server:
        page = open_page("#runs?run=a", url=server.url)
        tiles = page.locator(".tiles")
        expect(tiles).to_contain_text("300 ms")  # of the last twenty
        expect(tiles).to_contain_text("3,333")
        expect(tiles).to_contain_text("4.75 min")  # 950 steps of 300 ms
        page.close()


def test_a_server_that_comes_back_is_believed(open_page: OpenPage, tmp_path: Path) -> None:
    write_run(tmp_path, 5, finished=True)
    with running(tmp_path) as server:
        page = open_page("#runs", url=server.url)
        expect(page.locator(".run-head .state")).to_have_text("finished")
        page.route("**/api/runs**", lambda route: route.fulfill(status=404))
        expect(page.locator(".watched .problem")).to_contain_text("The server answered 404")
        page.unroute("**/api/runs**")
        expect(page.locator(".watched .problem")).to_have_count(0)
        page.close()


def test_on_a_cpu_the_process_is_held_against_the_plan_of_the_process(open_page: OpenPage, tmp_path: Path) -> None:
    path = write_run(tmp_path, 5, finished=True)
    plan = {"device": {"kind": "cpu"}, "memory": {"allocated_mib": 2.0, "context_mib": 400.0, "total_mib": 402.0}}
    (path / "plan.json").write_text(json.dumps(plan))
    with running(tmp_path) as server:
        page = open_page("#runs", url=server.url)
        memory = page.locator(".plot", has_text="Memory")
        expect(memory).to_contain_text("MiB, the process")
        expect(memory.locator(".legend")).to_contain_text("402 MiB")
        (path / "plan.json").write_text('{"device": {"kind": "cpu"}}')
        page.reload()
        expect(memory).to_contain_text("MiB, the process")
        expect(memory.locator(".legend")).not_to_contain_text("402 MiB")
        page.close()


def test_one_run_stands_against_its_plan(open_page: OpenPage) -> None:
    page = open_page("#runs?run=a")
    expect(page.locator(".tiles")).to_contain_text("plan")
    expect(page.locator(".plot canvas")).to_have_count(6)
    expect(page.locator(".plot", has_text="Throughput").locator(".legend")).to_contain_text("278")


def test_plots_run_over_steps_tokens_hours_and_flops(open_page: OpenPage) -> None:
    page = open_page("#runs?run=a")
    plot = page.locator(".plot").first
    for axis, unit in (("tokens", "tokens"), ("hours", "s"), ("flops", "FLOP"), ("step", "step")):
        page.locator(f".choice[data-name=axis] input[value={axis}]").check()
        plot.locator(".u-over").hover()
        expect(plot.locator(".where")).to_contain_text(unit)
    expect(plot.locator(".legend")).to_contain_text("train")


def test_smoothing_keeps_the_raw_line_and_changes_the_figure(open_page: OpenPage) -> None:
    page = open_page("#runs?run=a")
    legend = page.locator(".plot").first.locator(".legend")
    expect(legend).to_contain_text("0.3333")
    page.locator(".choice[data-name=smoothing] input[value='0.95']").check()
    expect(legend).not_to_contain_text("0.3333")


def test_two_runs_are_compared(open_page: OpenPage) -> None:
    page = open_page("#runs?run=a")
    expect(page.locator(".tiles")).to_be_visible()
    page.get_by_label("compare b").check()
    expect(page.locator(".run-head")).to_contain_text("2 runs")
    expect(page.locator(".plot").first.locator(".legend")).to_contain_text("a, val")
    expect(page.locator(".verdict-list")).to_contain_text("final loss", timeout=60_000)
    page.wait_for_url("**/#runs?run=a&run=b")


def test_a_run_that_is_gone_is_named(open_page: OpenPage) -> None:
    page = open_page("#runs?run=gone")
    expect(page.locator(".watched .problem")).to_contain_text("gone")
    expect(page.get_by_text("reading gone")).to_have_count(0)
