"""PyTorch's out-of-memory messages of every generation, and which tensor failed."""

from __future__ import annotations

import pytest
import simulate

from oomph.config import TrainConfig
from oomph.predict.allocator.blocks import segment_bytes
from oomph.runs import read_text
from oomph.runs.findings.oom import failed_tensors
from oomph.runs.holding import of_message
from oomph.runs.infer import infer
from oomph.runs.reading.oom import parse
from oomph.units import MIB

GIB = 1024.0


@pytest.mark.parametrize("generation", list(simulate.OOM_MESSAGES))
def test_every_generation_tells_what_failed_and_what_was_there(generation: str) -> None:
    oom = parse(simulate.OOM_MESSAGES[generation])
    assert oom.tried_mib == pytest.approx(1.54 * GIB)
    assert oom.total_mib == pytest.approx(11.62 * GIB)
    assert oom.free_mib == pytest.approx(1.06 * GIB)
    assert oom.allocated_mib == pytest.approx(9.25 * GIB)
    assert oom.reserved_mib == pytest.approx(9.75 * GIB)
    assert oom.old == (generation in ("cached", "reserved"))


def test_newer_messages_tell_the_process_and_the_others() -> None:
    oom = parse(simulate.OOM_MESSAGES["2.5"])
    assert (oom.process_mib, oom.processes, oom.private_pools_mib) == (10.25 * GIB, {2143: 300}, 32)
    assert of_message(parse(simulate.OOM_MESSAGES["2.1"])).process_mib == 10.25 * GIB  # the only one that can be ours


def test_apples_message_is_read() -> None:
    oom = parse(
        "RuntimeError: MPS backend out of memory (MPS allocated: 6.04 GB, other allocations: 1.04 GB, max allowed: "
        "6.77 GB). Tried to allocate 459.07 MB on private pool."
    )
    assert (oom.memory, oom.tried_mib) == ("mps", 459.07)
    assert oom.allowed_mib == pytest.approx(6.77 * GIB)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("generation", list(simulate.OOM_MESSAGES))
def test_a_message_that_a_terminal_broke_is_joined(generation: str, width: int) -> None:
    message = simulate.OOM_MESSAGES[generation]
    broken = "\n".join(message[start : start + width] for start in range(0, len(message), width))
    run = read_text(broken + "\niter 1: loss 3.0, time 5.00ms, mfu 1.00%\n")
    whole = parse(message)
    assert len(run.ooms) == 1
    assert (run.ooms[0].tried_mib, run.ooms[0].free_mib) == (whole.tried_mib, whole.free_mib)
    assert (run.ooms[0].allocated_mib, run.ooms[0].reserved_mib) == (whole.allocated_mib, whole.reserved_mib)
    assert run.steps.count == 1


def test_the_traceback_tells_the_phase_and_the_line() -> None:
    message = simulate.OOM_MESSAGES["2.5"]
    found = read_text(simulate.EVALUATION_TRACEBACK + message).ooms[0]
    assert (found.phase, found.code) == ("evaluation", "train.py:224 in estimate_loss")
    assert read_text(simulate.BACKWARD_TRACEBACK + message).ooms[0].phase == "backward"
    assert read_text(message).ooms[0].phase == "unknown"


def test_1_54_gib_are_the_float32_logits_of_8_sequences() -> None:
    config = TrainConfig(batch_size=8, block_size=1024, vocab_size=50304)
    guesses = failed_tensors(parse(simulate.OOM_MESSAGES["2.5"]), config)
    assert [(guess.formula, guess.bytes) for guess in guesses] == [("8 × 1024 × 50304 × 4", 1_648_361_472)]
    assert "logits" in guesses[0].name


def test_without_a_config_no_tensor_is_named() -> None:
    assert failed_tensors(parse(simulate.OOM_MESSAGES["2.5"]), None) == []


def test_run_d_failed_for_its_logits() -> None:
    run = read_text(simulate.run_d())
    config = infer(run).config
    assert config is not None
    guess = failed_tensors(run.ooms[0], config.config)[0]
    assert guess.formula == "16 × 1024 × 50304 × 4"


def test_the_allocator_asks_in_its_own_sizes() -> None:
    sizes = (1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 11 * MIB)
    assert [segment_bytes(size) // MIB for size in sizes] == [2, 2, 20, 20, 10, 12]


def test_endless_failures_are_counted_and_bounded() -> None:
    run = read_text((simulate.OOM_MESSAGES["reserved"] + "\n") * 500)
    assert run.event_counts["oom"] == 500
    assert len(run.ooms) <= 32
