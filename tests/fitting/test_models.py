"""Models found rather than settings: the largest that fits, and a run from nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph import config as configs
from oomph import devices
from oomph.fitting import grow
from oomph.fitting.fit import fit
from oomph.fitting.grow import DepthAndWidth, Limits, Sizer
from oomph.fitting.result import Fit
from oomph.fitting.search import Searcher
from oomph.fitting.space import of_width
from oomph.report.fit import document
from oomph.report.markdown import to_markdown

HISTORY = {
    "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 16,
    "gradient_accumulation_steps": 32, "max_iters": 20000,
}  # fmt: skip


def test_the_gpt_2_family_lies_on_the_line_of_usual_depths() -> None:
    assert [grow.usual_depth(width) for width in (768, 1024, 1280)] == [12, 24, 36]


@pytest.mark.parametrize(
    ("width", "rate"), [(768, 6e-4), (1024, 3e-4), (1536, 2.5e-4), (2048, 2e-4), (4096, 1.2e-4), (9999, 1.2e-4)]
)
def test_learning_rates_are_gpt_3s_at_its_widths(width: int, rate: float) -> None:
    assert grow.learning_rate(width, DepthAndWidth(24, width).block_parameters) == rate


@given(st.integers(1, 60), st.integers(2, 63))
def test_a_wider_model_never_gets_a_higher_learning_rate(layers: int, heads: int) -> None:
    sizes = (DepthAndWidth(layers, 64 * count) for count in (heads, heads + 1))
    narrow, wide = (grow.learning_rate(shape.n_embd, shape.block_parameters) for shape in sizes)
    if 64 * heads >= 768 or 64 * (heads + 1) < 768:
        assert wide <= narrow
    assert 1e-5 < wide < 3e-3


@given(st.floats(1e6, 1e12), st.sampled_from([64, 256, 1024, 2048]))
def test_a_batch_is_a_power_of_two_of_at_most_half_a_million_tokens(tokens: float, block: int) -> None:
    sequences = grow.batch_sequences(tokens, block)
    assert sequences & (sequences - 1) == 0
    assert sequences == 1 or sequences * block <= min(grow.BATCH_TOKENS, tokens / grow.FEWEST_STEPS)


def test_a_ladder_grows_and_has_heads_of_64() -> None:
    ladder = grow.proportioned(50304)
    sizes = [shape.block_parameters + 50304 * shape.n_embd for shape in ladder]
    assert sizes == sorted(sizes)
    assert all(shape.n_embd % 64 == 0 for shape in ladder)
    assert {DepthAndWidth(12, 768), DepthAndWidth(24, 1024), DepthAndWidth(36, 1280)} <= set(ladder)


@pytest.mark.parametrize("hours", [None, 0.01])
def test_the_deepest_model_is_that_of_trying_every_depth(hours: float | None) -> None:
    config = {
        "n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 256, "vocab_size": 4096, "batch_size": 8,
        "gradient_accumulation_steps": 1, "max_iters": 1000,
    }  # fmt: skip
    searcher = Searcher(devices.custom("small", mib=800, tflops=5.0, gbs=100.0, watts=None))
    sizes = [DepthAndWidth(layers, 128) for layers in range(1, 30)]
    sizers = [
        Sizer(configs.as_loaded(config), searcher, Limits(hours, None), proposing=False, tell=lambda _: None)
        for _ in range(2)
    ]
    deepest = sizers[0].last(sizes)
    every = [shape for shape in sizes if sizers[1].will_do(shape)]
    assert 1 < len(every) < len(sizes)
    assert deepest == every[-1]
    assert sizers[0].evaluated < sizers[1].evaluated / 3


@pytest.mark.slow
def test_the_largest_models_fit_and_one_step_more_does_not() -> None:
    found = fit(HISTORY, "RTX 4070", largest=True, hours=60)
    assert found.chosen is not None
    for option in found.options:
        assert option.fits
        assert (option.hours or 0) <= 60
        assert option.plan.config.n_embd == 64 * option.plan.config.n_head
        assert option.sequences == 512
    free = [option.plan.config for option in found.options if "as asked" not in option.name]  # in its micro-batch
    wider = max(config.n_embd for config in free if config.n_layer == 12) + 64
    beyond = fit(HISTORY | {"n_embd": wider, "n_head": wider // 64}, "RTX 4070", hours=60)
    fitting = [each for each in beyond.options if each.kind == "same" and each.fits and each.trainer == "nanogpt"]
    assert all((each.hours or 0) > 60 for each in fitting if not each.patched)


def test_from_nothing_a_model_is_proposed_that_fits_trains_in_time_and_has_its_tokens() -> None:
    found = fit({"dataset_tokens": 3_680_000_000}, "RTX 4070", tokens=10e9, hours=20)
    assert found.proposed
    best = found.chosen
    assert best is not None
    assert best.fits
    assert (best.hours or 0) <= 20
    assert (best.hours or 0) > 14  # a model a good deal smaller would leave the card idle
    assert best.plan.data.total_tokens == pytest.approx(10e9, rel=1e-3)
    assert best.plan.data.tokens_per_param >= 20
    assert best.plan.data.epochs == pytest.approx(2.717, abs=0.01)
    assert any("Muennighoff" in sentence for sentence in found.why)
    assert any("learning rate" in sentence for sentence in found.why)


@pytest.fixture(scope="module")
def proposed() -> Fit:
    """A model from nothing but five hours."""
    return fit(None, "RTX 4070", hours=5)


def test_with_hours_alone_the_tokens_are_twenty_a_parameter(proposed: Fit) -> None:
    assert proposed.chosen is not None
    assert proposed.chosen.plan.data.tokens_per_param == pytest.approx(20, rel=0.01)
    assert (proposed.chosen.hours or 0) <= 5


def test_a_model_no_larger_than_its_tokens_are_worth_is_proposed() -> None:
    found = fit(None, "A100 SXM4 80GB", tokens=4e8)
    assert found.chosen is not None
    assert found.chosen.plan.model.params_nanogpt <= 4e8 / 20


def test_keys_that_were_said_are_kept_in_a_proposal() -> None:
    found = fit({"block_size": 512, "learning_rate": 1e-3, "bias": True}, "RTX 4070", tokens=1e9)
    assert found.chosen is not None
    config = found.chosen.plan.config
    assert (config.block_size, config.learning_rate, config.bias) == (512, 1e-3, True)


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": 8},
        {"gradient_accumulation_steps": 40},
        {"batch_size": 8, "gradient_accumulation_steps": 4},
        {"batch_size": 6, "world_size": 4},
        {"compile": False, "expandable_segments": True},
    ],
)
def test_a_proposal_keeps_the_batch_that_was_given_and_has_the_tokens_asked_for(given: dict[str, int]) -> None:
    found = fit(given, "RTX 4070", tokens=1e9)
    assert found.chosen is not None
    config, data = found.chosen.plan.config, found.chosen.plan.data
    assert {key: getattr(config, key) for key in given} == given
    assert 1e9 <= data.total_tokens < 1e9 + data.tokens_per_step
    assert data.tokens_per_step <= grow.BATCH_TOKENS
    assert data.tokens_per_param >= 20
    assert config.lr_decay_iters == config.max_iters
    assert any("1.000 B, as asked" in sentence for sentence in found.why)


def test_tokens_that_whole_steps_cannot_keep_are_not_said_to_be_as_asked() -> None:
    found = fit({"batch_size": 64, "gradient_accumulation_steps": 5000}, "H100 SXM5 80GB", tokens=1e9)
    assert found.chosen is not None
    assert any("1.311 B, the 1.000 B asked for in whole steps" in sentence for sentence in found.why)


def test_the_steps_that_were_given_make_the_length_of_a_proposal() -> None:
    found = fit({"max_iters": 1000}, "RTX 4070", hours=20)
    assert found.chosen is not None
    config, data = found.chosen.plan.config, found.chosen.plan.data
    assert (config.max_iters, config.lr_decay_iters, config.warmup_iters) == (1000, 1000, 50)
    assert 20 <= data.tokens_per_param < 25
    assert any("max_iters = 1000 as given" in sentence for sentence in found.why)


def test_a_learning_rate_that_was_given_is_said_to_be_and_ends_at_its_tenth() -> None:
    found = fit({"learning_rate": 1e-3}, "RTX 4070", tokens=1e9)
    assert found.chosen is not None
    assert found.chosen.plan.config.min_lr == 1e-4
    assert any("learning rate: 0.001 as given" in sentence for sentence in found.why)


def test_a_given_batch_that_nothing_fits_with_is_named_in_the_cure() -> None:
    found = fit({"batch_size": 700}, "RTX 4070", tokens=1e9)
    assert "does not fit" in found.verdict
    assert "a smaller batch_size" in found.why[0]


@pytest.mark.parametrize("steps", ["--max_iters=1000", "given"])
def test_a_length_given_in_tokens_and_in_steps_is_refused(steps: str) -> None:
    loaded = configs.load([], [("max_iters", "1000", steps)]) if steps != "given" else {"max_iters": 1000}
    with pytest.raises(oomph.InputError, match="max_iters: gives the run's length, and so do tokens"):
        fit(loaded, "RTX 4070", tokens=1e9)


def test_an_hour_that_is_too_short_for_anything_is_a_no() -> None:
    found = fit(None, "RTX 4070", tokens=1e12, hours=0.5)
    assert found.best is None
    assert found.verdict.startswith("No")


def test_a_proposal_plans_the_same_on_its_own(proposed: Fit) -> None:
    assert proposed.chosen is not None
    again = oomph.plan(proposed.chosen.plan.config, "RTX 4070")
    assert again.memory.total_mib == proposed.chosen.plan.memory.total_mib


@pytest.mark.parametrize(
    ("tokens", "hours", "said"),
    [(1, None, "1 token is too few"), (1e12, 0.5, "takes longer"), (1e6, 5, "tokens are too few")],
)
def test_a_refusal_names_the_limit_that_failed(tokens: float, hours: float | None, said: str) -> None:
    found = fit(None, "RTX 4070", tokens=tokens, hours=hours)
    assert found.best is None
    assert said in found.verdict


def test_a_card_too_small_for_any_model_is_told_by_its_memory() -> None:
    tiny = devices.custom("tiny", mib=450, tflops=20.0, gbs=300.0, watts=None)
    assert "does not fit" in fit(None, tiny, hours=5).verdict


@pytest.mark.slow
def test_the_largest_model_is_looked_for_with_expandable_segments_too(largest: Fit) -> None:
    free = [option.plan for option in largest.options if "as asked" not in option.name]
    assert [(plan.config.n_layer, plan.config.n_embd) for plan in free] == [(27, 1216), (12, 1728), (69, 768)]
    assert all(plan.config.expandable_segments for plan in free)
    assert largest.verdict.endswith(", with expandable_segments = True")
    assert "1 × 512, expandable segments" in to_markdown(document(largest))


@pytest.mark.parametrize(("name", "width"), [("Qwen/Qwen3-0.6B", 1088), ("meta-llama/Llama-3.2-1B", 1536)])
def test_a_wider_model_keeps_its_proportions(name: str, width: int) -> None:
    given = configs.load(name).config
    wide = configs.load(name, [(key, str(value), key) for key, value in of_width(given, width).items()]).config
    assert given.intermediate_size is not None
    assert wide.n_head / (wide.num_key_value_heads or 1) == given.n_head / (given.num_key_value_heads or 1)
    assert wide.intermediate_size == pytest.approx(width * given.intermediate_size / given.n_embd, abs=32)


def test_no_setting_that_keeps_the_training_lets_a_wider_model_pass() -> None:
    small = devices.custom("small", mib=1500, tflops=5.0, gbs=100.0, watts=None)
    config = {"n_layer": 2, "block_size": 256, "vocab_size": 4096, "max_iters": 1000}
    sequences = {"batch_size": 4, "gradient_accumulation_steps": 2}
    loaded = configs.as_loaded(config | sequences)
    sizer = Sizer(loaded, Searcher(small), Limits(None, None), proposing=False, tell=lambda _: None)
    widest = sizer.last([DepthAndWidth(2, 64 * heads) for heads in range(1, 40)])
    assert widest is not None
    wider = (of_width(loaded.config, widest.n_embd + 64 * more) for more in (1, 2, 3))
    for shape, size, compiled, segments in itertools.product(wider, (1, 2, 4, 8), (True, False), (True, False)):
        setting = {"batch_size": size, "gradient_accumulation_steps": 8 // size}
        setting |= {"compile": compiled, "expandable_segments": segments}
        memory = oomph.plan(config | shape | setting, small).memory
        assert not (memory.fits and memory.is_sure) or memory.retries


@pytest.mark.slow
def test_one_command_answers_which_widths_of_12_layers_run_at_16_by_1024_on_12_gb(largest: Fit) -> None:
    widest = next(option for option in largest.options if option.name == "the widest of 12 layers at 16 × 32 as asked")
    assert (widest.plan.config.n_layer, widest.plan.config.batch_size) == (12, 16)
    for width, heads in ((384, 6), (504, 12), (512, 8), (576, 9), (704, 11), (768, 12)):
        tried = oomph.plan(HISTORY | {"n_embd": width, "n_head": heads}, "RTX 4070").memory
        assert tried.fits is (width <= widest.plan.config.n_embd)


def test_the_largest_is_called_the_largest_only_of_its_proportions() -> None:
    found = fit(HISTORY, "RTX 4070", largest=True, hours=20)
    assert found.chosen is not None
    assert found.verdict.startswith("The largest model in GPT-2's proportions")
    most = max(found.options, key=lambda option: option.plan.model.params_nanogpt)
    assert most is found.chosen or any("more parameters, in other proportions" in sentence for sentence in found.why)
    assert "1 layers" not in to_markdown(document(found))


@pytest.mark.slow
def test_the_largest_model_of_transformers_may_have_its_blocks_checkpointed() -> None:
    keys = {"trainer": "hf", "model_type": "llama", "n_layer": 2, "n_embd": 256, "n_head": 4, "num_key_value_heads": 2,
            "vocab_size": 1024, "block_size": 256, "intermediate_size": 1024, "batch_size": 64}  # fmt: skip
    found = fit(keys, devices.custom(None, mib=800, tflops=50, gbs=500, watts=None), largest=True)
    configs = [option.plan.config for option in found.options]
    assert any(config.checkpoint_layers == config.n_layer for config in configs)
    for config in configs:
        assert config.checkpoint_layers in (0, config.n_layer)
        assert config.n_head % (config.num_key_value_heads or 1) == 0
