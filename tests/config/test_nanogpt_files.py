"""nanoGPT's config files: read from their text, never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.config import LoadedConfig, load
from oomph.errors import InputError

# The settings of the seven config files nanoGPT ships: key values as published, in words of our own.
SHIPPED = {
    "train_gpt2": (
        "wandb_log = True\nwandb_project = 'owt'\nwandb_run_name='gpt2-124M'\n# half a million tokens a step\n"
        "batch_size = 12\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\nmax_iters = 600000\n"
        "lr_decay_iters = 600000\neval_interval = 1000\neval_iters = 200\nlog_interval = 10\nweight_decay = 1e-1\n",
        {"gradient_accumulation_steps": 40, "n_layer": 12, "n_embd": 768, "eval_interval": 1000, "vocab_size": 50304},
    ),
    "train_shakespeare_char": (
        "out_dir = 'out-shakespeare-char'\neval_interval = 250\neval_iters = 200\nlog_interval = 10\n"
        "always_save_checkpoint = False\nwandb_log = False\nwandb_project = 'shakespeare-char'\n"
        "wandb_run_name = 'mini-gpt'\ndataset = 'shakespeare_char'\ngradient_accumulation_steps = 1\nbatch_size = 64\n"
        "block_size = 256\nn_layer = 6\nn_head = 6\nn_embd = 384\ndropout = 0.2\nlearning_rate = 1e-3\n"
        "max_iters = 5000\nlr_decay_iters = 5000\nmin_lr = 1e-4\nbeta2 = 0.99\nwarmup_iters = 100\n",
        {"n_layer": 6, "n_embd": 384, "dropout": 0.2, "learning_rate": 1e-3, "beta2": 0.99, "block_size": 256},
    ),
    "finetune_shakespeare": (
        "import time\nout_dir = 'out-shakespeare'\neval_interval = 5\neval_iters = 40\nwandb_log = False\n"
        "wandb_project = 'shakespeare'\nwandb_run_name = 'ft-' + str(time.time())\ndataset = 'shakespeare'\n"
        "init_from = 'gpt2-xl'\nalways_save_checkpoint = False\nbatch_size = 1\ngradient_accumulation_steps = 32\n"
        "max_iters = 20\nlearning_rate = 3e-5\ndecay_lr = False\n",
        {"n_layer": 48, "n_head": 25, "n_embd": 1600, "vocab_size": 50257, "bias": True, "wandb_run_name": "gpt2"},
    ),
    **{
        "eval_" + name.replace("-", "_"): (
            f"batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = '{name}'\n",
            {"n_layer": layers, "n_head": heads, "n_embd": width, "eval_only": True, "bias": True, "batch_size": 8},
        )
        for name, layers, heads, width in [
            ("gpt2", 12, 12, 768),
            ("gpt2-medium", 24, 16, 1024),
            ("gpt2-large", 36, 20, 1280),
            ("gpt2-xl", 48, 25, 1600),
        ]
    },
}


def read(folder: Path, text: str, *more: str) -> LoadedConfig:
    paths = []
    for number, content in enumerate((text, *more)):
        path = folder / f"run{number}.py"
        path.write_text(content)
        paths.append(path)
    return load(paths)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(folder, text)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", SHIPPED)
def test_each_config_nanogpt_ships_is_read_with_its_values(tmp_path: Path, name: str) -> None:
    text, expected = SHIPPED[name]
    config = read(tmp_path, text).config
    assert {key: getattr(config, key) for key in expected} == expected


def test_a_run_name_made_of_the_clock_is_passed_over_with_its_line(tmp_path: Path) -> None:
    (note,) = read(tmp_path, SHIPPED["finetune_shakespeare"][0]).notes
    assert "run0.py:7" in note
    assert "time.time()" in note


def test_each_value_says_its_line(tmp_path: Path) -> None:
    loaded = read(tmp_path, "# a comment\nbatch_size = 4\n")
    assert loaded.sources["batch_size"] == f"{tmp_path / 'run0.py'}:2"
    assert loaded.sources["n_layer"] == "default"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("n_layer: int = 3", "n_layer", 3),
        ("n_layer = 3\nn_layer *= 2", "n_layer", 6),
        ("n_head = n_layer = 4", "n_layer", 4),
        ("n_layer, n_head = 6, 8", "n_layer", 6),
        ("n_layer, n_head = 6, 8\nn_layer, n_head = n_head, n_layer", "n_layer", 8),
        ("shape = (6, 8, 512)\nn_layer, n_head, n_embd = shape", "n_embd", 512),
        ("gpus = 8\ngradient_accumulation_steps = 5 * gpus", "gradient_accumulation_steps", 40),
        ("lr_decay_iters = max_iters", "lr_decay_iters", 600000),
        ("min_lr = learning_rate / 10", "min_lr", 6e-4 / 10),
        ("max_iters = 10 if n_layer > 6 else 20", "max_iters", 10),
        ("debug = True\nif debug:\n    max_iters = 10\nelse:\n    max_iters = 20", "max_iters", 10),
        ("if __name__ == '__main__':\n    n_layer = 2", "n_layer", 2),
        ("out_dir = f'out-{n_layer}x{n_embd:05d}'", "out_dir", "out-12x00768"),
        ("n_layer = max(1, min(4, round(7.6)))", "n_layer", 4),
        ("n_layer = 12.0", "n_layer", 12),
        ("max_iters = 1e5", "max_iters", 100_000),
        ("compile = 0", "compile", False),
        ("dropout = 0", "dropout", 0.0),
        ("import torch\nn_layer = 5", "n_layer", 5),
        ("'''a docstring'''\nn_layer = 5", "n_layer", 5),
        ("\ufeffn_layer = 5", "n_layer", 5),
        ("n_layer = 5\r\nn_head = 6\r\n", "n_layer", 5),
        ("sizes = ['s', 'm']\nn_layer = [6, 12][len(sizes) - 1]", "n_layer", 12),
        ("compile = not False and (1 < 2 < 3)", "compile", True),
    ],
)
def test_what_people_write_in_configs_is_worked_out(tmp_path: Path, text: str, key: str, value: object) -> None:
    assert getattr(read(tmp_path, text).config, key) == value


def test_dtype_that_depends_on_the_card_is_unsaid(tmp_path: Path) -> None:
    line = "dtype = 'bfloat16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else 'float16'"
    loaded = read(tmp_path, line)
    assert loaded.config.dtype is None
    assert not loaded.said("dtype")


def test_device_that_depends_on_the_machine_is_cuda_with_a_note(tmp_path: Path) -> None:
    loaded = read(tmp_path, "device = 'cuda' if torch.cuda.is_available() else 'cpu'")
    assert loaded.config.device == "cuda"
    assert "device" in loaded.notes[0]


def test_a_misspelt_key_is_a_problem_with_the_nearest(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "n_layer = 4\nbatch_sise = 8")
    assert "run0.py:2" in problem
    assert "batch_size" in problem


def test_all_misspelt_keys_are_named_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "batch_sise = 8\nn_layr = 3\nN_EMBD = 64\n_drop = 1")) == 4


def test_a_misspelt_key_that_only_a_print_reads_is_noted(tmp_path: Path) -> None:
    notes = read(tmp_path, "n_layers = 3\nprint(n_layers)").notes
    assert any("n_layers" in note and "nearest key is n_layer)" in note for note in notes)


@pytest.mark.parametrize(
    "text",
    [
        "batch_size = int(os.environ['BATCH'])",
        "for i in range(3):\n    batch_size = i",
        "while True:\n    batch_size += 1",
        "try:\n    batch_size = 1\nexcept Exception:\n    pass",
        "with open('x') as f:\n    batch_size = 4",
        "def f():\n    global batch_size\n    batch_size = 4\nf()",
        "if torch.cuda.is_available():\n    batch_size = 4",
        "x = (batch_size := 4)\nn_layer = x",
        "from settings import batch_size",
        "batch_size, *rest = 1, 2, 3",
        "del batch_size",
        "batch_size = undefined * 2",
        "batch_size = 'a' + 5",
        "batch_size = 1 / 0",
        "batch_size = [[1]]",
    ],
)
def test_a_needed_key_that_only_running_could_tell_is_a_problem(tmp_path: Path, text: str) -> None:
    assert any("batch_size" in problem for problem in problems(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    ["exec(open('more.py').read())", "globals().update(a=1)", "from config.base import *", "x = vars()\nn_layer = x"],
)
def test_code_that_could_set_any_key_is_a_problem(tmp_path: Path, text: str) -> None:
    assert any("could set any key" in problem for problem in problems(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "for i in range(3):\n    print(i)",
        "def helper(batch_size):\n    n_layer = 3\n    return n_layer",
        "class Settings:\n    batch_size = 3",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "assert n_layer == 12",
        "import os\nos.environ['A'] = 'b'",
        "if torch.cuda.is_available():\n    print('card')",
    ],
)
def test_code_that_sets_no_key_is_passed_over_with_a_note(tmp_path: Path, text: str) -> None:
    loaded = read(tmp_path, text)
    assert len(loaded.notes) == 2
    assert "skipped" in loaded.notes[0]
    assert "sets no key" in loaded.notes[1]
    assert set(loaded.sources.values()) == {"default"}


def test_an_override_replaces_a_value_that_could_not_be_told(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text("batch_size = int(os.environ['BATCH'])")
    assert load([path], [("batch_size", "4", "--batch_size=4")]).config.batch_size == 4


TRAIN_PY = (
    "import torch\nfrom model import GPT\nbatch_size = 6\nwindow = 128\nuse_rope = True\nn_layer = 8\n"
    "config_keys = [k for k, v in globals().items()]\nexec(open('configurator.py').read())\n"
    "for batch_size in range(9):\n    n_layer = batch_size\nmisspelt_nonsense = 3\n"
)


def test_a_whole_train_py_gives_its_defaults_and_nothing_after_them(tmp_path: Path) -> None:
    loaded = read(tmp_path, TRAIN_PY)
    assert (loaded.config.batch_size, loaded.config.n_layer) == (6, 8)
    assert len(loaded.notes) == 2  # window and use_rope


def test_a_forks_own_keys_may_be_set_once_its_train_py_is_named(tmp_path: Path) -> None:
    loaded = read(tmp_path, TRAIN_PY, "use_rope = False\nblock_size = window * 4")
    assert loaded.config.block_size == 512
    with pytest.raises(InputError):
        read(tmp_path, "use_rope = False")


def test_a_forks_own_keys_that_change_a_step_are_known_where_they_are_on(tmp_path: Path) -> None:
    text = "n_layer = 2\nn_kv_head = 4\nuse_checkpoint = False\nmy_note = 'x'\nuse_rope = False\nconfig_keys = []\n"
    assert read(tmp_path, text).foreign == ("n_kv_head",)
    assert read(tmp_path, text, "use_rope = True").foreign == ("n_kv_head", "use_rope")


def test_a_train_pys_own_shape_raises_no_note_beside_init_from(tmp_path: Path) -> None:
    loaded = read(tmp_path, "n_layer = 12\nconfig_keys = []\n", "init_from = 'gpt2-xl'")
    assert loaded.config.n_layer == 48
    assert loaded.notes == []


def test_an_empty_file_changes_nothing_and_says_so(tmp_path: Path) -> None:
    loaded = read(tmp_path, "")
    assert "empty" in loaded.notes[0]
    assert set(loaded.sources.values()) == {"default"}


@pytest.mark.parametrize(
    "text",
    [
        "n_layer = 10**10**10",
        "n_layer = 1 << 10**9",
        "out_dir = 'a' * 10**9",
        "out_dir = f'{1:999999999}'",
        "n_layer = round(5, -10**9)",
        "n_layer = 0x" + "f" * 10_000,
        "n_layer = " + "9" * 10_000,
        "n_layer = " + "(" * 1000,
        "n_layer = " + "-" * 100_000 + "1",
        "n_layer = a" + ".a" * 50_000,
        "n_layer = " + "1+" * 50_000 + "1",
        "a = [1]\nb = [1]\n" + "a = [a, a]\nb = [b, b]\n" * 100 + "eval_only = a == b",
        "n_layer = int('9' * 900)",
        "n_layer = (-1) ** 0.5",
        "n_layer = 1e308 * 10",
        "x" * 300_000,
        "if n_layer == 0:\n  pass\n" + "elif n_layer == 1:\n  n_head = 1\n" * 2000,
    ],
)
def test_sizes_and_depths_out_of_all_bounds_are_problems(tmp_path: Path, text: str) -> None:
    for problem in problems(tmp_path, text):
        assert len(problem) < 600


def test_a_syntax_error_says_its_line(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "n_layer = 3\nn_head = = 4\n")
    assert "run0.py:2" in problem
    assert "not Python" in problem
