"""fkjit.layer_norm and fkjit.rms_norm on a CUDA GPU: numbers, gradients, plans, graphs."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cupy", reason="needs CuPy")

import fkjit  # noqa: E402
from fkjit.errors import ParameterError  # noqa: E402
from tests.norm.kit import DTYPES, EPS, OPS, assert_right, double, norm, theirs  # noqa: E402
from tests.norm.kit import normal as seeded  # noqa: E402


def normal(*shape, **options):
    return seeded(*shape, device="cuda", **options)


WIDTHS = [64, 65, 256, 768, 1024, 2047, 2048, 4096, 5120, 8192, 12_288, 16_384, 32_768, 50_000,
          65_536, 65_537]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 33, 700])
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_errs_at_most_twice_as_much_as_pytorch(op, dtype, columns, rows):
    x, residual = (normal(rows, columns, dtype=dtype, seed=i, mean=0.5) for i in range(2))
    weight, bias = (normal(columns, dtype=dtype, seed=i) for i in (2, 3))
    y = norm(op, x, weight, bias)
    assert_right(y, theirs(op, *double(x, weight, bias)), theirs(op, x, weight, bias), dtype)
    y, s = norm(op, x, weight, bias, residual)
    assert torch.equal(s, x + residual) and torch.equal(y, norm(op, s, weight, bias))
    into = x.clone()
    assert norm(op, into, weight, bias, residual, out=into)[0] is into and torch.equal(into, y)


@pytest.mark.parametrize("columns", [64, 100, 1024, 2048, 4096, 8192, 9000, 20_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_gradients(op, dtype, columns):
    names = ("x", "residual", "weight", *(("bias",) if op == "layer_norm" else ()))
    sizes = {"x": (3000, columns), "residual": (3000, columns)}
    leaves = {
        n: normal(*sizes.get(n, (columns,)), dtype=dtype, seed=i).requires_grad_()
        for i, n in enumerate(names)
    }
    given = [normal(3000, columns, dtype=dtype, seed=9 + i) for i in range(2)]

    def gradients(leaves, call):
        y, s = call(**leaves)
        outputs = torch.autograd.grad((y, s), list(leaves.values()), [g.to(y) for g in given])
        return dict(zip(leaves, outputs, strict=True))

    def by_torch(x, residual, weight, bias=None):
        s = x + residual
        return theirs(op, s, weight, bias), s

    wide = {n: leaf.detach().double().requires_grad_() for n, leaf in leaves.items()}
    exact, peer = gradients(wide, by_torch), gradients(leaves, by_torch)
    found, again = (gradients(leaves, lambda **given: norm(op, **given)) for _ in range(2))
    for name in names:
        assert_right(found[name], exact[name], peer[name], dtype)
        assert torch.equal(found[name], again[name])


def test_a_geometry_that_was_met_twice_takes_the_warm_path():
    plans = sys.modules["fkjit.ops.norm.call"]._LAYER.plans
    x, weight = normal(100, 256), normal(256)
    first = norm("layer_norm", x, weight)
    assert plans.lookup([x, weight, *[None] * 6], (EPS, 0.0)) is None
    assert torch.equal(norm("layer_norm", x, weight), first)
    assert plans.lookup([x, weight, *[None] * 6], (EPS, 0.0)) is not None
    assert torch.equal(norm("layer_norm", x, weight), first)
    buffer = normal(3, 256)
    norm("layer_norm", buffer[:1], weight, out=buffer[1:2])
    with pytest.raises(ParameterError, match="out overlaps x"):
        norm("layer_norm", buffer.flatten()[:256], weight, out=buffer.flatten()[16:272])


def test_in_a_cuda_graph():
    x, residual, weight = normal(64, 4096), normal(64, 4096), normal(4096)
    fkjit.prepare("rms_norm", x, weight, EPS, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, s = norm("rms_norm", x, weight, residual=residual)
    x.copy_(normal(64, 4096, seed=7))
    graph.replay()
    assert torch.equal(s, x + residual)
    assert torch.equal(y, norm("rms_norm", s, weight))


def test_more_than_two_to_the_31_elements():
    x = torch.randint(-9, 9, (2**19 + 5, 4096), device="cuda", dtype=torch.int8).half()
    out = norm("layer_norm", x)
    for rows in (slice(0, 50), slice(-50, None)):
        exact, peer = theirs("layer_norm", x[rows].double()), theirs("layer_norm", x[rows])
        assert_right(out[rows], exact, peer, "fp16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 100), (300, 4096)], ids=str)
def test_the_twin(shape, dtype):
    pytest.importorskip("triton", reason="needs triton")
    from bench.norm.triton_layer_norm import norm as twin

    x, weight, bias = normal(*shape, dtype=dtype), normal(shape[1]), normal(shape[1], seed=1)
    exact = theirs("layer_norm", *double(x, weight, bias))
    peer = theirs("layer_norm", x.float(), weight, bias).to(x.dtype)
    assert_right(twin(x, weight, bias), exact, peer, dtype)
