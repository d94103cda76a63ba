"""The suite's families of operations, each a folder: where its files are found."""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from pathlib import Path

FAMILIES = ("attention", "gemm", "norm", "reduce", "rope", "kv", "moe", "quantize", "elementwise")

SUITE = Path(__file__).resolve().parents[1]  # the folder that holds the families
_PACKAGE = __name__.rpartition(".core.")[0]  # "bench", or "fkjit._bench" in a wheel


@lru_cache(maxsize=8)
def modules(prefix: str) -> dict[str, str]:
    """The families' modules `<prefix><name>`: name -> what imports it, by name."""
    found = {}
    for family in FAMILIES:
        for module in pkgutil.iter_modules([str(SUITE / family)]):
            if module.name.startswith(prefix):
                found[module.name.removeprefix(prefix)] = f"{_PACKAGE}.{family}.{module.name}"
    return dict(sorted(found.items()))
