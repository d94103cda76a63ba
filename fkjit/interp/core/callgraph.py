"""Which device functions need frames of their own: those that recur or whose address is taken."""

from __future__ import annotations

from functools import lru_cache

from fkjit.interp.core.ptx import Frame, Function, Instruction, Module, Operand, Reg, Sym, Vec

FUNCTION_WINDOW = 1 << 46  # addresses of functions, 16 apart


@lru_cache(maxsize=64)
def addresses(module: Module) -> dict[str, int]:
    """The address of every device function that has a body."""
    bodies = [f.name for f in module.functions.values() if not f.entry and f.instructions]
    return {name: FUNCTION_WINDOW + 16 * at for at, name in enumerate(bodies, 1)}


def callee(call: Instruction) -> Operand | None:
    """What a call calls: a name, or a register that holds an address."""
    return next((arg for arg in call.args if isinstance(arg, Sym | Reg)), None)


def framed(module: Module, kernel: Function) -> tuple[str, ...]:
    """The functions reachable from a kernel that cannot be inlined, in order of appearance."""
    taken = _taken(module)
    calls = {f.name: _called(f, taken) for f in module.functions.values()}
    reached = _closure(calls, calls[kernel.name])
    indirect = any(
        isinstance(callee(ins), Reg)
        for name in (kernel.name, *reached) if name in module.functions
        for ins in module.functions[name].instructions if ins.op[0] == "call"
    )  # fmt: skip
    return tuple(
        name for name in module.functions
        if name in reached and module.functions[name].instructions
        and ((indirect and name in taken) or name in _closure(calls, calls[name]))
    )  # fmt: skip


def _taken(module: Module) -> set[str]:
    """Functions named elsewhere than as the target of a call."""
    named = {name for v in module.variables for _, name, _ in v.relocations}
    for function in module.functions.values():
        for ins in function.instructions:
            if ins.op[0] != "call":
                named.update(arg.name for arg in ins.args if isinstance(arg, Sym))
    return named & addresses(module).keys()


def _called(function: Function, taken: set[str]) -> set[str]:
    found: set[str] = set()
    for ins in function.instructions:
        if ins.op[0] == "call":
            target = callee(ins)
            found |= {target.name} if isinstance(target, Sym) else taken
    return found


def _closure(calls: dict[str, set[str]], start: set[str]) -> set[str]:
    found, rest = set(), list(start)
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            rest += calls.get(name, ())
    return found


def buffers(call: Instruction, results: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the .param variables that take a call's results and hold its arguments."""
    groups = [arg.items for arg in call.args if isinstance(arg, Vec)]
    taken = groups.pop(0) if results else ()
    given = groups.pop(0) if groups else ()
    names = [tuple(arg.name for arg in group if isinstance(arg, Sym)) for group in (taken, given)]
    if len(names[0]) != len(taken) or len(names[1]) != len(given):
        raise ValueError("a call whose parameters are no .param variables")
    return names[0], names[1]


def has_results(call: Instruction) -> bool:
    """Whether a call's first operand lists results: it stands before the callee."""
    return bool(call.args) and isinstance(call.args[0], Vec)


def addresses_of(function: Function, symbols: dict[str, int]) -> dict[int, Frame]:
    """The functions that a kernel may call by their address."""
    return {symbols[name]: frame for name, frame in function.frames.items()}
