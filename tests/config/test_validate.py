"""What a config may be, and that everything wrong with it is said at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.config import TrainConfig, describe_keys, from_dict, validate
from oomph.config.keys import keys
from oomph.config.programs import EAGER
from oomph.config.values import coerce
from oomph.devices import find
from oomph.errors import InputError, Problem
from oomph.fitting.space import programs
from oomph.units import parse_count


def refused(**values: object) -> list[Problem]:
    with pytest.raises(InputError) as caught:
        from_dict(values)
    return list(caught.value.problems)


def test_the_defaults_are_sound() -> None:
    assert validate(TrainConfig()) == []


def test_every_key_describes_itself() -> None:
    described = describe_keys()
    assert [key.name for key in described] == list(TrainConfig.__struct_fields__)
    for key in described:
        assert key.description
        assert key.allowed
        assert key.whose in ("nanogpt", "oomph")
        assert key.default is None or not isinstance(coerce(key, key.default, "default"), Problem)


def test_nanogpts_keys_are_the_thirty_three_of_its_train_py() -> None:
    assert sum(key.whose == "nanogpt" for key in describe_keys()) == 33


def test_all_problems_are_said_at_once() -> None:
    found = refused(n_layer=0, dropout=1.0, dtype="bf16", device="gpu", torch_version="new", compile="yes", n_layr=1)
    assert len(found) == 7


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"n_embd": 770}, "768 or 780"),
        ({"n_embd": 5}, "12"),
        ({"gradient_accumulation_steps": 5, "world_size": 2}, "a multiple of 2"),
        ({"checkpoint_layers": 13}, "n_layer = 12"),
        ({"return_logits": True, "loss_chunk": 128}, "loss_chunk = 0"),
    ],
)
def test_values_are_held_against_each_other(values: dict[str, object], allowed: str) -> None:
    (problem,) = refused(**values)
    assert allowed in str(problem)


def test_a_value_wrong_in_itself_is_not_judged_with_others() -> None:
    assert len(refused(n_head=0, n_embd=770)) == 1


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("n_layer", 10_001),
        ("n_embd", 1_000_001),
        ("block_size", 100_000_001),
        ("batch_size", 10_000_001),
        ("vocab_size", 2**32 + 1),
        ("vocab_size", 0),
        ("eval_iters", 0),
        ("log_interval", 0),
        ("max_iters", 0),
        ("max_iters", 10**400),
        ("learning_rate", 10**400),
        ("learning_rate", math.inf),
        ("beta2", 1),
        ("dropout", -0.1),
        ("n_layer", True),
        ("n_layer", None),
        ("bias", 2),
        ("bias", "True"),
        ("out_dir", 3),
        ("out_dir", "a\nb"),
        ("out_dir", "x" * 5000),
        ("device", "cuda:x"),
        ("torch_version", "2"),
        ("trainer", "nanoGPT"),
        ("init_from", "gpt3"),
        ("n_layer", [1]),
        ("n_layer", {}),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_a_problem(key: str, bad: object) -> None:
    (problem,) = refused(**{key: bad})
    assert problem.allowed
    assert len(str(problem)) < 400


def test_a_choice_misspelt_names_the_nearest() -> None:
    (problem,) = refused(dtype="bfloat")
    assert problem.nearest == "bfloat16"


@pytest.mark.parametrize("good", ["2.4", "2.13.0", "2.4.1+cu121"])
def test_torch_versions_are_taken_as_torch_writes_them(good: str) -> None:
    assert from_dict({"torch_version": good}).config.torch_version == good


@given(st.sampled_from(sorted(keys())), st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()))
def test_a_value_is_taken_without_loss_or_is_a_problem(name: str, value: object) -> None:
    key = keys()[name]
    result = coerce(key, value, "here")
    if isinstance(result, Problem):
        assert str(result).startswith("here: ")
    elif result is not None:
        assert type(result) is key.kind
        assert result == value or (isinstance(value, str) and parse_count(value) == result)


@given(st.integers(0, 10**9), st.sampled_from("kMBT"))
def test_a_count_with_a_suffix_is_exact(number: int, suffix: str) -> None:
    scale = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}[suffix]
    assert parse_count(f"{number}{suffix}") == number * scale
    assert parse_count(f"{number}.25{suffix}") == number * scale + scale // 4


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5])
def test_a_share_that_must_be_more_than_0_and_at_most_1_is_held_to_both(value: float) -> None:
    with pytest.raises(InputError) as error:
        from_dict({"partial_rotary_factor": value})
    assert [problem.allowed for problem in error.value.problems] == ["a number of more than 0, at most 1"]


@pytest.mark.parametrize("trainer", EAGER)
def test_programs_described_only_eagerly_are_refused_compiled(trainer: str) -> None:
    settings = {"trainer": trainer, "model_type": "llama", "batch_size": 1, "block_size": 512}
    found = [problem.found for problem in refused(**settings, compile=True)]
    assert f"trainer = {trainer!r}, compile = True" in found
    assert programs(from_dict(settings), find("RTX 4090"))[trainer].compile == (False,)
