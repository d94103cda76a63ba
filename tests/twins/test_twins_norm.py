"""The norms' Triton twins in Triton's interpreter, and the benchmark's cases of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from bench.core import twins  # noqa: E402
from bench.core.catalog import operations  # noqa: E402
from bench.core.op import Refused  # noqa: E402
from bench.norm.cases_norms import problem  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.norm.kit import DTYPES, OPS, assert_right, double, normal, theirs  # noqa: E402
from tests.twins.kit import interpreter  # noqa: E402, F401


class Place:
    """What the suite makes inputs on."""

    torch, place = torch, "cpu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 77), (2, 1000), (0, 8)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_errs_at_most_twice_as_much_as_pytorch(interpreter, op, shape, dtype):  # noqa: F811
    from bench.norm.triton_layer_norm import norm

    x, residual = (normal(*shape, dtype=dtype, seed=i) for i in range(2))
    weight, bias = (normal(shape[-1], dtype=dtype, seed=i) for i in (2, 3))
    bias = bias if op == "layer_norm" else None
    y, s = norm(x, weight, bias, residual=residual, centered=op == "layer_norm")
    assert torch.equal(s, x + residual)
    if x.numel():
        exact, peer = theirs(op, *double(s, weight, bias)), theirs(op, s, weight, bias)
        assert_right(y, exact, peer, dtype)
    alone = norm(s, weight, bias, centered=op == "layer_norm")
    assert torch.equal(alone, y)


@one_in(2, residual=[False, True], op=OPS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_the_suite_finds_ours_and_the_twin_right_and_another_norm_wrong(
    interpreter,  # noqa: F811
    op,
    residual,
):
    suite, given = operations()[op], problem(op, 130, 128, residual)
    arrays = suite.inputs(given, Place)
    expected = suite.expected(given, arrays)
    for prepared in (suite.ours(given, arrays), twins.twin(op).prepare(given, arrays)):
        with quiet():
            right = prepared.output(prepared.call())
        assert expected.judge(right).why_wrong() is None
    for peer in suite.peers:
        if peer.name == "eager":
            prepared = peer.prepare(given, arrays)
            assert expected.judge(prepared.output(prepared.call())).why_wrong() is None
    other = "rms_norm" if op == "layer_norm" else "layer_norm"
    wrong = twins.twin(other).prepare(given, {**arrays, "x": arrays["x"] + 1})
    assert "wrong result" in str(expected.judge(wrong.output(wrong.call())).why_wrong())


def test_the_twin_refuses_gaps_and_rows_too_wide():
    given = problem("rms_norm", 2, 64, False)
    gaps = {"x": normal(2, 128)[:, :64], "weight": normal(64)}
    for arrays, case in ((gaps, given), ({"x": normal(2, 64)}, {**given, "columns": 65_537})):
        with pytest.raises(Refused, match="rows without gaps, of up to 65536 columns"):
            twins.twin("rms_norm").prepare(case, arrays)
