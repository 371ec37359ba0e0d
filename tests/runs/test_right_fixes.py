"""What to do fits the cause: no fix that cannot help, no cause that the message contradicts."""

from __future__ import annotations

import pytest
from explaining import explained, get

from oomph.runs import read_text
from oomph.runs.causes import cause_of, general_fixes
from oomph.runs.holding import of_message
from oomph.runs.run import Oom

OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {tried} (GPU 0; {total} total capacity; {used} already "
    "allocated; {free} free; {reserved} reserved in total by PyTorch)"
)
HINT = " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."


def failure(text: str) -> tuple[str, str, Oom]:
    """(cause, all fixes as one text, the error) of a text's out-of-memory message."""
    oom = read_text(text).ooms[-1]
    held = of_message(oom)
    cause = cause_of(oom, held)
    fixes = general_fixes(cause, oom, held)
    return cause, " ".join(f"{fix.title} {' '.join(fix.lines)}" for fix in fixes), oom


def old(tried: str, total: str, used: str, free: str, reserved: str) -> str:
    return OLD.format(tried=tried, total=total, used=used, free=free, reserved=reserved)


def test_a_setting_is_proposed_to_a_torch_that_has_it() -> None:
    text = old("2.50 GiB", "15.00 GiB", "9.00 GiB", "30.00 MiB", "14.00 GiB")
    assert "1.10" in failure(text)[1]
    assert "1.10" not in failure(text + HINT)[1]


def test_pieces_that_are_as_large_as_the_request_by_rounding() -> None:
    text = old("1.50 GiB", "4.00 GiB", "300.00 MiB", "700.00 MiB", "1.79 GiB")
    cause, _, oom = failure(text)
    assert (cause, oom.unused_mib) == ("fragments", pytest.approx(1533, abs=1))
    assert "more than the" not in get(explained(text, "text", None), "memory.cause").title


def test_room_that_was_refused_is_not_held_by_others() -> None:
    assert failure(old("2.20 GiB", "6.00 GiB", "700.00 MiB", "3.00 GiB", "1.20 GiB"))[0] == "refused"
    assert failure(old("2.20 GiB", "6.00 GiB", "700.00 MiB", "1.00 GiB", "1.20 GiB"))[0] == "beside"


def test_one_large_piece_in_main_memory_is_not_the_loaders() -> None:
    text = "RuntimeError: [enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory: you tried to "
    large, small = (failure(f"{text}allocate {size} bytes.") for size in (90_000_000_000, 1_000_000_000))
    assert large[2].memory == "machine"
    assert ("num_workers" in large[1], "num_workers" in small[1]) == (False, True)
    assert "64" not in large[1] + small[1]


STEP = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 9, in <module>\n'
    "    optimizer.step()\n"
    '  File "/x/site-packages/torch/optim/adamw.py", line 600, in _multi_tensor_adamw\n'
    "    {code}\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capacity of "
    "24.00 GiB of which 80.00 MiB is free.\n"
)


def test_temporary_tensors_of_an_optimizer_are_not_its_state() -> None:
    cause, fixes, _ = failure(STEP.format(code="root = torch._foreach_sqrt(device_exp_avg_sqs)"))
    assert cause == "optimizer"
    assert "foreach=False" in fixes
    assert "foreach=False" not in failure(STEP.format(code='state["exp_avg"] = torch.zeros_like(p)'))[1]


@pytest.mark.parametrize("program", ["vllm/worker.py: loading", "python -m sglang.launch_server --port 1", "ggml_cuda"])
def test_a_server_is_not_told_to_train_otherwise(program: str) -> None:
    message = old("70.00 MiB", "60.00 GiB", "57.00 GiB", "5.00 MiB", "57.10 GiB")
    assert "accumulation" in failure(message)[1]
    assert "accumulation" not in failure(f"{program}\n{message}")[1]


def test_fused_attention_that_is_in_use_is_not_proposed() -> None:
    message = old("35.00 GiB", "60.00 GiB", "28.00 GiB", "30.50 GiB", "29.00 GiB")
    assert "sdpa" in failure(message)[1]
    assert "sdpa" not in failure(f"x = F.scaled_dot_product_attention(q, k, v)\n{message}")[1]


def test_a_program_that_a_tpu_has_no_room_for_is_not_moved_by_windows() -> None:
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    cause, _, oom = failure(f"{text}Used 21.90G of 15.48G hbm.")
    assert (cause, oom.memory) == ("activations", "tpu")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.0 GiB\n(GPU 0; 24.00 GiB total capacity; 21.00 GiB already allocated)",
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total capacity; 21.00 GiB already allocated; "
        "1.00 GiB free; 22.00 GiB reserved by PyTorch using the caching allocator)",
        "CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0; 24.00 GiB total capacity; 21.00 GiB already allocated; "
        "0 bytes free; 22.00 GiB reserved",
    ],
)
def test_shortened_messages_still_say_who_holds_the_card(text: str) -> None:
    oom = failure(text)[2]
    assert (oom.total_mib, oom.allocated_mib) == (24 * 1024, 21 * 1024)


def test_a_first_tensor_that_was_refused() -> None:
    text = (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.00 "
        "GiB. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    )
    cause, _, oom = failure(text)
    assert (cause, oom.total_mib, oom.free_mib) == ("refused", 15 * 1024, None)


def test_an_idle_card_with_a_login_screen_holds_nothing() -> None:
    row = "[{}] GeForce RTX 3090 | 30'C,  0 % | {} / 24576 MB | gdm({}M)\n"
    assert explained(row.format(0, 13, 4), "text", None).finding("card.idle") is None
    assert explained(row.format(0, 9000, 8900), "text", None).finding("card.idle") is not None


def test_a_learning_rate_that_is_far_too_high_is_not_talked_away() -> None:
    line = "{{'loss': 0.0, 'grad_norm': nan, 'learning_rate': {}, 'epoch': 0.{}}}\n"
    high, usual = ("".join(line.format(rate, n) for n in range(1, 6)) for rate in (0.05, 1e-4))
    assert "0.05" in get(explained(high, "text", None), "loss.not_finite").text
    assert "AdamW" not in get(explained(usual, "text", None), "loss.not_finite").text


def test_checkpointing_that_is_in_use_is_not_proposed() -> None:
    frame = '  File "train.py", line 5, in forward\n    x = {}\n'
    message = old("1.00 GiB", "8.00 GiB", "7.00 GiB", "30.00 MiB", "7.10 GiB")
    assert "gradient_checkpointing" in failure(frame.format("block(x)") + message)[1]
    assert "gradient_checkpointing" not in failure(frame.format("checkpoint(block, x)") + message)[1]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus.", "dmesg"),
        ("RuntimeError: CUDA error: device-side assert triggered", "index"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "architecture"),
        (
            "RTX 3060 with CUDA capability sm_86 is not compatible with the current PyTorch installation.",
            "architecture",
        ),
        ("slurmstepd: error: *** JOB 77 ON node-1 CANCELLED AT 2026-01-02T03:04:05 ***", "Slurm"),
    ],
)
def test_what_an_error_means_is_said(text: str, word: str) -> None:
    assert word in get(explained(text, "text", None), "log.crash").text


def test_olmos_steps_with_their_epoch() -> None:
    step = "2026-01-02 INFO [step={0}/2500,epoch=1]\n    optim/total_grad_norm=0.2\n    train/CrossEntropyLoss=2.{0}\n"
    assert read_text(step.format(11) + step.format(12)).steps.column("step") == [11.0, 12.0]


@pytest.mark.parametrize("program", ["torch/utils/checkpoint.py", "mine/utils/checkpoint.py"])
def test_frames_below_the_message_tell_what_is_in_use(program: str) -> None:
    at = f"\n\nAt:\n  /opt/lib/torch/nn/functional.py(900): gelu\n  /opt/lib/{program}(41): forward\n"
    text = old("96.00 MiB", "40.00 GiB", "38.00 GiB", "30.00 MiB", "38.50 GiB") + HINT + at
    assert failure(text)[2].checkpointed == program.startswith("torch")
    assert ("gradient_checkpointing" in failure(text)[1]) != program.startswith("torch")


def test_a_traceback_below_its_message_tells_the_phase() -> None:
    message = old("40.00 MiB", "11.00 GiB", "10.00 GiB", "5.00 MiB", "10.10 GiB").replace("RuntimeError", "ERROR")
    below = (
        "Traceback (most recent call last):\n"
        '  File "run.py", line 9, in resume\n    self.optimizer.load_state_dict(saved["optimizer"])\n'
        '  File "/lib/torch/optim/optimizer.py", line 100, in load_state_dict\n    state = deepcopy(state)\n'
    )
    cause, fixes, oom = failure(f"{message}\n{below}")
    assert (cause, oom.phase, oom.code) == ("loading", "loading", "run.py:9 in resume")
    assert "map_location" in fixes
    assert not any(word in fixes for word in ("micro-batch", "checkpointing_enable", "Shorter"))
    whole = read_text(f"{message}\n{below}KeyError: 'state'\n")  # another error: the message was caught
    assert (whole.ooms[-1].phase, whole.crash is not None) == ("unknown", True)
    other = failure(f"[rank0]: {message.replace('ERROR', 'RuntimeError')}\n{below}")  # of another rank
    assert other[2].phase == "unknown"


def test_weights_that_are_loaded_are_not_called_a_checkpoint_restored() -> None:
    frame = '  File "/lib/modeling.py", line 9, in _load_pretrained_model\n    _load_state_dict_into_model(x, "cuda")\n'
    _, fixes, oom = failure(frame + old("386.00 MiB", "61.00 GiB", "59.60 GiB", "17.00 MiB", "60.00 GiB"))
    assert (oom.phase, "bfloat16" in fixes, "map_location" in fixes) == ("loading", True, False)
