"""Too little evidence draws no conclusion, and what other programs print in lines of their own is read."""

from __future__ import annotations

import pytest
from explaining import explained, get

from oomph.runs import read_text

WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLGATHER, Timeout(ms)=600000)"


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("{{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.{0}}}\n", "error"),
        ("{{'loss': 0.0, 'grad_norm': tensor(nan, device='cuda:0'), 'epoch': 0.{0}}}\n", "error"),
        ("step {0}/90 | loss     nan (+nanz)| norm    nan (+nanz)| lr 3.00e-04 | 36.50 ms\n", "error"),
    ],
)
def test_what_was_never_a_number_did_not_diverge(line: str, severity: str) -> None:
    text = "".join(line.format(n) for n in range(1, 6))
    found = get(explained(text, "text", None), "loss.not_finite")
    assert found.severity == severity
    assert "checkpoint" not in found.text
    assert "learning rate" in found.text


def test_a_run_that_failed_has_nothing_to_go() -> None:
    text = "".join(f"step {n}/900 loss 3.{n} time 200 ms\n" for n in range(1, 6)) + f"{WATCHDOG} ran for 600061 "
    whole = explained(f"{text}milliseconds before timing out.\n", "text", None)
    assert "to go" not in get(whole, "time.left").title
    assert "to go" in get(explained(text.partition(WATCHDOG)[0], "text", None), "time.left").title


def test_an_old_evaluation_does_not_tell_how_it_stands() -> None:
    line = "Iter {0}0: Train loss 1.{1}, It/sec 1.5, Tokens/sec 70.1, Trained Tokens {0}00, Peak mem 5.1 GB\n"
    text = "Iter 1: Val loss 2.936, Val took 5.265s\n" + "".join(line.format(n, 9 - n) for n in range(1, 6))
    assert get(explained(text, "text", None), "loss.now").numbers["loss"] == 1.4


SMI = (
    "|===============================+======================+======================|\n"
    "|   0  NVIDIA GeForce ...  On   | 00000000:01:00.0 Off |                  Off |\n"
    "| 43%   27C    P2    66W / 450W |  21614MiB / 24564MiB |      0%      Default |\n"
)


def test_a_name_that_the_screen_cuts_off_is_no_unknown_card() -> None:
    found = explained(SMI, "text", None)
    assert "cuts off" in get(found, "card.unknown").title
    assert "GeForce RTX 4090" in get(found, "card.unknown").text
    assert get(found, "card.idle").severity == "info"


def test_sizes_of_another_program_are_of_no_card() -> None:
    assert not read_text("  1     GeForce GTX TITAN X*    94 MiB/12209 MiB    0.77    20.38 W/250.00 W\n").gpus


def test_a_dict_alone_is_not_the_trainers() -> None:
    assert read_text("{'Step': 10, 'Loss': '3.4376', 'Learning Rate': '1.00e-04'}\n").program is None


def test_millions_of_parameters_are_not_thousands() -> None:
    text = "#trainable params: 11.54048 M || all params: 2208.9856 M || trainable%: 0.522%\n"
    assert read_text(text).printed.params_total is None


def test_a_batch_in_an_epoch_is_a_step_and_a_batch_size_is_not() -> None:
    run = read_text("".join(f"epoch:0, batch: {n}1, current loss: 1.{n}\n" for n in range(1, 5)))
    assert (run.steps.count, run.last_step) == (4, 41)
    assert read_text("loss: 3.1, lr: 0.001, batch: 32\n").last_step != 32


def test_peaks_in_lines_of_their_own_are_read() -> None:
    megatron = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 3.1 | max allocated: 56.5 | max reserved: 64.0\n"
    assert read_text(megatron).printed.peak_allocated_mib == 56.5
    verl = "memory allocated (GB): 1.14, max memory allocated (GB): 2.5, max memory reserved (GB): 3.00\n"
    assert read_text(verl).printed.peak_reserved_mib == 3 * 1024


def test_dotted_arguments_are_told_and_not_planned() -> None:
    text = "  num_layers ...................... 44..........................updated\n  world_size .......... 16\n"
    run = read_text(text)
    assert list(run.settings) == ["world_size"]
    assert "num_layers = 44" in get(explained(text, "text", None), "log.settings").title


def test_tensorflows_first_try_may_be_no_error() -> None:
    line = "E rocm_driver.cc:601] failed to allocate 7.35G (7889485824 bytes) from device: hipError_t(1002)\n"
    found = explained(line, "text", None)
    assert "no error" in get(found, "memory.oom").text
    assert get(found, "memory.oom").numbers["tried_mib"] == pytest.approx(7.35 * 1024)


def test_intels_rows_are_read() -> None:
    text = (
        "Timestamp, DeviceId, GPU Utilization (%), GPU Memory Utilization (%), GPU Memory Used (MiB)\n"
        "12:39:00.000,    3,  N/A, 87.55, 43020.16\n12:39:01.000,    3,  N/A, 87.55, 43021.16\n"
    )
    gpu = read_text(text).gpus[3]
    assert (gpu.used_mib, gpu.nvidia) == (43021.16, False)


def test_the_mean_of_evaluation_lines_is_the_pace() -> None:
    line = "step:{0}/1480 val_loss:4.{0} train_time:{0}00ms step_avg:{1}ms\n"
    found = explained("".join(line.format(n, 260 if n else "nan") for n in (0, 125, 250, 375)), "text", None)
    assert get(found, "time.step").numbers["step_ms"] == 260


def test_an_error_without_a_traceback_ends_the_run_unless_steps_follow() -> None:
    steps = "".join(f"step {n}: loss 3.{n}\n" for n in range(1, 4))
    failed = f"{steps}Exception: the loss scale is already at its minimum\n"
    assert get(explained(failed, "text", None), "log.crash").severity == "error"
    assert read_text(f"{failed}step 4: loss 3.9\n").crash is None


@pytest.mark.parametrize("signal", ["Killed", "Segmentation fault"])
def test_a_loaders_process_is_told_apart(signal: str) -> None:
    found = explained(f"RuntimeError: DataLoader worker (pid 22358) is killed by signal: {signal}.\n", "text", None)
    assert get(found, "log.crash").title.endswith(signal)


@pytest.mark.parametrize(
    "line",
    [
        "torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -11) local_rank: 0 (pid: 7)\n",
        "  exitcode  : -11 (pid: 3304209)\n",
    ],
)
def test_a_signal_that_ends_a_process_is_read(line: str) -> None:
    assert "-11" in get(explained(line, "text", None), "log.crash").title


def test_a_loss_that_never_changes_is_said() -> None:
    text = "".join(f"iter {n} step {n // 2}: loss 10.8259, iter time: 197.87ms\n" for n in range(40, 80))
    assert get(explained(text, "text", None), "loss.constant").numbers["loss"] == 10.8259
    assert explained(text.replace("10.8259", "10.8258", 1), "text", None).finding("loss.constant") is None


def test_a_loss_that_rose_and_stayed_diverged_however_few() -> None:
    line = "Iter {}: Train loss {}, It/sec 1.0, Tokens/sec 387.6\n"
    losses = (1.59, 1.41, 3.32, 6.44, 5.48, 4.86)
    found = explained("".join(line.format(25 * n, loss) for n, loss in enumerate(losses, 1)), "text", None)
    assert get(found, "loss.diverging").severity != "info"


def test_thousands_of_tokens_are_thousands() -> None:
    run = read_text("INFO - Step   1560 | Loss: 0.5275 | LR: 3.00e-04 | GradNorm: 2.29 | TPS: 16.88K | Data: 0.007s\n")
    assert run.steps.totals["tokens_per_s"].last == pytest.approx(16880)


def test_the_lowest_loss_scale_is_no_usual_start() -> None:
    line = "[deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
    assert get(explained(line.format(1, 1) * 3, "text", None), "loss.skipped").severity == "warning"
    assert get(explained(line.format(65536, 32768), "text", None), "loss.skipped").severity == "info"


def test_a_drivers_error_names_no_phase() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 457, in train\n    loss.backward()\n'
        "RuntimeError: CUDA error: out of memory\n"
    )
    found = explained(text, "text", None)
    assert get(found, "memory.oom").numbers["phase"] == "unknown"
    assert any("pin_memory" in line for fix in found.fixes for line in fix.lines)


def test_a_request_of_most_of_the_card_is_the_cause() -> None:
    message = (
        "CUDA out of memory. Tried to allocate {} GiB (GPU 0; 23.70 GiB total capacity; 1.54 GiB already allocated; "
        "{} GiB free; 1.87 GiB reserved in total by PyTorch)\n"
    )
    large = get(explained(message.format("23.11", "20.83"), "text", None), "memory.cause")
    assert (large.numbers["cause"], "98 %" in large.title) == ("request", True)
    assert get(explained(message.format("1.10", "1.01"), "text", None), "memory.cause").numbers["cause"] != "request"


def test_tensorflow_that_went_on_did_not_run_out() -> None:
    text = "failed to allocate 15.90G (17071144960 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY\n"
    assert not read_text(f"{text}INFO:tensorflow:global step 5320: loss = 6.8224 (29.31 sec/step)\n").ooms
    assert read_text(text).ooms


def test_one_huge_tensor_in_main_memory_is_not_the_loaders() -> None:
    line = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12\n"
    huge, usual = (explained(line.format(size), "text", None) for size in (2**47, 2**30))
    assert not any("num_workers" in line for fix in huge.fixes for line in fix.lines)
    assert any("num_workers" in line for fix in usual.fixes for line in fix.lines)
