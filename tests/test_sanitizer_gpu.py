"""NVIDIA's compute-sanitizer over every kernel: memory errors and shared-memory races."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)


@pytest.mark.gpu
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize(
    ("check", "verdict"),
    [("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "0 hazards displayed (0 errors")],
)
def test_no_kernel_misuses_memory(check, verdict):
    done = subprocess.run(
        [str(TOOL), "--tool", check, sys.executable, "-m", "tests.sanitizer_cases"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert verdict in done.stdout, done.stdout[-3000:]
    launches = re.search(r"launches (\d+)", done.stdout)
    assert launches and int(launches[1]) > 100
