"""The fixture `sanitize` in a test run of its own, as a user's tests have it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = '''
import numpy as np
import pytest
import fkjit
from fkjit.sanitizer import current

COPY = "__global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + AT]; }"
COLUMN = """
__global__ void column(float* y) {
  __shared__ float s[64];
  s[threadIdx.x * 2] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[(threadIdx.x ^ 1) * 2];
}"""

def run(at):
    fkjit.launch_cpu(COPY.replace("AT", str(at)), 1, 8, [np.ones(8, "f4"), np.ones(8, "f4")])

def test_without():
    assert current() is None

def test_default(sanitize):
    assert current() is sanitize and sanitize.mem and sanitize.race and not sanitize.banks
    run(0)

def test_finds(sanitize):
    run(1)

@pytest.mark.sanitize(mem=False, race=False)
def test_unchecked(sanitize):
    run(1)

@pytest.mark.sanitize(race=False, banks=2)
def test_banks(sanitize):
    fkjit.launch_cpu(COLUMN, 1, 32, [np.ones(32, "f4")])
    assert [line.ratio for line in sanitize.reports] == [2.0, 2.0]

@pytest.mark.sanitize(banks=1.5)
class TestClass:
    def test_gate(self, sanitize):
        fkjit.launch_cpu(COLUMN, 1, 32, [np.ones(32, "f4")])

@pytest.mark.sanitize(False)
def test_positional(sanitize):
    pass

@pytest.mark.sanitize(rase=False)
def test_misspelt(sanitize):
    pass
'''


def pytest_(folder: Path, *words: str) -> str:
    """What pytest says, without plugins but ours."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "fkjit.pytest_plugin", "--strict-markers",
         "-p", "no:cacheprovider", "-rA", *words],
        cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_fixture_and_its_marker(tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS)
    said = pytest_(tmp_path)
    verdicts = {
        name: verdict
        for verdict, name in re.findall(r"(?m)^(PASSED|FAILED|ERROR) test_mine\.py::(\S+)", said)
    }
    assert verdicts == {
        "test_without": "PASSED",
        "test_default": "PASSED",
        "test_finds": "FAILED",
        "test_unchecked": "PASSED",
        "test_banks": "PASSED",
        "TestClass::test_gate": "FAILED",
        "test_positional": "ERROR",
        "test_misspelt": "ERROR",
    }, said
    assert "copy: out-of-bounds global read" in said and "column: bank conflicts" in said
    assert "the marker sanitize takes options by name, sanitize(race=False); got False" in said
    assert "unexpected keyword argument 'rase'" in said
    assert "@pytest.mark.sanitize(mem=True, race=True, banks=False): " in pytest_(
        tmp_path, "--markers"
    )


def test_pytest_loads_it_where_fkjit_is_installed():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.entry-points.pytest11]\n")[1].split("\n\n")[0]
    assert section.strip() == 'fkjit = "fkjit.pytest_plugin"'


def test_loading_it_brings_nothing_along():
    code = "import sys, pytest; had = set(sys.modules); import fkjit.pytest_plugin; "
    code += "print(*(set(sys.modules) - had))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert set(done.stdout.split()) == {"fkjit", "fkjit.pytest_plugin"}, done.stderr
