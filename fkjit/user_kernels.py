"""The user's own kernels: which files of a folder on FKJIT_KERNEL_PATH are run, and what fails."""

from __future__ import annotations

import ast
import importlib.util
import sys
import threading
from pathlib import Path

from fkjit.errors import ParameterError
from fkjit.settings import Settings

_failures: dict[Path, str] = {}
_running = threading.RLock()  # one thread loads; kernels' files that call fkjit find it loading


def load_folder(folder: Path) -> list[str]:
    """Run each `*.py` of a folder that registers kernels; other files there are left alone.

    A file that raises costs its own kernels: a line on stderr says so, and `failures` keeps it.
    Returns the names of the modules. ParameterError when the folder is not there.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise ParameterError(
            f"{Settings.variable('kernel_path')}: {folder} is not a folder of kernels"
        )
    with _running:
        running = _files_of_modules()
        paths = [path for path in sorted(folder.glob("*.py")) if path not in running]
        return [name for path in paths if registers(path) and (name := _run(path))]


def failures() -> list[str]:
    """Files that could not be run, each with what they raised."""
    return list(_failures.values())


def registers(path: Path) -> bool:
    """Whether a file uses fkjit's `register`: `fkjit.register(…)`, or imported by its name.

    What does not is a script that happens to stand beside kernels. A file that Python cannot read
    counts where it has the word: running it says what is wrong.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if "register" not in text:
        return False
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return True
    modules = {
        alias.asname or "fkjit"
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] == "fkjit"
    }
    return any(_names_register(node, modules) for node in nodes)


def _names_register(node: ast.AST, modules: set[str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        ours = (node.module or "").partition(".")[0] == "fkjit"
        return ours and any(alias.name == "register" for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "register"
        and ast.unparse(node.value).partition(".")[0] in modules
    )


def _files_of_modules() -> set[Path]:
    """Files that run already, the main script and imported ones: their kernels are theirs."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {Path(file).resolve() for file in files if isinstance(file, str)}


def _run(path: Path) -> str | None:
    """Run a file as a module of its own; its name, or None where it raised."""
    name = f"fkjit_user_{abs(hash(str(path.parent))):x}_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # a .py has both
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        first = (str(error) or repr(error)).partition("\n")[0]
        _failures[path] = f"{path}: {type(error).__name__}: {first}"
        print(f"fkjit: {_failures[path]}; its kernels are missing", file=sys.stderr)
        return None
    _failures.pop(path, None)
    return name
