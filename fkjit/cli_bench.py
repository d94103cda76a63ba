"""`fkjit bench`: hands over to the suite, which is no part of what kernels are called through."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from fkjit.paths import HERE


def suite() -> str:
    """The suite's package: `bench` beside fkjit in a checkout, `fkjit._bench` in a wheel."""
    if (HERE / "_bench").is_dir():
        return "fkjit._bench"
    root = str(HERE.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return "bench"


def main(arguments: Sequence[str]) -> int:
    """Run the suite's command; its exit status."""
    return import_module(f"{suite()}.command").main(arguments)
