"""What the README and the docs say is so: the example, the figures, the names, the links."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from bench.report import figure
from fkjit.settings import Settings
from tests.cli.kit import run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = (
    "README.md", "CONTRIBUTING.md", "docs/DESIGN.md", "docs/BENCHMARKS.md", "docs/PROFILING.md",
    "docs/TUNING.md", "docs/ATTENTION.md", "docs/BANDWIDTH.md", "docs/PYTORCH.md",
)  # fmt: skip


def test_the_example_runs_and_is_right():
    (code,) = re.findall(r"(?s)```python\n(.*?)```", README)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    q, k, v, o = (names[name].astype(np.float64) for name in "qkvo")
    k, v = (np.repeat(x, 4, axis=1) for x in (k, v))
    scores = np.tril(np.exp(q @ k.swapaxes(2, 3) / 8))
    expected = scores / scores.sum(-1, keepdims=True) @ v
    assert np.abs(o - expected).max() < 4e-3


def test_every_setting_is_in_the_readme():
    for field in fields(Settings):
        assert f"`{Settings.variable(field.name)}" in README
    named = set(re.findall(r"FKJIT_[A-Z_]+", README))
    assert named == {Settings.variable(field.name) for field in fields(Settings)}


def test_every_command_it_names_exists():
    named = set(re.findall(r"`fkjit (\w+)", README))
    assert named == {
        "doctor", "list", "check", "show", "compile", "warm", "bench", "report", "tune", "profile",
        "cache",
    }  # fmt: skip
    for name in named:
        assert run(name, "--help").status == 0


@pytest.mark.parametrize("name", figure.TABLES)
def test_tables_are_those_of_committed_runs(name):
    results = _source(name)
    cells, environment = figure.read(results)
    made = figure.table(cells, environment, results, name)
    assert figure.with_table(README, name, made) == README
    assert environment["date"][:10] in README and environment["gpu"] in README


def test_picture_is_that_of_the_committed_run():
    made = figure.picture(*figure.read(_source("figures")))
    assert figure.PICTURE.read_text() == made
    assert f"]({figure.PICTURE.relative_to(ROOT)})" in README


def _source(name: str) -> Path:
    """The result file that a table of the README says it is from."""
    text = README.split(f"<!-- {name}: begin -->")[1].split("<!-- ")[0]
    return ROOT / text.rsplit("From `", 1)[1].split("`")[0]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_documents_point_to_is_there(document):
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / document).parent.joinpath(link).exists(), link
    for path in re.findall(r"`((?:tests|docs|bench|fkjit|templates|kernels_cu)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


def test_the_design_names_every_module():
    text = (ROOT / "docs" / "DESIGN.md").read_text().split("## Modules")[1]
    named = re.findall(r"`(\w+)([/*]?)`", text)
    for path in (ROOT / "fkjit").iterdir():
        stem = path.name.removesuffix(".py")
        if path.suffix == ".py" and stem != "__init__":
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
