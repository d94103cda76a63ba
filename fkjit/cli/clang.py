"""Kernels as clang reads them: the flags of every file, and a template as one variant renders it.

clang takes headers as they are. A `.cu` has values and statements in it; here it becomes C++ with
every line where it was: values filled in, lines that the variant leaves out empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from fkjit import ops
from fkjit.arch import arch
from fkjit.errors import CacheError, FkjitError, ToolchainError
from fkjit.jit.render import Rendered, load, load_text
from fkjit.jit.toolchain import header_dirs
from fkjit.paths import kernels_dir, source_root, templates_dir
from fkjit.spec import KernelSpec, Params, registered

STUB = Path(__file__).with_name("clang.cuh")  # what NVRTC knows by itself
DATABASE = "compile_commands.json"
_ARCHS = ("sm_90a", "sm_80", "sm_75")  # whose variants are looked at, the first that has some
_LOOKED_AT, _MOST = 12, 4000  # variants of a kernel, of so many
# What a header expects of the kernel that includes it.
_EXPECTED = {
    "score_mod.cuh": ("SCORE_FIELDS=int b, h;", "SCORE_EXPRESSION=score", "SCORE_DERIVATIVE=1.f")
}


def flags(file: Path) -> list[str]:
    """clang's flags for a kernel or a header. NVIDIA's headers where they are installed."""
    try:
        toolkit = [word for folder in header_dirs() for word in ("-isystem", str(folder))]
    except ToolchainError:
        toolkit = []
    language = ["-xc++", "-std=c++17", "--target=nvptx64-nvidia-cuda"]
    alone = ["-nostdinc++", "-nostdlibinc", "-include", str(STUB)]
    quiet = ["-Wno-division-by-zero", "-Wno-pragma-once-outside-header"]
    ours = ["-I", str(templates_dir()), "-I", str(file.parent)]
    given = [f"-D{text}" for text in _EXPECTED.get(file.name, ())]
    return [*language, *alone, *quiet, *ours, *toolkit, *given]


def files() -> list[Path]:
    """Every kernel's source, those of the user too, and all headers."""
    ops.load()
    sources = {*kernels_dir().rglob("*.cu"), *map(_source, registered())}
    return sorted(sources) + sorted(templates_dir().rglob("*.cuh"))


def write(folder: Path) -> Path:
    """The compilation database of `files` in a folder. CacheError where it cannot be written."""
    entries = [
        {
            "directory": str(source_root()),
            "file": str(file),
            "arguments": ["clang++", *flags(file), "-fsyntax-only", str(file)],
        }
        for file in files()
    ]
    path = folder / DATABASE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CacheError(f"clangd: {path} cannot be written: {error}") from error
    return path


def as_clang_reads(file: Path, text: str) -> str | None:
    """A kernel's template with this text, line for line as a variant renders it.

    Of the variants that have most of its lines. A text of no registered kernel is left as it is;
    None for a template that cannot be rendered, as it is while one is being written.
    """
    found = _variant(file.resolve())
    if found is None:
        return text
    spec, values = found
    try:
        return _line_for_line(load_text(_name(spec), text, file, values))
    except FkjitError:
        return None


def _source(spec: KernelSpec) -> Path:
    return ((spec.root or kernels_dir()) / spec.source).resolve()


def _name(spec: KernelSpec) -> str:
    """As errors call the file."""
    return f"{(spec.root or kernels_dir()).name}/{spec.source}"


@lru_cache(maxsize=64)
def _variant(file: Path) -> tuple[KernelSpec, dict[str, Any]] | None:
    """A kernel of this file, and the values of a variant that has most of its lines."""
    ops.load()
    found = [
        (_line_for_line(load(spec, params)), spec, params)
        for spec in registered()
        if _source(spec) == file
        for params in _some(spec)
    ]
    if not found:
        return None
    _, spec, params = max(found, key=lambda one: sum(map(bool, one[0].split("\n"))))
    return spec, spec.template_values(params)


def _some(spec: KernelSpec) -> Iterator[Params]:
    """A few variants, spread over those of the newest architecture that has any."""
    for name in _ARCHS:
        if every := list(islice(spec.variants(arch(name)), _MOST)):
            yield from every[:: -(-len(every) // _LOOKED_AT)]
            return


def _line_for_line(rendered: Rendered) -> str:
    """The rendered text, each line where the template has it: `#line` says where."""
    lines = [""] * (rendered.template.count("\n") + 1)
    at, mark = 0, re.compile(rf'\s*#line (\d+) "{re.escape(rendered.name)}"')
    for line in rendered.text.split("\n"):
        moved = mark.fullmatch(line)
        if moved:
            at = int(moved[1]) - 1
        elif at < len(lines):
            lines[at] = line
            at += 1
    return "\n".join(lines)
