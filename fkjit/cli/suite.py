"""`fkjit bench`, `report`, `profile` and `tune` hand over to the benchmark suite.

No call of a kernel needs the suite, so nothing else in fkjit imports it.
"""

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


def main(command: str, arguments: Sequence[str]) -> int:
    """Run a command of the suite: "bench", "report", "profile", "tune"; its exit status."""
    module = "command" if command == "bench" else f"{command}.command"
    return import_module(f"{suite()}.{module}").main(arguments)
