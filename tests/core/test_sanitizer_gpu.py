"""NVIDIA's compute-sanitizer over every kernel: memory errors and shared-memory races."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fkjit import ops
from fkjit.jit.build import build, quiet
from fkjit.spec import registered

TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)
VERDICTS = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "0 hazards displayed (0 errors"}
# racecheck follows only the lane that arrives at an mbarrier: what the other lanes have read before
# a __syncwarp() it takes for unordered (docs/SANITIZER.md). In the Hopper backward that is what
# rows bring along, in attention and products of codes the scales, in steps of one launch the stages
# of weights and a tile's sums; fkjit's own finder of races checks these kernels as they are.
LEFT_OUT = {
    "memcheck": [],
    "racecheck": [
        "quantized_attention.flash_sm90",
        "quantized_linear.wgmma_blocks",
        "grouped_linear.fp8_wgmma_blocks",
        "decode_step.whole",
        *(
            f"attention_backward{form}.flash_{name}"
            for form in ("", "_form")
            for name in ("sm90", "wide_sm90")
        ),
    ],
}


PARTS = 24  # each of so many processes runs some 30 variants


def sanitize(check: str, part: str) -> subprocess.CompletedProcess[str]:
    without = [f"--without={kernel}" for kernel in LEFT_OUT[check]]
    cases = [sys.executable, "-m", "tests.core.sanitizer_cases", f"--part={part}", *without]
    return subprocess.run(
        [str(TOOL), "--tool", check, *cases],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )


@pytest.mark.gpu
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("check", VERDICTS)
@pytest.mark.parametrize("part", [f"{part}/{PARTS}" for part in range(PARTS)])
def test_no_kernel_misuses_memory(part, check):
    """From a cache filled first: the tools slow down whatever happens in a process."""
    pytest.importorskip("cupy", reason="needs CuPy")
    from fkjit.runtime.device import device_target
    from tests.core.sanitizer_cases import cases, part_of

    ops.load()
    chosen = list(cases([], LEFT_OUT[check]))[part_of(part)]
    with quiet():
        for spec, params in chosen:
            build(spec, params, device_target(0))
    done = sanitize(check, part)
    assert done.returncode == 0, done.stdout[-3000:]
    assert VERDICTS[check] in done.stdout, done.stdout[-3000:]
    kernels = re.search(r"^kernels (.*)$", done.stdout, re.M)
    assert kernels and set(kernels[1].split()) == {spec.id for spec, _ in chosen}
    assert "variants left out 0" in done.stdout


@pytest.mark.gpu
def test_the_parts_leave_no_kernel_out():
    pytest.importorskip("cupy", reason="needs CuPy")
    from fkjit.runtime.device import device_target
    from tests.core.sanitizer_cases import cases, part_of

    ops.load()
    here = device_target(0).arch
    every = list(cases([], []))
    parts = [every[part_of(f"{part}/{PARTS}")] for part in range(PARTS)]
    assert sum(map(len, parts)) == len(every)
    expected = {spec.id for spec in registered() if next(spec.variants(here), None)}
    assert {spec.id for part in parts for spec, _ in part} == expected
