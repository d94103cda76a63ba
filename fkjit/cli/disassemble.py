"""Cubin -> SASS, with whichever of NVIDIA's disassemblers this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from fkjit.errors import ToolchainError
from fkjit.jit.includes import ROOT
from fkjit.jit.render import Rendered

_TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}
_PLACE = r'(?m)^\s*//## File "([^"]+)", line (\d+).*$'  # what `nvdisasm -g` writes


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
