"""Imports point one way, and `import fkjit` brings nothing along."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fkjit"

# A module may import from rows above its own, and from its own folder.
LAYERS = (
    {"__init__"},
    {"errors"},
    {"paths", "settings", "arch"},
    {"spec"},
    {"cache"},
    {"jit", "tuning"},
    {"interp"},
    {"sanitizer"},
    {"runtime"},
    {"cpu"},
    {"ops"},
    {"api", "compat", "device", "warm_worker", "pytest_plugin"},
    {"warming"},
    {"cli"},
)
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
HEAVY = ("cupy", "torch", "jinja2", "typer", "rich", "ml_dtypes", "filelock", "platformdirs")
USES_CUPY = {"jit", "runtime", "ops", "cli"}
USES_TERMINAL = {"cli"}  # typer or rich


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(path: Path, everywhere: bool = True) -> list[str]:
    """Dotted names of what a module imports; without `everywhere`, outside functions only."""
    found: list[str] = []
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            argument = node.args[0]
            found += [argument.value] if isinstance(argument, ast.Constant) else []
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if not is_type_checking(node) and (everywhere or not inside):
            nodes += ast.iter_child_nodes(node)
    return [name for name in found if isinstance(name, str)]


def layers_imported(path: Path) -> set[str]:
    found = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "fkjit" and len(parts) > 1:
            found.add(parts[1] if parts[1] in RANK else "__init__")
    return found


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_stands_in_one_layer():
    assert {layer_of(path) for path in modules()} <= set(RANK)
    assert sum(map(len, LAYERS)) == len(RANK)


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_up(path):
    own = layer_of(path)
    if own == "__init__":
        return
    for other in layers_imported(path) - {own}:
        assert RANK[other] < RANK[own], f"{own} imports {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_only_the_modules_that_need_them_import_heavy_packages(path):
    own = layer_of(path)
    names = {name.split(".")[0] for name in imports(path)}
    at_import = {name.split(".")[0] for name in imports(path, everywhere=False)}
    assert not names & {"tests", "bench"}
    assert not at_import & {"cupy", "torch", "jinja2"}
    assert "torch" not in names
    assert "cupy" not in names or own in USES_CUPY
    assert not names & {"typer", "rich"} or own in USES_TERMINAL


def test_importing_fkjit_imports_the_package_alone():
    loaded = python("import sys, fkjit; print(*sorted(m.split('.')[0] for m in sys.modules))")
    assert "fkjit" in loaded.split()
    assert not {*HEAVY, "numpy", "argparse", "asyncio"} & set(loaded.split())
    ours = python("import sys, fkjit; print(*[m for m in sys.modules if m.startswith('fkjit')])")
    assert ours.split() == ["fkjit"]


def test_looking_up_attention_brings_neither_a_framework_nor_the_commands():
    loaded = python("import sys, fkjit; fkjit.attention; print(*sys.modules)").split()
    assert "numpy" in loaded and "fkjit.ops.attention.forward" in loaded
    assert not {"cupy", "torch", "jinja2", "typer", "rich", "fkjit.interp"} & set(loaded)


def test_a_call_from_a_warm_cache_renders_nothing():
    code = (
        "import sys, numpy as np, fkjit\n"
        "x = np.ones((1, 1, 16, 32), np.float16)\n"
        "print(fkjit.attention(x, x, x, block=16).shape, *sys.modules)\n"
    )
    python(code)
    loaded = python(code)
    assert loaded.startswith("(1, 1, 16, 32) ")
    assert not {"jinja2", "torch", "typer", "rich"} & set(loaded.split())


def test_public_names_are_what_they_say_whatever_was_imported_before():
    code = (
        "import fkjit, types, sys\n"
        "from fkjit import ops\n"
        "import fkjit.warming, fkjit.api, fkjit.cli.app, fkjit.cli.demo\n"
        "ops.load()\n"
        "print([n for n in fkjit.__all__ if not callable(getattr(fkjit, n))])\n"
        "print(fkjit.errors.ParameterError.__name__, set(fkjit.__all__) <= set(dir(fkjit)))\n"
    )
    assert python(code) == "[]\nParameterError True\n"


def test_an_unknown_name_lists_the_public_ones():
    import fkjit

    with pytest.raises(AttributeError, match=r"no attribute 'atention' \(has: attention, "):
        _ = fkjit.atention


def test_attention_leaves_the_modules_of_other_ops_alone():
    code = "import sys, fkjit.ops.attention.forward; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name.split(".")[-1] for name in done.stdout.split() if ".ops." in name]
    assert "attention" in loaded
    assert not [name for name in loaded if name.startswith(("decode", "kv_", "moe", "norm"))]
