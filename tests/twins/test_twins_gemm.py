"""The products' Triton twin in Triton's interpreter, and the benchmark's cases of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from bench.core import twins  # noqa: E402
from bench.core.catalog import operations  # noqa: E402
from bench.gemm import cases_linear_backward as backward_bench  # noqa: E402
from bench.gemm.cases_linear_dweight import dweight  # noqa: E402
from bench.gemm.cases_linear_dx import dx  # noqa: E402
from bench.gemm.products import activated, problem  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.twins.kit import interpreter, normal  # noqa: E402, F401


class Place:
    """What the suite makes inputs on."""

    torch, place = torch, "cpu"


SHAPES = [(1, 8, 8), (70, 40, 96), (33, 77, 51), (5, 16, 130)]  # m, k, n; tiles are 32 x 32 x 32
DTYPES = ["fp16", "bf16", "fp32"]
TAILS = [("none", False), ("relu", False), ("gelu", False), ("gelu_tanh", True), ("silu", True)]


def exact(x, weight, bias, residual, activation, gate):
    """The textbook, in the operands' own dtype."""
    z = x @ weight.t() + bias
    n = weight.shape[0] // (2 if gate else 1)
    y = activated(torch.nn.functional, activation, z[:, :n])
    return (y * z[:, n:] if gate else y) + residual


@one_in(3, dtype=DTYPES, transposed=[False, True], tail=TAILS, shape=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tail", TAILS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errs_at_most_twice_as_much_as_pytorch(interpreter, shape, tail, transposed, dtype):  # noqa: F811
    from bench.gemm.triton_linear import linear

    (m, k, n), (activation, gate) = shape, tail
    wide = n * (2 if gate else 1)
    x, weight = normal(m, k, dtype=dtype), normal(wide, k, dtype=dtype, seed=1) * k**-0.5
    if transposed:
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    bias, residual = normal(wide, dtype=dtype, seed=2), normal(m, n, dtype=dtype, seed=3)
    out = linear(x, weight, bias, residual, activation=activation, gate=gate)
    given = (x, weight, bias, residual)
    right = exact(*(array.double() for array in given), activation, gate)
    theirs = exact(*given, activation, gate).double() - right
    ours = out.double() - right
    assert out.dtype == x.dtype and out.shape == (m, n)
    floor = 2e-6 * max(1.0, float(right.norm()))
    assert ours.norm() <= 2 * theirs.norm() + floor
    assert ours.abs().max() <= 2 * theirs.abs().max() + floor


def test_without_rows_and_without_the_rest(interpreter):  # noqa: F811
    from bench.gemm.triton_linear import linear

    x, weight = normal(0, 16), normal(24, 16)
    assert linear(x, weight).shape == (0, 24)
    x = normal(3, 16)
    assert torch.allclose(linear(x, weight).float(), x.float() @ weight.float().t(), atol=2e-2)


CASES = [
    ("linear", problem(37, 64, 48, bias=True, activation="gelu_tanh")),
    ("linear", problem(70, 32, 40, gate=True, activation="silu", residual=True)),
    ("linear", problem(5, 40, 24, weight_layout="kn", dtype="fp32", residual=True)),
    ("linear_dx", dx(40, 24, 56)),
    ("linear_dweight", dweight(40, 24, 56)),
]
CASES += [
    ("linear_backward", backward_bench.problem(37, 300, activation, gate, dtype))
    for activation, gate, dtype in (
        ("gelu_tanh", False, "bf16"), ("gelu", False, "fp32"), ("silu", True, "fp16"),
        ("relu", True, "fp32"), ("none", False, "bf16"),
    )
]  # fmt: skip
CANDIDATES = [(case, name) for case in CASES for name in ("ours", "triton", "torch")]
CANDIDATES += [(CASES[0], "addmm_activation"), (CASES[2], "addmm")]


@one_in(2)
@pytest.mark.parametrize(("case", "name"), CANDIDATES, ids=[f"{c[0]}-{n}" for c, n in CANDIDATES])
def test_the_suite_finds_each_candidate_right_and_other_numbers_wrong(interpreter, case, name):  # noqa: F811
    named, given = case
    op = operations()[named]
    arrays, others = op.inputs(given, Place), op.inputs(given, Place)
    peers = {peer.name: peer.prepare for peer in op.peers}
    with quiet():
        prepared = {**peers, "ours": op.ours}[name](given, arrays)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    assert "wrong result" in str(op.expected(given, others).judge(found).why_wrong())


@one_in(2)
@pytest.mark.parametrize("given", [given for op, given in CASES if op == "linear_backward"],
                         ids=backward_bench.label)  # fmt: skip
def test_the_twin_makes_dbias_as_well(interpreter, given):  # noqa: F811
    from bench.gemm.peers_linear_backward import gradients
    from bench.gemm.triton_linear_backward import backward

    arrays = backward_bench.inputs(given, Place)
    dy, pre = arrays["dy"], arrays.get("pre")
    found = backward(dy, pre, activation=given["activation"], gate=given["gate"])
    wide = gradients(given)(dy.double(), None if pre is None else pre.double())
    tolerance = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 2e-1}[given["dtype"]]
    assert len(found) == len(wide)
    for one, right in zip(found, wide, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["linear", "linear_dx", "linear_dweight", "linear_backward"])
def test_the_twin_is_right_on_the_quick_cases_of_the_suite(name):
    pytest.importorskip("triton", reason="needs triton")
    op, twin = operations()[name], twins.twin(name)
    for given in op.sets["quick"]:
        arrays = op.inputs(given, SimpleNamespace(torch=torch, place="cuda"))
        right, prepared = op.expected(given, arrays), twin.prepare(given, arrays)
        for _ in range(2):  # while tiles are tried, and afterwards
            assert right.judge(prepared.output(prepared.call())).why_wrong() is None


def test_every_gradient_has_the_twin():
    assert {"linear", "linear_dx", "linear_dweight", "linear_backward"} <= set(twins.names())
