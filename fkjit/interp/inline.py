"""Device functions: every call is replaced by the function's body, with names of its own.

Parameters of device functions are variables in the caller's local memory, so ld.param and
st.param inside a body become local accesses to the buffers that the caller filled.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fkjit.errors import InterpreterError
from fkjit.interp.decode import unsupported
from fkjit.interp.ptx import (
    Function,
    Instruction,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Sym,
    Vec,
)

MAX_INSTRUCTIONS = 200_000
MAX_DEPTH = 32


@lru_cache(maxsize=64)
def inline_calls(module: Module, kernel: Function) -> Function:
    """The kernel without calls; raises InterpreterError for indirect and recursive ones."""
    if not any(ins.op[0] == "call" for ins in kernel.instructions):
        return kernel
    out = Function(kernel.name, True, kernel.params, max_threads=kernel.max_threads)
    _Inliner(module, out).body(kernel, "", {}, None, 0)
    for pc, ins in enumerate(out.instructions):
        ins.pc = pc
    return out


class _Inliner:
    def __init__(self, module: Module, out: Function) -> None:
        self.module, self.out = module, out
        self.calls = 0

    def body(
        self, function: Function, suffix: str, names: dict[str, str], end: str | None, depth: int
    ) -> None:
        """Append a function's instructions, its own names made unique by `suffix`."""
        own = [v.name for v in function.variables] + list(function.labels)
        names = {**{name: name + suffix for name in own + list(function.registers)}, **names}
        for name, kind in function.registers.items():
            self.out.registers[names[name]] = kind
        for variable in function.variables:
            self.out.variables.append(replace(variable, name=names[variable.name]))
        at = _labels_by_pc(function)
        for ins in function.instructions:
            self._labels(at.get(ins.pc, ()), function, names)
            self._instruction(ins, names, end, depth)
        self._labels(at.get(len(function.instructions), ()), function, names)

    def _labels(self, labels: tuple[str, ...], function: Function, names: dict[str, str]) -> None:
        for label in labels:
            self.out.labels[names[label]] = len(self.out.instructions)
            if label in function.tables:
                targets = function.tables[label]
                self.out.tables[names[label]] = tuple(names[target] for target in targets)

    def _instruction(
        self, ins: Instruction, names: dict[str, str], end: str | None, depth: int
    ) -> None:
        guard = (names[ins.guard[0]], ins.guard[1]) if ins.guard else None
        args = tuple(_renamed(arg, names) for arg in ins.args)
        mine = replace(ins, args=args, guard=guard, _registers=None)
        if ins.op[0] == "ret" and end is not None:
            mine = replace(mine, op=("bra",), args=(Sym(end),), _registers=None)
        if ins.op[0] == "call":
            self._call(mine, ins, depth)
            return
        self.out.instructions.append(mine)
        if len(self.out.instructions) > MAX_INSTRUCTIONS:
            raise InterpreterError(
                f"interpreter: more than {MAX_INSTRUCTIONS:,} instructions once device functions "
                f"are inlined into {self.out.name}"
            )

    def _call(self, call: Instruction, original: Instruction, depth: int) -> None:
        """call{.uni} {(results),} name{, (parameters)}."""
        groups = [arg.items for arg in call.args if isinstance(arg, Vec)]
        name = next((arg.name for arg in original.args if isinstance(arg, Sym)), "")
        if name == "__assertfail":  # the call of a failed assert(): the report has its line
            self.out.instructions.append(replace(call, op=("trap",), args=(), _registers=None))
            return
        function = self.module.functions.get(name)
        if function is None or not function.instructions:
            raise unsupported(original, f"a call of {name or 'an address'}, which has no body here")
        if depth >= MAX_DEPTH:
            raise unsupported(original, "recursion")
        results = groups.pop(0) if function.results else ()
        given = groups.pop(0) if groups else ()
        formal = [v.name for v in function.results] + [v.name for v in function.params]
        actual = [arg.name for arg in (*results, *given) if isinstance(arg, Sym)]
        if len(formal) != len(actual):
            raise unsupported(original, "a call whose parameters are no .param variables")
        self.calls += 1
        suffix = f"#{self.calls}"
        end = f"{name}.end{suffix}"
        skip = end if call.guard else None
        if call.guard and skip:
            jump = replace(
                call, op=("bra",), args=(Sym(end),), guard=(call.guard[0], not call.guard[1])
            )
            self.out.instructions.append(jump)
        self.body(function, suffix, dict(zip(formal, actual, strict=True)), end, depth + 1)
        self.out.labels[end] = len(self.out.instructions)


def _labels_by_pc(function: Function) -> dict[int, tuple[str, ...]]:
    at: dict[int, tuple[str, ...]] = {}
    for label, pc in function.labels.items():
        at[pc] = (*at.get(pc, ()), label)
    return at


def _renamed(operand: Operand, names: dict[str, str]) -> Operand:
    match operand:
        case Reg(name):
            return Reg(names.get(name, name))
        case Sym(name, offset):
            return Sym(names.get(name, name), offset)
        case Not(reg):
            return Not(Reg(names.get(reg.name, reg.name)))
        case Vec(items):
            return Vec(tuple(_renamed(item, names) for item in items))
        case Pair(first, second):
            return Pair(_renamed(first, names), _renamed(second, names))
        case Mem(base, offset, extra):
            return Mem(_renamed(base, names), offset, tuple(_renamed(e, names) for e in extra))
    return operand
