"""PTX declarations: variables with their initial bytes, and the heads of functions."""

from __future__ import annotations

import re
from dataclasses import replace

from fkjit.errors import InterpreterError
from fkjit.interp.core.ptx import SIZE, Function, Variable

_VARIABLE = re.compile(
    r"((?:\.(?:visible|weak|extern|common)\s+)*)\.(shared|global|const|local|param)\s+"
    r"(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?(?:\.(v[24])\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s*(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$%]+)\s*"
    r"((?:\[\s*\d*\s*\]\s*)*)\s*(?:=\s*(.*))?$",
    re.S,
)
_VALUE = re.compile(
    r"(?P<float>0[fFdD][0-9a-fA-F]+)|(?P<int>-?(?:0[xX][0-9a-fA-F]+|\d+)U?)"
    r"|(?:generic\()?(?P<sym>[A-Za-z_$%][\w$]*)\)?(?:\s*\+\s*(?P<add>-?\d+))?"
)


def variable(text: str) -> Variable:
    """`.extern .shared .align 16 .b8 smem[]`, `.global .u32 n = 64`, `.param .u64 p`, …"""
    match = _VARIABLE.match(" ".join(text.split()))
    if not match:
        raise InterpreterError(f"interpreter: the PTX declaration {text!r} cannot be read")
    linkage, space, align, vector, kind, name, dims, init = match.groups()
    if kind not in SIZE:
        raise InterpreterError(f"interpreter: the PTX type .{kind} of {name!r} is not known")
    sizes = [int(dim or 0) for dim in re.findall(r"\[\s*(\d*)\s*\]", dims)]
    element = SIZE[kind] * (int(vector[1]) if vector else 1)
    data, relocations = _initial(init or "", SIZE[kind])
    if sizes and sizes[0] == 0 and data:
        sizes[0] = len(data) // element
    size = element
    for count in sizes:
        size *= count
    external = "extern" in linkage
    return Variable(name, space, int(align or element), size, data, relocations, external)


def _initial(text: str, width: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
    """The bytes of an initialiser and the addresses that have to be filled in."""
    data, relocations = bytearray(), []
    for match in _VALUE.finditer(text):
        value = 0
        if match["float"]:
            value = int(match["float"][2:], 16)
        elif match["int"]:
            value = int(match["int"].rstrip("U"), 0)
        else:
            relocations.append((len(data), match["sym"], int(match["add"] or 0)))
        data += (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return bytes(data), tuple(relocations)


def renamed(declared: Variable, name: str) -> Variable:
    """The same variable under another name."""
    return replace(declared, name=name)


def _parameters(text: str) -> list[Variable]:
    return [variable(part.strip()) for part in re.split(r",(?![^\[(]*[\])])", text) if part.strip()]


def function(head: str) -> Function:
    """`.visible .entry name(params) .maxntid 128, 1, 1` or `.func (result) name(params)`."""
    head = " ".join(head.split())
    match = re.search(
        r"\.(entry|func)\s*(\([^)]*\))?\s*([\w$]+)\s*(\((?:[^()]|\([^()]*\))*\))?", head
    )
    if not match:
        raise InterpreterError(f"interpreter: the PTX function head {head!r} cannot be read")
    kind, results, name, params = match.groups()
    threads = re.search(r"\.(?:maxntid|reqntid)\s+([\d\s,]+)", head)
    count = None
    if threads:
        count = 1
        for part in threads[1].split(","):
            count *= int(part or 1)
    dims = re.search(r"\.reqnctapercluster\s+([\d\s,]+)", head)
    x, y, z = (*map(int, dims[1].split(",")), 1, 1)[:3] if dims else (1, 1, 1)
    return Function(
        name=name,
        entry=kind == "entry",
        params=_parameters((params or "()")[1:-1]),
        results=_parameters((results or "()")[1:-1]),
        max_threads=count,
        cluster=(x, y, z) if dims else None,
    )
