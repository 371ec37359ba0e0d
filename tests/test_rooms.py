"""The rooms of the house and what each may import: arrows go one way, from a room to those above it in the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "oomph"

# Each room and the rooms it may import, all listed before it. Every room may import those of BASE.
MAY_IMPORT = {
    "config": (),
    "devices": (),
    "step": ("config", "devices"),
    "predict": ("config", "devices", "step"),
    "planning": ("config", "devices", "step", "predict"),
    "fitting": ("config", "devices", "step", "predict", "planning"),
    "data": ("config",),
    "training": ("config", "devices", "predict", "planning", "data"),
    "checking": ("config", "devices", "step", "predict", "planning", "data", "training"),
    "runs": ("config", "devices", "step", "predict", "planning", "fitting"),
    "report": ("config", "devices", "step", "predict", "planning", "fitting", "checking", "runs"),
    "web": ("config", "devices", "step", "predict", "planning", "fitting", "data", "checking", "runs", "report"),
    "cli": (
        "config", "devices", "step", "predict", "planning", "fitting", "data", "training", "checking", "runs", "report",
        "web",
    ),
}  # fmt: skip
BASE = {"errors", "units", "files", "display"}
FACE = {"__init__", "__main__"}  # the public face: may import every room
# (file, room) that the table does not allow, and why it is so.
EXCEPTIONS = {
    ("training/run.py", "report"): "prints the plan when a run starts",
}

TEST_FILES = {path.name for path in Path(__file__).parent.rglob("*.py")}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path, for_types: bool = True) -> Iterator[str]:
    """Names of oomph that the file imports, lazily too: "oomph.config.load.load"."""
    tree = parsed(file)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "oomph")


def room_of(module: str) -> str:
    """The room of a module: "config" of "oomph.config.load"; "" of "oomph" itself."""
    return ([*module.split("."), ""])[1]


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_every_arrow_of_the_table_points_up() -> None:
    rooms = list(MAY_IMPORT)
    for room, allowed in MAY_IMPORT.items():
        assert set(allowed) <= set(rooms[: rooms.index(room)]), room


def test_every_module_is_in_a_room_of_the_table() -> None:
    found = {file.relative_to(SOURCE).parts[0].removesuffix(".py") for file in files()}
    assert found == set(MAY_IMPORT) | BASE | FACE


@pytest.mark.parametrize("room", [*MAY_IMPORT, *sorted(BASE)])
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = {room, *MAY_IMPORT.get(room, ()), *BASE, ""}
    wrong = []
    for file in files():
        name = file.relative_to(SOURCE).as_posix()
        if name.split("/")[0].removesuffix(".py") != room:
            continue
        for module in imports(file):
            to = room_of(module).replace("__version__", "")
            if to not in allowed and (name, to) not in EXCEPTIONS:
                wrong.append(f"{name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_verb_of_the_command_imports_another() -> None:
    shared = {"main", "arguments", "output"}
    verbs = [file for file in files() if file.parent.name == "cli" and file.stem not in shared]
    wrong = [
        f"{file.stem} imports {module}"
        for file in verbs
        for module in imports(file)
        if room_of(module) == "cli" and module.split(".")[2] not in shared
    ]
    assert not wrong, "\n".join(wrong)


def test_renderers_know_nothing_of_plans() -> None:
    known = {
        file.stem: {module.rpartition(".")[0] for module in imports(file)}
        for file in files()
        if file.parent.name == "report" and file.stem in ("document", "terminal", "markdown", "svg")
    }
    assert all(modules <= {"oomph.report", "oomph.report.document"} for modules in known.values()), known


def test_no_report_plans() -> None:
    """A what-if is the caller's: a report takes plans, it makes none."""
    makers = {"oomph.planning.plan.plan", "oomph.planning.plan.without_returned_logits"}
    assert not [file.stem for file in files() if file.parent.name == "report" for m in imports(file) if m in makers]


def module_of(name: str, modules: dict[str, Path]) -> str:
    """The module that an imported name is or is part of."""
    return name if name in modules else name.rpartition(".")[0]


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files()
    }
    del modules["oomph"]  # it imports its public names when they are first used
    graph = {
        module: {
            to
            for name in imports(file, for_types=False)
            if (to := module_of(name, modules)) in modules and to != module
        }
        for module, file in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_the_page_on_the_architecture_names_every_folder_and_no_file_that_is_gone() -> None:
    page = (SOURCE.parents[1] / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.\w+)?)`", page)) | set(re.findall(r"(?<=[ (])[\w/]+/[\w]+", page))
    parts = {part for name in named for part in name.removesuffix(".py").split("/")}
    folders = {file.parent.name for file in SOURCE.rglob("__init__.py")} - {"oomph"}
    assert folders <= parts
    there = {path.name for path in SOURCE.rglob("*") if path.suffix in (".py", ".txt")}
    assert {name.split("/")[-1] for name in named if name.endswith((".py", ".txt"))} <= there | TEST_FILES


def test_a_type_name_means_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
