"""Instructions on two or four packed integers: vadd2, vsub4, vabsdiff4, vmin2, vmax4, vavrg4 …"""

from __future__ import annotations

from typing import Any

import numpy as np

from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, opcode

_OPERATIONS: dict[str, Any] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
    "vavrg": lambda a, b: (a + b + 1) >> 1,
}


@opcode(*(f"{name}{count}" for name in _OPERATIONS for count in (2, 4)))
def packed(d: Decoder, ins: Instruction) -> Step:
    """vop4.dtype.atype.btype{.sat}{.add} d, a, b, c: by parts; .add: c and the sum of the parts."""
    function, count = _OPERATIONS[ins.op[0][:-1]], int(ins.op[0][-1])
    types, flags = ins.op[1:4], ins.op[4:]
    if not set(types) <= {"u32", "s32"} or flags not in ((), ("sat",), ("add",)):
        raise ValueError("modifier")
    bits = 32 // count
    of_d, of_a, of_b = (np.dtype(f"{'i' if t == 's32' else 'u'}{bits // 8}") for t in types)
    a, b, c = (d.src(arg, "u32") for arg in ins.args[1:4])
    limits = np.iinfo(of_d)

    def compute(out: np.ndarray) -> None:
        x, y = (np.ascontiguousarray(v) for v in np.broadcast_arrays(a, b))
        parts = function(x.view(of_a).astype(np.int32), y.view(of_b).astype(np.int32))
        if flags == ("add",):
            out[...] = parts.reshape(-1, count).sum(1).astype(np.uint32) + c
            return
        if flags:
            parts = np.clip(parts, limits.min, limits.max)
        out[...] = parts.astype(of_d).view(np.uint32)

    return d.step(ins, ins.args[0], "u32", compute)
