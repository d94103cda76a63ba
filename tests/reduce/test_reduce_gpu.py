"""The reductions on a CUDA GPU: accuracy against PyTorch, determinism, streams and graphs."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import CaptureError
from fkjit.runtime import workspace

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
cupy = pytest.importorskip("cupy", reason="needs CuPy")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LENGTHS = (1, 31, 1000, 4097, 2**15, 2**16, 2**18 + 5, 2**20, 2**21, 2**24 + 3, 2**28)


def normal(*shape, dtype="fp32"):
    return torch.randn(*shape, device="cuda", dtype=DTYPES[dtype])


def poison(shape, dtype):
    return torch.full(shape, float("nan"), device="cuda", dtype=DTYPES[dtype])


def compare(make, axis, dtype, repeats=1):
    """At most twice PyTorch's own error against float64, and two roundings of a usual result."""
    for ours, theirs in ((fkjit.reduce_sum, torch.sum), (fkjit.reduce_mean, torch.mean)):
        squares = {"ours": 0.0, "theirs": 0.0, "size": 0.0}
        for _ in range(repeats):
            x = make()
            dims, shape = ((), ()) if axis is None else ((axis,), x.shape[:-1])
            exact, out = theirs(x.double(), *dims), poison(shape, dtype)
            assert ours(x, axis, out=out) is out
            squares["ours"] += (out.double() - exact).square().mean().item()
            squares["theirs"] += (theirs(x, *dims).double() - exact).square().mean().item()
            count = x.numel() / exact.numel()
            squares["size"] += count if ours is fkjit.reduce_sum else 1 / count
        error, reference, size = (value**0.5 for value in squares.values())
        assert error <= 2 * reference + 2 * size * torch.finfo(x.dtype).eps, (x.shape, dtype)
    out = poison(shape, dtype)
    fkjit.reduce_max(x, axis, out=out)
    assert torch.equal(out, x.max() if axis is None else x.amax(-1))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("n", LENGTHS)
def test_everything(n, dtype):
    compare(lambda: normal(n, dtype=dtype), None, dtype, 8)


ROWS = [(1, 2**20 + 1), (3, 100_003), (64, 4096), (16384, 4096), (65, 8), (100_000, 3), (5000, 131)]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", ROWS)
def test_the_last_axis(shape, dtype):
    compare(lambda: normal(*shape, dtype=dtype), -1, dtype)


def test_strided_and_misaligned_rows():
    for part in (
        lambda x: x[:, 1:],
        lambda x: x[:, :1028],
        lambda x: x[::2, 3:900],
        lambda x: x[:, ::3],
        lambda x: x.t(),
    ):
        for axis in (-1, None):
            compare(lambda part=part: part(normal(700, 1031)), axis, "fp32", 8)


def test_nan_anywhere_is_found():
    for n in (1000, 2**20):
        for place in (0, 3, n // 2, n - 1):
            x = normal(n)
            x[place] = float("nan")
            assert torch.isnan(fkjit.reduce_max(x)) and torch.isnan(fkjit.reduce_sum(x))


def test_results_repeat_bit_for_bit_while_other_streams_work():
    x, y = normal(2**22 + 1), normal(2**23)
    expected, other = fkjit.reduce_sum(x), fkjit.reduce_sum(y)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((i % 2, fkjit.reduce_sum(y if i % 2 else x)))
    torch.cuda.synchronize()
    assert all(torch.equal(value, other if odd else expected) for odd, value in found)


def test_graphs_replay_beside_calls_on_the_stream_they_were_captured_on():
    x, y = normal(2**22), normal(2**22)
    stream = torch.cuda.Stream()
    fkjit.prepare("reduce_sum", x)
    graphs, results = [], []
    for source in (x, y):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(fkjit.reduce_sum(source))
        graphs.append(graph)
    expected = [fkjit.reduce_sum(source) for source in (x, y)]
    torch.cuda.synchronize()
    others = [torch.cuda.Stream() for _ in graphs]
    eager = []
    for _ in range(30):
        for graph, other in zip(graphs, others, strict=True):
            with torch.cuda.stream(other):
                graph.replay()
        with torch.cuda.stream(stream):
            eager.append(fkjit.reduce_sum(x))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert all(torch.equal(value, expected[0]) for value in eager)
    x.normal_()
    graphs[0].replay()
    assert torch.equal(results[0], fkjit.reduce_sum(x))


def test_a_capture_without_counters_left_says_prepare(monkeypatch):
    x = normal(2**22)
    fkjit.reduce_sum(x)
    monkeypatch.setattr(workspace, "_devices", {0: workspace._Device()})
    says = r"call fkjit\.prepare\(\.\.\.\) before"
    with pytest.raises(CaptureError, match=says), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fkjit.reduce_sum(x)
    fkjit.prepare("reduce_sum", x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fkjit.reduce_sum(x)


def test_the_interpreter_and_the_gpu_give_the_same_bits():
    x = np.random.default_rng().standard_normal(50_001, dtype=np.float32)
    assert fkjit.reduce_sum(cupy.asarray(x)).get().tobytes() == fkjit.reduce_sum(x).tobytes()


def test_cupy_arrays_on_their_own_stream():
    x = cupy.random.standard_normal(2**20, "f4")
    with cupy.cuda.Stream(non_blocking=True):
        assert abs(float(fkjit.reduce_mean(x)) - float(x.astype("f8").mean())) < 1e-6
