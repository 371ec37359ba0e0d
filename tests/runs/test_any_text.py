"""Every format is read, and none of the false statements that too little evidence invites is made."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import simulate
import texts
from explaining import explained, get, number
from hypothesis import given
from hypothesis import strategies as st

from oomph.report.explain import document
from oomph.report.terminal import to_text
from oomph.runs import Explanation, LoggedRun, compare, read_text
from oomph.runs.causes import cause_of
from oomph.runs.holding import LEAST_PROCESS_MIB, of_message
from oomph.runs.pace import step_pace
from oomph.runs.reading.builder import Builder
from oomph.runs.reading.oom import parse


@pytest.mark.parametrize("name", list(texts.LOGS))
def test_a_log_is_read_whatever_program_wrote_it(name: str) -> None:
    text, program, steps, loss, ms = texts.LOGS[name]
    run = read_text(text)
    assert (run.program, run.steps.count, run.unreadable_count) == (program, steps, 0)
    assert run.steps.totals["loss"].last == pytest.approx(loss)
    assert run.steps.backward == 0
    pace = step_pace(run)
    assert (None if pace is None else pace.step_ms) == (ms if ms is None else pytest.approx(ms))


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LoggedRun]:
    """The slow oracle of the block reader: no shape is learned."""

    def read(text: str) -> LoggedRun:
        with monkeypatch.context() as patch:
            for name in ("learn", "learn_screen"):
                patch.setattr(Builder, name, lambda *_: None)
            return read_text(text)

    return read


@pytest.mark.parametrize("name", list(texts.LOGS))
def test_many_lines_at_once_are_read_as_one_by_one(name: str, one_by_one: Callable[[str], LoggedRun]) -> None:
    text, *_ = texts.LOGS[name]
    fast, slow = read_text(text), one_by_one(text)
    assert fast.steps.to_dict() == slow.steps.to_dict()
    assert (fast.progress, fast.copies) == (slow.progress, slow.copies)


BAR = "Epoch {e}:  {p}%|{bar}| {n}/90 [00:{n}<01:30,  {r}it/s, v_num=0, loss={loss}{more}]"


@pytest.mark.parametrize("end", ["\r", "\n"])
@pytest.mark.parametrize("more", ["", ", val_loss=3.25"])
@pytest.mark.parametrize("drawn", [1, 2])
def test_many_bars_are_read_as_one_by_one(
    end: str, more: str, drawn: int, one_by_one: Callable[[str], LoggedRun]
) -> None:
    rows = [(e, n) for e in range(3) for n in range(10, 90) for _ in range(drawn)]
    text = "".join(
        BAR.format(e=e, n=n, p=n, bar="#" * (n // 9), r=1 + n % 3, loss=4 - e - n / 100, more=more if e else "") + end
        for e, n in rows
    )
    fast, slow = read_text(text), one_by_one(text)
    assert fast.steps.to_dict() == slow.steps.to_dict()
    assert fast.evals.to_dict() == slow.evals.to_dict()
    assert (fast.progress, fast.copies, fast.steps.count) == (slow.progress, slow.copies, 240)


ROWS = {
    "csv": (
        "index, name, memory.used [MiB], memory.total [MiB], power.draw [W]\n",
        "{card}, NVIDIA H100, {used} MiB, 81559 MiB, {used}.5 W\n",
    ),
    "dmon": (
        "# gpu   pwr gtemp    sm    fb\n# Idx     W     C     %    MB\n",
        "    {card}   181     -    97  {used}\n",
    ),
    "table": (
        "",
        "+-----------------------------------------+------------------------+----------------------+\n"
        "|   {card}  NVIDIA H100 80GB HBM3          On  | 00000000:0{card}:00.0 Off |                    0 |\n"
        "| N/A   3{card}C    P0             {used:3d}W /  700W | {used:6d}MiB /  81559MiB | {card:6d}%      Default |\n"
        "|                                         |                        |             Disabled |\n"
        "|    {card}   N/A  N/A         1234{card}      C   python                      {used:8d}MiB |\n",
    ),
    "gpustat": ("", "[{card}] NVIDIA H100 | {used}°C,  9{card} % | {used} / 81559 MB | ann:python/77{card}({used}M)\n"),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_many_rows_of_cards_are_read_as_one_by_one(name: str, one_by_one: Callable[[str], LoggedRun]) -> None:
    head, row = ROWS[name]
    text = head + "".join(row.format(card=n % 3, used=100 + 7 * n) for n in range(50))
    fast, slow = read_text(text), one_by_one(text)
    assert {card: gpu.readings.to_dict() for card, gpu in fast.gpus.items()} == {
        card: gpu.readings.to_dict() for card, gpu in slow.gpus.items()
    }
    assert [gpu.readings.count for gpu in fast.gpus.values()] == [17, 17, 16]
    assert [(gpu.name, gpu.total_mib, gpu.limit_watts) for gpu in fast.gpus.values()] == [
        (gpu.name, gpu.total_mib, gpu.limit_watts) for gpu in slow.gpus.values()
    ]
    held = [(p.pid, p.gpu, p.mib, p.most_mib) for p in fast.processes.values()]
    assert held == [(p.pid, p.gpu, p.mib, p.most_mib) for p in slow.processes.values()]


@pytest.mark.parametrize("name", list(texts.SCREENS))
def test_a_screen_is_read(name: str) -> None:
    text, seen, cards = texts.SCREENS[name]
    run = read_text(text)
    assert len(run.gpus) == cards
    gpu = run.gpus[0]
    assert gpu.total_mib is not None
    assert (gpu.used_mib, round(gpu.total_mib)) == seen
    assert "card.screen" in {finding.id for finding in explained(text, "screen", None).findings}


def test_a_progress_bar_alone_tells_how_far_it_is() -> None:
    found = get(explained("Training:   0%|  | 2/624 [21:47<114:32:27, 660.0s/it]\n", "bar", None), "time.step")
    assert (found.numbers["step"], found.numbers["of"], found.numbers["step_ms"]) == (2, 624, 660e3)


def test_wandbs_summary_is_shown() -> None:
    text = "wandb: Run summary:\nwandb:   actor/grad_norm 0.5\nwandb:   score 7\nwandb:\n"
    assert "score 7" in get(explained(text, "summary", None), "log.summary").title


def test_a_trainers_last_line_tells_how_long_it_took() -> None:
    text = "{'train_runtime': 7200.0, 'train_samples_per_second': 10.0, 'train_loss': 1.5, 'epoch': 1.0}\n"
    assert number(get(explained(text, "end", None), "time.left"), "hours") == 2


def test_torchs_memory_summary_is_read() -> None:
    rows = (
        "| Allocated memory      |  10344 MiB |  14441 MiB |  45674 MiB |\n| GPU reserved memory   | 1 GB | 20 GB |\n"
    )
    printed = read_text(rows).printed
    assert (printed.peak_allocated_mib, printed.peak_reserved_mib) == (14441, 20480)


def test_a_card_of_another_maker_is_no_card_of_nvidias() -> None:
    found = explained(texts.OOMS["activations"].replace("NPU", "GPU").replace("GPU out", "HIP out"), "hip", None)
    assert found.measured.inference.card.candidates == ()


@pytest.mark.parametrize("cause", list(texts.OOMS))
def test_the_cause_is_the_one_that_the_message_shows(cause: str) -> None:
    oom = parse(texts.OOMS[cause])
    assert cause_of(oom, of_message(oom)) == cause
    assert get(explained(texts.OOMS[cause], "oom", None), "memory.cause").numbers["cause"] == cause


@pytest.mark.parametrize("text", texts.KILLED)
def test_the_systems_killer_is_known(text: str) -> None:
    oom = read_text(text).ooms[0]
    assert (oom.library, oom.memory) == ("the kernel", "machine")


@pytest.mark.parametrize("library", list(texts.ELSEWHERE))
def test_other_libraries_messages_are_known(library: str) -> None:
    assert read_text(texts.ELSEWHERE[library]).ooms[0].library == library.strip()


def test_a_bare_killed_does_not_say_why() -> None:
    found = explained("iter 1: loss 3.0, time 5.00ms\nKilled\n", "killed", None)
    assert found.run.ooms == []
    assert "SIGKILL" in get(found, "log.crash").title


# --- statements that are not made ------------------------------------------------------------------


def said(found: Explanation) -> str:
    return " ".join(f"{finding.title} {finding.text}" for finding in found.findings)


@pytest.mark.parametrize("tried", ["1.54 GiB", "3.07 GiB", "2.00 GiB", "6.14 GiB"])
def test_a_size_alone_names_no_tensor(tried: str) -> None:
    found = explained(texts.OOMS["others"].replace("20.00 MiB. GPU", f"{tried}. GPU"), "size", None)
    assert "logits" not in said(found)


def test_inductors_code_states_the_tensor() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/tmp/torchinductor_me/ab/cab.py", line 900, in call\n'
        "    buf7 = empty_strided_cuda((16384, 1536), (1536, 1), torch.float32)\n"
    )
    oom = read_text(trace + texts.OOMS["others"]).ooms[0]
    assert (oom.shape, oom.number_bytes) == ((16384, 1536), 4)
    assert "16,384 × 1,536" in said(explained(trace + texts.OOMS["others"], "inductor", None))


@pytest.mark.parametrize(
    ("code", "phase"),
    [
        ("    model.to(device)", "loading"),
        ("    loss.backward()", "backward"),
        ("    optimizer.step()", "optimizer"),
        ("    x = fancy(y)", "unknown"),
    ],
)
def test_the_phase_is_what_the_frames_show(code: str, phase: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "/home/me/t.py", line 9, in <module>\n{code}\n'
    assert read_text(trace + texts.OOMS["others"]).ooms[0].phase == phase


def test_eight_processes_are_not_one_card_above_its_peak() -> None:
    """nanoGPT prints the tokens of all processes and the MFU of one."""
    ms = 9340.0 / 8  # eight cards, each as fast as the one of run C
    log = simulate.text(simulate.preamble(simulate.C, simulate.RUN), simulate.steps(simulate.C, 40, ms))
    shared = "".join(
        f"{line.split(', mfu')[0]}, mfu 15.40%\n" if ", mfu" in line and "-100" not in line else f"{line}\n"
        for line in log.splitlines()
    )
    found = explained(shared, "ddp")
    assert found.measured.inference.settings["world_size"].value == 8
    assert found.measured.mfu == pytest.approx(0.82, abs=0.03)


def test_more_than_a_cards_peak_is_several_cards_never_an_mfu() -> None:
    log = simulate.text(simulate.preamble(simulate.C, simulate.RUN), simulate.steps(simulate.C, 40, 9340.0 / 8))
    found = explained("\n".join(line.split(", mfu")[0] for line in log.splitlines()), "fast")
    assert found.measured.mfu is None
    assert number(get(found, "card.several"), "least") >= 7
    assert get(found, "card.several").basis == "guess"


def test_no_batch_follows_where_the_processes_are_not_counted() -> None:
    text = "total desired batch size: 524288\n=> calculated gradient accumulation steps: 1\nblock_size = 1024\n"
    found = explained(f"step     1 | loss: 3.0 | norm: 1.0 | dt: 100.00ms\n{text}", "ddp", None)
    assert "batch_size" not in found.measured.inference.settings


def test_a_command_does_not_tell_what_its_config_file_sets() -> None:
    text = "torchrun --nproc_per_node=1 train.py config/own.py --dtype=float16\n" + texts.LOGS["nanoGPT"][0]
    found = explained(text, "command")
    assert found.plan is None
    assert not {"data.tokens", "time.left", "loss.expected"} & {finding.id for finding in found.findings}


def test_a_rounding_is_no_other_process() -> None:
    text = (
        texts.OOMS["others"].replace("Process 4711 has 20.10 GiB memory in use. ", "").replace("3.52 GiB", "23.63 GiB")
    )
    assert of_message(parse(text)).others_mib == 0


@given(st.floats(0.5, 80), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_parts_of_a_card_never_exceed_it(total: float, used: float, own: float, allocated: float) -> None:
    """The arithmetic of any message that adds up."""
    in_use = total * used
    ours = in_use * own
    tensors = ours * allocated
    text = (
        f"CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of {total:.2f} GiB of which "
        f"{total - in_use:.2f} GiB is free. Including non-PyTorch memory, this process has {ours:.2f} GiB memory in use"
        f" Of the allocated memory {tensors:.2f} GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    )
    held = of_message(parse(text))
    assert sum(mib for _, mib in held.parts()) <= (held.total_mib or 0.0) + 4 * 10.24
    others = 1024 * (in_use - ours)
    assert (held.others_mib or 0.0) == pytest.approx(others if others > LEAST_PROCESS_MIB else 0.0, abs=75)


def test_a_loss_that_is_no_language_models_has_no_perplexity() -> None:
    assert "perplexity" not in said(explained(texts.LOGS["key=value"][0], "any", None))


def test_overfitting_needs_a_training_loss() -> None:
    text = "".join(f"step {n}: val_loss: {loss}\n" for n, loss in ((100, 3.0), (200, 2.9), (300, 3.2), (400, 3.4)))
    assert explained(text, "vals", None).finding("loss.overfitting") is None


def test_a_single_infinite_gradient_norm_is_a_skipped_step() -> None:
    norms = ["1.0"] * 5 + ["inf"] + ["1.0"] * 5
    text = "".join(f"{{'loss': 2.0, 'grad_norm': {norm}, 'learning_rate': 1e-4, 'epoch': 0.1}}\n" for norm in norms)
    assert explained(text, "scaler", None).finding("loss.not_finite") is None


def test_nan_norms_with_a_loss_of_zero_are_the_first_thing_said() -> None:
    text = "".join("{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-4, 'epoch': 0.1}\n" for _ in range(4))
    found = explained(text, "nan", None)
    assert found.findings[0].id == "loss.not_finite"
    assert math.isnan(found.run.steps.column("grad_norm")[0])


def test_text_in_no_known_format_is_said_to_be_so() -> None:
    found = explained("Dear all,\nthe meeting is moved.\n", "letter", None)
    assert [finding.id for finding in found.findings] == ["log.unknown"]
    assert "Dear all," in found.findings[0].text


def test_every_guess_says_so_in_its_words() -> None:
    known = [*texts.OOMS.values(), *(text for text, *_ in texts.LOGS.values()), simulate.run_a()]
    guesses = [each for text in known for each in explained(text, "any", None).findings if each.basis == "guess"]
    assert guesses
    assert all(" may " in f" {each.title} " or " could " in each.title for each in guesses), guesses


@pytest.mark.parametrize("gpu", [None, "RTX 4070"])
def test_one_screen_is_25_lines_at_80_columns(gpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    known = [
        *texts.OOMS.values(),
        *(text for text, *_ in (*texts.LOGS.values(), *texts.SCREENS.values())),
        *(simulate.run_a(), simulate.run_b(), simulate.run_d()),
    ]
    for text in known:
        report = document(explained(text, "name-of-a-log-that-is-rather-long", gpu, with_fixes="out of mem" in text))
        shown = to_text(
            report.then(("oomph explain " + "x" * 90 + " CONFIG --gpu NAME", "exact"), ("--all", report.more))
        )
        assert len(shown.splitlines()) <= 25, shown
        assert max(map(len, shown.splitlines())) <= 120


# --- comparisons -----------------------------------------------------------------------------------


def curve(name: str, losses: dict[int, float], ms: float = 100.0) -> LoggedRun:
    rows = [
        f"step {step}: train loss {loss:.4f}, val loss {loss:.4f}\n"
        f"iter {step}: loss {loss:.4f}, time {ms:.2f}ms, mfu 5.00%"
        for step, loss in losses.items()
    ]
    return read_text("tokens per iteration will be: 1,024\n" + "\n".join(rows) + "\n", name)


def test_runs_that_begin_at_other_losses_have_no_winner() -> None:
    one, other = curve("bytes", {0: 5.5, 500: 2.0, 1000: 1.5}), curve("words", {0: 10.9, 500: 4.0, 1000: 3.5})
    found = compare([one, other])
    assert {each.winner for each in found.verdicts if each.unit == "nats"} == {None}
    assert found.sentence.startswith("No winner: they begin at different losses")


def test_no_winner_is_read_out_of_a_gap() -> None:
    one, other = curve("sparse", {0: 10.9, 100: 6.0, 1000: 3.0}), curve("dense", {0: 10.9, 100: 6.0, 300: 4.6})
    found = compare([one, other])
    assert next(each for each in found.verdicts if each.goal == "quality per token").winner is None


def test_the_first_sentence_says_who_learns_more_and_where_they_meet() -> None:
    steps = range(0, 1001, 50)
    slow = curve("slow", {n: 10.9 - 0.9 * math.log(1 + n) for n in steps}, 400.0)
    fast = curve("fast", {n: 10.9 - 0.75 * math.log(1 + n) for n in steps}, 100.0)
    found = compare([slow, fast])
    assert found.sentence.startswith("slow learns more per token, fast more per hour")
