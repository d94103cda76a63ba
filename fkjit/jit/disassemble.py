"""Cubin -> SASS, with whichever of NVIDIA's disassemblers this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fkjit.errors import ToolchainError
from fkjit.jit.includes import ROOT
from fkjit.jit.render import Rendered

_TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}
_PLACE = r'(?m)^\s*//## File "([^"]+)", line (\d+).*$'  # what `nvdisasm -g` writes
_CODE = r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;"
_LABEL = r"(\.L_[\w.]+):"


def disassembler() -> Path | None:
    """nvdisasm or cuobjdump: on PATH, in CUDA_HOME or CUDA_PATH, or from the pip package."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda")]
    for name in _TOOLS:
        on_path = shutil.which(name)
        if on_path:
            return Path(on_path)
        for folder in folders + _package_folders():
            if os.access(folder / name, os.X_OK):
                return folder / name
    return None


def _package_folders() -> list[Path]:
    """The bin folders of NVIDIA's pip packages (nvidia/cu13/bin, nvidia/cuda_nvdisasm/bin)."""
    spec = find_spec("nvidia")
    roots = [Path(path) for path in spec.submodule_search_locations or []] if spec else []
    return [folder for root in roots for folder in sorted(root.glob("*/bin"), reverse=True)]


def sass(cubin: bytes, source: Rendered | None = None) -> str:
    """The machine code of a cubin as text; ToolchainError says how to get a disassembler.

    `source`: what the cubin was made of. Each run of instructions then stands below the line that
    it comes from, which needs nvdisasm.
    """
    tool = disassembler()
    if tool is None:
        raise ToolchainError(
            "show: no nvdisasm or cuobjdump on PATH, in CUDA_HOME or beside Python: "
            "pip install nvidia-cuda-nvdisasm (or: pip install 'fkjit[sass]')"
        )
    if source is None:
        return _run(tool, _TOOLS[tool.name], cubin)
    if tool.name != "nvdisasm":
        raise ToolchainError(
            f"show: --lines needs nvdisasm, and {tool} is there alone: "
            "pip install nvidia-cuda-nvdisasm (or: pip install 'fkjit[sass]')"
        )
    text = _run(tool, (*_TOOLS[tool.name], "-g"), cubin)
    return re.sub(_PLACE, lambda match: _line(source, match[1], int(match[2])), text)


@dataclass(frozen=True)
class Line:
    """One instruction, or a label, of machine code; `frames`: the lines that it comes from, the
    innermost of inlined functions first, as ("templates/ptx/mma.cuh", 20)."""

    text: str
    frames: tuple[tuple[str, int], ...] = ()
    address: int | None = None  # None: a label


def listing(cubin: bytes) -> list[Line]:
    """The instructions of a cubin with all their source lines; needs nvdisasm."""
    tool = disassembler()
    if tool is None or tool.name != "nvdisasm":
        raise ToolchainError(
            "machine code with its lines needs nvdisasm, on PATH, in CUDA_HOME or beside Python: "
            "pip install nvidia-cuda-nvdisasm (or: pip install 'fkjit[sass]')"
        )
    found: list[Line] = []
    frames: list[tuple[str, int]] = []
    ended = True  # the frames are those of an instruction before
    for raw in _run(tool, ("-c", "-gi", "-ndf"), cubin).splitlines():
        place, code, label = (re.match(p, raw) for p in (_PLACE, rf"\s*{_CODE}", rf"\s*{_LABEL}"))
        if place:
            frames = [] if ended else frames
            frames.append((place[1].removeprefix(ROOT), int(place[2])))
            ended = False
        elif code:
            found.append(Line(code[2], tuple(frames), int(code[1], 16)))
            ended = True
        elif label:
            found.append(Line(f"{label[1]}:"))
    return found


def _line(source: Rendered, file: str, number: int) -> str:
    name = file.removeprefix(ROOT)
    return f"// {name}:{number}: {source.line(name, number)}".rstrip(": ")


def _run(tool: Path, options: tuple[str, ...], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise ToolchainError(
            f"show: {tool} does not read this cubin ({why}); it may be older than NVRTC: "
            "pip install --upgrade nvidia-cuda-nvdisasm"
        )
    return done.stdout
