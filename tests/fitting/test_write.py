"""`--write`: the user's own file with just the changed lines changed, and it runs as it is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oomph
from oomph import devices
from oomph.errors import InputError
from oomph.fitting.edit import correct, set_key
from oomph.fitting.fit import fit
from oomph.fitting.result import Fit, Option
from oomph.fitting.space import changes_between, with_changes
from oomph.fitting.write import check_target, write_config

OLD = {"batch_size": 16, "gradient_accumulation_steps": 32, "block_size": 1024}
NEW = OLD | {"batch_size": 8, "gradient_accumulation_steps": 64}
TRAIN_GPT2 = """\
# these make the total batch size be ~0.5M
# 24 batch size * 1024 block size * 5 gradaccum * 4 GPUs = 491,520
batch_size = 24
block_size = 1024
gradient_accumulation_steps = 5 * 4

n_embd=256 # narrow
n_head = 4
n_layer = 2
"""


def changed_lines(before: str, after: str) -> list[tuple[str, str]]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return [(old, new) for old, new in pairs if old != new]


def test_only_the_changed_lines_of_the_users_file_change_and_its_comment_is_made_true(
    run_d: Fit, example: Path, tmp_path: Path
) -> None:
    option = next(each for each in run_d.options if each.name == "half the micro-batch")
    target = tmp_path / "fits.py"
    write_config(target, run_d, option)
    assert changed_lines(example.read_text(), target.read_text()) == [
        (
            "batch_size = 16                  # sequences to one micro-step",
            "batch_size = 8                   # sequences to one micro-step",
        ),
        ("gradient_accumulation_steps = 32", "gradient_accumulation_steps = 64"),
        (
            "block_size = 1024                # 16 * 32 * 1024 = 524,288 tokens to one optimizer step",
            "block_size = 1024                # 8 * 64 * 1024 = 524,288 tokens to one optimizer step",
        ),
    ]
    assert len(target.read_text().splitlines()) == len(example.read_text().splitlines())


@pytest.mark.parametrize("name", ["option.py", "option.toml"])
def test_every_option_is_read_back_as_it_was_planned(run_d: Fit, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    for option in run_d.options:
        write_config(target, run_d, option)
        again = oomph.plan(target, "RTX 4070")
        assert again.config == option.plan.config
        assert again.memory.total_mib == option.plan.memory.total_mib
    assert list(tmp_path.iterdir()) == [target]


def test_a_toml_file_keeps_its_comments_and_its_order(tmp_path: Path) -> None:
    source = tmp_path / "run.toml"
    source.write_text(
        'dataset = "a # b"  # not a comment before this one\n'
        "batch_size = 64  # 64 * 8 = 512 sequences\n"
        "gradient_accumulation_steps = 8\n"
        "n_layer = 2\nn_head = 4\nn_embd = 256\n"
    )
    found = fit(source, "RTX 4070")
    option = next(each for each in found.options if each.name == "an eighth of the micro-batch")
    write_config(source, found, option)
    assert source.read_text().splitlines()[:3] == [
        'dataset = "a # b"  # not a comment before this one',
        "batch_size = 8   # 8 * 64 = 512 sequences",
        "gradient_accumulation_steps = 64",
    ]
    assert oomph.plan(source, "RTX 4070").config == option.plan.config


def test_a_product_over_devices_stays_one_in_the_value_and_in_the_comment(tmp_path: Path) -> None:
    source = tmp_path / "train_gpt2.py"
    source.write_text(TRAIN_GPT2)
    found = fit(source, "RTX 4070")
    option = next(each for each in found.options if each.name == "half the micro-batch")
    write_config(tmp_path / "new.py", found, option)
    lines = (tmp_path / "new.py").read_text().splitlines()
    assert lines[1] == "# 12 batch size * 1024 block size * 10 gradaccum * 4 GPUs = 491,520"
    assert lines[2] == "batch_size = 12"
    assert lines[4] == "gradient_accumulation_steps = 10 * 4"


def test_a_value_that_follows_from_another_is_left_to_follow(tmp_path: Path) -> None:
    source = tmp_path / "derived.py"
    source.write_text(
        "batch_size = 64\ngradient_accumulation_steps = 512 // batch_size\nn_embd = 256\nn_head = 4\nn_layer = 2\n"
    )
    found = fit(source, "RTX 4070")
    option = next(each for each in found.options if each.name == "an eighth of the micro-batch")
    write_config(tmp_path / "new.py", found, option)
    assert (tmp_path / "new.py").read_text() == source.read_text().replace("64", "8")


def test_keys_given_on_the_command_line_and_in_presets_are_written_too(tmp_path: Path) -> None:
    said = {"n_layer": "2", "batch_size": "32", "dropout": "0.1"}
    loaded = oomph.load_config(["gpt2-medium"], [(key, value, f"--{key}={value}") for key, value in said.items()])
    found = fit(loaded, "RTX 4070")
    assert found.chosen is not None
    for name in ("run.py", "run.toml"):
        write_config(tmp_path / name, found, found.chosen)
        again = oomph.plan(tmp_path / name, "RTX 4070").config
        assert again == found.chosen.plan.config
        assert (again.n_layer, again.n_embd, again.dropout) == (2, 1024, 0.1)


def test_a_key_set_in_a_branch_is_set_again_at_the_end(tmp_path: Path) -> None:
    source = tmp_path / "branch.py"
    shape = "n_embd = 256\nn_head = 4\nn_layer = 2\ngradient_accumulation_steps = 2\n"
    source.write_text(f"{shape}if n_embd > 128:\n    batch_size = 32\n")
    found = fit(source, "RTX 4070")
    option = next(each for each in found.options if each.name == "half the micro-batch")
    write_config(tmp_path / "new.py", found, option)
    text = (tmp_path / "new.py").read_text()
    assert "if n_embd > 128:\n    batch_size = 32\n" in text
    assert text.splitlines()[-1].startswith("batch_size = 16")
    assert oomph.plan(tmp_path / "new.py", "RTX 4070").config == option.plan.config


def halved_to(source: Path, target: Path) -> tuple[str, ...]:
    """Write half of the file's micro-batch there; the keys that it says were held."""
    found = fit(source, "RTX 4070")
    option = next(each for each in found.options if each.name == "half the micro-batch")
    held = write_config(target, found, option)
    assert oomph.plan(target, "RTX 4070").config == option.plan.config
    return held


MODEL = "n_embd = 256\nn_head = 4\nn_layer = 2\n"


def test_a_variable_of_the_files_own_is_changed_where_it_is_set(tmp_path: Path) -> None:
    source, target = tmp_path / "run.py", tmp_path / "new.py"
    source.write_text(f"{MODEL}bs = 32  # mine\nbatch_size = bs\ngradient_accumulation_steps = 64 // bs\n")
    assert halved_to(source, target) == ()
    assert target.read_text() == source.read_text().replace("bs = 32", "bs = 16")


@pytest.mark.parametrize(
    "lines",
    [
        "bs = 16\nbatch_size = bs * 2\ngradient_accumulation_steps = 2\n",
        "bs = 2\nbs = 32\nbatch_size = bs\ngradient_accumulation_steps = 64 // bs\n",
        "n = 2\nbatch_size = n\ngradient_accumulation_steps = n\n",
        "batch_size = 4\nif True:\n    batch_size = 32\ngradient_accumulation_steps = 2\n",
        "batch_size = 4\nbatch_size, gradient_accumulation_steps = 32, 2\n",
    ],
)
def test_a_value_with_no_plain_place_of_its_own_is_set_at_the_end(tmp_path: Path, lines: str) -> None:
    source, target = tmp_path / "run.py", tmp_path / "new.py"
    source.write_text(MODEL + lines)
    halved_to(source, target)
    assert "\nbatch_size = " in target.read_text().partition("# Set by oomph fit:")[2]


def test_a_key_that_was_worked_out_from_a_changed_one_is_held_and_named(tmp_path: Path) -> None:
    source, target = tmp_path / "run.py", tmp_path / "new.py"
    source.write_text(f"{MODEL}batch_size = 32\ngradient_accumulation_steps = 2\neval_iters = batch_size * 10\n")
    assert halved_to(source, target) == ("eval_iters",)
    assert "eval_iters = 320\n" in target.read_text()


def test_a_proposal_is_written_with_its_reasons(tmp_path: Path) -> None:
    found = fit({"dataset_tokens": 10**9}, "RTX 4070", hours=3)
    assert found.chosen is not None
    write_config(tmp_path / "new.py", found, found.chosen)
    text = (tmp_path / "new.py").read_text()
    assert "Chinchilla" in text
    assert oomph.plan(tmp_path / "new.py", "RTX 4070").config == found.chosen.plan.config


@pytest.mark.parametrize("name", ["config.yaml", "config", "missing/config.py"])
def test_a_file_that_cannot_be_written_is_refused_and_nothing_is_left(run_d: Fit, tmp_path: Path, name: str) -> None:
    assert run_d.chosen is not None
    with pytest.raises(InputError):
        write_config(tmp_path / name, run_d, run_d.chosen)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("comment", "corrected"),
    [
        ("# 16 * 32 * 1024 = 524,288 tokens", "# 8 * 64 * 1024 = 524,288 tokens"),
        ("# 16×32×1024 = 524288", "# 8×64×1024 = 524288"),
        ("# 16 x 32 = 512 sequences", "# 8 x 64 = 512 sequences"),
        ("# 16 sequences * 32 micro-steps = 512", "# 8 sequences * 64 micro-steps = 512"),
        ("# 32 accumulation * 16 batch = 512", "# 64 accumulation * 8 batch = 512"),
        ("# 16 * 32 = 500, roughly", "# 16 * 32 = 500, roughly"),
        ("# 3 * 7 = 21", "# 3 * 7 = 21"),
        ("# that is 16 * 32 * 1024 = 0.5M tokens", "# that is 8 * 64 * 1024 = 0.5M tokens"),
        ("# 16 * 32 * 1024 = ~512K tokens", "# 8 * 64 * 1024 = ~512K tokens"),
        ("# 16 * 32 * 1024 ≈ 0.52 million", "# 8 * 64 * 1024 ≈ 0.52 million"),
        ("# 16 * 32 * 1024 = 0.4M tokens", "# 16 * 32 * 1024 = 0.4M tokens"),
        ("# 16 * 32 * 1024 = 0.5", "# 16 * 32 * 1024 = 0.5"),
        ("# 0 * 16 = 0M", "# 0 * 16 = 0M"),
        (f"# 16 * {10**400} = 16M", f"# 16 * {10**400} = 16M"),
        ("# see page 16", "# see page 16"),
    ],
)
def test_a_comment_that_states_the_old_product_states_the_new_one(comment: str, corrected: str) -> None:
    assert correct(comment, OLD, NEW) == corrected


def test_a_product_that_becomes_another_number_gets_it() -> None:
    assert correct("# 16 * 32 * 1024 = 524_288", OLD, OLD | {"batch_size": 8}) == "# 8 * 32 * 1024 = 262_144"
    assert correct("# 16 * 32 * 1024 = 0.5M", OLD, OLD | {"batch_size": 8}) == "# 8 * 32 * 1024 = 0.26M"


@given(st.text(max_size=200))
def test_a_comment_is_never_changed_where_no_value_changes(comment: str) -> None:
    assert correct(comment, OLD, OLD) == comment


@given(st.integers(1, 10**6), st.booleans(), st.sampled_from(["", "  # why", "    # é × ü"]))
def test_a_value_is_set_where_it_stands_and_the_rest_is_kept(value: int, toml: bool, comment: str) -> None:
    text = f"# first é\nbatch_size = 12{comment}\nn_layer = 3\n"
    lines = set_key(text, toml, "batch_size", value).splitlines()
    assert lines[0] == "# first é"
    assert lines[1].startswith(f"batch_size = {value}")
    assert lines[1].endswith(comment.strip())
    assert lines[2] == "n_layer = 3"


SHAPE = "n_embd = 256\nn_head = 4\nn_layer = 2\ngradient_accumulation_steps = 2\n"


def halved(source: Path) -> bytes:
    """What is written over the file for half of its micro-batch."""
    found = fit(source, "RTX 4070")
    option = next(each for each in found.options if each.name == "half the micro-batch")
    write_config(source, found, option)
    assert oomph.plan(source, "RTX 4070").config == option.plan.config
    return source.read_bytes()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["run.py", "run.toml"])
def test_line_ends_and_a_byte_order_mark_are_kept(tmp_path: Path, name: str, mark: bytes) -> None:
    source = tmp_path / name
    before = mark + f"{SHAPE}batch_size = 32\n".replace("\n", "\r\n").encode()
    source.write_bytes(before)
    wanted = before.replace(b"batch_size = 32", b"batch_size = 16").replace(b"steps = 2", b"steps = 4")
    assert halved(source) == wanted


@pytest.mark.parametrize("odd", ["\f", "\u2028", "\x85", "\x1c"])
def test_letters_that_only_look_like_line_ends_do_no_harm(tmp_path: Path, odd: str) -> None:
    source = tmp_path / "run.py"
    head = f"# a{odd}b\n" + ("\f\n" if odd == "\f" else "")
    source.write_text(f"{head}{SHAPE}batch_size = 32  # 32 * 2 = 64\n", encoding="utf-8")
    text = halved(source).decode()
    assert text.startswith(head + SHAPE.replace("steps = 2", "steps = 4"))
    assert text.endswith("batch_size = 16  # 16 * 4 = 64\n")


@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_quoted_key_of_a_toml_file_is_changed_where_it_stands(tmp_path: Path, quote: str) -> None:
    source = tmp_path / "run.toml"
    source.write_text(f"{SHAPE}{quote}batch_size{quote} = 32\n")
    assert halved(source).decode().endswith(f"steps = 4\n{quote}batch_size{quote} = 16\n")


def test_another_option_is_written_under_its_own_name_and_oomph_needs_no_patch(run_d: Fit, tmp_path: Path) -> None:
    target = tmp_path / "other.toml"
    option = next(each for each in run_d.options if each.trainer == "oomph" and each is not run_d.chosen)
    write_config(target, run_d, option)
    text = target.read_text()
    assert text.startswith(f"# Option {run_d.options.index(option) + 1} of oomph fit")
    assert "patch" not in text


def test_an_error_names_the_users_file_and_no_temporary_one(tmp_path: Path) -> None:
    source = tmp_path / "run.toml"
    source.write_text(f"{SHAPE}batch_size = 32\n")
    found = fit(source, "RTX 4070")
    source.write_text(f"{SHAPE}batch_size = 32\nbatch_sise = 3\n")  # somebody edits it meanwhile
    assert found.chosen is not None
    with pytest.raises(InputError) as error:
        write_config(source, found, found.chosen)
    assert ".oomph-" not in str(error.value)
    assert "run.toml" in str(error.value)


def test_a_value_that_the_file_goes_on_to_multiply_is_set_at_its_end() -> None:
    text = set_key("batch_size = 8\nbatch_size *= 2\n", False, "batch_size", 4)
    assert text.startswith("batch_size = 8\nbatch_size *= 2\n")
    assert "batch_size = 4" in text


def test_a_comment_that_was_not_true_before_is_left_alone() -> None:
    stale = "# 12 batch size * 1024 block size * 5 gradaccum * 8 GPUs = 491,520"
    old = {"batch_size": 16, "gradient_accumulation_steps": 40, "block_size": 1024}
    new = old | {"batch_size": 10, "gradient_accumulation_steps": 64}
    assert correct(stale, old, new) == stale


def test_a_file_that_is_there_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "run.py"
    target.write_text("# mine\n")
    with pytest.raises(InputError, match="is there already"):
        check_target(target)
    check_target(target, overwrite=True)


def test_a_link_stays_one_and_the_file_behind_it_keeps_its_permissions(run_d: Fit, tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("# mine\n")
    real.chmod(0o600)
    link.symlink_to(real)
    write_config(link, run_d, run_d.options[0])
    assert link.is_symlink()
    assert "# mine" not in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o600


LARGER = {"n_layer": 27, "n_head": 19, "n_embd": 1216}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("heads_first.py", "n_layer = 12\nn_head = 12\nn_embd = 768\n"),
        ("width_first.py", "n_embd = 384\nn_head = 6\nn_layer = 6\n"),
        ("derived.py", "n_head = 6\nn_embd = 64 * n_head\nn_layer = n_head\n"),
        ("variable.py", "d = 6\nn_head = d\nn_embd = 64 * d\nn_layer = d\n"),
        ("heads_alone.py", "n_head = 6\n"),
        ("nothing.py", "# all as nanoGPT has it\n"),
        ("run.toml", "n_head = 5\nn_embd = 320\nn_layer = 6\n"),
    ],
)
def test_a_larger_model_is_written_whichever_way_the_file_sets_width_and_heads(
    tmp_path: Path, name: str, text: str
) -> None:
    source, target = tmp_path / name, tmp_path / f"larger{Path(name).suffix}"
    source.write_text(text)
    loaded = oomph.load_config([source])
    now = oomph.plan(loaded, "RTX 4070")
    for shape in (LARGER, {"n_layer": 61}, {"n_head": 38, "n_embd": 2432}):
        wanted = oomph.plan(with_changes(loaded, shape), "RTX 4070")
        option = Option("larger", changes_between(now.config, wanted.config), "different", wanted, 0.0, "", "")
        write_config(target, Fit(loaded, now, (option,), 0, None, 1, "", ()), option)
        assert oomph.plan(target, "RTX 4070").config == wanted.config


def test_width_and_heads_that_change_together_change_where_they_stand(tmp_path: Path) -> None:
    source = tmp_path / "run.py"
    shape = "n_embd = 256  # wide\nn_head = 4  # of 64\nn_layer = 4\n"
    source.write_text(f"{shape}compile = False\nblock_size = 128\nvocab_size = 512\nbatch_size = 2\n")
    found = fit(source, devices.custom("small", mib=900, tflops=20, gbs=300, watts=None), largest=True)
    assert found.chosen is not None
    config = found.chosen.plan.config
    write_config(source, found, found.chosen)
    assert source.read_text().splitlines()[:3] == [
        f"n_embd = {config.n_embd}  # wide",
        f"n_head = {config.n_head}  # of 64",
        f"n_layer = {config.n_layer}",
    ]


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("Qwen/Qwen3-0.6B", {"n_layer": "2"}),
        ("mistralai/Mistral-7B-v0.3", {"trainer": "torch", "n_layer": "2", "n_embd": "1024", "n_head": "8"}),
        ("google/gemma-3-1b-pt", {"n_layer": "2"}),
        ("nanochat-d4", {}),
        ("gpt2", {"trainer": "hf", "n_layer": "2"}),
        ("gpt2", {"trainer": "oomph", "n_layer": "2"}),
    ],
)
def test_an_option_of_any_program_is_read_back_as_it_was_planned(
    tmp_path: Path, source: str, keys: dict[str, str]
) -> None:
    found = fit(oomph.load_config([source], [(key, value, f"--{key}={value}") for key, value in keys.items()]), "4070")
    for option, name in itertools.product(found.options, ("option.py", "option.toml")):
        write_config(tmp_path / name, found, option)
        again = oomph.plan(tmp_path / name, "4070")
        assert again.config == option.plan.config
        assert again.memory.total_mib == option.plan.memory.total_mib
