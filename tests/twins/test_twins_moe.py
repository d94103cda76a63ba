"""Benchmarks of routing to experts on a CPU: twins in Triton's interpreter, peers, references."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench.core.catalog import operations
from bench.core.store import SCHEMA
from bench.moe import cases_moe, cases_moe_rows
from bench.moe import steps as moe_steps
from bench.moe import tables as moe_tables
from bench.moe.tables import BOTH, REGROUP, ROUTE
from bench.report.bandwidth import sources, trials
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.jit.build import quiet  # noqa: E402
from tests.twins.kit import interpreter  # noqa: E402, F401

DEVICE = SimpleNamespace(torch=torch, place="cpu")
ROW_OPS = ("moe_permute", "moe_combine")
ROUTING = [
    cases_moe.problem(37, 24, 3, block_size=4),
    cases_moe.problem(9, 64, 8, "bf16", block_size=16),
]
ROWS = [cases_moe_rows.problem(11, 3, 72, dtype, 5) for dtype in ("fp32", "bf16")]
CASES = [
    (op, given, name)
    for names, problems in (
        (("moe_route", "moe_regroup", "moe_route_and_regroup"), ROUTING),
        (("moe_permute", "moe_combine"), ROWS),
    )
    for op in names
    for given in problems
    for name in ("ours", "triton", "torch")
]


def candidates(op, name, given, arrays):
    """Ours, or the peer of this name."""
    if name == "ours":
        return op.ours(given, arrays)
    (made,) = [peer for peer in op.peers if peer.name == name]
    return made.prepare(given, arrays)


@one_in(3)
@pytest.mark.parametrize(
    ("op", "given", "name"), CASES, ids=[f"{o}-{n}-{g['dtype']}" for o, g, n in CASES]
)
def test_each_candidate_is_right_and_other_numbers_are_found_wrong(interpreter, op, given, name):  # noqa: F811
    op = operations()[op]
    with quiet():
        arrays = op.inputs(given, DEVICE)
        prepared = candidates(op, name, given, arrays)
        found = prepared.output(prepared.call())
        others = op.inputs(given, DEVICE)
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    assert op.expected(given, others).judge(found).why_wrong() is not None


@pytest.mark.parametrize("name", ["route + regroup", "route + torch"])
def test_one_launch_and_two_are_alike(name):
    op, given = operations()["moe_route_and_regroup"], ROUTING[0]
    arrays = op.inputs(given, DEVICE)
    with quiet():
        prepared = candidates(op, name, given, arrays)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None


def test_labels():
    assert cases_moe.label(ROUTING[1]) == "bf16 T9 E64 K8"
    assert cases_moe_rows.label(ROWS[0]) == "fp32 T11 K3 H72"


def stored(tmp_path):
    """A run of ours, the twin and PyTorch, with times that say whose they are."""
    problems = [*cases_moe.SETS["default"], *cases_moe.SETS["table"]]
    cases = [(op, cases_moe.label(p)) for p in problems for op in (ROUTE, REGROUP, BOTH)]
    cases += [
        (op, cases_moe_rows.label(p)) for p in cases_moe_rows.SETS["default"] for op in ROW_OPS
    ]
    lines = [{"record": "run", "schema": SCHEMA}]
    for op, case in dict.fromkeys(cases):
        for us, name in ((4.5, "fkjit"), (12.25, "triton"), (250.0, "torch")):
            graph = {"p50": us * 1e-3 * (2 if op == BOTH else 1), "gbs": 3600.0, "share_copy": 0.9}
            cell = {"record": "cell", "op": op, "case": case, "candidate": name, "graph": graph}
            kind = "ours" if name == "fkjit" else "peer"
            lines.append({**cell, "kind": kind, "warm": {"p50": us * 1e-3}})
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tables_and_picture_of_a_stored_run(tmp_path):
    path = stored(tmp_path)
    made = moe_tables.tables([path])
    assert (
        "| both in one launch, fp32 T32768 E64 K2 | 9.00 | 24.5 | 500 | 55.6 |" in made["headlines"]
    )
    assert "| permute, bf16 T64 K8 H7168 | 4.50 | 12.2 | 250 | 3600 (0.900) |" in made["rows"]
    assert made["sizes of route"].count("4.50 / 12.2 / 250") == len(cases_moe.SETS["table"])
    page = moe_tables.PAGE.read_text()
    assert moe_tables.with_tables(page, made).count(made["sizes of both"]) == 1
    times = moe_steps.steps(trials(path))
    assert times == pytest.approx([250, 500, 254.5, 24.5, 9, 9, 4.5])
    assert "two launches: 9.0" in moe_steps.picture(times, "made up")


def test_the_page_has_the_tables_and_the_picture_of_its_runs():
    page = moe_tables.PAGE.read_text()
    paths = sources(page)
    assert moe_tables.with_tables(page, moe_tables.tables(paths)) == page
    drawn = moe_steps.picture(moe_steps.steps(trials(paths[-1])), paths[-1].name)
    assert moe_tables.PICTURE.read_text() == drawn


def test_a_time_of_an_older_run_says_which(tmp_path):
    path = stored(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    newer = tmp_path / "newer.jsonl"
    newer.write_text(lines[0] + "".join(line for line in lines if "moe_permute" in line))
    made = moe_tables.tables([path, newer])
    permute, combine = made["rows"].splitlines()[2], made["rows"].splitlines()[-1]
    assert "(a)" not in permute and "H7168 (a) | 4.50" in combine
    assert "4.50 / 12.2 / 250 (a)" in made["sizes of route"]
    assert f"- b: `bench/results/{newer.name}`" in made["runs"]


def test_a_row_with_more_cells_than_headings_is_refused():
    with pytest.raises(ValueError, match="3 cells under 2 headings"):
        moe_tables.markdown([["a", "b"], ["1", "2", "3"]])
