"""nanoGPT's log, as printed and as it reaches people: labelled, coloured, cut, run together."""

from __future__ import annotations

import io
import math

import simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.config import TrainConfig
from oomph.runs import read, read_text
from oomph.runs.infer import infer
from oomph.runs.pace import step_pace
from oomph.runs.reading.reader import LONGEST_LINE


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    heads = draw(st.integers(1, 16))
    return TrainConfig(
        n_layer=draw(st.integers(1, 24)),
        n_head=heads,
        n_embd=heads * 8 * draw(st.integers(1, 12)),
        block_size=draw(st.sampled_from((64, 128, 256, 512, 1000, 1024, 2048))),
        batch_size=draw(st.integers(1, 64)),
        gradient_accumulation_steps=draw(st.integers(1, 40)),
        vocab_size=draw(st.sampled_from((50304, 50257, 65, 256, 32000, 777))),
        bias=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.1, 0.2))),
        max_iters=draw(st.integers(1, 600_000)),
        learning_rate=draw(st.sampled_from((6e-4, 1e-3, 3e-4))),
        compile=draw(st.booleans()),
        dataset=draw(st.sampled_from(("openwebtext", "shakespeare_char", "fineweb"))),
        dtype=draw(st.sampled_from((None, "float16", "bfloat16"))),
        eval_interval=draw(st.sampled_from((7, 50, 2000))),
        log_interval=draw(st.sampled_from((1, 1, 3))),
    )


def changed(config: TrainConfig) -> list[str]:
    """The keys that a config file of this run would set; nanoGPT has none for the vocabulary."""
    plain = TrainConfig()
    return [k for k in config.__struct_fields__ if getattr(config, k) != getattr(plain, k) and k != "vocab_size"]


@settings(deadline=None, max_examples=60)
@given(configs(), st.integers(0, 60), st.floats(20, 9000))
def test_a_printed_run_is_read_back_to_the_same_config_and_figures(config: TrainConfig, count: int, ms: float) -> None:
    text = simulate.text(simulate.preamble(config, changed(config)), simulate.steps(config, count, ms))
    run = read_text(text)
    assert run.unreadable_count == 0
    assert infer(run).contradictions == []
    loaded = infer(run).config
    assert loaded is not None
    same = [key for key in config.__struct_fields__ if key not in ("optimizer_loop",)]
    assert {k: getattr(loaded.config, k) for k in same} == {k: getattr(config, k) for k in same}
    assert run.steps.count == len(range(0, count, config.log_interval))
    printed = [line for line in text.splitlines() if line.startswith("iter ")]
    assert run.steps.column("ms") == [float(line.split("time ")[1].split("ms")[0]) for line in printed]
    assert run.steps.column("loss") == [float(line.split("loss ")[1].split(",")[0]) for line in printed]
    assert run.evals.count == len(range(0, count, config.eval_interval))


@settings(deadline=None, max_examples=40)
@given(configs(), st.sampled_from(("", "[rank0]: ", "2025-11-15 10:00:00,123 INFO ")), st.integers(1, 90))
def test_a_launchers_label_before_each_line_changes_nothing(config: TrainConfig, label: str, count: int) -> None:
    lines = simulate.text(simulate.steps(config, count, 100.0)).splitlines()
    nans = [f"iter {1000 + n}: loss nan, time 1.00ms, mfu 3.00%" for n in range(6)]
    lines[len(lines) // 2 : len(lines) // 2] = nans
    plain = read_text("\n".join(lines)).to_dict()
    labelled = read_text("\n".join(label + line for line in lines)).to_dict()
    assert plain["steps"]["count"] == sum(line.startswith("iter") for line in lines)
    assert (labelled["steps"], labelled["evals"]) == (plain["steps"], plain["evals"])


def test_labels_colours_windows_ends_progress_bars_and_wandb_do_not_matter() -> None:
    plain = simulate.run_b()
    dressed = []
    for number, line in enumerate(plain.splitlines()):
        if line.startswith(("iter ", "step ")):
            line = f"\x1b[32m[rank0]:\x1b[0m {line}"
        if number % 50 == 20:
            dressed.append("wandb: Network error (ConnectionError), entering retry loop.")
            line = f"  5%|█▌        | 5/100 [00:01<00:23,  4.1it/s]\r 10%|██        | 10/100\r{line}"
        dressed.append(line)
    run, again = read_text(plain), read_text("\r\n".join(dressed) + "\r\n")
    assert again.unreadable_count == 0
    assert again.steps.to_dict() == run.steps.to_dict()
    assert again.evals.to_dict() == run.evals.to_dict()
    assert {k: s.value for k, s in again.settings.items()} == {k: s.value for k, s in run.settings.items()}


def test_powershell_writes_utf_16(tmp_path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "train.log"
    log.write_text(simulate.run_b(), encoding="utf-16")
    assert read(log).steps.count == 1010


def test_a_run_is_named_by_its_file_or_by_its_folder_where_the_file_says_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name, called in (("wide.log", "wide"), ("train.log", tmp_path.name)):
        (tmp_path / name).write_text(simulate.run_c())
        assert read(tmp_path / name).name == called


def test_a_log_cut_anywhere_is_read_up_to_the_cut() -> None:
    text = simulate.text(simulate.preamble(simulate.B, simulate.RUN), simulate.steps(simulate.B, 20, 3910.0))
    for cut in range(0, len(text), 7):
        run = read_text(text[:cut])
        assert run.steps.count <= text[:cut].count("iter ")
        assert run.steps.count >= text[:cut].count("%\n")
        assert run.unreadable_count <= 1


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_bytes_make_it_fail(data: st.DataObject) -> None:
    whole = (simulate.run_a() + simulate.run_d()).encode()
    pieces = data.draw(
        st.lists(st.one_of(st.binary(max_size=30), st.integers(0, len(whole)).map(lambda n: whole[n : n + 200])))
    )
    stream = io.BytesIO(b"".join(pieces))
    run = read(stream)
    infer(run)
    step_pace(run)
    run.to_dict()


def test_lines_that_cannot_be_read_are_named_with_their_numbers() -> None:
    text = "iter 0: loss 10.9, time 5.00ms, mfu 1.00%\n\niter 1: loss 10.9, ti\nnoise\niter 2: loss x, time 5.00ms\n"
    run = read_text(text, "train.log")
    assert [(entry.source, entry.line) for entry in run.unreadable] == [("train.log", 3), ("train.log", 5)]
    assert str(run.unreadable[0]).startswith("train.log:3: ")
    assert run.unreadable[0].text == "iter 1: loss 10.9, ti"


def test_a_broken_line_among_a_thousand_is_found() -> None:
    lines = list(simulate.steps(simulate.B, 1000, 3910.0))
    lines[700] = "iter 699: loss 3.1.4, time 3910.00ms, mfu 12.90%"
    lines[800] = lines[800].replace(", time", " time")  # a missing comma does not matter
    run = read_text("\n".join(lines))
    assert [entry.line for entry in run.unreadable] == [701]
    assert run.steps.count == 999


def test_many_unreadable_lines_are_counted_and_sampled() -> None:
    run = read_text("iter 5: loss\n" * 1000)
    assert run.unreadable_count == 1000
    assert len(run.unreadable) <= 32
    assert run.unreadable[0].line == 1


def test_two_records_on_one_line_are_both_read() -> None:
    run = read_text("iter 1: loss 5.0, time 1.00ms, mfu 1.00%iter 2: loss 4.0, time 2.00ms, mfu 1.00%\n")
    assert run.steps.column("step") == [1, 2]


def test_a_nan_loss_is_kept_with_its_step() -> None:
    run = read_text(
        "".join(f"iter {n}: loss {'nan' if n >= 7 else '3.5'}, time 5.00ms, mfu 1.00%\n" for n in range(12))
    )
    loss = run.steps.totals["loss"]
    assert (loss.count, loss.non_finite, loss.first_non_finite_key) == (7, 5, 7)


def test_an_old_log_without_mfu_is_read() -> None:
    run = read_text("".join(f"iter {n}: loss 3.5, time 5.00ms\n" for n in range(12)))
    assert run.steps.count == 12
    assert all(map(math.isnan, run.steps.column("mfu_percent")))


def test_a_restart_is_noticed_and_the_later_values_count() -> None:
    first = [f"iter {n}: loss 5.0, time 5.00ms, mfu 1.00%" for n in range(100)]
    second = [f"iter {n}: loss 4.0, time 5.00ms, mfu 1.00%" for n in range(50, 120)]
    run = read_text("\n".join(first + second))
    assert run.steps.backward == 1
    assert len(run.notes) == 1
    assert dict(run.steps.curve("loss"))[60] == 4.0


def test_the_command_line_tells_settings_too() -> None:
    line = (
        "$ torchrun --standalone --nproc_per_node=4 train.py config/x.py --batch_size=8 --compile=False --dtype=float16"
    )
    run = read_text(line)
    found = {key: setting.value for key, setting in run.settings.items()}
    assert found == {"batch_size": 8, "compile": False, "dtype": "float16", "world_size": 4}


def test_settings_are_worked_out_as_nanogpt_would() -> None:
    run = read_text(
        "batch_size = 12\ngradient_accumulation_steps = 5 * 8 # per device\nblock_size=256\nmax_iters = 600000 // 2\n"
    )
    found = {key: (setting.value, setting.where) for key, setting in run.settings.items()}
    assert found == {
        "batch_size": (12, "text:1"),
        "gradient_accumulation_steps": (40, "text:2"),
        "block_size": (256, "text:3"),
        "max_iters": (300000, "text:4"),
    }


def test_a_printed_dict_tells_settings() -> None:
    run = read_text("{'out_dir': 'out', 'batch_size': 16, 'learning_rate': 0.0006, 'compile': True, 'odd': 3}")
    assert {k: s.value for k, s in run.settings.items()} == {
        "out_dir": "out",
        "batch_size": 16,
        "learning_rate": 6e-4,
        "compile": True,
    }


def test_what_the_user_gives_overrules_the_log(tmp_path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "run.log"
    log.write_text("batch_size = 12\n")
    run = read(log, overrides=[("batch_size", "4", "--batch_size=4")])
    assert (run.settings["batch_size"].value, run.settings["batch_size"].how) == (4, "given")


def test_the_gradscaler_warning_does_not_claim_float16() -> None:
    warning = "train.py:196: FutureWarning: `torch.cuda.amp.GradScaler(args...)` is deprecated."
    run = read_text(warning)
    assert run.event_counts == {"grad_scaler": 1}
    assert "dtype" not in run.settings


def test_a_line_without_end_is_read_in_pieces() -> None:
    bar = " 10%|##        | 10/100\r" * (3 * LONGEST_LINE // 24)
    run = read_text(
        bar + "iter 1: loss 5.0, time 1.00ms, mfu 1.00%\n" + "x" * (3 * LONGEST_LINE) + "\niter 2: loss z\n"
    )
    assert run.steps.column("step") == [1]
    assert [entry.line for entry in run.unreadable] == [3]


class Endless(io.RawIOBase):
    """A log that is made up while it is read."""

    def __init__(self, block: bytes, times: int) -> None:
        super().__init__()
        self.block, self.times = block, times

    def read(self, _size: int = -1) -> bytes:
        self.times -= 1
        return self.block if self.times >= 0 else b""


def test_memory_does_not_grow_with_the_log() -> None:
    import tracemalloc

    steps = "".join(f"iter {n}: loss 3.5, time 5.00ms, mfu 1.00%\n" for n in range(900))
    rest = "".join(f"step {n}: train loss 3.1, val loss 3.2\niter {n}: loss\n" for n in range(30))
    block = (steps + rest).encode()
    peaks = []
    for times in (10, 60):
        tracemalloc.start()
        run = read(Endless(block, times))  # type: ignore[arg-type]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert run.steps.count == 900 * times
        assert run.unreadable_count == 30 * times
    assert peaks[1] < 1.3 * peaks[0]
