"""Loads, stores and atomics in every state space; calls; jump tables: through CUDA kernels."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.interp import Arg, run
from tests.interp.interp_kit import apply, compile_ptx


def launch(source: str, grid: int, block: int, arguments: list[Arg], shared: int = 0) -> None:
    run(compile_ptx(source), "k", grid, block, arguments, shared)


def test_vector_loads_and_narrow_types() -> None:
    source = """
    extern "C" __global__ void k(const float4* a, const short2* b, const signed char* c,
                                 const unsigned char* d, float4* o) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      float4 x = a[i]; short2 s = b[i];
      o[i] = make_float4(x.w + s.x, x.z - s.y, x.y * c[i], x.x + d[i]);
    }"""
    rng = np.random.default_rng(0)
    n = 192
    a = rng.standard_normal((n, 4)).astype("f4")
    b = rng.integers(-32768, 32767, (n, 2)).astype("i2")
    c, d = rng.integers(-128, 127, n).astype("i1"), rng.integers(0, 255, n).astype("u1")
    o = np.zeros((n, 4), "f4")
    launch(source, 3, 64, [Arg("a", a), Arg("b", b), Arg("c", c), Arg("d", d), Arg("o", o, True)])
    want = np.stack([a[:, 3] + b[:, 0], a[:, 2] - b[:, 1], a[:, 1] * c, a[:, 0] + d], 1)
    np.testing.assert_array_equal(o, want.astype("f4"))


def test_local_arrays_and_constant_tables() -> None:
    source = """
    __constant__ int table[5] = {7, -3, 11, 1000, 5};
    __device__ int scale = 3;
    extern "C" __global__ void k(const int* a, int* o, int n) {
      int i = threadIdx.x, stack[16];
      for (int j = 0; j < 16; ++j) stack[j] = a[(i + j) % n] * scale;
      int at = a[i] & 15;
      stack[at] += table[i % 5];
      int sum = 0;
      for (int j = 0; j < 16; ++j) sum = sum * 3 + stack[(j + at) & 15];
      o[i] = sum;
    }"""
    n = 50
    a = np.random.default_rng(1).integers(0, 100, n).astype("i4")
    o = np.zeros(n, "i4")
    launch(source, 1, n, [Arg("a", a), Arg("o", o, True), Arg("n", np.int32(n))])
    table = [7, -3, 11, 1000, 5]
    for i in range(n):
        stack = [int(a[(i + j) % n]) * 3 for j in range(16)]
        at = int(a[i]) & 15
        stack[at] += table[i % 5]
        total = 0
        for j in range(16):
            total = total * 3 + stack[(j + at) & 15]
        assert o[i] == np.array(total).astype("i4")


def test_generic_pointers_into_different_spaces() -> None:
    source = """
    extern "C" __global__ void k(const int* a, int* o) {
      __shared__ int s[32]; int local[2] = {100 + (int)threadIdx.x, 200};
      int i = threadIdx.x;
      s[i] = 2 * i; __syncthreads();
      const int* where[3] = {a + i, s + (i ^ 1), local + (i & 1)};
      const int* p = where[a[i] % 3];
      o[i] = *p;
    }"""
    a = np.arange(32, dtype="i4") * 7
    o = np.zeros(32, "i4")
    launch(source, 1, 32, [Arg("a", a), Arg("o", o, True)])
    i = np.arange(32)
    want = np.choose(a % 3, [a, 2 * (i ^ 1), np.where(i & 1, 200, 100 + i)])
    np.testing.assert_array_equal(o, want)


def test_shared_static_and_dynamic_in_two_dimensions() -> None:
    source = """
    extern __shared__ float dynamic[];
    extern "C" __global__ void k(const float* a, float* o) {
      __shared__ float tile[8][9];
      int x = threadIdx.x, y = threadIdx.y, i = (blockIdx.y * gridDim.x + blockIdx.x) * 64;
      tile[y][x] = a[i + y * 8 + x]; dynamic[y * 8 + x] = y;
      __syncthreads();
      o[i + y * 8 + x] = tile[x][y] + dynamic[x * 8 + y];
    }"""
    a = np.random.default_rng(2).standard_normal((6, 8, 8)).astype("f4")
    o = np.zeros_like(a)
    run(compile_ptx(source), "k", (2, 3), (8, 8), [Arg("a", a), Arg("o", o, True)], 256)
    np.testing.assert_array_equal(o, a.swapaxes(1, 2) + np.arange(8, dtype="f4"))


def test_device_function_calls_and_switches() -> None:
    source = """
    struct Big { float x, y, z; };
    __device__ __noinline__ Big spin(Big b, int times) {
      for (int i = 0; i < times; ++i) { float t = b.x; b.x = b.y; b.y = b.z; b.z = t; }
      return b;
    }
    __device__ __noinline__ int pick(int a) {
      switch (a) { case 0: return 5; case 1: return -7; case 2: return a * 9; case 3: return 1;
        case 4: return 77; case 5: return a << 9; case 6: return 13; default: return -1; }
    }
    extern "C" __global__ void k(const int* a, float* o) {
      int i = threadIdx.x;
      Big b = spin(Big{1.f, 2.f, 4.f}, a[i] % 5);
      if (a[i] > 3) b = spin(b, 1);
      o[i] = b.x + 10 * b.y + pick(a[i]);
    }"""
    a = np.arange(40, dtype="i4") % 9
    o = np.zeros(40, "f4")
    launch(source, 1, 40, [Arg("a", a), Arg("o", o, True)])
    for i in range(40):
        turns = int(a[i]) % 5 + (a[i] > 3)
        values = [1, 2, 4]
        values = values[turns % 3 :] + values[: turns % 3]
        extra = {0: 5, 1: -7, 2: 18, 3: 1, 4: 77, 5: 5 << 9, 6: 13}.get(int(a[i]), -1)
        assert o[i] == values[0] + 10 * values[1] + extra


def test_jump_table() -> None:
    text = """
    ts: .branchtargets L0, L1, L2;
    @%p bra DONE;
    mov.u32 %d, 9; rem.u32 %t, %a, 3;
    brx.idx %t, ts;
    L0: mov.u32 %d, 100; bra DONE;
    L1: mov.u32 %d, 200; bra DONE;
    L2: add.u32 %d, %a, 1;
    DONE:"""
    a = np.arange(100, dtype="u4")
    got = apply("setp.ge.u32 %p, %a, 90; mov.u32 %d, 5;" + text, a)
    want = np.choose(a % 3, [100, 200, a + 1])
    np.testing.assert_array_equal(got, np.where(a >= 90, 5, want))


@pytest.mark.parametrize(
    ("operation", "kind"),
    [("add", "u32"), ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
     ("add", "u64"), ("add", "f32")],
)  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_without_a_result(space: str, operation: str, kind: str) -> None:
    width = int(kind[1:]) // 8
    ctype = {"u32": "unsigned", "s32": "int", "b32": "unsigned", "u64": "unsigned long long",
             "f32": "float"}[kind]  # fmt: skip
    name = operation.capitalize()
    target = "o" if space == "global" else "&cell"
    source = f"""
    extern "C" __global__ void k(const {ctype}* a, {ctype}* o) {{
      __shared__ {ctype} cell;
      if (threadIdx.x == 0) cell = *o;
      __syncthreads();
      atomic{name}({target}, a[threadIdx.x]);
      __syncthreads();
      if (threadIdx.x == 0 && {int(space == "shared")}) *o = cell;
    }}"""
    dtype = {"u": "u", "b": "u", "s": "i", "f": "f"}[kind[0]] + str(width)
    rng = np.random.default_rng(5)
    a = rng.integers(-1000, 1000, 96).astype("i8").astype(dtype)
    o = np.array([12345], dtype)
    want = o.copy()
    ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
             "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]  # fmt: skip
    for value in a:
        want[0] = ufunc(want[0], value)
    ptx = compile_ptx(source)
    assert f"{space}.{operation}.{kind}" in ptx
    run(ptx, "k", 1, 96, [Arg("a", a), Arg("o", o, True)])
    np.testing.assert_array_equal(o, want)


def test_atomics_give_the_old_value_in_lane_order() -> None:
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void k(unsigned* o, unsigned* r, __half2* h) {
      int i = threadIdx.x;
      r[i] = atomicAdd(o, 2u);
      r[64 + i] = atomicInc(o + 1, 10u);
      r[128 + i] = atomicDec(o + 2, 5u);
      r[192 + i] = atomicExch(o + 3, (unsigned)i);
      r[256 + i] = atomicCAS(o + 4, (unsigned)i, (unsigned)i + 1);
      atomicAdd(h, __floats2half2_rn(1.f, 0.5f));
    }"""
    o = np.array([5, 0, 0, 99, 0], "u4")
    r = np.zeros((5, 64), "u4")
    h = np.zeros(2, "f2")
    launch(source, 1, 64, [Arg("o", o, True), Arg("r", r, True), Arg("h", h, True)])
    i = np.arange(64)
    np.testing.assert_array_equal(r[0], 5 + 2 * i)
    np.testing.assert_array_equal(r[1], i % 11)
    np.testing.assert_array_equal(r[2], (-i) % 6)
    np.testing.assert_array_equal(r[3], [99, *range(63)])
    np.testing.assert_array_equal(r[4], i)
    np.testing.assert_array_equal(o, [133, 64 % 11, (-64) % 6, 63, 64])
    np.testing.assert_array_equal(h, [64, 32])
