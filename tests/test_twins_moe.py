"""Benchmarks of routing to experts on a CPU: twins in Triton's interpreter, peers, references."""

from __future__ import annotations

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


def test_the_picture_of_the_steps():
    from bench import moe_steps

    text = (
        "NVIDIA H200: copy 4272 GB/s\n"
        f"[1/4] moe_route {moe_steps.CASE}:  fkjit 6.0 us 1421 GB/s  torch 118.5 us 75 GB/s\n"
        "[2/4] moe_route bf16 T32768 E64 K2:  fkjit 9.0 us 1 GB/s\n"
        f"[3/4] moe_regroup {moe_steps.CASE}:  fkjit 9.5 us 81 GB/s  torch 112.8 us 7 GB/s\n"
        f"[4/4] moe_route_and_regroup {moe_steps.CASE}:  fkjit 13.2 us 715 GB/s  "
        "triton 58.7 us 161 GB/s  torch 1.5 ms 42 GB/s  (0:16 left)\n"
    )
    times = moe_steps.steps(moe_steps.read(text))
    assert times == pytest.approx([1500, 118.8, 58.7, 15.5, 13.2])
    assert "two launches: 15.5" in moe_steps.picture(times, "made up")
