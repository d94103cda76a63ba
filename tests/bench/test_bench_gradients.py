"""The suite's cases of the norms' gradients: ours right, wrong ones found, peers right."""

from __future__ import annotations

import pytest

from bench.core.catalog import operations
from bench.norm.cases_norm_gradients import problem
from bench.norm.peers_norm_gradients import textbook
from fkjit.arch import arch
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.norm.kernels_backward import BACKWARD

torch = pytest.importorskip("torch", reason="needs torch")
from tests.core.sampling import one_in  # noqa: E402
from tests.twins.kit import interpreter  # noqa: E402, F401

NORMS = ("layer_norm", "rms_norm")


class CpuDevice:
    torch, place = torch, "cpu"


def made(norm, residual, dtype="fp32"):
    op, given = operations()[f"{norm}_backward"], problem(norm, 5, 64, residual, dtype)
    return op, given, op.inputs(given, CpuDevice)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_ours_is_right_and_other_numbers_are_not(norm, residual):
    op, given, arrays = made(norm, residual, "bf16")
    with quiet():
        prepared = op.ours(given, arrays)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    other = {**arrays, "dy": arrays["dy"] * 1.5}
    assert "wrong result" in str(op.expected(given, other).judge(found).why_wrong())


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_pytorch_is_right(norm, residual):
    op, given, arrays = made(norm, residual)
    names = ("dy", "dsum", "x", "weight", "mean", "rstd")
    by_hand = textbook(*(arrays.get(name) for name in names))
    right = op.expected(given, arrays)
    assert right.judge(by_hand[0]).why_wrong() is None
    if norm == "rms_norm":  # PyTorch has that kernel on GPUs only
        return
    eager = next(peer for peer in op.peers if peer.name == "eager").prepare(given, arrays)
    found = eager.call()
    assert right.judge(eager.output(found)).why_wrong() is None
    for one, two in zip(found[1:], by_hand[1:], strict=True):
        torch.testing.assert_close(one, two)


@one_in(4)
@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("norm", NORMS)
def test_the_twin_is_right(interpreter, norm, columns):  # noqa: F811
    from bench.norm.triton_layer_norm_backward import gradients

    op = operations()[f"{norm}_backward"]
    for residual, dtype in ((True, "fp32"), (False, "bf16")):
        given = problem(norm, 300, columns, residual, dtype)
        arrays = op.inputs(given, CpuDevice)
        names = ("dy", "dsum", "x", "weight", "mean", "rstd")
        found = gradients(*(arrays.get(name) for name in names))
        assert op.expected(given, arrays).judge(found[0]).why_wrong() is None
        wide = {n: x.float() for n, x in arrays.items()}
        want = textbook(*(wide.get(name) for name in names))
        assert len(found) == len(want)
        limits = {"rtol": 0.01, "atol": 0.15} if dtype == "bf16" else {"rtol": 1e-4, "atol": 1e-4}
        for one, two in zip(found[1:], want[1:], strict=True):
            torch.testing.assert_close(one.float(), two, **limits)


@pytest.mark.parametrize("norm", NORMS)
def test_another_tile_is_as_right(norm):
    op, given, arrays = made(norm, True, "bf16")
    spec, here = BACKWARD[norm], arch("sm_90a")
    default = op.choose(spec, given, here)
    assert default["tile"] == (32, 1, 1) and op.specs == [spec]
    other = {**default, "tile": (128, 1, 1)}
    with quiet():
        prepared = op.launch(spec, other, given, arrays, None)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    with pytest.raises(ParameterError, match="is not for"):
        op.choose(spec, problem(norm, 5, 20_000), here)


def test_traffic_is_counted():
    op = operations()["layer_norm_backward"]
    assert op.bytes(problem("layer_norm", 5, 64)) == 4 * 2 * 5 * 64
    assert op.flops(problem("layer_norm", 5, 64)) == 16 * 5 * 64
