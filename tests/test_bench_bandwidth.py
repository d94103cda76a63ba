"""The table of docs/BANDWIDTH.md: out of the stored run, of the trial with most candidates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import bandwidth

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_has_the_table_of_the_run_that_it_names():
    page = bandwidth.PAGE.read_text()
    (name,) = set(re.findall(r"`(bench/results/\S+\.jsonl)`", page))
    assert bandwidth.with_table(page, bandwidth.table(ROOT / name)) == page


def cell(candidate, ms, kind="peer", case="fp32 2^28"):
    return {
        **{"record": "cell", "op": "vector_add", "case": case, "candidate": candidate},
        **{"kind": kind, "graph": {"p50": ms, "gbs": 4412.3}},
    }


@pytest.fixture
def run(tmp_path):
    header = {"record": "run", "schema": 1}
    records = [
        header,
        cell("fkjit", 0.7, "ours"),
        *(cell(name, 0.75) for name in ("triton", "eager", "cupy")),
        cell("fkjit", 0.00213, "ours", "fp32 2^16"),
        {**cell("cupy", 1.0, case="fp32 2^16"), "graph": {"missing": "no graph"}},
        header,
        cell("fkjit", 0.9, "ours"),
        cell("compile", 1.5),
        cell("fkjit", 0.0025, "ours", "fp32 2^16"),
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_of_several_trials_the_fullest_counts_and_of_those_the_last(run):
    lines = bandwidth.table(run).splitlines()
    assert lines[2] == "| vector_add | fp32 2^16 | 2.50 | 4.41 |  |  |  |  |"
    assert lines[3] == "|  | fp32 2^28 | 700.0 | 4.41 | 750.0 | 750.0 |  | CuPy 750.0 |"
    assert len(lines) == 4
