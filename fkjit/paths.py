"""Where fkjit's own CUDA sources are (beside the package in a checkout, inside it in a wheel), and
how its documents are called."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fkjit.errors import ToolchainError

HERE = Path(__file__).resolve().parent


@lru_cache(maxsize=1)
def source_root() -> Path:
    """The folder that holds `kernels_cu/` and `templates/`."""
    for candidate in (HERE / "_cuda", HERE.parent):
        if (candidate / "kernels_cu").is_dir() and (candidate / "templates").is_dir():
            return candidate
    raise ToolchainError(
        f"fkjit: its CUDA sources (kernels_cu/, templates/) are neither in {HERE / '_cuda'} nor in "
        f"{HERE.parent}; the installation is incomplete: pip install --force-reinstall fkjit"
    )


def document(name: str) -> str:
    """How help calls a page: "docs/BENCHMARKS.md"; an installed fkjit has no docs/ beside it."""
    beside = (HERE.parent / "docs" / name).is_file()
    return f"docs/{name}" if beside else f"docs/{name} of fkjit's sources"


def kernels_dir() -> Path:
    """The folder of every file with a `__global__`."""
    return source_root() / "kernels_cu"


def templates_dir() -> Path:
    """The folder of every file that kernels include."""
    return source_root() / "templates"
