"""The argument list of a kernel, read from its rendered source."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fkjit.errors import RenderError
from fkjit.jit.render import Rendered

TENSOR_MAP_BYTES = 128  # of a CUtensorMap

# C type (spelled without const) -> struct letters with native alignment. `TensorMap` has to stand
# at a multiple of 64 bytes: before all others. `Strides` is the prelude's struct of three 64-bit
# counts of elements: batch, head, row; `RopeFrequencies` is that of rope/angle.cuh, `Routing` that
# of moe/route.cuh, `Grouping` that of moe/groups.cuh, `AttentionForm` that of
# attention/features.cuh, `DecodeModel` that of kernels_cu/step/whole.cu.
_CODES = {
    **dict.fromkeys(("int", "signed", "signed int", "int32_t", "i32"), "i"),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t", "u32"), "I"),
    **dict.fromkeys(("long long", "long long int", "int64_t", "i64"), "q"),
    **dict.fromkeys(("unsigned long long", "uint64_t", "u64", "size_t"), "Q"),
    **dict.fromkeys(("float", "fp32"), "f"),
    "double": "d",
    "bool": "?",
    "Strides": "qqq",
    "RopeFrequencies": "Q" * 14,
    "Routing": "i" * 9 + "f",
    "Grouping": "iiiIiiiiIii",
    "AttentionForm": "q" * 6 + "i" * 4 + "f" * 2,
    "DecodeModel": "q" + "i" * 24 + "ff",
    "TensorMap": f"{TENSOR_MAP_BYTES}s",
}
_NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL
)  # comments and strings; `extern "C"` is looked for before they go
_LINE = re.compile(r'^#line (\d+) "([^"]*)"$', re.MULTILINE)
_QUALIFIER = re.compile(r"\b(?:__restrict__|__restrict|__grid_constant__|struct)\b")


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel; `code` is for `struct.pack` with native alignment."""

    name: str  # "q"
    ctype: str  # "const elem_t*"
    code: str  # "P" pointer, "i" int, "I" unsigned, "q", "Q", "f", "d", "?", "qqq" Strides
    pointer: bool
    const: bool  # what a pointer points to is only read


def signature(rendered: Rendered, entry: str) -> tuple[Argument, ...]:
    """The arguments of `extern "C" __global__ … entry(…)`, in order.

    RenderError names the line of an argument whose type has no known size, or the file when there
    is no such entry point.
    """
    plain = _NOISE.sub(_blank, rendered.text)
    head = re.search(rf'extern\s+"C"[^;{{}}]*?__global__[^;{{}}]*?\b{re.escape(entry)}\s*\(', plain)
    if not head:
        raise RenderError(f'{rendered.name}: has no extern "C" __global__ function {entry!r}')
    end = _closing(plain, head.end())
    arguments, position = [], head.end()
    for piece in _split(plain[position:end]):
        where = position + len(piece) - len(piece.lstrip())
        if piece.strip():
            arguments.append(_argument(rendered.name, plain, where, entry, piece))
        position += len(piece) + 1
    _check_maps(rendered.name, entry, arguments)
    return tuple(arguments)


def _check_maps(file: str, entry: str, arguments: list[Argument]) -> None:
    """Tensor maps are 64-byte aligned, which `struct` cannot express: they come first."""
    maps = [argument.ctype.endswith("TensorMap") for argument in arguments]
    if maps != sorted(maps, reverse=True):
        raise RenderError(f"{file}: {entry}: TensorMap arguments must stand before all others")


def loose_signature(rendered: Rendered, entry: str) -> tuple[Argument, ...]:
    """The arguments of any `__global__ … entry(…)`; code "" where a type is not known here.

    Empty where the source does not have it in plain text: made by a macro, say.
    """
    plain = _NOISE.sub(_blank, rendered.text)
    heads = [
        match.end()
        for match in re.finditer(rf"__global__[^;{{}}]*?\b{re.escape(entry)}\s*\(", plain)
    ]
    defined = [at for at in heads if plain[_closing(plain, at) + 1 :].lstrip().startswith("{")]
    for start in [*defined, *heads][:1]:
        pieces = _split(plain[start : _closing(plain, start)])
        return tuple(_read(piece)[0] for piece in pieces if piece.strip())
    return ()


def _blank(match: re.Match[str]) -> str:
    """Comments become spaces, so that offsets and lines stay; strings stay if they are "C"."""
    text = match[0]
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


def _closing(text: str, position: int) -> int:
    depth = 1
    for index in range(position, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _split(text: str) -> list[str]:
    """`text` at its commas outside <> and (), with `#line` lines blanked out."""
    text = _LINE.sub(lambda match: " " * len(match[0]), text)
    pieces, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            pieces.append(text[start:index])
            start = index + 1
    return [*pieces, text[start:]]


def _argument(file: str, text: str, where: int, entry: str, piece: str) -> Argument:
    argument, words = _read(piece)
    if not argument.code or argument.name == "?":
        known = ", ".join(sorted(_CODES))
        raise RenderError(
            f"{file}:{_template_line(text, where)}: {entry}: argument {words!r} has no type fkjit "
            f"can pass (allowed: pointers, {known})"
        )
    return argument


def _read(piece: str) -> tuple[Argument, str]:
    """One declaration, its words; name "?" if it has none, code "" if its type is not known."""
    words = " ".join(_QUALIFIER.sub(" ", piece).split())
    match = re.fullmatch(r"(.*[\s*])(\w+)", words)
    ctype = re.sub(r"\s*\*\s*", "*", match[1]).strip() if match else words
    name = match[2] if match else "?"
    pointer = ctype.endswith("*") or ctype.endswith("*const")
    bare = re.sub(r"\bconst\b", " ", ctype).split()
    code = "P" if pointer else _CODES.get(" ".join(bare), "")
    const = pointer and "const" in ctype.rpartition("*")[0].split()
    return Argument(name, ctype, code, pointer, const), words


def _template_line(text: str, position: int) -> int:
    """The template's line at an offset of the rendered text, by the `#line` above it."""
    marks = list(_LINE.finditer(text, 0, position))
    if not marks:
        return text.count("\n", 0, position) + 1
    above = marks[-1]
    return int(above[1]) + text.count("\n", above.end(), position) - 1
