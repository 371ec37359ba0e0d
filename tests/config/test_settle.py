"""What nobody said, decided from the trainer and the device, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from oomph.config import COMPILED_LOSS_CHUNK, DEFAULT_LOSS_CHUNK, from_dict, load, settle, with_trainer


@dataclass(frozen=True)
class Card:
    kind: str = "cuda"
    name: str = "RTX 4070"
    has_bf16: bool = True
    capability: tuple[int, int] | None = (8, 9)


OLD_CARD = Card(name="GTX 1080", has_bf16=False, capability=(6, 1))
PROCESSOR = Card(kind="cpu", name="this CPU")
MAC = Card(kind="mps", name="M2")


def test_every_unsaid_value_is_decided_with_its_reason() -> None:
    settled = settle(load(), Card())
    config = settled.config
    assert (config.dtype, config.return_logits, config.loss_chunk, config.optimizer_loop) == (
        "bfloat16",
        True,
        0,
        "fused",
    )
    assert settled.sources["dtype"] == "default: RTX 4070 has bfloat16"
    assert config.dataset_tokens is None


def test_a_card_without_bfloat16_gets_float16() -> None:
    settled = settle(load(), OLD_CARD)
    assert settled.config.dtype == "float16"
    assert "GTX 1080" in settled.sources["dtype"]


def test_oomphs_trainer_returns_no_logits_and_chunks_the_loss() -> None:
    config = settle(from_dict({"trainer": "oomph"}), Card()).config
    assert (config.return_logits, config.loss_chunk) == (False, COMPILED_LOSS_CHUNK)


@pytest.mark.parametrize("keys", [{"compile": False}, {"dtype": "float32"}, {"autocast": False}])
def test_where_a_logit_takes_more_or_no_chunk_is_summed_up_chunks_are_smaller(keys: dict[str, Any]) -> None:
    assert settle(from_dict({"trainer": "oomph", **keys}), Card()).config.loss_chunk == DEFAULT_LOSS_CHUNK


@pytest.mark.parametrize("device", [PROCESSOR, MAC])
def test_nanogpt_without_cuda_computes_in_float32_and_loops_over_tensors(device: Card) -> None:
    config = settle(load(), device).config
    assert (config.dtype, config.optimizer_loop) == ("float32", "forloop")


def test_a_dtype_without_effect_is_changed_with_a_note() -> None:
    settled = settle(from_dict({"dtype": "bfloat16"}), PROCESSOR)
    assert settled.config.dtype == "float32"
    assert "no effect" in settled.notes[-1]


def test_oomph_on_a_processor_fuses_and_keeps_the_dtype_that_was_said() -> None:
    said = settle(from_dict({"dtype": "bfloat16", "trainer": "oomph"}), PROCESSOR)
    assert (said.config.dtype, said.config.optimizer_loop, said.notes) == ("bfloat16", "fused", [])
    assert settle(from_dict({"trainer": "oomph"}), PROCESSOR).config.dtype == "float32"


def test_what_was_said_is_kept() -> None:
    said = {"dtype": "float32", "return_logits": False, "loss_chunk": 0, "optimizer_loop": "foreach"}
    settled = settle(from_dict(said), Card())
    assert {key: getattr(settled.config, key) for key in said} == said
    assert settled.sources["dtype"] == "given"


def test_logits_and_chunks_are_decided_so_that_they_agree() -> None:
    assert settle(from_dict({"loss_chunk": 64, "trainer": "oomph"}), Card()).config.return_logits is False
    assert settle(from_dict({"return_logits": True, "trainer": "oomph"}), Card()).config.loss_chunk == 0


def test_a_settled_config_can_be_settled_again_for_another_trainer() -> None:
    settled = settle(load(), Card())
    again = settle(with_trainer(settled, "oomph"), OLD_CARD).config
    assert (again.dtype, again.loss_chunk) == ("float16", COMPILED_LOSS_CHUNK)


def test_an_old_card_takes_the_memory_efficient_kernel_and_says_why() -> None:
    settled = settle(load(), OLD_CARD)
    assert settled.config.attention == "efficient"
    assert "GTX 1080" in settled.sources["attention"]
    assert settle(load(), Card()).config.attention == "flash"


def test_nanogpt_is_planned_as_published_and_what_it_lacks_is_noted() -> None:
    asked = from_dict({"checkpoint_layers": 12, "optimizer": "adamw8bit", "loss_chunk": 512})
    nanogpt, ours = settle(asked, Card()), settle(with_trainer(asked, "oomph"), Card())
    assert (nanogpt.config.checkpoint_layers, nanogpt.config.optimizer, nanogpt.config.loss_chunk) == (0, "adamw", 0)
    (note,) = [note for note in nanogpt.notes if "nanoGPT as published has no" in note]
    assert all(key in note for key in ("checkpoint_layers", "optimizer", "loss_chunk"))
    assert (ours.config.checkpoint_layers, ours.config.optimizer, ours.config.loss_chunk) == (12, "adamw8bit", 512)
