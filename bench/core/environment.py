"""Where a run was measured: GPU, driver, versions, commit. A figure means nothing without them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from fkjit import __version__
from fkjit.runtime.gpus import driver_version, gpus

from .op import version

_PACKAGES = (
    "torch", "triton", "numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13", "nvidia-cublas", "flash-attn-4", "flashinfer-python", "quack-kernels",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Everything of the machine and the software; what is not there is None or left out."""
    from fkjit.jit.toolchain import dotted, driver_cuda_version, nvrtc_info

    found, why = gpus()
    cuda = driver_cuda_version() if found else None
    versions = {name: version(name) for name in _PACKAGES}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "gpu": found[0].name if found else None,
        "gpu_missing": why,
        "capability": list(found[0].capability) if found else None,
        "gpu_bytes": found[0].memory if found else None,
        "driver": driver_version(),
        "driver_cuda": dotted(cuda) if cuda else None,
        "nvrtc": dotted(nvrtc_info().version),
        "cudnn": _cudnn(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "fkjit": __version__,
        "versions": {name: text for name, text in versions.items() if text},
        **_commit(),
    }


def _cudnn() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return import_module("torch.backends.cudnn").version()


def _commit() -> dict[str, Any]:
    """The checkout's commit, and whether anything beside results differs from it.

    Where git cannot say, FKJIT's own version has to do and the commit is None.
    """
    here = Path(__file__).resolve().parents[2]
    if not (here / "pyproject.toml").exists():
        return {"commit": None, "modified": None}

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", ".", ":!bench/results")
    return {"commit": commit, "modified": None if changed is None else bool(changed)}
