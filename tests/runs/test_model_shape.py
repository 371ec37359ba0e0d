"""What the counts that nanoGPT prints tell of its model."""

from __future__ import annotations

import simulate
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oomph.config import TrainConfig
from oomph.runs import read_text
from oomph.runs.infer import infer

SHAPE = ("n_layer", "n_embd", "vocab_size", "block_size", "bias")


def shape_of(text: str) -> dict[str, object]:
    found = infer(read_text(text)).settings
    return {key: found[key].value for key in SHAPE if key in found}


def test_run_a_follows_from_its_printed_counts() -> None:
    text = "number of parameters: 29.94M\nnum decayed parameter tensors: 26, with 30,130,176 parameters\n"
    found = infer(read_text(text))
    assert shape_of(text) == {"n_layer": 6, "n_embd": 384, "vocab_size": 50304, "block_size": 512, "bias": False}
    assert {found.settings[key].how for key in SHAPE} == {"inferred"}
    assert found.settings["n_head"].how == "assumed"
    assert found.settings["n_head"].value == 6
    assert "30,130,176" in found.settings["n_embd"].where


def test_gpt2s_own_counts_are_recognised() -> None:
    gpt2 = TrainConfig(vocab_size=50257, bias=True)
    assert shape_of(simulate.text(simulate.counts(gpt2)))["vocab_size"] == 50257


def test_characters_are_recognised() -> None:
    config = TrainConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65)
    assert shape_of(simulate.text(simulate.counts(config))) == {key: getattr(config, key) for key in SHAPE}


@settings(deadline=None, max_examples=80)
@given(
    layers=st.integers(1, 48),
    width=st.integers(2, 32).map(lambda n: 64 * n),
    words=st.sampled_from((50304, 50257, 65, 256, 32000, 65536)),
    length=st.sampled_from((128, 256, 512, 1024, 2048)),
    bias=st.booleans(),
)
def test_a_usual_shape_follows_from_its_counts(layers: int, width: int, words: int, length: int, bias: bool) -> None:
    config = TrainConfig(n_layer=layers, n_head=1, n_embd=width, vocab_size=words, block_size=length, bias=bias)
    found = infer(read_text(simulate.text(simulate.counts(config))))
    shape = {key: getattr(config, key) for key in SHAPE}
    if found.ambiguous:
        assert shape in found.ambiguous
    else:
        assert {key: found.settings[key].value for key in SHAPE} == shape


def test_several_shapes_are_listed_and_none_is_chosen() -> None:
    text = "number of parameters: 40.56M\ntokens per iteration will be: 524,288\n" + "".join(
        f"iter {n}: loss 4.9, time 3905.00ms, mfu 12.90%\n" for n in range(800, 830)
    )
    found = infer(read_text(text))
    assert {"n_layer": 12, "n_embd": 384, "vocab_size": 50304, "block_size": 1024, "bias": False} in found.ambiguous
    assert len(found.ambiguous) > 1
    assert found.config is None
    assert "n_layer" in found.missing


def test_what_is_not_echoed_is_nanogpts_default_where_the_counts_agree() -> None:
    found = infer(read_text(simulate.text(simulate.preamble(TrainConfig(batch_size=4), ("batch_size",)))))
    assert found.settings["n_layer"].value == 12
    assert found.settings["n_layer"].how == "default"
    assert found.config is not None
    assert found.config.config.gradient_accumulation_steps == 40


def test_counts_overrule_a_config_that_a_resumed_run_ignored() -> None:
    lines = list(simulate.preamble(simulate.A, simulate.SHAPE))
    said = [line.replace("n_layer = 6", "n_layer = 8") for line in lines]
    found = infer(read_text("\n".join(said)))
    assert found.settings["n_layer"].value == 6
    assert any("n_layer = 8" in text for text in found.contradictions)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64))
def test_two_parts_of_a_batch_give_the_third(batch: int, accumulation: int) -> None:
    assume((batch, accumulation) != (12, 40))
    tokens = batch * accumulation * 1024
    found = infer(read_text(f"batch_size = {batch}\nblock_size = 1024\ntokens per iteration will be: {tokens:,}\n"))
    assert found.settings["gradient_accumulation_steps"].value == accumulation
    assert found.settings["gradient_accumulation_steps"].how == "inferred"


def test_a_batch_that_contradicts_the_tokens_is_said() -> None:
    found = infer(read_text("batch_size = 7\nblock_size = 1024\ntokens per iteration will be: 524,288\n"))
    assert any("524,288" in text for text in found.contradictions)


def test_steps_alone_tell_no_config() -> None:
    found = infer(read_text("iter 5: loss 3.0, time 5.00ms, mfu 1.00%\n"))
    assert found.config is None
    assert "n_embd" in found.missing


def test_the_rounded_count_alone_tells_all_but_the_block() -> None:
    found = infer(read_text("number of parameters: 123.59M\n"))
    assert not found.contradictions
    told = {key: found.settings[key].value for key in ("n_layer", "n_embd", "vocab_size", "bias")}
    assert told == {"n_layer": 12, "n_embd": 768, "vocab_size": 50304, "bias": False}
    assert "block_size" in found.missing
