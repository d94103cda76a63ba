"""Imports point one way, by folder and by file, and `import fkjit` brings nothing along."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fkjit"
SOURCES = ("fkjit", "bench", "kernels_cu", "templates")
MOST_FILES, MOST_LINES = 30, 400

# Of fkjit: a folder or module may import from rows above its own, and from itself.
LAYERS = (
    {"__init__"},
    {"terminal"},
    {"errors", "symbolic", "types"},
    {"paths", "arch", "arguments"},
    {"settings"},
    {"spec", "messages", "occupancy", "scaffold"},
    {"cache"},
    {"jit", "tuning", "numerics", "user_kernels"},
    {"interp"},
    {"sanitizer"},
    {"runtime"},
    {"cpu"},
    {"ops"},
    {"distributed"},
    {"api", "compat", "device", "warm_calls", "warm_worker", "pytest_plugin"},
    {"warming", "warm_record", "replay"},
    {"models"},
    {"playground"},
    {"gallery"},
    {"cli"},
    {"__main__"},
)
# Of fkjit/ops: every family knows `op`, and of the other families only these.
FAMILIES = {
    "attention": {"kv", "quantize", "rope"},
    "elementwise": set(),
    "gemm": {"quantize"},  # fkjit.linear of a QuantizedTensor, and nothing else
    "kv": {"rope"},
    "moe": {"gemm"},
    "grouped": {"gemm", "moe", "quantize"},
    "norm": set(),
    "quantize": {"gemm", "kv"},
    "reduce": set(),
    "rope": set(),
    "step": {"gemm", "kv", "rope"},
}
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
HEAVY = ("cupy", "torch", "jinja2", "typer", "rich", "ml_dtypes", "filelock", "platformdirs")
USES_CUPY = {"jit", "runtime", "ops", "cli", "replay"}
USES_TERMINAL = {"cli"}  # typer or rich


def name_of(path: Path) -> str:
    """`fkjit.ops.norm.call` of fkjit/ops/norm/call.py; a package has its `__init__`'s name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


@cache
def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Dotted names of what a module imports, not for types alone; without `everywhere`, outside
    functions only. The name of a module of ours in a string counts: for `import_module`."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            found |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
        elif isinstance(node, ast.Constant) and str(node.value).count(".") > 1:
            found |= {node.value} & MODULES.keys()
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if not is_type_checking(node) and (everywhere or not inside):
            nodes += ast.iter_child_nodes(node)
    return found


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is, or is in."""
    inside = name.rpartition(".")[0]
    return name if name in MODULES else inside if inside in MODULES else None


@cache
def graph() -> dict[str, set[str]]:
    """File to files; what fkjit/__init__ has are names, each imported when it is asked for."""
    return {
        name: {module_of(found) for found in imports(path)} - {name, None}
        for name, path in MODULES.items()
        if name != "fkjit"
    }


def child(name: str, package: str) -> str:
    """`spec` of `fkjit.spec`, `ops` of `fkjit.ops.op.op`; `__init__` of the package itself."""
    rest = name.removeprefix(package).removeprefix(".")
    return rest.partition(".")[0] or "__init__"


def edges(package: str) -> set[tuple[str, str, str, str]]:
    """(child, child it imports from, file, file) of a package, of different children."""
    inside = {n: child(n, package) for n in MODULES if f"{n}.".startswith(f"{package}.")}
    return {
        (inside[name], inside[other], name, other)
        for name, others in graph().items()
        for other in others
        if name in inside and other in inside and inside[name] != inside[other]
    }


def sources() -> list[Path]:
    kinds = (".py", ".cu", ".cuh")
    return [p for top in SOURCES for p in (ROOT / top).rglob("*") if p.suffix in kinds]


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_stands_in_one_layer_and_every_family_in_the_table():
    assert {child(name, "fkjit") for name in MODULES} <= set(RANK)
    assert sum(map(len, LAYERS)) == len(RANK)
    folders = {path.name for path in (PACKAGE / "ops").iterdir() if (path / "__init__.py").exists()}
    assert folders == {*FAMILIES, "op"}


def test_folders_of_fkjit_import_from_rows_above():
    wrong = [
        f"{name} imports {found}" for a, b, name, found in edges("fkjit") if RANK[b] >= RANK[a]
    ]
    assert sorted(wrong) == []


def test_families_know_op_and_few_others():
    wrong = [
        f"{name} imports {found}"
        for family, other, name, found in edges("fkjit.ops")
        if other not in {"op"} | FAMILIES.get(family, set())
    ]
    assert sorted(wrong) == []


def test_no_file_comes_round_to_itself():
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names the files


def test_no_folder_is_crowded():
    files = Counter(path.parent for path in sources())
    assert {str(folder): n for folder, n in files.items() if n > MOST_FILES} == {}


def test_no_source_is_long():
    lines = {p: p.read_text().count("\n") for p in sources()}
    assert {str(path): n for path, n in lines.items() if n > MOST_LINES} == {}


@pytest.mark.parametrize("name", MODULES)
def test_only_the_modules_that_need_them_import_heavy_packages(name):
    own, path = child(name, "fkjit"), MODULES[name]
    names = {found.split(".")[0] for found in imports(path)}
    at_import = {found.split(".")[0] for found in imports(path, everywhere=False)}
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

    near = r"no attribute 'atention'; did you mean attention or AttentionCodes\? \(has: attention, "
    with pytest.raises(AttributeError, match=near):
        _ = fkjit.atention


def test_attention_leaves_the_modules_of_other_ops_alone():
    code = "import sys, fkjit.ops.attention.forward; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name.split(".")[-1] for name in done.stdout.split() if ".ops." in name]
    assert "attention" in loaded
    assert not [name for name in loaded if name.startswith(("decode", "kv_", "moe", "norm"))]
