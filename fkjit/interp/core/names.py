"""C++ symbols as the source has them: `_Z3addPKfPf` is add, `_ZZ3addPKfPfE4part` its part."""

from __future__ import annotations

import re


def source_name(symbol: str) -> str:
    """The last name in a mangled symbol, without namespaces and types; others stay as they are."""
    inner = re.match(r"_ZZ.*E(\d+)([A-Za-z_]\w*)$", symbol)  # a variable in a function
    if inner:
        return inner[2][: int(inner[1])]
    rest, name = re.sub(r"^_ZN?L?", "", symbol), symbol
    while rest != symbol and (match := re.match(r"L?(\d+)", rest)):
        end = match.end() + int(match[1])
        name, rest = rest[match.end() : end], rest[end:]
        if not symbol.startswith("_ZN"):
            break
    return name
