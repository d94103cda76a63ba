"""Docstrings as this project writes them, turned into the reStructuredText that autodoc wants.

They are plain text: `name` is code, indented blocks are code, sections are "Args:", "Returns:",
"Raises:" and "Attributes:". A `name` that is public becomes a link to where it is described.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection
from importlib import import_module
from typing import Any

MODULES = ("fkjit", "fkjit.models", "fkjit.distributed", "fkjit.compat")
SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Example): *(.*)")
_ONE = r"[A-Za-z_][\w.]*(?: others)?(?: \[[^\]]*\]| \([^)]*\))?"
ENTRY = re.compile(rf"({_ONE}(?:, {_ONE})*): (.*)")
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


def public(word: str, module: str) -> str | None:
    """The full name of what `word` means in a docstring of `module`, if that is public."""
    for where in dict.fromkeys((module, *MODULES[:1], "fkjit.errors")):
        full = word if word.startswith("fkjit.") else f"{where}.{word}"
        home, _, name = full.rpartition(".")
        if home == "fkjit.errors" and hasattr(import_module(home), name):
            return f"fkjit.{name}" if name == "SanitizerError" else full
        if home in MODULES and name in import_module(home).__all__:
            return full
    return None


def inline(text: str, module: str) -> str:
    """One line: `code` as code or a link, the rest without marks that would mean something."""

    def code(word: str) -> str:
        full = public(word, module)
        return f":py:obj:`{word} <{full}>`" if full else f"``{word}``"

    parts = re.split(r"`([^`]+)`", text)
    plain = [re.sub(r"([*|\\])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
    plain = [re.sub(r"\b[A-Z]\w+Error\b", lambda found: _error(found[0], module), p) for p in plain]
    plain = [PAGE.sub(r":doc:`docs/\1.md </docs/\1>`", part) for part in plain]
    out = plain[0]
    for word, after in zip(parts[1::2], plain[1:], strict=True):
        out += code(word) + ("\\ " if after[:1].isalnum() else "") + after  # ends the mark
    return out


def _error(name: str, module: str) -> str:
    full = public(name, module)
    return f":py:obj:`{name} <{full}>`" if full else name


def depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def blocks(lines: list[str]) -> list[list[str]]:
    """What stands between empty lines; an empty line within an indented block is one of its own."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [block for block in found if block]


def converted(text: str, module: str, parameters: Collection[str] = ()) -> list[str]:
    """A whole docstring, dedented, as lines of reStructuredText."""
    out: list[str] = []
    before = ""
    for block in blocks(text.splitlines()):
        head = SECTION.fullmatch(block[0])
        kind = "section" if head else "code" if depth(block[0]) else "prose"
        if head:
            out += [f"**{head[1].replace('Args', 'Arguments')}**", ""]
            body = ([head[2]] if head[2] else []) + _dedented(block[1:])
            body = apart(body, parameters) if head[1] == "Args" else body
            out += body if head[1] == "Example" else entries(body, module, sparing=False)
        elif kind == "code":
            out += block if before == "code" else [".. code-block:: python", "", *block]
        else:
            out += entries(block, module, sparing=True)
        out.append("")
        before = kind
    return [line for line, last in zip(out, ["", *out], strict=False) if line or last]


def _dedented(lines: list[str]) -> list[str]:
    least = min((depth(line) for line in lines), default=0)
    return [line[least:] for line in lines]


def entries(block: list[str], module: str, *, sparing: bool) -> list[str]:
    """Lines of "name: what it is" as a list of definitions, all else as paragraphs.

    sparing: in prose, where an entry is one only if its further lines are indented.
    """
    out: list[str] = []
    inside = False  # an entry
    for line, below in zip(block, [*block[1:], ""], strict=True):
        head = ENTRY.fullmatch(line)
        if head and (inside or not sparing or depth(below)):
            names = ", ".join(_name(name, module) for name in _names(head[1]))
            out += ["", names, f"    {inline(head[2], module)}"]
            inside = True
        elif inside and (depth(line) or not sparing):
            out.append(f"    {inline(line.strip(), module)}")
        else:
            out += ([""] if inside else []) + [inline(line.strip(), module)]
            inside = False
    return out


def _names(head: str) -> list[str]:
    return re.split(r", (?![^\[]*\])(?![^(]*\))", head)


def _name(name: str, module: str) -> str:
    word, _, more = name.partition(" (")
    if more:
        return inline(f"`{word}` ({more}", module)
    return inline(name if " " in name and "[" not in name else f"`{name}`", module)


def apart(lines: list[str], parameters: Collection[str]) -> list[str]:
    """Entries that share a line ("q: [B]; k: [C]."), on lines of their own."""
    out = []
    for line in lines:
        start = 0
        for found in re.finditer(r"(?<=[.;]) (?=([a-z_]\w*(?:, [a-z_]\w*)*): )", line):
            if set(found[1].split(", ")) <= set(parameters):
                out.append(line[start : found.start()].removesuffix(";"))
                start = found.end()
        out.append(line[start:])
    return out


def fields(source: str) -> list[str]:
    """Of a class's source: its annotated fields as they stand there, with their comments."""
    lines = textwrap.dedent(source).splitlines()
    body = next(node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef))
    found = [node for node in body.body if isinstance(node, ast.AnnAssign)]
    if not found:
        return []
    docstring = body.body[0] if isinstance(body.body[0], ast.Expr) else body
    first = found[0].lineno - 1 if docstring is body else docstring.end_lineno or 0
    shown = _dedented([line for line in lines[first : found[-1].end_lineno] if line.strip()])
    return ["**Fields**", "", ".. code-block:: python", "", *(f"    {line}" for line in shown), ""]


def signature(text: str) -> str:
    """With short defaults: `...` for a function, `Work()` for an object with all of its fields."""
    text = re.sub(r"<function (?:[^<>]|<\w+>)*>", "...", text)
    return re.sub(r"=([A-Z]\w+)\([^()]*\)", r"=\1()", text)


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """autodoc's event."""
    module = next((m for m in reversed(MODULES) if name.startswith(f"{m}.")), "fkjit")
    called = what in ("function", "method", "class")
    parameters = inspect.signature(obj).parameters if called else ()
    lines[:] = converted("\n".join(lines).rstrip(), module, parameters)
    if what == "class":
        lines += fields(inspect.getsource(obj))


def process_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, given: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """autodoc's event."""
    return signature(given or "") or None, returned


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", process_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
