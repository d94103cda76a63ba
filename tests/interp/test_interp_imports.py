"""The interpreter's folders import one way, and no file comes round to itself."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import fkjit.interp

PACKAGE = Path(fkjit.interp.__file__).parent
MOST_FILES = 30  # of one folder

# A folder imports from rows above its own; those of one row do not know each other.
LAYERS = (
    {"core", "numbers"},
    {"spaces"},
    {"machine"},
    {"race", "ops"},
    {"memory", "wgmma"},
    {"threads", "copies", "mma"},
    {"opcode_files"},
    {"schedule"},
    {"launch"},
    {"__init__"},
)
RANK = {folder: rank for rank, layer in enumerate(LAYERS) for folder in layer}


def name_of(path: Path) -> str:
    """`machine.decode` of machine/decode.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """The interpreter's modules that a file imports anywhere, for types alone too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("fkjit.interp") for alias in node.names), path
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fkjit.interp"):
            module = (node.module or "").removeprefix("fkjit.interp").removeprefix(".")
            inside = {".".join(filter(None, (module, alias.name))) for alias in node.names}
            found |= {name if name in MODULES else module for name in inside}
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Of each module what it imports."""
    return {name: imported(path) for name, path in MODULES.items()}


def folder(name: str) -> str:
    return name.split(".")[0]


def test_every_folder_has_its_row():
    assert {folder(name) for name in MODULES} == set(RANK)
    assert sum(map(len, LAYERS)) == len(RANK)
    assert {name for names in graph().values() for name in names} <= set(MODULES)


def test_folders_import_one_way():
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if folder(name) != folder(other) and RANK[folder(other)] >= RANK[folder(name)]
    ]
    assert wrong == []


def test_no_file_comes_round_to_itself():
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names the files


def test_no_folder_is_crowded():
    for each in {path.parent for path in MODULES.values()}:
        assert len(list(each.glob("*.py"))) <= MOST_FILES, each
