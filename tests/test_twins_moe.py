"""Benchmarks of routing to experts on a CPU: twins in Triton's interpreter, peers, references."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench.op import operations
from bench.ops import moe, moe_rows

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.build import quiet  # noqa: E402
from tests.twins_kit import interpreter  # noqa: E402, F401

DEVICE = SimpleNamespace(torch=torch, place="cpu")
ROUTING = [moe.problem(37, 24, 3, block_size=4), moe.problem(9, 64, 8, "bf16", block_size=16)]
ROWS = [moe_rows.problem(11, 3, 72, dtype, 5) for dtype in ("fp32", "bf16")]
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
    assert moe.label(ROUTING[1]) == "bf16 T9 E64 K8"
    assert moe_rows.label(ROWS[0]) == "fp32 T11 K3 H72"


def test_the_picture_of_the_steps(tmp_path):
    from bench import moe_steps

    cells = [
        {"op": moe_steps.OP, "case": moe_steps.CASE, "candidate": name, mode: {"p50": 0.001 * n}}
        for n, (name, mode, *_) in enumerate(moe_steps.STEPS, 1)
    ]
    header = {"record": "run", "schema": 1, "gpu": "a GPU", "date": "2026-11-22"}
    lines = [header, *({"record": "cell", **cell} for cell in cells)]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    times, found = moe_steps.read(path)
    assert times == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] and found["gpu"] == "a GPU"
    drawn = moe_steps.picture([None, *times[1:]], found)
    assert "one launch: 6.0" in drawn and "call by call" not in drawn
