"""The scripts of docs/examples run, and compare themselves with what they stand for."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fkjit.jit.build import quiet

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script, capsys):
    if "transformers" in script.read_text():
        pytest.importorskip("transformers", reason="needs transformers")
    with quiet():
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_page_has_every_script():
    page = (FOLDER / "README.md").read_text()
    assert len(SCRIPTS) >= 4 and all(f"]({script.name})" in page for script in SCRIPTS)
