"""Texts of programs that are no language models' trainers, and screens with parts of what they could show."""

from __future__ import annotations

import io

import pytest
from explaining import explained, get, number

from oomph.report.explain import ALL_WELL, TOO_FEW, document
from oomph.report.terminal import to_text
from oomph.runs import read, read_text
from oomph.runs.findings.oom import size

PAIRED = "step: {}\ttrain loss: {}\ttest loss: {}\ttokens/gpu/sec: 9000.0\n"


def test_equal_evaluations_of_neighbouring_lines_are_counted() -> None:
    vals = (3.1, 2.9, 2.8, 2.8, 2.7, 2.7, 2.7)
    text = "".join(PAIRED.format(10 * n, 3.2 - n / 10, val) for n, val in enumerate(vals, 1))
    assert read_text(text).evals.count == len(vals)


def test_a_validation_loss_that_every_step_repeats_is_one_evaluation() -> None:
    vals = (3.1, 3.1, 3.1, 2.8, 2.8, 2.8, 2.7)
    text = "".join(PAIRED.format(10 * n, 3.2 - n / 10, val) for n, val in enumerate(vals, 1))
    assert read_text(text).evals.column("step") == [10.0, 40.0, 70.0]


def test_opennmts_steps_are_read() -> None:
    line = (
        "[2026-01-02 03:04:05,678 INFO] Step {}/ 9000; acc: 21.5; ppl: {}; xent: {}; lr: 0.5; 700/650 tok/s; 6 sec;\n"
    )
    run = read_text(line.format(50, 30.0, 3.4) + line.format(100, 20.1, 3.0))
    assert (run.steps.column("step"), run.steps.column("loss")) == ([50.0, 100.0], [3.4, 3.0])
    assert (run.printed.steps_planned, run.steps.totals["tokens_per_s"].count) == (9000, 0)


YOLO = "     Epoch   gpu_mem       box       obj       cls    labels  img_size\n"
ROW = "      {}/49     3.21G    {}    0.0204   {}        31       640: 100%|####| 9/9 [00:08<00:00,  1.10it/s]\n"


def test_nan_in_a_detectors_row_is_said() -> None:
    explanation = explained(
        "".join(YOLO + ROW.format(n, *row) for n, row in enumerate((("0.08", "0.01"),) * 2)), "y", None
    )
    assert explanation.finding("loss.not_finite") is None
    assert explanation.run.printed.peak_reserved_mib == 3.21e9 / 2**20
    text = YOLO + ROW.format(0, "0.08", "0.01") + YOLO + ROW.format(1, "nan", "nan")
    found = get(explained(text, "y", None), "loss.not_finite")
    assert (number(found, "epoch"), found.numbers["columns"]) == (1, "box, cls")


def test_nvidia_smis_query_of_performance_alone_is_a_screen() -> None:
    card = (
        "GPU 00000000:{}:00.0\n    Performance State                 : P2\n    Clocks Event Reasons\n"
        "        Idle                          : Not Active\n        SW Power Cap                  : Not Active\n"
        "        SW Thermal Slowdown           : {}\n\n"
    )
    head = "==============NVSMI LOG==============\n\nAttached GPUs                     : 2\n"
    found = get(
        explained(head + card.format(21, "Not Active") + card.format(41, "Not Active"), "q", None), "card.screen"
    )
    assert (number(found, "cards"), "P2" in found.title) == (2, True)
    hot = explained(head + card.format(21, "Active"), "q", None)
    assert "SW Thermal Slowdown" in get(hot, "card.slowed").title
    ecc = "    ECC Mode\n        Current                       : Enabled\n"
    assert (
        number(
            get(explained(head + card.partition("\n")[0].format(21) + "\n" + ecc, "q", None), "card.screen"), "cards"
        )
        == 1
    )


METRICS = "***** {} metrics *****\n  epoch                    =        3.0\n  {}\n"


@pytest.mark.parametrize(("loss", "said"), [("1.25", ALL_WELL), ("0.0", TOO_FEW), ("nan", "NaN")])
def test_a_trainers_metrics_are_read_and_a_mean_of_0_proves_nothing(loss: str, said: str) -> None:
    text = METRICS.format("train", f"train_loss = {loss}\n  train_runtime = 1:02:03.50") + "saved\n"
    explanation = explained(text, "m", None)
    assert explanation.run.printed.runtime_s == 3723.5
    assert (explanation.finding("loss.not_finite") is not None) == (loss == "nan")
    assert said in to_text(document(explanation))


def test_metrics_of_an_evaluation_are_one() -> None:
    line = "{'loss': 2.5, 'learning_rate': 1e-4, 'epoch': 1.0}\n"
    run = read_text(line + METRICS.format("eval", "eval_loss                =     1.75") + "\n")
    assert run.evals.column("val_loss") == [1.75]


def test_zeros_before_a_log_are_no_text() -> None:
    line = b"step %d | loss 3.%d | lr 1e-4\n"
    run = read(io.BytesIO(b"\x00" * 300_000 + b"".join(line % (n, 99 - n) for n in range(5))))
    assert run.steps.column("step") == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("before", ["server-1  | ERROR 01-02 03:04:05 engine.py:99] ", "gpu-node-03.lan: ", "n7: "])
def test_what_a_container_a_logger_or_a_host_prints_before_a_line_is_not_part_of_it(before: str) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "serve.py", line 7, in start',
        "    go()",
        "ValueError: No room",
    )
    crash = read_text("".join(f"{before}{line}\n" for line in lines)).crash
    assert crash is not None
    assert (crash.what, crash.code) == ("ValueError: No room", "serve.py:7 in start")
    assert read_text("".join(f"gpu_2   | step {n}: loss 2.{n}\n" for n in range(4))).steps.count == 4


def test_nccls_warning_is_told_with_the_error_after_it() -> None:
    warning = "node-9:40:41 [2] misc/socket.cc:40 NCCL WARN Call to connect failed : Connection refused\n"
    alone = get(explained(warning, "n", None), "log.crash")
    assert (alone.severity, "Connection refused" in alone.title) == ("warning", True)
    frame = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    reduce()\n'
    whole = get(
        explained(f"{warning}{frame}RuntimeError: NCCL error in: x.cpp:1, system error\n", "n", None), "log.crash"
    )
    assert (whole.severity, "Connection refused" in whole.text) == ("error", True)
    later = explained(f"{warning}step 1: loss 3.0, lr 1e-4\n", "n", None)
    assert later.finding("log.crash") is None


def test_a_program_that_refuses_its_arguments() -> None:
    text = "usage: fit.py [-h] [--rate RATE]\nfit.py: error: argument --rate: invalid float value: 'fast'\n"
    assert "--rate" in get(explained(text, "a", None), "log.crash").title


def test_paddles_message_gives_its_figures() -> None:
    text = (
        "Out of memory error on GPU 1. Cannot allocate 3.500000GB memory on GPU 1, 13.000000GB memory has been "
        "allocated and available memory is only 3.000000GB."
    )
    oom = read_text(text).ooms[0]
    assert (oom.library, oom.gpu, oom.tried_mib, oom.free_mib) == ("Paddle", 1, 3584.0, 3072.0)
    assert (oom.total_mib, oom.allocated_mib) == (16384.0, None)


def test_litgpts_end_tells_the_peak() -> None:
    line = "Epoch 1 | iter {0} step {0} | loss train: 1.1, val: 1.2 | iter time: 500.00 ms (step)\n"
    run = read_text(line.format(1) + line.format(2) + "Training time: 60.00s\nMemory used: 8.00 GB\n")
    assert run.printed.peak_allocated_mib == 8e9 / 2**20
    assert read_text("Memory used: 8.00 GB\n").printed.peak_allocated_mib is None


def test_sizes_above_a_thousand_gib_are_tib() -> None:
    assert (size(3 * 2.0**20), size(1023 * 1024.0)) == ("3.00 TiB", "1023.00 GiB")
