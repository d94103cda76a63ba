"""What a kernel costs in lines: CUDA with the headers that it includes, its Triton twin.

    python -m bench.core.lines

Lines that hold code: neither blank nor comment nor docstring.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass

from fkjit import ops
from fkjit.cli import console as report
from fkjit.jit.render import load
from fkjit.spec import KernelSpec, registered

from . import twins

_CUDA_COMMENT = r"/\*[\s\S]*?\*/|//(?!%)[^\n]*"  # `//%` is a statement of ours
_CUDA_TEXT = r'"(?:\\.|[^"\\\n])*"'
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Lines:
    """One kernel file: lines of the kernel itself, and with all that it needs.

    CUDA: the `.cu`, and the headers of ours that it includes, each once. Triton: the functions
    under `@triton.jit`, and the whole file, which also launches and tunes them.
    """

    op: str
    name: str  # of the kernel; "triton" for a twin
    kernel: int
    total: int


def cuda(text: str) -> int:
    """Lines of CUDA C++ that hold code."""

    def spaces(found: re.Match[str]) -> str:
        kept = found[0].startswith('"')
        return found[0] if kept else re.sub(r"[^\n]", " ", found[0])

    bare = re.sub(f"{_CUDA_TEXT}|{_CUDA_COMMENT}", spaces, text)
    return sum(1 for line in bare.splitlines() if line.strip())


def python(text: str) -> int:
    """Lines of Python that hold code."""
    return len(_code(text))


def jitted(text: str) -> int:
    """Those of them in functions under `@triton.jit`, their decorators and signatures included."""
    code, inside = _code(text), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and _is_jitted(node):
            first = min(item.lineno for item in node.decorator_list)
            inside |= set(range(first, (node.end_lineno or first) + 1))
    return len(code & inside)


def _is_jitted(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(item).startswith("triton.jit") for item in node.decorator_list)


def _code(text: str) -> set[int]:
    """The numbers of the lines that hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):  # docstrings
            held -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return held


def of_kernel(spec: KernelSpec) -> Lines:
    """Lines of one kernel of ours."""
    loaded = load(spec, next(spec.variants()))
    kernel = cuda(loaded.template)
    headers = sum(cuda(_own(text)) for text in loaded.headers.values())
    return Lines(spec.op, spec.name, kernel, kernel + headers)


def _own(header: str) -> str:
    """A header without the `#line` that rendering puts before it."""
    return header.split("\n", 1)[1] if header.startswith("#line 1 ") else header


def of_twin(op: str) -> Lines:
    """Lines of one twin."""
    text = twins.source(op).read_text()
    return Lines(op, "triton", jitted(text), python(text))


def together(op: str) -> Lines:
    """All kernels of an operation, every header counted once: what its CUDA costs as a whole."""
    templates: dict[str, str] = {}
    headers: Mapping[str, str] = {}
    for spec in registered(op):
        loaded = load(spec, next(spec.variants()))
        templates[loaded.name] = loaded.template
        headers = {**headers, **loaded.headers}
    kernels = sum(map(cuda, templates.values()))
    return Lines(op, "all kernels", kernels, kernels + sum(cuda(_own(t)) for t in headers.values()))


def costs(op: str) -> list[Lines]:
    """Every kernel of an operation, all of them together, and its twin where it has one."""
    found = [of_kernel(spec) for spec in registered(op)]
    whole = [together(op)] if len(found) > 1 else []
    return [*found, *whole, *([of_twin(op)] if op in twins.names() else [])]


def main() -> None:
    """Print the table."""
    ops.load()
    made = report.table("operation", "kernel", ">lines", ">with what it needs")
    for op in dict.fromkeys(spec.op for spec in registered()):
        rows = [(line.op, line.name, str(line.kernel), str(line.total)) for line in costs(op)]
        report.add_rows(made, rows)
    report.console().print(made)


if __name__ == "__main__":
    main()
