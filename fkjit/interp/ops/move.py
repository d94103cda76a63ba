"""mov (packing and unpacking too), cvta, mapping of addresses between windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fkjit.interp.core.ptx import SIZE, UNSIGNED, Instruction, Reg, Vec
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only, opcode
from fkjit.interp.ops.timers import CLOCKS, read_clock
from fkjit.interp.spaces.local import LOCAL_WINDOW
from fkjit.interp.spaces.shared import SHARED_WINDOW


@opcode("mov")
def mov(d: Decoder, ins: Instruction) -> Step:
    """mov.type d, a; mov.b32 {lo, hi}, a; mov.b64 d, {lo, hi}."""
    target, source = ins.args
    only(ins, (ins.type,) if ins.type in SIZE else ())
    if isinstance(source, Reg) and source.name in CLOCKS:
        return read_clock(d, ins, source.name)
    if isinstance(target, Vec):
        return _unpack(d, ins, target)
    if isinstance(source, Vec):
        return _pack(d, ins, source)
    value = d.src(source, ins.type)
    return d.step(ins, target, ins.type, lambda out: np.copyto(out, value))


def _unpack(d: Decoder, ins: Instruction, target: Vec) -> Step:
    whole = SIZE[ins.type]
    part = whole // len(target.items)
    value = d.src(ins.args[1], f"b{8 * whole}")
    parts = np.ascontiguousarray(value).view(UNSIGNED[part]).reshape(-1, len(target.items))
    outs = [d.dst(item, f"b{8 * part}") for item in target.items]

    def run(group: Any) -> None:
        for number, out in enumerate(outs):
            if group.write is None:
                out[...] = parts[:, number]
            else:
                np.copyto(out, parts[:, number], where=group.write)

    if value.size > 1 and not np.shares_memory(parts, value):
        raise ValueError("unpacking part of a wider register")
    return run


def _pack(d: Decoder, ins: Instruction, source: Vec) -> Step:
    whole = SIZE[ins.type]
    part = whole // len(source.items)
    values = [d.src(item, f"b{8 * part}") for item in source.items]
    spare = d.scratch(UNSIGNED[whole], "pack")
    parts = spare.view(UNSIGNED[part]).reshape(-1, len(values))

    def compute(out: np.ndarray) -> None:
        for number, value in enumerate(values):
            parts[:, number] = value
        out[...] = spare

    return d.step(ins, ins.args[0], f"b{8 * whole}", compute)


@opcode("cvta")
def cvta(d: Decoder, ins: Instruction) -> Step:
    """cvta{.to}.space: between generic addresses and those of a state space."""
    to = ins.has("to")
    space = ins.op[2 if to else 1].split("::")[0]
    if space not in ("shared", "local", "global", "const", "param"):
        raise ValueError(f"modifier .{space}")
    only(ins, ("to", ins.op[2 if to else 1], "u32", "u64"))
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
    if ins.type == "u32":
        window = 0
    a = d.src(ins.args[1], ins.type)
    by = np.array([window], a.dtype)
    function: Any = np.subtract if to else np.add
    return d.step(ins, ins.args[0], ins.type, lambda out: function(a, by, out))
