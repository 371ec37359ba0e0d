"""Sentences that a text does not support are not made, and each of these lines is read as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import texts
from explaining import explained, get, number

from oomph.report.explain import ALL_WELL, NO_MORE, SCREEN_ONLY, SETTINGS_ONLY, TOO_FEW, document
from oomph.report.terminal import to_text
from oomph.runs import explain, read_text
from oomph.runs.pace import step_pace

WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLGATHER, Timeout(ms)=600000)"
GPUSTAT = "[0] GeForce RTX 3090 | 60'C, 90 % | {} / 24576 MB | ann({})"
FAIRSEQ = "| epoch {0:03d} | loss 4.{0} | ppl 9.1 | wps 40000 | num_updates {0}00 | lr 0.0005 | gnorm 0.3\n"
VALID = "| epoch {0:03d} | valid on 'valid' subset | valid_loss 4.5 | num_updates {0}00 | best 4.5\n"


def screen(text: str) -> str:
    return to_text(document(explained(text, "text", None)))


def test_several_nulls_leave_out_and_one_alone_is_nan() -> None:
    line = '{{"current_steps": {0}, "total_steps": 40, "loss": {1}, "eval_loss": null, "learning_rate": {1}}}\n'
    run = read_text("".join(line.format(step, value) for step, value in ((20, 2.5), (30, 2.4), (40, "null"))))
    assert run.steps.totals["loss"].non_finite == 0
    assert run.event_counts == {"finished": 1}


def test_updates_are_not_called_epochs() -> None:
    run = read_text("".join(FAIRSEQ.format(n) + VALID.format(n) for n in (2, 3, 4)))
    assert (run.step_unit, run.steps.count, run.last_step) == ("step", 3, 400)


def test_torchtunes_loss_stands_before_its_bar() -> None:
    run = read_text("".join(f"2|{n}|Loss: 1.{n}:  10%|#  | {n - 30}/100 [00:10<00:90,  2.00s/it]\n" for n in (41, 42)))
    assert (run.steps.column("step"), run.steps.totals["loss"].last) == ([41.0, 42.0], 1.42)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Loss is nan, stopping training\n", "Loss is nan, stopping training"),
        (f"[rank3]:[E9] [Rank 3] {WATCHDOG} ran for 600013 milliseconds before timing out.\n", "ALLGATHER"),
        ("Process finished with exit code 137 (interrupted by signal 9: SIGKILL)\n", "SIGKILL"),
    ],
)
def test_the_end_is_told_in_its_own_words(text: str, said: str) -> None:
    assert said in get(explained(f"step 1: loss 3.0, lr 1e-4\n{text}", "end", None), "log.crash").title


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("step 1: loss 3.0, lr 1e-4\n", TOO_FEW),
        ("".join(f"step {n}: loss 3.{99 - n}, lr 1e-4\n" for n in range(40)), ALL_WELL),
        (GPUSTAT.format(12000, "11000M").replace("90 %", "0 %") + "\n", NO_MORE),
        (GPUSTAT.format(12000, "11000M") + "\n", SCREEN_ONLY),
        ("Num GPUs = 4 | Batch size per device = 2 | Total steps = 900\n", SETTINGS_ONLY),
    ],
)
def test_only_a_run_is_said_to_go_well(text: str, headline: str) -> None:
    assert headline[:60] in screen(text)


def test_settings_alone_are_shown() -> None:
    found = explained("Num GPUs = 4 | Batch size per device = 2\n", "banner", None)
    assert get(found, "log.settings").title == "It sets world_size = 4 and batch_size = 2"


def test_the_world_is_more_than_its_data_parallel_part() -> None:
    run = read_text("world size:     128\ndata parallel size:    16\n")
    assert run.settings["world_size"].value == 128


@pytest.mark.parametrize(("used", "process"), [(12000, "?M"), (11030, "11000M")])
def test_what_no_process_is_listed_for_is_not_called_other_programs(used: int, process: str) -> None:
    assert explained(GPUSTAT.format(used, process) + "\n", "gpustat", None).finding("memory.others") is None


def test_a_size_below_one_mib_is_not_called_none() -> None:
    text = "MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 GiB, max allowed: 9.07 GiB). "
    assert (
        "256 bytes asked for" in get(explained(f"{text}Tried to allocate 256 bytes\n", "mps", None), "memory.oom").title
    )


def test_a_size_that_no_machine_has_is_an_error_in_the_program() -> None:
    found = explained("CUDA out of memory. Tried to allocate more than 1EB memory.\n", "size", None)
    assert get(found, "memory.cause").numbers["cause"] == "size"


def test_torchtitans_memory_is_what_is_reserved() -> None:
    line = "[titan] step: {}  loss: 5.0  memory: 10.00GiB(50.00%)  tps: 5,000  mfu: 30.00%\n"
    assert "reserved" in get(explained(line.format(1) + line.format(2), "titan", None), "memory.logged").title


@pytest.mark.parametrize(("losses", "jumps"), [((2.3, 11.0), True), ((4.9, 7.7, 2.1, 8.6), False)])
def test_of_a_few_steps_only_a_jump_is_told(losses: tuple[float, ...], jumps: bool) -> None:
    text = "".join(f"step {n}: loss {loss}, lr 1e-4\n" for n, loss in enumerate(losses, 1))
    assert (explained(text, "jump", None).finding("loss.diverging") is not None) == jumps


def test_a_model_implies_its_program(tmp_path: Path) -> None:
    log = tmp_path / "error.txt"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.\n")
    adapter = [("method", "lora", "--method=lora"), ("batch_size", "4", "--batch_size=4")]
    found = explain([log, "Qwen/Qwen3-0.6B"], "RTX 4070", overrides=adapter, with_fixes=False)
    assert (found.measured.value("trainer"), found.measured.value("method")) == ("hf", "lora")


def test_every_labelled_rank_is_counted() -> None:
    lines = (f"[rank{rank}]: step {n} | loss {3 - n / 100} | dt 100.0ms\n" for n in range(9) for rank in (1, 0, 3, 2))
    assert read_text("".join(lines)).ranks == {0, 1, 2, 3}


def test_a_config_against_its_log_is_the_headline(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("batch_size = 8\nblock_size = 512\ngradient_accumulation_steps = 4\n")
    steps = "".join(f"iter {n}: loss 3.1, time 100.00ms, mfu 10.00%\n" for n in range(5))
    (tmp_path / "train.log").write_text(f"tokens per iteration will be: 491,520\n{steps}")
    found = explain([tmp_path / "train.log", tmp_path / "run.py"], with_fixes=False)
    assert "The given settings contradict the log" in to_text(document(found))
    assert "8 sequences" not in get(found, "time.step").text


@pytest.mark.parametrize(
    ("line", "ms"),
    [
        ("completed step: {0}, seconds: 2.5, TFLOP/s/device: 40.0, Tokens/s/device: 9000.5, loss: 3.{0}", 2500.0),
        ("{{'loss': 3.{0}, 'global_step/max_steps': '{0}/90', 'elapsed_time': '1h {0}m 30s'}}", 60e3),
        ("Training Epoch: 1/3, step {0}/36 completed (loss: 3.{0}):  33%|## | 3/9 [03:17<06:31, 65.28s/it]", None),
    ],
)
def test_the_loss_the_step_and_the_time_are_read(line: str, ms: float | None) -> None:
    run = read_text("".join(f"{line.format(step)}\n" for step in (11, 12, 13)))
    pace = step_pace(run)
    assert (run.steps.column("step"), run.steps.totals["loss"].last) == ([11.0, 12.0, 13.0], 3.13)
    assert (None if pace is None else pace.step_ms) == ms


def test_gradient_norms_without_steps_are_no_copies_of_one() -> None:
    run = read_text("".join(f"    optim/total_grad_norm={n}.5\n    train/Perplexity=9.0\n" for n in (7, 6, 5)))
    assert (run.steps.count, run.copies) == (0, 1)


@pytest.mark.parametrize(("name", "word"), [("memory", "memory"), ("max_memory_allocated", "tensors")])
def test_memory_of_an_open_name_is_not_called_tensors(name: str, word: str) -> None:
    found = explained(f"step 1: loss 3.0, {name}: 5000MiB\nstep 2: loss 3.0, {name}: 5000MiB\n", "memory", None)
    assert get(found, "memory.logged").title.endswith(f"{word}, as logged")


@pytest.mark.parametrize(
    ("process", "shown"),
    [
        ("python/5204(900M)", "python (5204)"),
        ("ann:python3/77(900M)", "python3 (77)"),
        ("ann(900M)", "ann's process 900"),
    ],
)
def test_gpustats_processes_have_their_own_names(process: str, shown: str) -> None:
    text = GPUSTAT.replace("ann({})", process).format(1000) + "\n"
    assert shown in get(explained(text, "gpustat", None), "card.screen").text


def test_a_card_that_oomph_does_not_know_is_named() -> None:
    found = explained(GPUSTAT.replace("GeForce RTX 3090", "FooBar 9").format(1000, "900M") + "\n", "gpustat", None)
    assert get(found, "card.unknown").title == "oomph does not know the card FooBar 9"


def test_the_first_step_is_left_out_once() -> None:
    text = "".join(f"step {n}: loss 3.0, dt {ms}ms\n" for n, ms in ((1, 900.0), (2, 100.0), (3, 100.0)))
    measured = get(explained(text, "steps", None), "time.step").text
    assert "the first step" in measured
    assert "warm-up" not in measured


def test_a_log_that_begins_among_the_ranks_does_not_count_them() -> None:
    """Of step 4 seven of eight lines are there."""
    step = "[titan] 2026 - root - INFO - step: {0}  loss: 7.{0}  memory: 66.91GiB(37.51%)  tps: 10,050\n"
    assert read_text(step.format(4) * 7 + step.format(5) * 8 + step.format(6)).copies == 8
    assert read_text(step.format(4) * 7 + step.format(5)).copies == 1


def test_cublas_may_have_met_another_error() -> None:
    text = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n"
    assert get(explained(text, "cublas", None), "memory.oom").title == "cuBLAS could not get memory on the card"


def test_a_loss_before_its_bar_has_the_bars_step() -> None:
    entry = "{{'loss': {0}, 'grad_norm': 1.4, 'learning_rate': 2e-06, 'epoch': 0.01}}\n"
    bar = "  1%|          | {0}/1752 [00:29<1:22:01,  2.83s/it]\n"
    text = "".join(entry.format(loss) + bar.format(step) for loss, step in ((3.5, 10), (3.4, 20), (3.3, 30)))
    run = read_text(text)
    assert run.steps.curve("loss") == [(10, 3.5), (20, 3.4), (30, 3.3)]
    assert (run.step_unit, run.printed.steps_planned) == ("step", 1752)


def test_a_slice_without_its_card_is_told_without_nonsense() -> None:
    found = explained("|  1    3   0   0  |  14366MiB / 19968MiB | 28      0 |  2   0    1    0    0 |\n", "mig", None)
    assert "14,366 of 19,968" in get(found, "card.screen").title


@pytest.mark.parametrize(("row", "shown"), [("0  -  -  -  -", "No process"), ("0  77  C  500  python", "python (77)")])
def test_processes_alone_are_shown(row: str, shown: str) -> None:
    found = explained(f"# gpu  pid  type  fb  command\n# Idx  #  C/G  MB  name\n{row}\n", "pmon", None)
    assert shown in get(found, "card.screen").title


def test_a_later_card_names_itself_without_a_screen() -> None:
    found = explained("name: GeForce RTX 2060 SUPER computeCapability: 7.5\n", "tensorflow", None)
    assert found.finding("card.screen") is None


def test_a_loss_below_zero_does_not_diverge() -> None:
    """A policy's loss rises and falls around 0."""
    text = "".join(f"step:{n} - actor/pg_loss:{-1 + n / 20} - actor/grad_norm:0.1\n" for n in range(60))
    assert explained(text, "verl", None).finding("loss.diverging") is None


def test_the_loss_now_is_at_its_own_step() -> None:
    text = "iter 3436 step 53: loss 2.9911, iter time: 400.10ms\niter 4 step 0: loss 2.6297, iter time: 827.80ms\n"
    assert get(explained(text, "litgpt", None), "loss.now").title.endswith("iteration 4")


def test_a_line_that_lacks_only_words_is_whole() -> None:
    """litgpt marks the iterations that end with the optimizer's step."""
    text = "".join(
        f"iter {n} step {n // 2}: loss 3.{n}, iter time: {700 if n % 2 == 0 else 500}.00ms"
        f"{' (optimizer.step)' if n % 2 == 0 else ''}\n"
        for n in range(1, 10)
    )
    run = read_text(text)
    assert (run.steps.count, run.unreadable_count, run.printed.iterations_per_step) == (9, 0, 2)
    assert get(explained(text, "litgpt", None), "time.step").numbers["step_ms"] == 600


@pytest.mark.parametrize(
    ("device", "memory"),
    [('_device="/job:x/task:0/cpu:0"', "machine"), ('_device="/job:x/gpu:0"', "card"), ("", "open")],
)
def test_tensorflows_node_tells_whose_memory_it_was(device: str, memory: str) -> None:
    text = (
        f"ResourceExhaustedError: OOM when allocating tensor with shape[2304,384]\n\t [[Node: a = Sub[{device}]()]]\n"
    )
    assert read_text(text).ooms[0].memory == memory


def test_figures_that_the_log_prints_are_printed_ones() -> None:
    text = (
        "step: 289, loss: 0.4, tokens_per_second: 80, mfu: 337\nstep: 290, loss: 0.4, tokens_per_second: 60, mfu: 43\n"
    )
    found = explained(text, "mfu", None)
    assert number(get(found, "time.mfu"), "printed_percent") == 43
    assert number(get(found, "time.step"), "tokens_per_s") in (60, 80)


def test_a_card_with_a_name_of_its_own_is_no_other() -> None:
    screen = (
        "|   0  GRID K520           On   | 00000000:00:03.0 Off |                  N/A |\n"
        "| N/A   30C    P8    17W / 125W |     46MiB /  4037MiB |      0%      Default |\n"
    )
    assert explained(screen, "k520", None).measured.inference.card.candidates == ()


def test_skipped_steps_are_told() -> None:
    text = "[2021] [INFO] [Rank 0] step=2000, skipped=1995, lr=[0.001, 0.001], mom=[0.0, 0.0]\n"
    found = explained(text, "deepspeed", None)
    assert (get(found, "loss.skipped").numbers["skipped"], number(get(found, "time.step"), "step")) == (1995, 2000)
    few = explained(text.replace("1995", "3"), "deepspeed", None)
    assert few.finding("loss.skipped") is None


def test_a_launchers_report_does_not_hide_what_it_reports() -> None:
    report = (
        "Traceback (most recent call last):\n"
        '  File "/usr/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    killed = explained(f"api.py:826] failed (exitcode: -9) local_rank: 0 (pid: 1322)\n{report}", "torchrun", None)
    assert "SIGKILL" in get(killed, "log.crash").title
    failed = explained(f"api.py:826] failed (exitcode: 1) local_rank: 7 (pid: 1322)\n{report}", "torchrun", None)
    assert "local rank 7" in get(failed, "log.crash").title


def test_composers_steps_are_read() -> None:
    text = "".join(f"[batch={n}/100]:\n\t Train loss/train/total: {9 - n}.5\n" for n in (1, 2, 3))
    run = read_text(text)
    assert (run.program, run.steps.curve("loss")) == ("composer", [(1, 8.5), (2, 7.5), (3, 6.5)])


def test_gb_are_shown_as_the_log_writes_them() -> None:
    found = explained(
        "{'loss': 0.6, 'learning_rate': 2e-05, 'epoch': 0.09, 'max_memory_allocated (GB)': 6.32}\n", "gb", None
    )
    assert get(found, "memory.logged").title.startswith("6.32 GB")


def test_words_before_a_step_do_not_hide_it() -> None:
    text = "".join(f"2026 INFO viz: Viz training_update step={n} loss={3 - n / 10}\n" for n in (1, 2, 3))
    assert read_text(text).steps.curve("loss") == [(1, 2.9), (2, 2.8), (3, 2.7)]
    assert read_text("step 1: lr 1e-4, aux loss=0.01\n").steps.count == 0


def test_an_old_kernels_killer_is_known() -> None:
    text = "[3017506.733819] Out of memory: Kill process 25635 (python) score 974 or sacrifice child\n"
    assert read_text(text).ooms[0].library == "the kernel"


def test_a_warning_of_tensorflows_allocator_is_no_failure() -> None:
    text = "Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.08GiB. {}\n"
    assert read_text(text.format("The caller indicates that this is not a failure")).ooms == []
    assert read_text(text.format("Current allocation summary follows.")).ooms[0].tried_mib == 1.08 * 1024


def test_bars_of_other_work_are_not_called_nothing() -> None:
    found = explained("Preprocessing dataset:  54%|###  | 7948/14732 [00:01<00:01, 6142.03it/s]\n", "bar", None)
    assert found.finding("log.unknown") is None
    assert found.finding("time.step") is None


def test_a_printed_yaml_config_is_read() -> None:
    run = read_text("batch_size: 4\ncompile: false\ngradient_accumulation_steps: 2\n")
    assert {key: each.value for key, each in run.settings.items()} == {
        "batch_size": 4,
        "compile": False,
        "gradient_accumulation_steps": 2,
    }


def test_a_text_that_ends_inside_a_traceback_tells_of_a_failure() -> None:
    text = 'step 1: loss 3.0, lr 1e-4\nTraceback (most recent call last):\n  File "/home/me/t.py", line 9, in main\n'
    assert "traceback" in get(explained(text, "cut", None), "log.crash").title
    assert explained(text + "    x()\nKeyError: 'x'\n", "whole", None).run.crash is not None


def test_memory_that_cuda_graphs_set_aside_is_not_called_pieces_alone() -> None:
    text = (
        texts.OOMS["others"].replace("Process 4711 has 20.10 GiB memory in use. ", "").replace("3.52 GiB", "23.00 GiB")
    )
    text = text.replace(
        ", and 20.00 MiB is", ", with 4.22 GiB allocated in private pools (e.g., CUDA Graphs), and 15 GiB is"
    )
    found = explained(text, "graphs", None)
    assert "CUDA graphs" in get(found, "memory.cause").text
    assert found.finding("memory.fragmented") is None


def test_a_summary_of_memory_counts_its_failures() -> None:
    row = "|            CUDA OOMs: {}            |        cudaMalloc retries: 1         |\n"
    assert [len(read_text(row.format(count)).ooms) for count in (0, 1)] == [0, 1]
