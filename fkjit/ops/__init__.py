"""The operations of fkjit, a folder a family. `load()` registers all kernels and the user's own."""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from fkjit import spec
from fkjit.errors import ParameterError
from fkjit.settings import Settings, settings

# Every module that registers kernels, in the order in which kernels are listed: a bare op name
# means the op's first kernel. A module that is not here is not loaded (tests/op/test_registry.py).
KERNELS = (
    "elementwise.vector_add",
    "reduce.kernels",
    "norm.kernels",
    "norm.kernels_backward",
    "rope.kernels",
    "kv.append",
    "kv.copy",
    "kv.read",
    "kv.slots",
    "kv.rope_append_kernels",
    "moe.route",
    "moe.regroup",
    "moe.route_and_regroup",
    "moe.rows",
    "attention.kernels_sm90",
    "attention.kernels",
    "attention.feature_kernels",
    "attention.decode.kernels",
    "attention.merge.kernels",
    "attention.backward.registered",
)


@lru_cache(maxsize=1)
def load() -> None:
    """Import every module of kernels, so that the registry is complete; once a process."""
    modules = [f"{__name__}.{name}" for name in KERNELS]
    for module in modules:
        import_module(module)
    spec.arrange(modules)
    for folder in settings().kernel_path:
        load_folder(folder)


def load_folder(folder: Path) -> list[str]:
    """Run every `*.py` of a folder of the user's kernels; each registers its own specs.

    Returns the names of the modules. ParameterError when the folder is not there, and when a module
    raises on import: it names the file and what was raised, which is its cause.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise ParameterError(
            f"{Settings.variable('kernel_path')}: {folder} is not a folder of kernels"
        )
    names = []
    for path in sorted(folder.glob("*.py")):
        name = f"fkjit_user_{abs(hash(str(folder))):x}_{path.stem}"
        found = importlib.util.spec_from_file_location(name, path)
        if found is None or found.loader is None:
            continue
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ParameterError(f"{path}: {type(error).__name__}: {error}") from error
        names.append(name)
    return names
