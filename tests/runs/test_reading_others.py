"""nanochat, build-nanogpt, metrics.jsonl and nvidia-smi."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import simulate

from oomph.errors import InputError
from oomph.runs import read, read_text
from oomph.runs.infer import infer
from oomph.runs.pace import step_pace

NANOCHAT = """\
GPU: NVIDIA H100 80GB HBM3 | Peak FLOPS (BF16): 9.89e+14
COMPUTE_DTYPE: torch.bfloat16 (auto-detected: CUDA SM 90)
Vocab size: 65,536
Model config:
{
  "sequence_len": 2048,
  "vocab_size": 65536,
  "n_layer": 20,
  "n_head": 10,
  "n_kv_head": 10,
  "n_embd": 1280,
}
Parameter counts:
total                   : 560,988,160
Estimated FLOPs per token: 3.491758e+09
Calculated number of iterations from target data:param ratio: 21,400
Total number of training tokens: 11,219,763,200
Tokens / micro-batch / rank: 32 x 2048 = 65,536
Tokens / micro-batch: 524,288
Total batch size 524,288 => gradient accumulation steps: 1
Step 00000 | Validation bpb: 3.3013
"""
NANOCHAT_STEP = (
    "step {0:05d}/21400 ({1:.2f}%) | loss: {2:.6f} | lrm: 1.00 | dt: {3:.2f}ms | tok/sec: {4:,} | bf16_mfu: 47.21 | "
    "epoch: 1 pq: 3 rg: 5 | total time: 0.34m | eta: 400.1m"
)


def nanochat(steps: int) -> str:
    lines = [NANOCHAT_STEP.format(n, n / 214, 11 - n / 100, 480 + n % 3, round(524288 / 0.48)) for n in range(steps)]
    return NANOCHAT + "\n".join(lines) + "\nPeak memory usage: 75422.02MiB\nTotal training time: 170.12m\n"


def test_nanochat_is_read() -> None:
    run = read_text(nanochat(200))
    assert run.program == "nanochat"
    assert run.unreadable_count == 0
    assert (run.steps.count, run.evals.count) == (200, 1)
    assert run.steps.column("tokens_per_s")[5] == 1092267
    assert run.printed.tokens_per_step == 524288
    assert run.printed.steps_planned == 21400
    assert run.printed.flops_per_token == 3.491758e9
    assert run.printed.peak_allocated_mib == 75422.02
    found = {key: setting.value for key, setting in run.settings.items()}
    assert found["n_layer"] == 20
    assert found["block_size"] == 2048
    assert found["batch_size"] == 32
    assert found["dtype"] == "bfloat16"
    speed = step_pace(run)
    assert speed is not None
    assert speed.step_ms == 481
    card = infer(run).card
    assert card.device is not None
    assert "H100" in card.device.name


def test_build_nanogpt_is_read_and_its_evaluation_belongs_to_the_next_step() -> None:
    lines = ["total desired batch size: 524288", "=> calculated gradient accumulation steps: 8"]
    for n in range(60):
        if n % 20 == 0:
            lines.append(f"validation loss: {10 - n / 10:.4f}")
        ms = 340 + (5000 if n % 20 == 0 else 0)
        lines.append(
            f"step {n:5d} | loss: {11 - n / 10:.6f} | lr {6e-4 * (n + 1) / 715:.4e} | norm: 1.2345 | "
            f"dt: {ms:.2f}ms | tok/sec: {524288 / ms * 1000:.2f}"
        )
    run = read_text("\n".join(lines))
    assert run.program == "build-nanogpt"
    assert run.unreadable_count == 0
    assert run.evals.curve("val_loss") == [(0, 10), (20, 8), (40, 6)]
    assert run.steps.column("lr")[1] == pytest.approx(6e-4 * 2 / 715, rel=1e-4)
    speed = step_pace(run)
    assert speed is not None
    assert speed.step_ms == 340
    assert speed.evaluation_ms == 5000


def test_build_nanogpts_log_file_is_read() -> None:
    run = read_text("0 val 10.9512\n0 hella 0.2463\n0 train 10.954\n1 train 9.5\n250 val 5.9\n")
    assert run.evals.curve("val_loss") == [(0, 10.9512), (250, 5.9)]
    assert run.steps.curve("loss") == [(0, 10.954), (1, 9.5)]


def metrics(count: int) -> str:
    rows = []
    for n in range(count):
        row = {"step": n, "tokens": n * 4096, "loss": 5 - n / 100, "lr": 1e-5 * (n + 1), "step_ms": 20.5, "mfu": 0.5}
        rows.append(json.dumps(row))
        if n % 10 == 0:
            rows.append(json.dumps({"step": n, "val_loss": 4.5, "event": "evaluation"}))
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("spaces", [True, False])
def test_metrics_are_read(spaces: bool) -> None:
    run = read_text(metrics(50) if spaces else metrics(50).replace(" ", ""))
    assert run.program == "oomph"
    assert run.unreadable_count == 0
    assert (run.steps.count, run.evals.count) == (50, 5)
    assert run.steps.column("mfu_percent") == [50.0] * 50
    assert run.steps.column("lr") == pytest.approx([1e-5 * (n + 1) for n in range(50)])
    assert infer(run).tokens_per_step == 4096


def test_a_null_loss_is_nan() -> None:
    run = read_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": null}\n')
    assert run.steps.totals["loss"].non_finite == 1


def test_metrics_that_are_no_json_are_named() -> None:
    run = read_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 3.\n', "metrics.jsonl")
    assert [entry.line for entry in run.unreadable] == [2]


def test_a_runs_folder_is_read_with_its_config(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics(20))
    (tmp_path / "config.toml").write_text("n_layer = 4\nn_head = 4\nn_embd = 128\nblock_size = 64\nbatch_size = 12\n")
    run = read(tmp_path)
    assert run.name == tmp_path.name
    assert run.settings["n_layer"].value == 4
    assert run.settings["n_layer"].how == "given"
    assert run.steps.count == 20


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path / "none.log", tmp_path / "nor_this.log")
    assert "none.log" in str(error.value)
    assert "nor_this.log" in str(error.value)


def test_an_nvidia_smi_screen_is_read_with_its_processes() -> None:
    run = read_text(simulate.nvidia_smi())
    gpu, process = run.gpu, run.process
    assert gpu is not None
    assert process is not None
    assert (gpu.name, gpu.total_mib, gpu.used_mib) == ("NVIDIA GeForce RTX 4070", 12282, 6582)
    assert (process.name, process.mib) == ("python", 4464)
    assert gpu.readings.column("utilization_percent") == [97]
    assert {p.name for p in run.processes.values()} == {"python", "/usr/lib/xorg/Xorg"}


def test_a_quoted_screen_of_an_older_driver_is_read() -> None:
    screen = """\
> |   0  GeForce RTX 208...  Off  | 00000000:01:00.0 Off |                  N/A |
> | 30%   55C    P2   180W / 250W |   6582MiB / 11019MiB |     98%      Default |
> |    0     12345      C   python                                      4464MiB |
"""
    run = read_text(screen)
    gpu = run.gpu
    assert gpu is not None
    assert (gpu.total_mib, gpu.used_mib, gpu.limit_watts) == (11019, 6582, 250)
    assert run.processes[12345].mib == 4464
    found = infer(run).card.device
    assert found is not None
    assert found.name == "GeForce RTX 2080 Ti"


def test_mig_slices_are_not_taken_for_the_card() -> None:
    run = read_text("|  1    3   0   0  |  14366MiB / 19968MiB | 28      0 |  2   0    1    0    0 |\n")
    assert run.gpus[1].mig
    assert run.gpus[1].readings.count == 0


def test_query_rows_are_read_by_their_header() -> None:
    rows = ["timestamp, index, name, memory.used [MiB], memory.total [MiB], utilization.gpu [%], power.draw [W]"]
    rows += [
        f"2025/11/15 10:00:{n:02d}.000, 0, NVIDIA GeForce RTX 4070, {6000 + n} MiB, 12282 MiB, 97 %, 181.{n} W"
        for n in range(50)
    ]
    rows.insert(20, "iter 5: loss 3.0, time 5.00ms, mfu 1.00%")
    run = read_text("\n".join(rows))
    gpu = run.gpu
    assert gpu is not None
    assert (gpu.readings.count, gpu.used_mib, gpu.total_mib) == (50, 6049, 12282)
    assert gpu.readings.column("watts")[7] == 181.7
    assert run.steps.count == 1


def test_query_rows_of_two_cards_are_told_apart() -> None:
    rows = ["index, memory.used [MiB], memory.total [MiB]"]
    rows += [f"{n % 2}, {1000 + 1000 * (n % 2) + n} MiB, 24564 MiB" for n in range(20)]
    run = read_text("\n".join(rows))
    assert {index: (gpu.readings.count, gpu.used_mib) for index, gpu in run.gpus.items()} == {
        0: (10, 1018),
        1: (10, 2019),
    }


def test_query_rows_without_header_are_told_by_their_units() -> None:
    run = read_text("NVIDIA GeForce RTX 4070, 6582 MiB, 12282 MiB, 97 %\n31872, python, 4464 MiB\n")
    gpu = run.gpu
    assert gpu is not None
    assert (gpu.name, gpu.used_mib, gpu.total_mib) == ("NVIDIA GeForce RTX 4070", 6582, 12282)
    assert run.processes[31872].mib == 4464


def test_rows_without_units_are_read_by_their_header() -> None:
    run = read_text("memory.used [MiB], memory.total [MiB]\n6582, 12282\n6600, 12282\n")
    assert run.gpus[0].used_mib == 6600


def test_processes_are_read_by_their_header() -> None:
    run = read_text("pid, process_name, used_gpu_memory [MiB]\n31872, python, 4464 MiB\n2143, Xorg, [N/A]\n")
    assert [(p.pid, p.name) for p in run.processes.values() if p.mib == 4464] == [(31872, "python")]
    assert math.isnan(run.processes[2143].mib)


@pytest.mark.parametrize("total,limit,name", [(12282, 200, "GeForce RTX 4070"), (12282, 220, "GeForce RTX 4070 SUPER")])
def test_a_card_is_told_by_memory_and_power_where_no_name_is(total: int, limit: int, name: str) -> None:
    card = infer(read_text(simulate.nvidia_smi("Graphics Device", total=total, limit=limit))).card
    assert card.device is not None
    assert card.device.name == name
    assert card.how == "inferred"


def test_cards_of_one_memory_are_listed() -> None:
    card = infer(read_text("6582MiB / 12282MiB\n")).card
    assert card.device is None
    assert "GeForce RTX 4070" in card.candidates
    assert len(card.candidates) > 1


def test_a_memory_snapshot_is_handed_over(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    assert len(read(path).snapshots) == 1
