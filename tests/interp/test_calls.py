"""Device functions: inlined, recursive, called by address; printf and assert."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx

RNG = np.random.default_rng(11)


def result(source: str, *inputs: np.ndarray, size: int = 64, dtype: str = "i4") -> np.ndarray:
    """What `k(y, inputs…)` writes, run by `size` threads in blocks of 32."""
    out = np.zeros(size, dtype)
    arguments = [Arg("y", out, True)]
    arguments += [Arg(f"p{at}", values) for at, values in enumerate(inputs)]
    run(compile_ptx(source), "k", -(-size // 32), min(size, 32), arguments)
    return out


def test_recursion_keeps_registers_and_local_arrays() -> None:
    source = """
    __device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
    __device__ __noinline__ int walk(int n, int* path, int at) {
      int mine[4];
      for (int i = 0; i < 4; ++i) mine[i] = n * 10 + i;
      path[at] = n;
      if (n == 0) return mine[at & 3];
      int below = walk(n - 1, mine, (at + 1) & 3);
      return below + mine[at] * 1000 + path[at];
    }
    extern "C" __global__ void k(int* y, const int* n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, path[4] = {0, 0, 0, 0};
      y[i] = fib(n[i]) + 100000 * walk(n[i] & 3, path, i & 3);
    }"""

    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def walk(n: int, path: list[int], at: int) -> int:
        mine = [n * 10 + i for i in range(4)]
        path[at] = n
        if n == 0:
            return mine[at & 3]
        below = walk(n - 1, mine, (at + 1) & 3)
        return below + mine[at] * 1000 + path[at]

    depth = RNG.integers(0, 11, 64).astype("i4")
    want = [fib(n) + 100000 * walk(n & 3, [0] * 4, i & 3) for i, n in enumerate(depth.tolist())]
    np.testing.assert_array_equal(result(source, depth), np.array(want).astype("i4"))


def test_mutual_recursion_with_structs_and_doubles() -> None:
    source = """
    struct Pair { double a; int b; };
    __device__ Pair odd(Pair p, int n);
    __device__ __noinline__ Pair even(Pair p, int n) {
      if (n == 0) return p;
      Pair q = {p.a * 2 + n, p.b + 1};
      return odd(q, n - 1);
    }
    __device__ __noinline__ Pair odd(Pair p, int n) {
      if (n == 0) return {-p.a, -p.b};
      Pair q = {p.a - n, p.b * 3};
      Pair r = even(q, n - 1);
      r.a += n;
      return r;
    }
    extern "C" __global__ void k(double* y, const int* n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      Pair p = even({i + 0.5, i}, n[i]);
      y[i] = p.a * 1000 + p.b;
    }"""

    def even(a: float, b: int, n: int) -> tuple[float, int]:
        return (a, b) if n == 0 else odd(a * 2 + n, b + 1, n - 1)

    def odd(a: float, b: int, n: int) -> tuple[float, int]:
        if n == 0:
            return -a, -b
        x, y = even(a - n, b * 3, n - 1)
        return x + n, y

    counts = RNG.integers(0, 9, 64).astype("i4")
    want = [even(i + 0.5, i, n) for i, n in enumerate(counts.tolist())]
    got = result(source, counts, dtype="f8")
    np.testing.assert_array_equal(got, [a * 1000 + b for a, b in want])


def test_function_pointers_from_tables_and_variables() -> None:
    source = """
    typedef int (*op_t)(int, int);
    __device__ __noinline__ int add(int a, int b) { return a + b; }
    __device__ __noinline__ int mul(int a, int b) { return a * b; }
    __device__ __noinline__ int twice(int a, int b) {
      op_t f = a > 40 ? add : mul;
      return f(f(a, b), b);
    }
    __device__ op_t table[3] = {add, mul, twice};
    extern "C" __global__ void k(int* y, const int* which) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      int value = table[which[i]](i, 3);
      op_t g = which[i] ? add : twice;
      y[i] = value * 7 + g(i, value);
    }"""

    def twice(a: int, b: int) -> int:
        return a + b + b if a > 40 else a * b * b

    which = RNG.integers(0, 3, 64)
    want = []
    for i, w in enumerate(which.tolist()):
        value = [i + 3, i * 3, twice(i, 3)][w]
        want.append(value * 7 + (i + value if w else twice(i, value)))
    np.testing.assert_array_equal(result(source, which.astype("i4")), want)


def test_calls_inside_loops_and_divergent_code_converge_again() -> None:
    source = """
    __device__ __noinline__ int depth(int n) { return n <= 0 ? 0 : 1 + depth(n - 2); }
    extern "C" __global__ void k(int* y, const int* n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
      for (int j = 0; j < n[i]; ++j)
        if ((i + j) & 1) sum += depth(j);
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      y[i] = sum;
    }"""
    n = RNG.integers(0, 9, 64).astype("i4")
    each = [sum((j + 1) // 2 for j in range(m) if (i + j) & 1) for i, m in enumerate(n.tolist())]
    want = np.array(each).reshape(-1, 32).sum(1).repeat(32)
    np.testing.assert_array_equal(result(source, n), want)


def test_endless_recursion_is_a_stack_overflow() -> None:
    source = """
    __device__ __noinline__ int down(int n, const int* p) { return *p + down(n + *p, p) * n; }
    extern "C" __global__ void k(int* y) { y[threadIdx.x] = down(0, y); }"""
    with pytest.raises(SanitizerError, match=r"stack overflow: 8,192 bytes.*do not hold"):
        result(source)


def test_a_call_of_no_function_is_a_fault() -> None:
    source = """
    __device__ __noinline__ int twice(int a) { return 2 * a; }
    __device__ __noinline__ int thrice(int a) { return 3 * a; }
    __device__ int (*volatile pointers[2])(int) = {twice, thrice};
    extern "C" __global__ void k(int* y) {
      if (threadIdx.x == 5) pointers[1] = (int (*)(int))64;
      __syncthreads();
      y[threadIdx.x] = pointers[threadIdx.x & 1](3);
    }"""
    with pytest.raises(SanitizerError, match="bad call: a call of 0x40, which is no function"):
        result(source)


def test_printf_writes_as_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    source = r"""
    extern "C" __global__ void k(int* y) {
      int i = threadIdx.x;
      if (i >= 3) return;
      const char* names[3] = {"zero", "one", "two"};
      y[i] = printf("%d|%5d|%-5d|%05d|%+d|%u|%x|%#X|%o|%c|%%|%s|%8.3s|\n", i, i, i, -i, i, -i, 255,
                    255, 8, 'a' + i, names[i], names[i]);
      printf("%lld %llu %hhd %ld %zu %p\n", -5000000000ll - i, ~0ull, 300, -1l, sizeof(double),
             (void*)(size_t)(4096 + i));
      printf("%f %.2f %e %g %10.4f %*d\n", 1.5f * i, 2.0 / 3, 12345.678, 1e-10, -1.25, 6, i);
      printf("no values\n");
    }"""
    returned = result(source, size=32)
    want = ""
    names = ["zero", "one", "two"]
    first = [
        f"{i}|{i:5d}|{i:<5d}|{-i:05d}|{i:+d}|{-i & 0xFFFFFFFF}|ff|0XFF|10|{'abc'[i]}|%|"
        f"{names[i]}|{names[i][:3]:>8}|\n"
        for i in range(3)
    ]
    want += "".join(first)
    want += "".join(f"{-5000000000 - i} {2**64 - 1} 44 -1 8 {4096 + i:#x}\n" for i in range(3))
    want += "".join(
        f"{1.5 * i:f} {2 / 3:.2f} 1.234568e+04 1e-10    -1.2500 {i:6d}\n" for i in range(3)
    )
    want += "no values\n" * 3
    assert capsys.readouterr().out == want
    assert (returned[:3] > 0).all()


def test_a_failed_assert_names_text_file_line_and_thread() -> None:
    source = """
    extern "C" __device__ void __assertfail(
        const char*, const char*, unsigned, const char*, size_t);
    #define assert(x) ((x) ? (void)0 : __assertfail(#x, "sample.cu", 42, __func__, 1))
    extern "C" __global__ void k(int* y) { assert(threadIdx.x != 7); y[threadIdx.x] = 1; }"""
    with pytest.raises(
        SanitizerError, match=r"assertion failed: threadIdx.x != 7, at sample.cu:42 in k"
    ) as caught:
        result(source, size=32)
    assert "thread (7, 0, 0)" in str(caught.value)
    fine = source.replace("!= 7", "< 32")
    np.testing.assert_array_equal(result(fine, size=32), 1)
