"""run(): arguments, views, structs, batches, progress, checks off; and whole attention kernels."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict

import numpy as np
import pytest

from fkjit.errors import InterpreterError, ParameterError, SanitizerError
from fkjit.interp import Arg, Checks, Stats, launch, run, schedule
from tests.interp.interp_kit import apply, compile_ptx

ADD = """
struct Strides { long long batch, head, row; };
extern "C" __global__ void k(const float* x, float* y, Strides sx, Strides sy, float scale, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  long long b = i / 20, h = i / 5 % 4, r = i % 5;
  y[b * sy.batch + h * sy.head + r * sy.row] =
      x[b * sx.batch + h * sx.head + r * sx.row] * scale + blockIdx.x;
}"""


def strides(view: np.ndarray) -> bytes:
    return np.array([s // view.itemsize for s in view.strides], "i8").tobytes()


def test_views_with_any_strides_and_structs() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 4, 9, 3)).astype("f4").transpose(2, 1, 0, 3)[::-1, ::2, :, 1]
    x = np.repeat(x, 2, axis=1)  # [9, 4, 5]
    x = np.asfortranarray(x)[:, ::-1]
    store = np.full((9, 4, 5, 2), -7, "f4")
    y = store[..., 0]
    arguments = [Arg("x", x), Arg("y", y, True), Arg("sx", strides(x)), Arg("sy", strides(y)),
                 Arg("scale", np.float32(3)), Arg("n", np.int32(x.size))]  # fmt: skip
    seen: list[float] = []
    stats = run(compile_ptx(ADD), "k", 6, 32, arguments, progress=seen.append)
    block = (np.arange(x.size) // 32).reshape(x.shape)
    np.testing.assert_allclose(y, x * 3.0 + block, rtol=1e-6, atol=1e-6)
    assert (store[..., 1] == -7).all()
    assert seen[-1] == 1.0 and isinstance(stats, Stats) and stats.blocks == 6


def test_many_batches_of_blocks_give_the_same() -> None:
    source = """
    extern "C" __global__ void k(int* o, int* total) {
      __shared__ int s[128];
      int i = blockIdx.z * gridDim.x * gridDim.y + blockIdx.y * gridDim.x + blockIdx.x;
      s[threadIdx.x] = i * threadIdx.x;
      __syncthreads();
      o[i * 128 + threadIdx.x] = s[127 - threadIdx.x] + blockIdx.z;
      if (threadIdx.x == 0) atomicAdd(total, i);
    }"""
    o, total = np.zeros((7 * 5 * 3, 128), "i4"), np.zeros(1, "i4")
    seen: list[float] = []
    arguments = [Arg("o", o, True), Arg("total", total, True)]
    stats = run(compile_ptx(source), "k", (7, 5, 3), 128, arguments, progress=seen.append)
    i = np.arange(105)
    np.testing.assert_array_equal(o, i[:, None] * (127 - np.arange(128)) + i[:, None] // 35)
    assert total[0] == i.sum()
    assert stats.batches == len(seen) > 1 and seen == sorted(seen)


def test_a_kernel_runs_on_grids_of_other_sizes() -> None:
    source = """
    extern "C" __global__ void k(int* o, int n) {
      int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
      if (i < n) o[i] = 100 * i + gridDim.x;
    }"""
    for x, y in ((2, 4), (3, 2), (8, 4), (1, 30), (4, 3), (100, 1)):
        n = x * y * 64 - 5
        o = np.zeros(n, "i4")
        run(compile_ptx(source), "k", (x, y), 64, [Arg("o", o, True), Arg("n", np.int32(n))])
        np.testing.assert_array_equal(o, 100 * np.arange(n) + x)


@pytest.mark.parametrize(("memory", "decoded"), [(launch.MAX_IDLE_BYTES, 7), (0, 21)])
def test_a_step_of_several_kernels_decodes_each_once_where_memory_allows(
    memory: int, decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, made = launch._Launch.decode, []
    monkeypatch.setattr(launch, "MAX_IDLE_BYTES", memory)
    monkeypatch.setattr(launch, "_idle", OrderedDict())
    monkeypatch.setattr(launch._Launch, "decode", lambda one: made.append(one) or usual(one))
    kernel = 'extern "C" __global__ void k$(int* y) { y[threadIdx.x] += $; }\n'
    ptx = compile_ptx("".join(kernel.replace("$", str(number)) for number in range(7)))
    y = np.zeros(32, "i4")
    for _ in range(3):
        for number in range(7):
            run(ptx, f"k{number}", 1, 32, [Arg("y", y, True)])
    assert (y == 3 * 21).all() and len(made) == decoded
    assert len(launch._idle) == (7 if memory else launch.MIN_IDLE)


@pytest.mark.parametrize("fault", [False, True])
def test_a_dropped_kernel_gives_its_memory_back_at_once(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector, which counts objects and not the bytes of their arrays."""
    monkeypatch.setattr(launch, "_idle", OrderedDict())
    monkeypatch.setattr(launch, "MAX_IDLE_BYTES", 0)
    usual, made = launch._Launch.decode, []

    def decode(one: launch._Launch) -> schedule.Scheduler:
        scheduler = usual(one)
        made.append(weakref.ref(scheduler.machine.registers))
        return scheduler

    monkeypatch.setattr(launch._Launch, "decode", decode)
    body = 'extern "C" __global__ void k(int* y) { __syncthreads(); y[threadIdx.x] = %d; }'
    gc.disable()
    try:
        for number in range(launch.MIN_IDLE + 2):
            y = Arg("y", np.zeros(16 if fault else 32, "i4"), True)
            with pytest.raises(SanitizerError) if fault else contextlib.nullcontext():
                run(compile_ptx(body % number), "k", 1, 32, [y], checks=Checks(race=True))
        alive = sum(one() is not None for one in made)
    finally:
        gc.enable()
    assert len(made) == launch.MIN_IDLE + 2 and alive == (0 if fault else launch.MIN_IDLE)


def test_checks_off_runs_a_correct_kernel_alike() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 4, 5)).astype("f4")
    results = []
    for checks in (Checks(), Checks(mem=False)):
        y = np.zeros_like(x)
        arguments = [Arg("x", x), Arg("y", y, True), Arg("sx", strides(x)), Arg("sy", strides(y)),
                     Arg("scale", np.float32(2)), Arg("n", np.int32(40))]  # fmt: skip
        run(compile_ptx(ADD), "k", 1, 64, arguments, checks=checks)
        results.append(y)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(results[0], 2 * x)


def test_arguments_that_do_not_fit_are_refused() -> None:
    ptx = compile_ptx('extern "C" __global__ void k(float* y, int n) { y[0] = n; }')
    y = np.zeros(1, "f4")
    with pytest.raises(ParameterError, match="1 arguments given; k has 2"):
        run(ptx, "k", 1, 32, [Arg("y", y)])
    with pytest.raises(ParameterError, match="'n' has 8 bytes; the kernel's parameter has 4"):
        run(ptx, "k", 1, 32, [Arg("y", y), Arg("n", np.int64(3))])
    with pytest.raises(ParameterError, match="2048 threads"):
        run(ptx, "k", 1, (1024, 2), [Arg("y", y), Arg("n", np.int32(3))])
    with pytest.raises(ParameterError, match=r"grid=\(3, 1, 1\) is no multiple of cluster=\(2"):
        run(ptx, "k", 3, 32, [Arg("y", y), Arg("n", np.int32(3))], cluster=2)
    with pytest.raises(InterpreterError, match=r"no kernel 'q'.*it has: k"):
        run(ptx, "q", 1, 32, [Arg("y", y), Arg("n", np.int32(3))])


def test_an_endless_kernel_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "STEP_LIMIT", 5000)
    ptx = compile_ptx("""
    extern "C" __global__ void k(volatile int* y) { while (*y == 0) {} }""")
    y = np.zeros(1, "i4")
    with pytest.raises(InterpreterError, match="the waiter: the kernel does not end"):
        run(ptx, "k", 1, 32, [Arg("y", y)], title="the waiter")
    y[0] = 1
    assert run(ptx, "k", 1, 32, [Arg("y", y)]).steps < 10


def test_registers_keep_other_lanes_values_under_guards() -> None:
    a = np.arange(64, dtype="u4")
    text = (
        "setp.lt.u32 %p, %a, 20; mov.u32 %d, 7; @%p add.u32 %d, %a, 100; @!%p mul.lo.u32 %d, %d, 3;"
    )
    np.testing.assert_array_equal(apply(text, a), np.where(a < 20, a + 100, 21))
    text = """mov.u32 %d, 1; setp.lt.u32 %p, %a, 20; @%p bra ELSE;
              add.u32 %t, %a, 5; mul.lo.u32 %d, %t, 2; bra END_IF;
              ELSE: mul.lo.u32 %t, %a, 3; sub.u32 %d, %d, %t;
              END_IF: add.u32 %d, %d, 1;"""
    want = np.where(a < 20, 2 - 3 * a.astype("i8"), (a.astype("i8") + 5) * 2 + 1)
    np.testing.assert_array_equal(apply(text, a), want.astype("u4"))


FLASH = """
#include <cuda_fp16.h>
typedef unsigned u32;
constexpr int D = 64, ROWS = 16, KEYS = 32;
__device__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void load4(u32 (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(p)) : "memory");
}
__device__ void load4t(u32 (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(p)) : "memory");
}
__device__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7},"
    " {%8,%9}, {%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// One warp, 16 query rows; online softmax over tiles of 32 keys. q, k, v, o: [heads, n, 64].
extern "C" __global__ void k(const __half* q, const __half* kk, const __half* v, __half* o, int n,
                             int causal) {
  __shared__ __align__(16) __half sq[ROWS][D], sk[KEYS][D], sv[KEYS][D];
  const int lane = threadIdx.x, first = blockIdx.x * ROWS;
  const long long head = (long long)blockIdx.y * n * D;
  for (int i = lane * 8; i < ROWS * D; i += 256)
    *(int4*)(&sq[0][0] + i) = first + i / D < n ? *(const int4*)(q + head + first * D + i) : int4{};
  __syncwarp();
  u32 a[D / 16][4];
  for (int c = 0; c < D / 16; ++c) load4(a[c], &sq[lane & 15][c * 16 + (lane >> 4) * 8]);
  float acc[D / 8][4] = {}, top[2] = {-1e30f, -1e30f}, sum[2] = {};
  for (int t = 0; t < (causal ? first + ROWS : n); t += KEYS) {
    __syncwarp();
    for (int i = lane * 8; i < KEYS * D; i += 256) {
      int size = t + i / D < n ? 16 : 0;
      const long long from = head + (size ? t * D + i : 0);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(at(&sk[0][0] + i)), "l"(kk + from), "r"(size));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(at(&sv[0][0] + i)), "l"(v + from), "r"(size));
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    float s[KEYS / 8][4] = {};
    for (int c = 0; c < D / 16; ++c)
      for (int j = 0; j < KEYS / 16; ++j) {
        u32 b[4];
        load4(b, &sk[j * 16 + (lane & 7) + (lane >> 4) * 8][c * 16 + (lane >> 3 & 1) * 8]);
        mma(s[2 * j], a[c], b[0], b[1]);
        mma(s[2 * j + 1], a[c], b[2], b[3]);
      }
    for (int h = 0; h < 2; ++h) {
      const int row = first + lane / 4 + 8 * h;
      float high = top[h];
      for (int j = 0; j < KEYS / 8; ++j)
        for (int e = 0; e < 2; ++e) {
          const int key = t + 8 * j + lane % 4 * 2 + e;
          float& x = s[j][2 * h + e];
          x = key < n && (!causal || key <= row) ? x * 0.125f : -1e30f;
          high = fmaxf(high, x);
        }
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float scale = __expf(top[h] - high);
      top[h] = high;
      sum[h] *= scale;
      for (int i = 0; i < D / 8; ++i) { acc[i][2 * h] *= scale; acc[i][2 * h + 1] *= scale; }
      for (int j = 0; j < KEYS / 8; ++j)
        for (int e = 0; e < 2; ++e) sum[h] += s[j][2 * h + e] = __expf(s[j][2 * h + e] - high);
    }
    for (int j = 0; j < KEYS / 16; ++j) {
      u32 p[4];
      for (int e = 0; e < 4; ++e) {
        __half2 x = __floats2half2_rn(s[2 * j + e / 2][e % 2 * 2], s[2 * j + e / 2][e % 2 * 2 + 1]);
        p[e] = *(u32*)&x;
      }
      for (int i = 0; i < D / 16; ++i) {
        u32 b[4];
        load4t(b, &sv[j * 16 + (lane & 15)][i * 16 + (lane >> 4) * 8]);
        mma(acc[2 * i], p, b[0], b[1]);
        mma(acc[2 * i + 1], p, b[2], b[3]);
      }
    }
  }
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    const int row = first + lane / 4 + 8 * h;
    if (row < n)
      for (int i = 0; i < D / 8; ++i)
        *(__half2*)(o + head + row * D + 8 * i + lane % 4 * 2) =
            __floats2half2_rn(acc[i][2 * h] / sum[h], acc[i][2 * h + 1] / sum[h]);
  }
}"""


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    q, k, v = (x.astype("f8") for x in (q, k, v))
    s = q @ k.swapaxes(1, 2) / 8
    if causal:
        s = np.where(np.tri(s.shape[1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 16, 75])
def test_a_flash_attention_kernel(n: int, causal: bool) -> None:
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((3, n, 64)).astype("f2") for _ in range(3))
    o = np.zeros_like(q)
    arguments = [Arg("q", q), Arg("k", k), Arg("v", v), Arg("o", o, True), Arg("n", np.int32(n)),
                 Arg("causal", np.int32(causal))]  # fmt: skip
    run(compile_ptx(FLASH), "k", (-(-n // 16), 3), 32, arguments)
    assert np.abs(o - attention(q, k, v, causal)).max() < 2e-3


NAIVE = """
// One thread a query row; q, k, v, o: [heads, n, 16] float32.
extern "C" __global__ void k(const float* q, const float* kk, const float* v, float* o, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n) return;
  const long long head = (long long)blockIdx.y * n * 16;
  float x[16], acc[16] = {}, top = -1e30f, sum = 0;
  for (int d = 0; d < 16; ++d) x[d] = q[head + row * 16 + d];
  for (int j = 0; j < n; ++j) {
    float s = 0;
    for (int d = 0; d < 16; ++d) s += x[d] * kk[head + j * 16 + d];
    s *= 0.125f;
    const float high = fmaxf(top, s), scale = expf(top - high), p = expf(s - high);
    for (int d = 0; d < 16; ++d) acc[d] = acc[d] * scale + p * v[head + j * 16 + d];
    sum = sum * scale + p;
    top = high;
  }
  for (int d = 0; d < 16; ++d) o[head + row * 16 + d] = acc[d] / sum;
}"""


@pytest.mark.parametrize("arch", ["compute_75", "compute_80"])
def test_a_naive_attention_kernel(arch: str) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, 37, 16)).astype("f4") for _ in range(3))
    o = np.zeros_like(q)
    arguments = [Arg("q", q), Arg("k", k), Arg("v", v), Arg("o", o, True), Arg("n", np.int32(37))]
    run(compile_ptx(NAIVE, arch), "k", (1, 2), 64, arguments)
    np.testing.assert_allclose(o, attention(q, k, v, False), atol=2e-6)


def test_blocks_of_a_cluster_know_their_place() -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      int values[6];
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(values[0]));
      asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(values[1]));
      asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(values[2]));
      asm("mov.u32 %0, %%clusterid.x;" : "=r"(values[3]));
      asm("mov.u32 %0, %%clusterid.y;" : "=r"(values[4]));
      asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(values[5]));
      if (threadIdx.x == 0)
        for (int i = 0; i < 6; ++i) y[(blockIdx.y * gridDim.x + blockIdx.x) * 6 + i] = values[i];
    }"""
    y = np.full((6, 8, 6), -1, np.int32)
    run(compile_ptx(source, "compute_90"), "k", (8, 6), 1024, [Arg("y", y, True)], cluster=(4, 2))
    for row in range(6):
        for column in range(8):
            inside = (column % 4, row % 2)
            expected = [inside[0] + 4 * inside[1], *inside, column // 4, row // 2, 8]
            assert y[row, column].tolist() == expected


def test_blocks_that_wait_for_one_another_run_together_however_many_ran_before() -> None:
    """A machine that is kept from a launch of two blocks is none for three that meet."""
    source = r"""
    extern "C" __global__ void k(unsigned* counter) {
      if (threadIdx.x == 0) {
        atomicAdd(counter, 1);
        while (atomicAdd(counter, 0) < gridDim.x) {}
      }
    }"""
    ptx = compile_ptx(source)
    for blocks in (2, 3, 2):
        counter = np.zeros(1, np.uint32)
        run(ptx, "k", blocks, 32, [Arg("counter", counter, True)], resident=True)
        assert counter[0] == blocks


def test_a_watch_is_told_of_every_access_of_its_own_launch_alone() -> None:
    source = """
    extern "C" __global__ void k(int* o) {
      __shared__ int s[32];
      s[threadIdx.x] = threadIdx.x;
      o[threadIdx.x] = s[threadIdx.x ^ 1];
    }"""
    seen: list[tuple[str, bool, int]] = []

    def watch(machine):
        start = machine.memory.shared.start

        def see(kind, shared, positions, width, lanes, ins):
            if ins.op[1] == "param":
                return
            seen.append((kind, shared, int((positions - start[lanes] * shared)[0])))
            assert ins.line > 0 and width == 4 and lanes.tolist() == list(range(32))

        return see

    ptx, o = compile_ptx(source), np.zeros(32, "i4")
    for told in (watch, None):
        run(ptx, "k", 1, 32, [Arg("o", o, True)], watch=told)
        assert o.tolist() == [i ^ 1 for i in range(32)]
        assert [(kind, shared) for kind, shared, _ in seen] == [
            ("write", True), ("read", True), ("write", False),
        ]  # fmt: skip
    assert seen[1][2] == seen[0][2] + 4  # lane 0 reads what lane 1 wrote
