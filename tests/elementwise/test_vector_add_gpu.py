"""fkjit.vector_add on a CUDA GPU, and with it what simple ops share: plans, streams, graphs."""

from __future__ import annotations

import sys

import pytest

import fkjit
from fkjit.errors import CaptureError, DeviceError, ParameterError
from fkjit.runtime import device

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
cupy = pytest.importorskip("cupy", reason="needs CuPy")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
fkjit.vector_add.prepare  # noqa: B018  imports the module
PLANS = sys.modules["fkjit.ops.elementwise.vector_add"]._OP.plans


def normal(*shape, dtype="fp32"):
    return torch.randn(*shape, device="cuda", dtype=DTYPES[dtype])


def poisoned(x):
    return torch.full_like(x, float("nan"))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("n", [1, 7, 1023, 2**16, 2**20 + 3, 2**26 + 1])
def test_the_sum_is_exact_at_any_length(n, dtype):
    a, b = normal(n, dtype=dtype), normal(n, dtype=dtype)
    out = poisoned(a)
    assert fkjit.vector_add(a, b, out=out) is out and torch.equal(out, a + b)
    assert torch.equal(fkjit.vector_add(a, b), a + b)


def test_strided_transposed_and_misaligned_views():
    a, b = normal(300, 5, 130, dtype="bf16"), normal(300, 5, 130, dtype="bf16")
    for cut in (
        lambda x: x[..., :77],
        lambda x: x[..., 1:],
        lambda x: x[::2, 1:4, ::3],
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1)[3:],
    ):
        assert torch.equal(fkjit.vector_add(cut(a), cut(b)), cut(a) + cut(b))
    one, two = a.flatten()[1:], b.flatten()[:-1]
    assert torch.equal(fkjit.vector_add(one, two), one + two)


def test_more_than_two_to_the_31_elements():
    a = torch.randint(-9, 9, (2**31 + 77,), device="cuda", dtype=torch.int8).half()
    out = fkjit.vector_add(a, a)
    assert torch.equal(out[-1000:], 2 * a[-1000:]) and torch.equal(out[:1000], 2 * a[:1000])


def test_a_geometry_that_was_met_twice_takes_the_warm_path():
    a, b = normal(100, 100), normal(100, 100)
    for x, y in ((a, b), (cupy.asarray(a), cupy.asarray(b))):
        for _ in range(2):
            fkjit.vector_add(x, y)
        assert PLANS.lookup([x, y, None], ()) is not None
        assert PLANS.lookup([x[:, 1:], y[:, 1:], None], ()) is None
        assert bool((fkjit.vector_add(x, y) == x + y).all())


def test_overlaps_are_refused_by_the_warm_path_as_well():
    x = normal(4000)
    fkjit.vector_add(x[1000:2000], x[2000:3000], out=x[:1000])
    fkjit.vector_add(x[1000:2000], x[2000:3000], out=x[1000:2000])
    with pytest.raises(ParameterError, match="out overlaps a in memory"):
        fkjit.vector_add(x[1000:2000], x[2000:3000], out=x[1008:2008])
    both = normal(64, 128)
    left, right = both[:, :64], both[:, 64:]
    expected = 2 * left
    for _ in range(3):
        assert torch.equal(fkjit.vector_add(left, left, out=right), expected)
    with pytest.raises(ParameterError, match="out overlaps a"):
        fkjit.vector_add(both[:, :64], both[:, :64], out=both[:, 32:96])


def test_lazily_negated_views_are_refused_warm_and_cold():
    x = torch.randn(64, device="cuda", dtype=torch.complex64)
    fkjit.vector_add(x.imag, x.imag)
    with pytest.raises(TypeError, match="lazily negated"):
        fkjit.vector_add(x.conj().imag, x.imag)


def test_parameters_under_no_grad_are_planned_and_otherwise_refused():
    w, x = torch.nn.Parameter(normal(50)), normal(50)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fkjit.vector_add(x, w), x + w)
        assert PLANS.lookup([x, w, None], ()) is not None
    with pytest.raises(ParameterError, match="b requires grad"):
        fkjit.vector_add(x, w)


def test_work_goes_to_the_callers_stream():
    a, stream = normal(2**20), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(a)
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        out = fkjit.vector_add(late, a)
    stream.synchronize()
    assert torch.equal(out, a + a)


def test_a_captured_graph_replays_on_new_inputs_and_a_first_call_says_prepare():
    device.forget()
    PLANS.known.clear()
    a, b = normal(5000, 3), normal(5000, 3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        with pytest.raises(CaptureError, match=r"fkjit\.prepare\('vector_add'"):
            fkjit.vector_add(a, b)
        graph.capture_end()
    fkjit.prepare("vector_add", a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fkjit.vector_add(a, b)
    for _ in range(2):
        a.normal_()
        graph.replay()
        assert torch.equal(out, a + b)


def test_cupy_and_dlpack_arrays_come_back_in_kind():
    a, b = cupy.random.standard_normal(1000, "f4"), cupy.random.standard_normal(1000, "f4")
    assert isinstance(fkjit.vector_add(a, b), cupy.ndarray)

    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    assert bool((cupy.asarray(fkjit.vector_add(Foreign(a), Foreign(b))) == a + b).all())
    out = Foreign(cupy.zeros_like(a))
    assert fkjit.vector_add(Foreign(a), Foreign(b), out=out) is out
    assert bool((out.array == a + b).all())


def test_mixed_devices_are_refused():
    with pytest.raises(DeviceError, match="b is on the CPU but a is on cuda:0"):
        fkjit.vector_add(normal(4), normal(4).cpu())
