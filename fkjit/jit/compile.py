"""Rendered CUDA -> cubin (or PTX) and what the kernel uses of the machine. Needs no GPU."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fkjit.arch import Target
from fkjit.errors import CompileError
from fkjit.jit.keys import key_fields, options
from fkjit.jit.render import Rendered
from fkjit.jit.toolchain import check_target, dotted, header_dirs, nvrtc_info, nvrtc_module

# NVRTC writes the working directory into -lineinfo before a relative name, and the cubin would
# depend on it; so while it compiles, every name of ours stands under this root.
_ROOT = "/fkjit/"
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


def compile_source(rendered: Rendered, entry: str, target: Target, *, describe: str) -> Compiled:
    """Compile one rendered kernel; `describe` is what errors call it: "attention.flash fp16 …".

    CompileError shows five lines of the template around the first error, the target, and where the
    rendered source was kept. Spills and wgmma or setmaxnreg warnings do not raise: see
    `Compiled.problems`. ToolchainError when NVRTC does not know the target or headers are missing.
    """
    check_target(target)
    version = nvrtc_info().version
    flags = [*options(target, version), *(f"-I{folder}" for folder in header_dirs())]
    begin = time.perf_counter()
    image, log = _run_nvrtc(rendered, target, flags, describe)
    seconds = time.perf_counter() - begin
    resources = parse_resources(log, entry) if target.kind == "cubin" else None
    if target.kind == "cubin" and resources is None:
        raise CompileError(
            f'{describe}: {rendered.name} has no extern "C" __global__ function {entry!r} (or '
            f"ptxas said nothing of it)\n{log}",
            log,
        )
    return Compiled(
        image, target.kind, target.name, resources, seconds, log, dotted(version), problems(log)
    )


def _run_nvrtc(
    rendered: Rendered, target: Target, flags: list[str], describe: str
) -> tuple[bytes, str]:
    """The image and the log, or CompileError."""
    nvrtc = nvrtc_module()
    names = [name.encode() for name in rendered.headers]
    texts = [_rooted(text).encode() for text in rendered.headers.values()]
    program = nvrtc.createProgram(_rooted(rendered.text), _ROOT + rendered.name, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except Exception as error:  # cupy's NVRTCError; the log says what it was
            log = _log(nvrtc, program) or str(error)
            raise CompileError(_explain(rendered, target, describe, log), log) from None
        log = _log(nvrtc, program)
        if target.kind == "ptx":
            return _text(nvrtc.getPTX(program)).replace(f'"{_ROOT}', '"').encode(), log
        return mend_cubin(nvrtc.getCUBIN(program)), log
    finally:
        nvrtc.destroyProgram(program)


def _rooted(text: str) -> str:
    return re.sub(r'(?m)^#line (\d+) "', rf'#line \1 "{_ROOT}', text)


def _log(nvrtc: Any, program: Any) -> str:
    """The program log with our names as the templates have them."""
    return _text(nvrtc.getProgramLog(program)).replace(_ROOT, "")


def _text(value: Any) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.rstrip("\0")


def mend_cubin(image: bytes) -> bytes:
    """The cubin with the last byte that CuPy's getCUBIN drops as if it ended a string.

    The ELF header says how long the file is; the program header table stands last and ends in a
    zero byte. A CuPy that drops nothing is left alone.
    """
    tables = [(32, 54), (40, 58)]  # offsets of: program headers, section headers; size and count
    ends = []
    for offset, shape in tables:
        start = int.from_bytes(image[offset : offset + 8], "little")
        size = int.from_bytes(image[shape : shape + 2], "little")
        count = int.from_bytes(image[shape + 2 : shape + 4], "little")
        ends.append(start + size * count)
    return image + b"\0" if len(image) == max(ends) - 1 else image


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


def _explain(rendered: Rendered, target: Target, describe: str, log: str) -> str:
    """The text of a CompileError."""
    version = dotted(nvrtc_info().version)
    errors = list(re.finditer(_ERROR, log))
    lines = [f"{describe}: NVRTC {version} refused it for {target.name}"]
    if errors:
        first, line = errors[0], int(errors[0]["line"])
        lines[0] += f": {first['file']}:{line}: {first['what']}"
        lines.append(rendered.window(first["file"], line))
        if len(errors) > 1:
            lines.append(f"and {len(errors) - 1} more:")
            lines += [f"  {e['file']}:{e['line']}: {e['what']}" for e in errors[1:4]]
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
