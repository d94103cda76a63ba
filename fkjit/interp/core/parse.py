"""PTX text -> `ptx.Module`: what NVRTC emits, and inline assembly with its nested scopes."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from functools import lru_cache

from fkjit.errors import InterpreterError
from fkjit.interp.core import declare
from fkjit.interp.core.ptx import (
    Float,
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
    Vec,
)

_NUMBER = re.compile(
    r"-?(0[xX][0-9a-fA-F]+U?|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[bB][01]+U?|\d+U?"
    r"|\d+\.\d*([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"
)
_ADDRESS = re.compile(r"(%?[\w$.%]+)\s*(?:\+\s*(-?\w+))?$")
_SYMBOL = re.compile(r"([A-Za-z_$][\w$]*)(?:\+(-?\d+))?$")
_IDENTIFIER = re.compile(r"(?<![\w.$%])%?[A-Za-z_$][\w$]*")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)\s*")
_BRACKET = re.compile(r"[{\[(]")
_DELIMITER = re.compile(r"[{\[(}\]),]")
_DOT = re.compile(r"(?<!:)\.(?!:)")
_LOC = re.compile(r"\.loc\s")
_INLINED = re.compile(r"inlined_at\s+(\d+)\s+(\d+)")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+(.*)$", re.S)
_STATEMENT = re.compile(r"[@a-z][^;{}:]*;$")  # one whole instruction and nothing else
_SKIPPED = (
    ".version", ".address_size", ".pragma", ".alias", ".minnctapersm", ".maxnreg",
    ".callprototype", ".calltargets",
)  # fmt: skip


def split_commas(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    if not _BRACKET.search(text):
        return [part for part in map(str.strip, text.split(",")) if part]
    parts, depth, start = [], 0, 0
    for match in _DELIMITER.finditer(text):
        char = match[0]
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _number(text: str) -> Operand:
    body = text.lstrip("-").rstrip("U")
    if body[:2] in ("0f", "0F"):
        return Float(int(body[2:], 16) ^ (1 << 31 if text[0] == "-" else 0), 4)
    if body[:2] in ("0d", "0D"):
        return Float(int(body[2:], 16) ^ (1 << 63 if text[0] == "-" else 0), 8)
    if re.search(r"[.eE]", body) and body[:2].lower() != "0x":
        return Float(int.from_bytes(struct.pack("<d", float(text)), "little"), 8)
    octal = len(body) > 1 and body[0] == "0" and body.isdigit()
    value = int(body, 8 if octal else 0)
    return Imm(-value if text[0] == "-" else value)


def _memory(text: str) -> Mem:
    first, *rest = split_commas(text)
    match = _ADDRESS.match(first)
    if not match:
        raise InterpreterError(f"interpreter: the PTX address [{text}] cannot be read")
    offset = int(match[2], 0) if match[2] else 0
    return Mem(operand(match[1]), offset, tuple(operand(part) for part in rest))


@lru_cache(maxsize=1 << 16)
def operand(text: str) -> Operand:
    """One operand; raises InterpreterError on a form that is not known."""
    if text[0] in "{(":
        return Vec(tuple(operand(part) for part in split_commas(text[1:-1])))
    if text[0] == "[":
        return _memory(text[1:-1].strip())
    if "|" in text:
        first, second = text.split("|")
        return Pair(operand(first.strip()), operand(second.strip()))
    if _NUMBER.match(text):
        return _number(text)
    if text[0] == "!":
        return Not(Reg(text[1:].strip()))
    if text[0] == "%" or text == "_":
        return Reg(text)
    match = _SYMBOL.match(text)
    if not match:
        raise InterpreterError(f"interpreter: the PTX operand {text!r} cannot be read")
    return Sym(match[1], int(match[2] or 0))


class _Body:
    """Reads the statements of one function; scopes map local names to unique ones."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.scopes: list[dict[str, str]] = [{}]
        self.pending: list[tuple[str, str, int, tuple[dict[str, str], ...]]] = []
        self.unique = 0

    def _local_name(self, name: str) -> str:
        """Registers declared without % or in an inner scope get a name of their own."""
        if len(self.scopes) == 1 and name[0] == "%":
            return name
        self.unique += 1
        own = f"%{name.lstrip('%')}$${self.unique}"
        self.scopes[-1][name] = own
        return own

    def label(self, name: str) -> None:
        if len(self.scopes) > 1:
            self.unique += 1
            self.scopes[-1][name] = name = f"{name}$${self.unique}"
        self.function.labels[name] = len(self.pending)

    def statement(self, text: str, location: str, number: int) -> None:
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".branchtargets"):
            name = next(reversed(self.function.labels))
            self.function.tables[name] = tuple(split_commas(text.split(None, 1)[1]))
        elif text.startswith("."):
            if not text.startswith(_SKIPPED):
                self._variable(text)
        else:
            self.pending.append((text, location, number, tuple(self.scopes)))

    def _registers(self, text: str) -> None:
        declared = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", text, re.S)
        kind, names = declared.groups()  # type: ignore[union-attr]
        for name in split_commas(names):
            many = re.match(r"(%?[\w$]+)<(\d+)>$", name)
            each = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
            if len(self.scopes) > 1 or name[0] != "%":
                each = [self._local_name(one) for one in each]
            self.function.registers.update(dict.fromkeys(each, kind))

    def _variable(self, text: str) -> None:
        variable = declare.variable(text)
        if variable.space == "param":  # argument buffers of a call: unique in their block
            self.unique += 1
            self.scopes[-1][variable.name] = f"{variable.name}$${self.unique}"
            variable = declare.renamed(variable, self.scopes[-1][variable.name])
        self.function.variables.append(variable)

    def finish(self) -> Function:
        """Resolve names (labels may be used before they stand) and parse all instructions."""
        for text, location, number, scopes in self.pending:
            names = {k: v for scope in scopes for k, v in scope.items()}
            self.function.instructions.append(_instruction(text, location, number, names))
        for pc, ins in enumerate(self.function.instructions):
            ins.pc = pc
        return self.function


@lru_cache(maxsize=1 << 12)
def _parts(opcode: str) -> tuple[str, ...]:
    return tuple(_DOT.split(opcode))


def _instruction(text: str, location: str, number: int, names: dict[str, str]) -> Instruction:
    shown = " ".join(text.split())
    guard = _GUARD.match(shown) if shown[0] == "@" else None
    body = guard[3] if guard else shown
    opcode, _, rest = body.partition(" ")
    if names:
        rest = _IDENTIFIER.sub(lambda match: names.get(match[0], match[0]), rest)
    condition = (names.get(guard[2], guard[2]), guard[1] == "!") if guard else None
    try:
        args = tuple(operand(arg) for arg in split_commas(rest))
    except (InterpreterError, ValueError, IndexError) as error:
        raise InterpreterError(f"{error}: {shown}\n    at {location or 'no line'}") from error
    return Instruction(_parts(opcode), args, condition, location, shown, line=number)


def _location(line: str, files: dict[str, str]) -> str:
    """`.loc 1 12 5, function_name …, inlined_at 1 32 3` -> "a.cu:12 (inlined at a.cu:32)"."""
    part = line.split()
    shown = f"{files.get(part[1], part[1])}:{part[2]}"
    at = _INLINED.search(line)
    return f"{shown} (inlined at {files.get(at[1], at[1])}:{at[2]})" if at else shown


class _Reader:
    """Walks the lines of a module and hands statements to the function being read."""

    def __init__(self) -> None:
        self.module = Module()
        self.body: _Body | None = None
        self.buffer = ""
        self.location, self.number = "", 0
        self.locations: dict[str, str] = {}  # of .loc lines: most come again and again

    def line(self, line: str, number: int) -> None:
        self.number = number
        if self.body is not None and not self.buffer and _STATEMENT.match(line):
            self.body.statement(line[:-1], self.location, number)
        elif _LOC.match(line):
            known = self.locations.get(line)
            if known is None:
                known = self.locations[line] = _location(line, self.module.files)
            self.location = known
        elif line.startswith(".target"):
            self.module.target = line.split()[1].rstrip(",")
        elif not line.startswith((".version", ".address_size", ".file")):
            rest = line
            while rest:
                rest = (self._inside if self.body else self._outside)(rest).strip()

    def _outside(self, text: str) -> str:
        """One step of module scope: a function head ends at `{`, all else at `;`."""
        function = re.match(r"\s*(\.\w+\s+)*?\.(entry|func)\b", self.buffer + " " + text)
        ends = [at for at in (text.find("{") if function else -1, text.find(";")) if at >= 0]
        if not ends:
            self.buffer += " " + text
            return ""
        end = min(ends)
        head, self.buffer = (self.buffer + " " + text[:end]).strip(), ""
        if function and text[end] == "{":
            self.body = _Body(declare.function(head))
        elif not function and head.startswith(".") and not head.startswith(_SKIPPED):
            self.module.variables.append(declare.variable(head))
        return text[end + 1 :]

    def _inside(self, text: str) -> str:
        """One step inside a function: a brace, a label, or a statement up to `;`."""
        assert self.body is not None
        if not self.buffer:
            if text[0] == "{":
                self.body.scopes.append({})
                return text[1:]
            if text[0] == "}":
                return self._close(text[1:])
            label = _LABEL.match(text)
            if label:
                self.body.label(label[1])
                return text[label.end() :]
        end = text.find(";")
        if end < 0:
            self.buffer += " " + text
            return ""
        statement, self.buffer = (self.buffer + " " + text[:end]).strip(), ""
        if statement:
            self.body.statement(statement, self.location, self.number)
        return text[end + 1 :]

    def _close(self, rest: str) -> str:
        assert self.body is not None
        self.body.scopes.pop()
        if not self.body.scopes:
            function = self.body.finish()
            self.module.functions[function.name] = function
            self.body, self.location = None, ""
        return rest


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """What is no comment and no debug information, with the numbers of its lines."""
    text = re.sub(r"/\*.*?\*/", _blank, text, flags=re.S)
    text = re.sub(r"^\s*\.section\s+\.debug.*?^\s*\}", _blank, text, flags=re.S | re.M)
    for number, raw in enumerate(text.rstrip("\0").split("\n"), 1):
        line = (raw.partition("//")[0] if "//" in raw else raw).strip()
        if line:
            yield line, number


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _paths(text: str) -> dict[str, str]:
    """The .file table with paths relative to the folder that NVRTC was run in."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M))
    roots = [path.partition("kernels_cu/")[0] for path in files.values() if "/kernels_cu/" in path]
    root = roots[0] if roots else _here()
    return {number: path.removeprefix(root) for number, path in files.items()}


def _here() -> str:
    """The working directory with a slash; "" where it has been deleted."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""


@lru_cache(maxsize=64)
def parse(text: str) -> Module:
    """The module of a PTX text (cached); raises InterpreterError where it cannot be read."""
    reader = _Reader()
    reader.module.files = _paths(text)
    for line, number in _lines(text):
        reader.line(line, number)
    if reader.body or not reader.module.functions:
        raise InterpreterError("interpreter: the PTX text ends inside a function, or has none")
    return reader.module
