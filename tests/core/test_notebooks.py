"""Notebooks run from the first cell to the last, and print what is stored in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.site import cells

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
AGAIN = "python -m docs.site.cells docs/notebooks/* writes what is printed now"


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(path):
    stored = path.read_text(encoding="utf-8")
    assert cells.executed(stored, path.name).splitlines() == stored.splitlines(), AGAIN


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_of_format_4_5(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code


def test_cells_share_names_and_their_last_value_is_shown():
    sources = ["x = 2\nprint('a')", "x + 1", "x = None\nx"]
    code = [
        {"cell_type": "code", "source": [s], "outputs": ["old"], "execution_count": 9}
        for s in sources
    ]
    done = json.loads(cells.executed(json.dumps({"cells": code})))["cells"]
    assert [cell["execution_count"] for cell in done] == [1, 2, 3]
    printed, value, nothing = (cell["outputs"] for cell in done)
    assert printed == [{"name": "stdout", "output_type": "stream", "text": ["a\n"]}]
    assert value[0]["data"] == {"text/plain": ["3"]} and not nothing


def test_a_page_shows_a_notebooks_text_code_and_outputs():
    pytest.importorskip("docutils", reason="needs fkjit[docs]")
    from docs.site.notebooks import markdown

    source = [{"cell_type": "markdown", "source": ["# T"]}]
    source += [{"cell_type": "code", "source": ["1 + 1"], "outputs": [], "execution_count": 1}]
    shown = markdown(cells.executed(json.dumps({"cells": source})))
    assert shown == "# T\n\n```python\n1 + 1\n```\n\n```text\n2\n```"
