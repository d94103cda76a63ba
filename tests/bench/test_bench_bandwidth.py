"""The tables of docs/BANDWIDTH.md and docs/DECODE.md: out of stored runs, of the fullest trials."""

from __future__ import annotations

import json

import pytest

from bench.report import bandwidth


@pytest.mark.parametrize("path", bandwidth.PAGES, ids=lambda path: path.stem)
def test_a_page_has_the_table_of_the_runs_that_it_names(path):
    page = path.read_text()
    made = bandwidth.table(bandwidth.sources(page), bandwidth.PAGES[path])
    assert bandwidth.with_table(page, made) == page


def cell(candidate, ms, kind="peer", case="fp32 2^28"):
    return {
        **{"record": "cell", "op": "vector_add", "case": case, "candidate": candidate},
        **{"kind": kind, "graph": {"p50": ms, "gbs": 4412.3}},
    }


@pytest.fixture
def run(tmp_path):
    header = {"record": "run", "schema": 1, "date": "2026-11-22T01:00:00"}
    header["ceilings"] = {"copy_gbs": 4250.0}
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
    lines = bandwidth.table([run]).splitlines()
    assert lines[2] == "| vector_add | fp32 2^16 | 2.50 | 4.41 |  |  |  |  | a |"
    assert lines[3] == "|  | fp32 2^28 | 700.0 | 4.41 | 750.0 | 750.0 |  | CuPy 750.0 | a |"
    assert lines[4:] == ["", "- a: `bench/results/run.jsonl`, 2026-11-22; copy 4.25 to 4.25 TB/s"]


def test_of_several_runs_the_last_counts_and_before_it_those_with_other_peers(run, tmp_path):
    other = tmp_path / "other.jsonl"
    records = [{"record": "run", "schema": 1}, cell("fkjit", 0.6, "ours"), cell("triton", 0.8)]
    other.write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = bandwidth.table([run, other]).splitlines()
    assert lines[2] == "| vector_add | fp32 2^16 | 2.50 | 4.41 |  |  |  |  | a |"
    assert lines[3] == "|  | fp32 2^28 | 600.0 | 4.41 | 800.0 |  |  |  | b |"
    assert lines[4] == "|  |  | 700.0 | 4.41 | 750.0 | 750.0 |  | CuPy 750.0 | a |"
    assert lines[-1] == "- b: `bench/results/other.jsonl`"
    assert len(bandwidth.table([other, run]).splitlines()) == 7  # the other one adds no peer
