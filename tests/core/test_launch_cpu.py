"""`fkjit.launch_cpu`: any CUDA source on the CPU, its arguments, its errors, its reports."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fkjit
from fkjit.errors import (
    ArgumentTypeError,
    CompileError,
    DeviceError,
    FkjitError,
    ParameterError,
    RenderError,
    SanitizerError,
)
from fkjit.interp import TensorMap

RNG = np.random.default_rng(12)
AXPY = """
__global__ void axpy(const float* x, float* y, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += factor * x[i];
}
"""


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype="f4")


def line_of(source: str, marker: str) -> int:
    (number,) = [i for i, line in enumerate(source.split("\n"), 1) if marker in line]
    return number


def test_a_plain_kernel_from_text_and_from_a_file(tmp_path):
    x, y = floats(100), floats(100)
    expected = y + np.float32(0.5) * x
    stats = fkjit.launch_cpu(AXPY, 4, 32, [x, y, 0.5, 100])
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert (stats.blocks, stats.threads) == (4, 32)
    path = tmp_path / "axpy.cu"
    path.write_text('#include "half_of.cuh"\n' + AXPY.replace("factor *", "half_of(factor) *"))
    (tmp_path / "half_of.cuh").write_text("inline float half_of(float x) { return x / 2; }\n")
    for given in (path, str(path)):
        before = y.copy()
        fkjit.launch_cpu(given, (4,), (32, 1, 1), (x, y, np.float32(3), np.int32(100)))
        np.testing.assert_allclose(y, before + 1.5 * x, rtol=1e-5, atol=1e-6)


def test_arrays_of_any_kind_and_views():
    torch = pytest.importorskip("torch", reason="needs torch")
    x, y = torch.randn(64), torch.zeros(64)
    fkjit.launch_cpu(AXPY, 2, 32, [x, y, 2, 64])
    assert torch.equal(y, 2 * x)
    grid = floats(8, 8)
    source = "__global__ void k(float* x, int step) { x[threadIdx.x * step] = threadIdx.x; }"
    fkjit.launch_cpu(source, 1, 8, [grid[:, 3], 8])
    np.testing.assert_array_equal(grid[:, 3], np.arange(8))


TYPES = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct Pair { int first; double second; bool flag; };
typedef long long count_t;
__global__ void types(double* y, const __nv_bfloat16* b, const __half* h, int i, unsigned u,
                      long long q, unsigned long long v, float f, double d, bool t, short s,
                      count_t c, Pair pair, __half half, const float4* null) {
  double values[] = {(double)i, (double)u, (double)q, (double)v, f, d, (double)t, (double)s,
                     (double)c, (double)pair.first, pair.second, (double)pair.flag,
                     (double)__half2float(half), (double)__bfloat162float(b[1]),
                     (double)__half2float(h[1]), (double)(null == nullptr)};
  y[threadIdx.x] = values[threadIdx.x];
}"""


def test_every_type_of_argument():
    b, h = floats(2).astype(ml_dtypes.bfloat16), floats(2).astype("f2")
    pair = np.zeros((), np.dtype([("first", "i4"), ("second", "f8"), ("flag", "?")], align=True))
    pair["first"], pair["second"], pair["flag"] = -7, 0.1, True
    scalars = [-1, 2**32 - 1, -(2**62), 2**63, 1.5, 0.1, True, -300, 2**40]
    typed = [np.int32(-1), np.uint32(2**32 - 1), np.int64(-(2**62)), np.uint64(2**63),
             np.float32(1.5), np.float64(0.1), np.True_, np.int16(-300),
             np.int64(2**40)]  # fmt: skip
    structs = [pair[()], pair.tobytes(), (-7, np.float64(0.1), True)]
    expected = np.array([*scalars, -7, 0.1, 1, 0.25, float(b[1]), float(h[1]), 1])
    for numbers, struct in zip((scalars, typed, scalars), structs, strict=True):
        y = np.zeros(16)
        half = np.float16(0.25) if numbers is typed else 0.25
        fkjit.launch_cpu(TYPES, 1, 16, [y, b, h, *numbers, struct, half, None])
        np.testing.assert_array_equal(y, expected)


READ_ONLY = floats(8)
READ_ONLY.flags.writeable = False
GOOD = {"source": AXPY, "grid": 1, "block": 8, "args": [floats(8), floats(8), 1.0, 8]}


def but(position: int, value: object) -> list[object]:
    return [value if i == position else old for i, old in enumerate(GOOD["args"])]


BOUND = "__global__ void __launch_bounds__(32) bound(float* y) { y[threadIdx.x] = 1; }"
PAIRS = """
__global__ void __cluster_dims__(2, 1, 1) pairs(int* y) {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  y[blockIdx.x] = rank;
}"""
IN_PAIRS = {"source": PAIRS, "grid": 4, "block": 1, "args": [np.zeros(4, "i4")], "arch": "sm_90a"}


def test_clusters_that_the_kernel_declares():
    for given in ({}, {"cluster": 2}):
        y = np.full(4, -1, "i4")
        fkjit.launch_cpu(**{**IN_PAIRS, "args": [y], **given})
        assert y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"args": GOOD["args"][:3]}, ParameterError,
         "axpy takes 4 arguments (x, y, factor, n) and got 3"),
        ({"args": floats(4)}, ArgumentTypeError,
         "args is a ndarray; allowed: a list of axpy's arguments"),
        ({"args": but(3, 8.0)}, ArgumentTypeError,
         "n is a float; the kernel's 'int n' takes a whole number"),
        ({"args": but(3, 2**31)}, ParameterError, "n=2147483648 does not fit the kernel's 'int n'"),
        ({"args": but(3, np.int64(8))}, ParameterError,
         "n has 8 bytes; the kernel's 'int n' has 4"),
        ({"args": but(3, np.float32(8))}, ArgumentTypeError,
         "n is a float32; the kernel's 'int n' takes a whole number"),
        ({"args": but(2, np.float64(8))}, ParameterError,
         "factor has 8 bytes; the kernel's 'float factor' has 4"),
        ({"args": but(2, np.int32(8))}, ArgumentTypeError,
         "factor is a int32; the kernel's 'float factor' takes a float"),
        ({"args": but(2, 1e300)}, ParameterError, "factor=1e+300 does not fit"),
        ({"args": but(2, "1")}, ArgumentTypeError,
         "factor is a str; the kernel's 'float factor' takes a number"),
        ({"args": but(2, floats(1))}, ArgumentTypeError, "factor is a ndarray; the kernel's"),
        ({"args": but(2, b"12")}, ParameterError, "factor has 2 bytes"),
        ({"args": but(0, 3)}, ArgumentTypeError,
         "x is a int; the kernel's 'const float* x' takes an array, or None"),
        ({"args": but(0, [1.0])}, ArgumentTypeError, "x is a builtins.list; allowed: a torch"),
        ({"args": but(0, np.zeros(8))}, ArgumentTypeError,
         "x is an array of float64; the kernel's 'const float* x' takes float32"),
        ({"args": but(1, READ_ONLY)}, ParameterError, "y is read-only, but the kernel's"),
        ({"entry": "add"}, ParameterError, "<source> has no kernel 'add' (it has: axpy)"),
        ({"source": AXPY + AXPY.replace("axpy", "other")}, ParameterError,
         "<source> has several kernels (axpy, other); say which: entry="),
        ({"source": "int three() {\n return 3; }"}, ParameterError,
         "<source> has no __global__ function"),
        ({"source": "nowhere/axpy.cu"}, ParameterError, "source='nowhere/axpy.cu' is no file"),
        ({"source": b"x"}, ArgumentTypeError, "source is a bytes; allowed: CUDA C++ as text"),
        ({"grid": 0}, ParameterError, "grid=0 is not one to three whole numbers above 0"),
        ({"grid": (1, 1, 1, 1)}, ParameterError, "grid=(1, 1, 1, 1) is not one to three"),
        ({"block": 2.0}, ParameterError, "block=2.0 is not one to three"),
        ({"block": (64, 32)}, ParameterError, "block=(64, 32) has 2048 threads; 1024 is the most"),
        ({**IN_PAIRS, "cluster": 4}, ParameterError,
         "cluster=(4, 1, 1); the kernel's __cluster_dims__ are (2, 1, 1)"),
        ({**IN_PAIRS, "grid": 3}, ParameterError,
         "grid=(3, 1, 1) is no multiple of cluster=(2, 1, 1)"),
        ({"source": BOUND, "block": 64, "args": [floats(64)]}, ParameterError,
         "bound: block=(64, 1, 1) has 64 threads; the kernel's __launch_bounds__ allow 32"),
        ({"cluster": "2"}, ParameterError, "cluster='2' is not one to three"),
        ({"smem": -1}, ParameterError, "smem=-1 is not a number of bytes"),
        ({"smem": [("a", 0)]}, ParameterError, "smem=[('a', 0)] is not a number of bytes"),
        ({"arch": "sm_1"}, FkjitError, "sm_1"),
        ({"race": "yes"}, ParameterError, "race='yes' is not True or False"),
        ({"banks": 0.5}, ParameterError, "banks=0.5 is not True, False, or a number from 1 on"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(change, kind, message):
    with pytest.raises(kind) as caught:
        fkjit.launch_cpu(**{**GOOD, **change})
    assert message in str(caught.value)


def test_arrays_on_a_gpu_are_refused(monkeypatch):
    from fkjit.runtime import interop

    real = interop.view
    monkeypatch.setattr(interop, "view", lambda *a: real(*a)._replace(device=0))
    with pytest.raises(DeviceError, match=r"launch_cpu: x is on cuda:0.*cupy\.asnumpy\(x\)"):
        fkjit.launch_cpu(**GOOD)


def test_errors_of_the_compiler_and_of_templates_name_the_line(tmp_path):
    with pytest.raises(CompileError, match=r'<source>:4: .*"fctor" is undefined'):
        fkjit.launch_cpu(AXPY.replace("+= factor", "+= fctor"), 1, 8, GOOD["args"])
    path = tmp_path / "made.cu"
    path.write_text(AXPY.replace("+= factor", "+= ${power}"))
    with pytest.raises(RenderError, match=r"made\.cu:4: 'power' is undefined"):
        fkjit.launch_cpu(path, 1, 8, GOOD["args"])
    x, y = floats(8), np.zeros(8, "f4")
    fkjit.launch_cpu(path, 1, 8, [x, y, 1.0, 8], params={"power": 4})
    np.testing.assert_array_equal(y, 4 * x)


def test_which_kernel():
    source = """
    extern "C" __global__ void one(float* y) { *y = 1; }
    namespace deep { __global__ void __launch_bounds__(32) two(float* y) { *y = 2; } }
    template <int N> __global__ void many(float* y) { *y = N; }
    template __global__ void many<3>(float* y);
    """
    for entry, value in (("one", 1), ("two", 2), ("many", 3), ("_ZN4deep3twoEPf", 2)):
        y = np.zeros(1, "f4")
        fkjit.launch_cpu(source, 1, 1, [y], entry=entry)
        assert y[0] == value
    with pytest.raises(ParameterError, match=r"several kernels \(many, one, two\)"):
        fkjit.launch_cpu(source, 1, 1, [np.zeros(1, "f4")])


def test_a_kernel_that_a_macro_declares():
    source = """
    #define KERNEL(name) __global__ void name##_kernel(float* y, int n)
    KERNEL(fill) { y[threadIdx.x] = n; }
    """
    y = floats(8)
    fkjit.launch_cpu(source, 1, 8, [y, 3])
    np.testing.assert_array_equal(y, 3)
    with pytest.raises(ParameterError, match="argument 1 has 8 bytes; the kernel's parameter of 4"):
        fkjit.launch_cpu(source, 1, 8, [y, np.int64(3)])


TMA = """
struct alignas(64) Map { char bytes[128]; };
__global__ void store(const __grid_constant__ Map to) {
  __shared__ __align__(128) float tile[32];
  tile[threadIdx.x] = threadIdx.x;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x != 0) return;
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];"
               ::"l"(&to), "r"(0), "r"((unsigned)__cvta_generic_to_shared(tile)) : "memory");
  asm volatile("cp.async.bulk.commit_group;");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}"""


def test_tensor_maps():
    y = np.full(40, -1, "f4")
    fkjit.launch_cpu(TMA, 1, 32, [TensorMap(y, [40], [], [32])], arch="sm_90a")
    np.testing.assert_array_equal(y, [*range(32), *[-1] * 8])
    with pytest.raises(SanitizerError, match=r"(?s)store: missing fence:.*<source>:\d+"):
        unfenced = TMA.replace("fence.proxy.async.shared::cta;", "")
        fkjit.launch_cpu(unfenced, 1, 32, [TensorMap(y, [40], [], [32])], arch="sm_90a")


BUG = """
__global__ void shift(const float* x, float* y) {
  extern __shared__ float part[];
  part[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = part[threadIdx.x + 1];  // BUG
}"""


def test_reports_name_the_users_file_and_line(tmp_path):
    path = tmp_path / "shift.cu"
    path.write_text(BUG)
    for source, name in ((BUG, "<source>"), (path, "shift.cu")):
        x, y = floats(32), floats(32)
        before = y.copy()
        with pytest.raises(SanitizerError) as caught:
            fkjit.launch_cpu(source, 1, 32, [x, y], smem=128)
        error = caught.value
        assert error.location == f"{name}:{line_of(BUG, 'BUG')}" and error.kernel == "shift"
        assert str(error).startswith("shift: out-of-bounds shared read: 4-byte access at byte 128")
        np.testing.assert_array_equal(y, before)


CARVED = """
__global__ void carved(float* y, int n) {
  extern __shared__ float rows[];
  float* sums = rows + 32 + ${guard} / 4;
  rows[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 4) sums[threadIdx.x] = 1;
  __syncthreads();
  y[threadIdx.x] = rows[threadIdx.x + n] + sums[threadIdx.x % 4];  // BUG
}"""


def test_carve_outs_of_shared_memory():
    layout = [("rows", 128), ("sums", 16)]
    y = np.zeros(32, "f4")
    fkjit.launch_cpu(CARVED, 1, 32, [y, 0], smem=layout)
    np.testing.assert_array_equal(y, np.arange(32) + 1)
    with pytest.raises(SanitizerError, match=r"byte 128 of rows \(dynamic shared, 128 bytes\)"):
        fkjit.launch_cpu(CARVED, 1, 32, [y, 1], smem=layout)
    fkjit.launch_cpu(CARVED, 1, 32, [y, 1], smem=layout, mem=False)  # there is no gap
    assert y[31] == 1 + 1
    fkjit.launch_cpu(CARVED, 1, 32, [y, 1], smem=np.int64(144))  # one array of 144 bytes
    assert y[31] == 1 + 1
    plain = CARVED.replace(" + ${guard} / 4", "")
    fkjit.launch_cpu(plain, 1, 32, [y, 0], smem=layout)
    with pytest.raises(SanitizerError, match=r"byte 16 of sums \(dynamic shared, 16 bytes\)"):
        fkjit.launch_cpu(plain, 1, 32, [y, 5], smem=layout)
