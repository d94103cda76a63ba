"""NVIDIA's compute-sanitizer over every kernel: memory errors and shared-memory races."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fkjit
from fkjit import ops
from fkjit.spec import registered

TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)
VERDICTS = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "0 hazards displayed (0 errors"}
# racecheck follows only the lane that arrives at an mbarrier: what the other lanes have read before
# a __syncwarp() it takes for unordered (docs/SANITIZER.md). In the Hopper backward that is what
# rows bring along; fkjit's own finder of races checks these kernels as they are.
LEFT_OUT = {
    "memcheck": [],
    "racecheck": ["attention_backward.flash_sm90", "attention_backward_form.flash_sm90"],
}


def sanitize(check: str) -> subprocess.Popen[str]:
    without = [f"--without={kernel}" for kernel in LEFT_OUT[check]]
    return subprocess.Popen(
        [str(TOOL), "--tool", check, sys.executable, "-m", "tests.core.sanitizer_cases", *without],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.gpu
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
def test_no_kernel_misuses_memory():
    """Every kernel of every operation, by both tools at the same time, from a cache filled first:
    the tools slow down whatever happens in a process."""
    from fkjit.runtime.device import device_target

    ops.load()
    here = device_target(0).arch
    expected = {spec.id for spec in registered() if next(spec.variants(here), None)}
    fkjit.warm()
    running = {check: sanitize(check) for check in VERDICTS}
    for check, process in running.items():
        text, _ = process.communicate(timeout=900)
        assert process.returncode == 0, text[-3000:]
        assert VERDICTS[check] in text, text[-3000:]
        kernels = re.search(r"^kernels (.*)$", text, re.M)
        assert kernels and set(kernels[1].split()) == expected - set(LEFT_OUT[check])
        assert "variants left out 0" in text
