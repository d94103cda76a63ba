"""The narrowest access to shared or global memory in a kernel."""

from __future__ import annotations

from fkjit.interp.core.ptx import SIZE, Function, Instruction

_WIDEST = 16


def narrowest(function: Function) -> int:
    """Bytes, 1 to 16: no two accesses of the kernel touch one unit of so many without a byte."""
    return min((_width(ins) for ins in function.instructions), default=_WIDEST)


def _width(ins: Instruction) -> int:
    name, op = ins.op[0], ins.op
    if name in ("ld", "ldu", "st", "atom", "red"):
        if any(part.split("::")[0] in ("local", "param", "const") for part in op[1:]):
            return _WIDEST
        vector = next((int(part[1:]) for part in op if part in ("v2", "v4", "v8")), 1)
        return min(SIZE.get(ins.type, 1) * vector, _WIDEST)
    if name == "cp" and op[1:2] == ("async",) and op[2] in ("ca", "cg"):
        return 4
    if name == "wmma":  # by columns, elements go one by one
        return SIZE.get(op[-1], 1)
    if name == "mbarrier":
        return 8
    return _WIDEST
