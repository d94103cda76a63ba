"""docs/SANITIZER.md: its example has the report that stands there, its calls work, its links lead
somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit.jit.build import quiet
from tests.cli.kit import run

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "SANITIZER.md"
TEXT = DOCUMENT.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", TEXT)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with block_sum.cu."""
    (source,) = blocks("cuda")
    (tmp_path / "block_sum.cu").write_text(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_race_has_the_report_that_is_shown(folder):
    (code,) = [code for code in blocks("python") if "block_sum.cu" in code]
    (shown,) = blocks("text")
    with quiet(), pytest.raises(fkjit.SanitizerError) as caught:
        exec(compile(code, "SANITIZER.md", "exec"), {})
    assert str(caught.value) == shown.strip()
    error = caught.value
    assert error.kind == "race" and error.kernel == "block_sum" and error.hint
    assert error.location.startswith("block_sum.cu:") and error.other.startswith("block_sum.cu:")


def test_the_remedy_it_names_is_one(folder):
    path = folder / "block_sum.cu"
    before = "    if (i < half)"
    path.write_text(path.read_text().replace(before, f"    __syncthreads();\n{before}"))
    x, total = np.random.default_rng(5).standard_normal((4, 256), dtype="f4"), np.zeros(4, "f4")
    with quiet():
        fkjit.launch_cpu("block_sum.cu", 4, 256, [x, total])
    np.testing.assert_allclose(total, x.sum(1), rtol=1e-5, atol=1e-5)


def test_the_bank_figures_have_the_fields_that_are_printed(capsys):
    (code,) = [code for code in blocks("python") if "found.reports" in code]
    q = np.random.default_rng(6).standard_normal((1, 1, 16, 32)).astype("f2")
    with quiet():
        exec(compile(code, "SANITIZER.md", "exec"), {"fkjit": fkjit, "q": q, "k": q, "v": q})
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("1.0 ") and ".cu" in line for line in lines)


def test_the_command_it_shows_exists():
    (words,) = re.findall(r"(?m)^    fkjit (check .*?)  #", TEXT)
    assert run("check", "--help").status == 0
    assert set(re.findall(r"--\w+", words)) <= set(re.findall(r"--\w+", run("check", "--help").out))


def test_links_and_paths_are_there():
    for path in re.findall(r"`((?:tests|docs|bench|fkjit|templates|kernels_cu)/[\w./]*)`", TEXT):
        assert (ROOT / path).exists(), path
    for document in ("README.md", "CONTRIBUTING.md", "docs/DESIGN.md"):
        assert "SANITIZER.md)" in (ROOT / document).read_text(), document
