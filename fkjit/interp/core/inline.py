"""Device functions: most calls are replaced by the function's body, with names of its own.

Parameters of device functions are variables in the caller's local memory, so ld.param and
st.param inside a body become local accesses to the buffers that the caller filled. Functions that
recur, or whose address is taken, stand once behind the kernel; their variables are in a frame on
a stack in local memory (see `threads.calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count

from fkjit.errors import InterpreterError
from fkjit.interp.core import callgraph
from fkjit.interp.core.ptx import (
    Frame,
    Function,
    Imm,
    Instruction,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Sym,
    Variable,
    Vec,
)
from fkjit.interp.core.report import unsupported

MAX_INSTRUCTIONS = 200_000
STACK_BYTES = 8192  # of each thread, for the frames of functions that are not inlined
STACK, FRAME = "%stack", Reg("%frame")  # the variable, and the register that holds a frame's start
_BUILT_IN = {"vprintf": "%printf", "__assertfail": "%assertfail"}


@lru_cache(maxsize=64)
def inline_calls(module: Module, kernel: Function) -> Function:
    """The kernel with all its device functions; raises InterpreterError for unknown ones."""
    if not any(ins.op[0] == "call" for ins in kernel.instructions):
        return kernel
    out = Function(kernel.name, True, kernel.params, max_threads=kernel.max_threads)
    framed = callgraph.framed(module, kernel)
    if framed:
        out.variables.append(Variable(STACK, "local", 16, STACK_BYTES))
        out.registers[FRAME.name] = "b64"
    serial = count(1)
    _Inliner(module, out, framed, None, serial).body(kernel, "", {}, None)
    for name in framed:
        frame = _lay_out(module.functions[name])
        out.frames[name] = frame
        _Inliner(module, out, framed, frame, serial).whole(module.functions[name])
    for pc, ins in enumerate(out.instructions):
        ins.pc = pc
    return out


def _lay_out(function: Function) -> Frame:
    """A frame begins with the results, so that callers find them whichever function it is."""
    frame = Frame(function.name)
    for variable in function.results:
        frame.add(variable)
    frame.parameters = [(frame.add(v), v.size) for v in function.params]
    return frame


class _Inliner:
    """Appends one body, and all that is inlined into it: the kernel, or a function with a frame."""

    def __init__(
        self, module: Module, out: Function, framed: Sequence[str], frame: Frame | None,
        serial: Iterator[int],
    ) -> None:  # fmt: skip
        self.serial = serial
        self.module, self.out, self.framed, self.frame = module, out, framed, frame

    def whole(self, function: Function) -> None:
        """A function with a frame."""
        assert self.frame is not None
        self.out.labels[self.frame.entry] = len(self.out.instructions)
        first = set(self.out.registers)
        formal = {v.name: v.name for v in (*function.results, *function.params)}
        self.body(function, f"#{function.name}", formal, None)
        self.frame.registers = [name for name in self.out.registers if name not in first]

    def body(self, function: Function, suffix: str, names: dict[str, str], end: str | None) -> None:
        """Append a function's instructions, its own names made unique by `suffix`."""
        own = [v.name for v in function.variables] + list(function.labels)
        names = {**{name: name + suffix for name in own + list(function.registers)}, **names}
        for name, kind in function.registers.items():
            self.out.registers[names[name]] = kind
        for variable in function.variables:
            mine = replace(variable, name=names[variable.name])
            if self.frame is not None and variable.space in ("local", "param"):
                self.frame.add(mine)
            else:
                self.out.variables.append(mine)
        at = _labels_by_pc(function)
        for ins in function.instructions:
            self._labels(at.get(ins.pc, ()), function, names)
            self._instruction(ins, names, end, function.entry)
        self._labels(at.get(len(function.instructions), ()), function, names)

    def _labels(self, labels: tuple[str, ...], function: Function, names: dict[str, str]) -> None:
        for label in labels:
            self.out.labels[names[label]] = len(self.out.instructions)
            if label in function.tables:
                targets = function.tables[label]
                self.out.tables[names[label]] = tuple(names[target] for target in targets)

    def _instruction(
        self, ins: Instruction, names: dict[str, str], end: str | None, entry: bool
    ) -> None:
        guard = (names.get(ins.guard[0], ins.guard[0]), ins.guard[1]) if ins.guard else None
        args = tuple(_renamed(arg, names) for arg in ins.args)
        mine = replace(ins, args=args, guard=guard, _registers=None)
        if ins.op[0] == "call":
            self._call(mine, ins)
            return
        if ins.op[0] == "ret" and end is not None:
            mine = replace(mine, op=("bra",), args=(Sym(end),))
        elif ins.op[0] == "ret" and self.frame is not None:
            mine = replace(mine, op=("%return",))
        elif not entry:
            mine = _local_parameters(mine)
        self._append(mine)

    def _append(self, ins: Instruction) -> None:
        self.out.instructions.append(_in_frame(ins, self.frame) if self.frame else ins)
        if len(self.out.instructions) > MAX_INSTRUCTIONS:
            raise InterpreterError(
                f"interpreter: more than {MAX_INSTRUCTIONS:,} instructions once device functions "
                f"are inlined into {self.out.name}"
            )

    def _call(self, call: Instruction, original: Instruction) -> None:
        """call{.uni} {(results),} name{, (parameters)}{, prototype}."""
        target = callgraph.callee(original)
        name = target.name if isinstance(target, Sym) else ""
        function = self.module.functions.get(name)
        plain = name in _BUILT_IN or isinstance(target, Reg) or name in self.framed
        if not plain and (function is None or not function.instructions):
            raise unsupported(original, f"a call of {name or 'an address'}, which has no body here")
        try:
            results, given = callgraph.buffers(call, callgraph.has_results(call))
        except ValueError as error:
            raise unsupported(original, str(error)) from error
        suffix = f"#{next(self.serial)}"
        end = f"{name}.end{suffix}"
        if call.guard:
            over = (call.guard[0], not call.guard[1])
            self._append(replace(call, op=("bra",), args=(Sym(end),), guard=over, _registers=None))
        call = replace(call, guard=None, _registers=None)
        if name in _BUILT_IN:
            self._built_in(call, _BUILT_IN[name], results, given)
        elif plain:
            self._framed_call(call, results, given)
        else:
            assert function is not None
            formal = [v.name for v in (*function.results, *function.params)]
            if len(formal) != len(results) + len(given):
                raise unsupported(original, "another number of parameters than the function has")
            names = dict(zip(formal, (*results, *given), strict=True))
            self.body(function, suffix, names, end)
        self.out.labels[end] = len(self.out.instructions)

    def _built_in(
        self, call: Instruction, op: str, results: Sequence[str], given: Sequence[str]
    ) -> None:
        args = (*(_buffer(name) for name in given), *(_buffer(name) for name in results))
        self._append(replace(call, op=(op, "local"), args=args))

    def _framed_call(self, call: Instruction, results: Sequence[str], given: Sequence[str]) -> None:
        """The call, which names this body's frame, and what is done after the return."""
        target = next(arg for arg in call.args if isinstance(arg, Reg | Sym))
        if isinstance(target, Sym):
            target = Imm(callgraph.addresses(self.module)[target.name])
        sizes = {v.name: v.size for v in self._variables()}
        own = Imm(-1 if self.frame is None else list(self.framed).index(self.frame.name))
        out_, in_ = (
            Vec(tuple(part for name in group for part in (_buffer(name), Imm(sizes[name]))))
            for group in (results, given)
        )
        self._append(replace(call, op=("%call",), args=(target, own, in_)))
        self._append(replace(call, op=("%resume",), args=(own, out_)))

    def _variables(self) -> list[Variable]:
        return self.out.variables if self.frame is None else self.frame.variables


def _buffer(name: str) -> Mem:
    return Mem(Sym(name), 0)


def _local_parameters(ins: Instruction) -> Instruction:
    """Parameters of device functions whose address is in a register are in local memory."""
    by_register = any(isinstance(arg, Mem) and isinstance(arg.base, Reg) for arg in ins.args)
    if not (by_register or ins.op[0] == "cvta") or not {"param", "param::func"} & set(ins.op):
        return ins
    return replace(ins, op=_as_local(ins.op))


def _as_local(op: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("local" if part in ("param", "param::func") else part for part in op)


def _in_frame(ins: Instruction, frame: Frame) -> Instruction:
    """Variables of the frame are addressed by its start."""
    if ins.op[0] == "mov" and isinstance(ins.args[1], Sym) and ins.args[1].name in frame.offsets:
        at = Imm(frame.offsets[ins.args[1].name] + ins.args[1].offset)
        return replace(ins, op=("add", "u64"), args=(ins.args[0], FRAME, at), _registers=None)
    args = tuple(_placed(arg, frame) for arg in ins.args)
    if args == ins.args:
        return ins
    return replace(ins, op=_as_local(ins.op), args=args, _registers=None)


def _placed(operand: Operand, frame: Frame) -> Operand:
    if isinstance(operand, Vec):
        return Vec(tuple(_placed(item, frame) for item in operand.items))
    if not isinstance(operand, Mem) or not isinstance(operand.base, Sym):
        return operand
    base = operand.base
    if base.name not in frame.offsets:
        return operand
    return Mem(FRAME, frame.offsets[base.name] + base.offset + operand.offset, operand.extra)


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
