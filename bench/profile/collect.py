"""Run the target under Nsight Compute or Systems, and put counters and candidates together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fkjit.errors import ToolchainError

from .metrics import EXTRA, SECTIONS, extract
from .parse import Launch, parse

_PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute", "/opt/nvidia/nsight-systems")
_GET = {
    "ncu": "Nsight Compute comes with the CUDA toolkit (/usr/local/cuda/bin/ncu), or as the "
    "package cuda-nsight-compute of NVIDIA's repositories, or from "
    "https://developer.nvidia.com/nsight-compute",
    "nsys": "Nsight Systems comes with the CUDA toolkit, or as the package nsight-systems-cli of "
    "NVIDIA's repositories, or from https://developer.nvidia.com/nsight-systems",
}
_TARGET = f"{__name__.rpartition('.')[0]}.target"
_ROOT = Path(__file__).resolve().parents[len(__name__.split(".")[:-1])]  # what holds the package


def find(tool: str) -> str:
    """Where the profiler is. ToolchainError says how to get it."""
    found = shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(_PLACES))
    if found is None:
        raise ToolchainError(
            f"profile: {tool} is neither on the PATH nor in {_PLACES[0]}. {_GET[tool]}. "
            "Everything else of fkjit works without it"
        )
    return found


def counters(request: dict[str, Any], report: Path | None = None) -> dict[str, Any]:
    """Profile with ncu: {"environment", "ncu", "entries"}; `report` keeps ncu's own file.

    ToolchainError where ncu is missing or fails, with the end of what it said.
    """
    ncu = find("ncu")
    with tempfile.TemporaryDirectory(prefix="fkjit-profile-") as name:
        folder = Path(name)
        kept = (report or folder / "profile").resolve()
        options = [*_options(EXTRA), "--export", str(kept), "--force-overwrite"]
        done, answer = _run([ncu, *options], request, folder)
        if done.returncode and "metric" in done.stdout + done.stderr:  # one that this GPU has not
            options = [*_options(()), "--export", str(kept), "--force-overwrite"]
            done, answer = _run([ncu, *options], request, folder)
        if answer is None:
            raise ToolchainError(f"profile: ncu failed ({done.returncode}): {_end(done)}")
        file = kept if kept.suffix == ".ncu-rep" else kept.with_name(kept.name + ".ncu-rep")
        table = [ncu, "--import", str(file), "--csv", "--page", "raw", "--print-units", "base"]
        printed = subprocess.run(table, capture_output=True, text=True, check=False)
        if printed.returncode or not file.exists():
            raise ToolchainError(f"profile: ncu profiled nothing: {_end(done)} {_end(printed)}")
    answer["ncu"] = version(ncu)
    return joined(answer, parse(printed.stdout))


def timeline(request: dict[str, Any], report: Path) -> Path:
    """Profile with nsys, with an NVTX range around each candidate; the report's path."""
    nsys = find("nsys")
    options = ["profile", "--trace", "cuda,nvtx", "--force-overwrite", "true", "--output"]
    with tempfile.TemporaryDirectory(prefix="fkjit-profile-") as name:
        done, answer = _run([nsys, *options, str(report.resolve())], request, Path(name))
    if answer is None or done.returncode:
        raise ToolchainError(f"profile: nsys failed ({done.returncode}): {_end(done)}")
    return report if report.suffix == ".nsys-rep" else report.with_name(f"{report.name}.nsys-rep")


def _options(extra: Sequence[str]) -> list[str]:
    """Clocks stay as they are; only what stands between start and stop of the target is seen."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    metrics = ["--metrics", ",".join(extra)] if extra else []
    return ["--clock-control", "none", "--profile-from-start", "off", "--nvtx", *sections, *metrics]


def _run(
    command: list[str], request: dict[str, Any], folder: Path
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """The target under a profiler, and its answer if it came to one."""
    asked, answer = folder / "request.json", folder / "answer.json"
    asked.write_text(json.dumps(request))
    python = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [*command, sys.executable, "-m", _TARGET, str(asked), str(answer)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": python},
    )  # fmt: skip
    return done, json.loads(answer.read_text()) if answer.exists() else None


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines of what it said."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return " / ".join(line.strip() for line in lines[-4:])[-600:] or "it said nothing"


def version(ncu: str) -> str | None:
    """ "2025.3.1.0" """
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    words = [word for word in said.split() if word[:4].isdigit() and "." in word]
    return words[0] if words else None


def joined(answer: dict[str, Any], launches: Sequence[Launch]) -> dict[str, Any]:
    """The answer with `kernels` in each candidate: name, grid, block and our metrics."""
    for entry in answer["entries"]:
        for candidate in entry["candidates"]:
            key = candidate.pop("range")
            if key is None:
                continue
            candidate["kernels"] = [
                {
                    "kernel": launch.kernel,
                    "grid": list(launch.grid),
                    "block": list(launch.block),
                    **extract(launch.metrics),
                }
                for launch in launches
                if launch.range == key
            ]
            if not candidate["kernels"]:
                candidate["missing"] = "ncu saw no kernel of it"
    return answer
