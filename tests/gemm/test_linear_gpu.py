"""fkjit.linear on a CUDA GPU: at most twice PyTorch's own error, gradients, plans, graphs."""

from __future__ import annotations

import itertools
import random

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cupy", reason="needs CuPy")

import fkjit  # noqa: E402
from fkjit.errors import CaptureError, ParameterError  # noqa: E402
from fkjit.ops.gemm import call as gemm  # noqa: E402
from fkjit.ops.gemm.candidates import CANDIDATES  # noqa: E402
from fkjit.runtime import device  # noqa: E402
from tests.gemm.kit import ACTIVATIONS, DTYPES, assert_right, double, linear, theirs  # noqa: E402
from tests.gemm.kit import inputs as seeded  # noqa: E402
from tests.gemm.kit import normal as seeded_normal  # noqa: E402


def inputs(*args, **options):
    return seeded(*args, device="cuda", **options)


def normal(*shape, **options):
    return seeded_normal(*shape, device="cuda", **options)


@pytest.fixture(autouse=True)
def exact():
    """PyTorch's products of fp32 without tf32, and of 16 bits with sums in fp32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    yield
    matmul.allow_tf32 = before


def check(arrays, dtype, **options):
    """Against float64, beside PyTorch in the same dtype; the same bits at every call, of which the
    third one has a plan."""
    residual = options.pop("residual", None)
    y, *others = (linear(*arrays, residual=residual, **options) for _ in range(3))
    options.pop("impl", None)
    peer = theirs(*arrays, residual=residual, **options)
    wide = theirs(*double(*arrays), residual=double(residual)[0], **options)
    assert_right(y, wide, peer, dtype)
    assert all(torch.equal(y, again) for again in others)


SIZES = [
    (1, 16384, 4096), (2, 4096, 4096), (8, 2048, 8192), (16, 8192, 8192), (64, 4096, 4096),
    (128, 4096, 14336), (513, 3072, 768), (1000, 1000, 1000), (4096, 3072, 768),
    (77, 50257, 768), (3, 5, 7), (129, 131, 4099),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_errs_at_most_twice_as_much_as_pytorch(dtype, sizes, layout):
    arrays = inputs(*sizes, dtype, layout=layout)
    check(arrays, dtype, weight_layout=layout)
    check(arrays, dtype, weight_layout=layout, activation="gelu_tanh")


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_epilogue(dtype, activation, gate):
    for m, n, k in ((4, 512, 1024), (40, 512, 1024), (300, 520, 264)):
        arrays = inputs(m, n, k, dtype, gate)
        residual = normal(m, n, dtype=dtype, seed=3)
        check(arrays, dtype, activation=activation, gate=gate, scale=0.5, residual=residual)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("sizes", [(512, 4096, 4096), (141, 5120, 1024), (1000, 776, 520)])
def test_a_residual_may_be_the_result_or_lie_unaligned(sizes, layout):
    """It comes ahead of the sums, to where out is staged; or pair by pair."""
    m, n, _ = sizes
    arrays = inputs(*sizes, "bf16", layout=layout)
    residual, wide = normal(m, n, dtype="bf16", seed=3), normal(m, n + 3, dtype="bf16", seed=4)
    options = {"weight_layout": layout, "activation": "gelu_tanh"}
    check(arrays, "bf16", residual=residual, **options)
    check(arrays, "bf16", residual=wide[:, 1 : n + 1], **options)
    y = linear(*arrays, residual=residual, **options)
    assert linear(*arrays, residual=residual, out=residual, **options) is residual
    assert torch.equal(residual, y)


@pytest.mark.parametrize("impl", CANDIDATES)
def test_every_kernel_by_name(impl):
    dtype = "fp32" if impl == "fma" else "bf16"
    for m, layout in itertools.product((1, 7), ("nk", "kn")):
        arrays = inputs(m, 1024, 2048, dtype, layout=layout)
        try:
            check(arrays, dtype, impl=impl, weight_layout=layout, activation="silu")
        except ParameterError as error:
            assert "needs" in str(error), "only for want of a GPU's features"


@pytest.mark.parametrize("seed", range(24))
def test_any_shape_and_stride(seed):
    rng = random.Random(seed)
    dtype = rng.choice(list(DTYPES))
    m, n, k = (rng.randint(1, most) for most in (700, 900, 1500))
    x, weight, bias = inputs(m, n, k, dtype)
    if rng.random() < 0.5:
        x = normal(k, m, dtype=dtype).t()
    if rng.random() < 0.5:
        weight = normal(n, k + 3, dtype=dtype, seed=1, scale=k**-0.5)[:, :k]
    check((x, weight, bias), dtype, activation=rng.choice(list(ACTIVATIONS)))


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype, gate, save):
    x, weight, bias = inputs(1200, 256, 520, dtype, gate)
    leaves = [t.requires_grad_() for t in (x, weight, bias, normal(1200, 256, dtype=dtype, seed=3))]
    given = normal(1200, 256, dtype=dtype, seed=4)

    def gradients(call, tensors, **options):
        x, weight, bias, residual = tensors
        options |= {"activation": "silu", "gate": gate, "residual": residual}
        return torch.autograd.grad(call(x, weight, bias, **options), tensors, given.to(x.dtype))

    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact, peer = gradients(theirs, wide), gradients(theirs, leaves)
    found, again = (gradients(linear, leaves, save_pre_activation=save) for _ in range(2))
    for ours, second, want, other in zip(found, again, exact, peer, strict=True):
        assert_right(ours, want, other, dtype)
        assert torch.equal(ours, second)


def test_a_plan_is_kept_and_does_the_same():
    x, weight, bias = inputs(64, 512, 1024, "bf16")
    gemm._LINEAR.plans.forget()
    first = [linear(x, weight, bias, activation="gelu") for _ in range(4)]
    assert len(gemm._LINEAR.plans.known) == 1
    assert all(torch.equal(first[0], y) for y in first)
    other = linear(x + 1, weight, bias, activation="gelu")
    assert not torch.equal(other, first[0])


@pytest.mark.parametrize("m", [1, 32, 300])
def test_in_a_cuda_graph(m):
    x, weight, bias = inputs(m, 1024, 2048, "bf16")

    def two_layers():
        y = linear(x, weight, bias, activation="relu")
        return linear(y, weight[:, :1024])

    two_layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = two_layers()
    for seed in (9, 10):
        x.copy_(normal(m, 2048, dtype="bf16", seed=seed))
        graph.replay()
        assert torch.equal(z, two_layers())


def test_a_first_call_under_capture_says_prepare():
    device.forget()
    x, weight, _ = inputs(9, 24, 40)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(CaptureError, match=r"fkjit\.prepare\('linear'"):
            linear(x, weight)
        graph.capture_end()
    fkjit.prepare("linear", x, weight)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear(x, weight)


def test_cupy_arrays():
    import cupy

    x, weight, bias = (cupy.from_dlpack(t) for t in inputs(40, 136, 264, "fp16"))
    y = linear(x, weight, bias, activation="relu")
    want = cupy.maximum(x.astype("f8") @ weight.T.astype("f8") + bias, 0)
    assert isinstance(y, cupy.ndarray) and float(abs(y - want).max()) < 5e-3
