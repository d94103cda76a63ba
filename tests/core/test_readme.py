"""What the README and the docs say is so: the example, the figures, the names, the links."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import fkjit
from bench.core import store
from bench.report import figure
from fkjit.arch import DEFAULT_ARCHS
from fkjit.settings import Settings
from tests.cli.kit import run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "COMMANDS.md").read_text()
RESULTS = ROOT / "bench" / "results"


def test_the_example_runs_and_is_right():
    (code,) = re.findall(r"(?s)```python\n(.*?)```", README)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    q, k, v, o = (names[name].double().cpu().numpy() for name in "qkvo")
    k, v = (np.repeat(x, 4, axis=1) for x in (k, v))
    scores = np.tril(np.exp(q @ k.swapaxes(2, 3) / 8))
    expected = scores / scores.sum(-1, keepdims=True) @ v
    assert np.abs(o - expected).max() < 4e-3


def test_the_excerpt_is_in_the_kernel():
    ((path, code),) = re.findall(r"(?s)\[[^\]]*\]\((\S+\.cu)\):\n\n```cuda\n(.*?)```", README)
    kernel = (ROOT / path).read_text()
    parts = re.split(r"(?m)^ *// ….*\n", code)  # what is left out
    places = [kernel.find(part) for part in parts]
    assert len(parts) > 1 and -1 not in places and places == sorted(places)


def test_the_table_of_gpus_has_every_target_and_what_was_measured():
    part = README.split("## Supported GPUs\n")[1].split("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    assert {f"`{name}`" for name in DEFAULT_ARCHS} <= set(re.findall(r"`sm_\w+`", " ".join(rows)))
    runs = [run for path in RESULTS.glob("*.jsonl") for run in store.read(path)]
    gpus = {run.header["gpu"].removeprefix("NVIDIA ") for run in runs}
    timed = {row.split()[1] for row in rows if "timed" in row}
    assert gpus == timed


def test_every_setting_is_in_the_document():
    text = COMMANDS.split("## Settings")[1]
    for name in Settings.names():
        assert f"`{Settings.variable(name)}" in text
    named = set(re.findall(r"FKJIT_[A-Z_]+", README + COMMANDS))
    assert named == set(map(Settings.variable, Settings.names()))


def test_every_command_the_documents_name_exists():
    named = set(re.findall(r"`fkjit (\w+)", COMMANDS))
    assert named == {
        "doctor", "list", "check", "show", "compile", "warm", "bench", "report", "tune", "profile",
        "cache", "explain", "generate", "new", "run", "clangd", "playground", "gallery",
    }  # fmt: skip
    assert set(re.findall(r"`fkjit (\w+)", README)) <= named
    for name in named:
        assert run(name, "--help").status == 0


@pytest.mark.parametrize("name", figure.TABLES)
def test_tables_are_those_of_committed_runs(name):
    page, results = figure.TABLES[name].page.read_text(), _source(name)
    assert figure.with_table(page, name, figure.table(results, name)) == page
    _, environment = figure.read(results)
    assert environment["date"][:10] in page and environment["gpu"] in page


def test_the_readme_shows_six_rows_of_the_run_that_the_page_has():
    assert len(figure.TABLES["summary"].rows) == 6
    assert _source("summary") == _source("forward") == _source("backward")


def test_picture_is_that_of_the_committed_run():
    made = figure.picture(*figure.read(_source("forward")))
    assert figure.PICTURE.read_text() == made
    assert f"]({figure.PICTURE.relative_to(ROOT)})" in README


def _source(name: str) -> Path:
    """The result file that a table says it is from."""
    page = figure.TABLES[name].page.read_text()
    text = page.split(f"<!-- {name}: begin -->")[1].split("<!-- ")[0]
    return ROOT / text.rsplit("From `", 1)[1].split("`")[0]


def test_versions_of_the_changelog():
    text = (ROOT / "docs" / "CHANGELOG.md").read_text()
    versions = re.findall(r"(?m)^## ([\d.]+)(?:, (?:unreleased|\d{4}-\d\d-\d\d))?$", text)
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(numbers, reverse=True) and len(versions) == text.count("\n## ")
    assert versions[0] == fkjit.__version__


def test_the_design_names_every_module():
    text = (ROOT / "docs" / "DESIGN.md").read_text().split("## Modules")[1]
    named = re.findall(r"`(\w+)([/*]?)`", text)
    for path in (ROOT / "fkjit").iterdir():
        stem = path.name.removesuffix(".py")
        if path.suffix == ".py" and not stem.startswith("__"):
            assert any(stem == n or (s == "*" and stem.startswith(n)) for n, s in named), stem


def test_figures_are_read_by_cell_of_16k_tokens_and_the_first_line_counts(tmp_path):
    def row(op, candidate, head_dim, seqlen, tflops):
        problem = {
            "head_dim": head_dim, "causal": False, "seqlen_k": seqlen, "seqlen_q": seqlen,
            "dtype": "bf16", "batch": 16_384 // seqlen, "heads_q": 2048 // head_dim,
        }  # fmt: skip
        cell = {"record": "cell", "op": op, "case": "c", "candidate": candidate}
        return {**cell, "problem": problem, "warm": {"p50": 1.0, "tflops": tflops}}

    lines = [
        {"record": "run", "schema": 1, "gpu": "G"},
        row("attention", "sdpa-flash", 128, 1024, 1),
        row("attention", "fkjit", 64, 512, 2),
        row("attention", "fkjit", 64, 1000, 7),
        row("attention", "sdpa-flash", 128, 1024, 3),
        {**row("attention", "fkjit", 128, 1024, 9), "warm": None, "error": "wrong"},
        row("scale", "fkjit", 128, 1024, 8),
    ]
    del lines[5]["warm"]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells, header = figure.read(path)
    assert cells == {(64, False, 512): {"fkjit": 2}, (128, False, 1024): {"sdpa-flash": 1}}
    assert list(cells) == sorted(cells) and header["gpu"] == "G"
    assert figure.candidates(cells) == ["fkjit", "sdpa-flash"]
