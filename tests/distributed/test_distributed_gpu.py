"""Two GPUs of one host: the checks of `gpu_ranks.py`, and the bench."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu


def torchrun(*command: str) -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*start, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_values_gradients_and_bits_of_two_gpus():
    said = torchrun("-m", "tests.distributed.gpu_ranks")
    assert said.count('"check"') >= 34 and '"wrong": true' not in said


def test_the_bench_measures_its_cases():
    said = torchrun(
        "-m",
        "bench.distributed.run",
        "--iterations",
        "2",
        "--cases",
        "ring8k,experts,column,decode",
    )
    assert "ring: ms" in said and "4 chunks: ms" in said and "fkjit, symmetric: ms" in said
