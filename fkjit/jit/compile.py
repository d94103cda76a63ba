"""Rendered CUDA -> cubin (or PTX) and what the kernel uses of the machine. Needs no GPU."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fkjit.arch import Target
from fkjit.errors import CompileError
from fkjit.jit.compiler import compile_here, compilers
from fkjit.jit.includes import ROOT, Includes, check_plain
from fkjit.jit.keys import key_fields, options
from fkjit.jit.nvrtc import Made, Program
from fkjit.jit.render import Rendered
from fkjit.jit.toolchain import check_target, dotted, nvrtc_info

_ERROR = (
    r"(?m)^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<what>.*)$"
)
# (C7508) setmaxnreg ignored, (C7510, C7514, C7517, C7519 …) wgmma serialised: all with status 0.
_SLOW = r"(?m)^.*\(C75\d\d\).*$"


__all__ = ["Compiled", "Resources", "compile_source", "key_fields", "options"]


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of the machine, from the log of ptxas; spills and sizes in bytes.

    `spill_*` include functions the kernel calls that were not inlined; `shared` is the static part;
    `stack` and spills are of one thread.
    """

    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0
    constant: int = 0
    barriers: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain integers by field name, as the cache stores them."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, int]) -> Resources:
        """The inverse of `to_dict`; unknown names are ignored, missing ones are 0."""
        known = Resources.__dataclass_fields__
        return Resources(**{"registers": 0, **{n: int(v) for n, v in values.items() if n in known}})


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of one kernel."""

    image: bytes  # the cubin, or PTX text
    kind: str  # "cubin" or "ptx"
    target: str  # "sm_90a"
    resources: Resources | None  # None for PTX: ptxas has not seen it yet
    seconds: float
    log: str
    nvrtc_version: str  # "13.0"
    problems: tuple[str, ...] = ()  # spills, serialised wgmma, ignored setmaxnreg
    read: Mapping[str, str] = field(default_factory=dict)  # of the toolkit, but for what all read


def compile_source(rendered: Rendered, entry: str, target: Target, *, describe: str) -> Compiled:
    """Compile one rendered kernel; `describe` is what errors call it: "attention.flash fp16 …".

    CompileError shows five lines of the template around the first error, the target, and where the
    rendered source was kept. Spills and wgmma or setmaxnreg warnings do not raise: see
    `Compiled.problems`. ToolchainError when NVRTC does not know the target or headers are missing.
    """
    check_target(target)
    version = nvrtc_info().version
    includes = Includes({name: _rooted(text) for name, text in rendered.headers.items()})
    program = Program(
        _rooted(rendered.text), ROOT + rendered.name, {}, options(target, version), (target.kind,)
    )
    made = run_program(program, includes, describe)
    log = made.log.replace(ROOT, "")
    if not made.images:
        raise CompileError(_explain(rendered, target, describe, log), log)
    image = made.images[target.kind]
    if target.kind == "ptx":
        image = image.rstrip(b"\0").replace(f'"{ROOT}'.encode(), b'"')
    resources = parse_resources(log, entry) if target.kind == "cubin" else None
    if target.kind == "cubin" and resources is None:
        raise CompileError(
            f'{describe}: {rendered.name} has no extern "C" __global__ function {entry!r} (or '
            f"ptxas said nothing of it)\n{log}",
            log,
        )
    return Compiled(
        image,
        target.kind,
        target.name,
        resources,
        made.seconds,
        log,
        dotted(version),
        problems(log),
        includes.read,
    )


def run_program(program: Program, includes: Includes, describe: str) -> Made:
    """The one place that compiles: what NVRTC makes of a program once it has every file it wants.

    Files of the toolkit are added to `includes` as it asks for them.
    """
    library = nvrtc_info().library
    while True:
        given = program._replace(headers=includes.given)
        made = compilers.compile(given, library, describe)
        if made is None:
            for name, text in {program.name: program.source, **includes.given}.items():
                check_plain(name.removeprefix(ROOT), text)
            made = compile_here(given, str(library or nvrtc_info().soname))
        if made.images or not includes.add_missing(made.log):
            return made._replace(log=made.log.replace(": Too many open files", ""))


def _rooted(text: str) -> str:
    return re.sub(r'(?m)^#line (\d+) "', rf'#line \1 "{ROOT}', text)


def parse_resources(log: str, entry: str) -> Resources | None:
    """The resources of `entry` from ptxas's verbose log, or None when it is not in it."""
    section = re.search(
        rf"Compiling entry function '{re.escape(entry)}' for '[^']*'(.*?)"
        r"(?=Compiling entry function|\Z)",
        log,
        re.DOTALL,
    )
    if not section:
        return None
    text = section[1]

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, text)]

    own = re.search(rf"Function properties for {re.escape(entry)}\n.*?(\d+) bytes stack", text)
    return Resources(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack=int(own[1]) if own else 0,
        shared=sum(numbers(r"(\d+) bytes smem")),
        constant=sum(numbers(r"(\d+) bytes cmem")),
        barriers=max(numbers(r"used (\d+) barriers"), default=0),
    )


def problems(log: str) -> tuple[str, ...]:
    """What ptxas lets pass and we do not: spills, and the warnings of `_SLOW`."""
    found = [line.strip() for line in re.findall(_SLOW, log)]
    spill = r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    for name, stores, loads in re.findall(spill, log):
        if int(stores) or int(loads):
            found.append(f"{name} spills registers: {stores} bytes stored, {loads} bytes loaded")
    return tuple(dict.fromkeys(found))


def errors_in(log: str) -> list[tuple[str, int, str]]:
    """File, line and text of each error in NVRTC's log, in its order."""
    return [(e["file"], int(e["line"]), e["what"]) for e in re.finditer(_ERROR, log)]


def _explain(rendered: Rendered, target: Target, describe: str, log: str) -> str:
    """The text of a CompileError."""
    version = dotted(nvrtc_info().version)
    errors = errors_in(log)
    lines = [f"{describe}: NVRTC {version} refused it for {target.name}"]
    if errors:
        file, line, what = errors[0]
        lines[0] += f": {file}:{line}: {what}"
        lines.append(rendered.window(file, line))
        if len(errors) > 1:
            lines.append(f"and {len(errors) - 1} more:")
            lines += [f"  {file}:{line}: {what}" for file, line, what in errors[1:4]]
    else:
        lines.append("\n".join(log.strip().splitlines()[:12]))
    values = ", ".join(f"{name}={value}" for name, value in sorted(rendered.values.items()))
    lines += [f"parameters: {values or 'none'}", f"target: {target.name}"]
    lines += [f"template: {rendered.where}", f"rendered source: {keep_source(rendered)}"]
    return "\n".join(line for line in lines if line)


def keep_source(rendered: Rendered) -> str:
    """Write the rendered source and its headers to a new temporary folder, for a look.

    Returns the path of the `.cu`, or why there is none: a full or read-only disk is no reason to
    lose the error this is for.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="fkjit-"))
        for name, text in {Path(rendered.name).name: rendered.text, **rendered.headers}.items():
            path = folder.joinpath(*(part for part in Path(name).parts if part != ".."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return str(folder / Path(rendered.name).name)
    except OSError as error:
        return f"could not be kept ({error})"
