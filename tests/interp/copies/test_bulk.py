"""Bulk copies and reductions of spans, their groups and mbarriers, and what goes wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fkjit.interp import Arg, Checks
from tests.core.sampling import one_in
from tests.interp.copies.hopper_kit import fault, launch, random_bytes

RNG = np.random.default_rng(40)
LOAD = (
    'ASM("cp.async.bulk.SPACE.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" '
    '::"r"(at(TO)), "l"(FROM), "r"(SIZE), "r"(at(BAR)) : "memory");'
)
STORE = (
    'ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" '
    '::"l"(TO), "r"(at(FROM)), "r"(SIZE) : "memory");'
)


def load(to: str, source: str, size: str, bar: str, space: str = "shared::cluster") -> str:
    text = LOAD.replace("SPACE", space).replace("FROM", source)
    return text.replace("TO", to).replace("SIZE", size).replace("BAR", bar)


def store(to: str, source: str, size: str) -> str:
    return STORE.replace("FROM", source).replace("TO", to).replace("SIZE", size)


@one_in(2)
@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_spans_come_and_go(space: str) -> None:
    """Each of 32 threads brings its own span; the sum of all goes out by spans again."""
    source = r"""
    extern "C" __global__ void k(const int* x, int* y, int n) {
      __shared__ alignas(128) int tile[32][64];
      __shared__ u64 bar;
      const int t = threadIdx.x, size = 16 * (t % 16 + 1);
      const int* from = x + blockIdx.x * 32 * 64 + t * 64;
      if (t == 0) { init(&bar, 32); ready(); }
      __syncthreads();
      if (t < 32) {
        ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(size) : "memory");
        expect(&bar, size);
        LOAD
      }
      wait(&bar, 0);
      if (t < 32) for (int i = 0; i < size / 4; ++i) tile[t][i] += t;
      proxy();
      __syncthreads();
      if (t < 32) {
        STORE
        commit();
        was_read<0>();
      }
    }""".replace("LOAD", load("tile[t]", "from", "size", "&bar", space)).replace(
        "STORE", store("y + blockIdx.x * 2048 + t * 64", "tile[t]", "size")
    )
    x = RNG.integers(-999, 999, (40, 32, 64)).astype("i4")
    y = np.full_like(x, 7)
    launch(source, Arg("x", x), Arg("y", y, True), Arg("n", np.int32(0)), grid=40)
    inside = np.arange(64) < 4 * (np.arange(32) % 16 + 1)[:, None]
    np.testing.assert_array_equal(y, np.where(inside, x + np.arange(32)[:, None], 7))


def test_groups_are_counted_by_thread_and_reading_is_not_writing() -> None:
    """With one group allowed to be pending, the source of the older one may be overwritten."""
    source = r"""
    extern "C" __global__ void k(int* y) {
      __shared__ alignas(16) int tile[2][8];
      const int t = threadIdx.x;
      if (t < 2) {
        for (int i = 0; i < 6; ++i) {
          int* mine = tile[t] + i % 2 * 4;
          for (int j = 0; j < 4; ++j) mine[j] = 100 * t + 10 * i + j;
          proxy();
          STORE
          commit();
          was_read<1>();
        }
        waited<0>();
      }
    }""".replace("STORE", store("y + t * 24 + i * 4", "mine", "16"))
    y = np.zeros((2, 6, 4), "i4")
    launch(source, Arg("y", y, True))
    t, i, j = np.indices(y.shape)
    np.testing.assert_array_equal(y, 100 * t + 10 * i + j)
    source = source.replace("was_read<1>", "was_read<2>")
    report = fault(source.replace("mine[j] =", "/*BUG*/ mine[j] ="), Arg("y", y, True))
    assert "missing wait" in report and "tile" in report


def test_a_copy_that_is_over_before_its_thread_waits_is_learnt_of_by_the_wait() -> None:
    """To see the sum is not to know that its source has been read: only the wait says so."""
    source = r"""
    extern "C" __global__ void k(int* y) {
      __shared__ alignas(16) int tile[4];
      const int t = threadIdx.x;
      if (t < 4) tile[t] = t + 1;
      proxy();
      __syncthreads();
      if (t == 0) {
        ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], 16;"
            ::"l"(y), "r"(at(tile)) : "memory");
        commit();
        while (atomicAdd(y, 0) == 0) {}
        WAIT
        *(volatile int*)tile = 5; // BUG
      }
    }"""
    for wait in ("was_read<0>();", "waited<0>();"):
        y = np.zeros(4, "i4")
        launch(source.replace("WAIT", wait), Arg("y", y, True))
        assert y.tolist() == [1, 2, 3, 4]
    report = fault(source.replace("WAIT", ""), Arg("y", np.zeros(4, "i4"), True))
    assert "tile" in report


REDUCE = r"""
extern "C" __global__ void k(const ELEMENT* x, ELEMENT* y) {
  __shared__ alignas(128) ELEMENT tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.OPERATION [%0], [%1], %2;"
        ::"l"(y), "r"(at(tile)), "r"((u32)sizeof tile) : "memory");
    commit();
    waited<0>();
  }
}"""
WORDS = {2: "unsigned short", 4: "unsigned", 8: "u64"}


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("add.u32", "u4"), ("add.s32", "i4"), ("add.u64", "u8"), ("add.f32", "f4"),
     ("add.f64", "f8"), ("add.noftz.f16", "f2"), ("add.noftz.bf16", ml_dtypes.bfloat16),
     ("min.s64", "i8"), ("max.u32", "u4"), ("max.f16", "f2"), ("min.bf16", ml_dtypes.bfloat16),
     ("inc.u32", "u4"), ("dec.u32", "u4"), ("and.b32", "u4"), ("or.b64", "u8"), ("xor.b64", "i8")],
)  # fmt: skip
def test_reductions_into_global_memory(operation: str, dtype: object) -> None:
    """Three blocks in turn; the numbers are small so that no order rounds differently."""
    kind = operation.split(".")[0]
    x = RNG.integers(0, 9, (3, 64)).astype(dtype)  # type: ignore[call-overload]
    y = RNG.integers(0, 9, 64).astype(dtype)  # type: ignore[call-overload]
    wanted = y.astype("f8") if np.dtype(dtype).kind in "fV" else y.copy()  # type: ignore[call-overload]
    for row in x.astype(wanted.dtype):
        wanted = {
            "add": lambda a=wanted, b=row: a + b, "min": lambda a=wanted, b=row: np.minimum(a, b),
            "max": lambda a=wanted, b=row: np.maximum(a, b),
            "and": lambda a=wanted, b=row: a & b, "or": lambda a=wanted, b=row: a | b,
            "xor": lambda a=wanted, b=row: a ^ b,
            "inc": lambda a=wanted, b=row: np.where(a >= b, 0, a + 1),
            "dec": lambda a=wanted, b=row: np.where((a == 0) | (a > b), b, a - 1),
        }[kind]()  # fmt: skip
    raw = y.view(f"u{y.itemsize}")
    launch(REDUCE.replace("ELEMENT", WORDS[y.itemsize]).replace("OPERATION", operation),
           Arg("x", x.view(f"u{x.itemsize}")), Arg("y", raw, True), grid=3)  # fmt: skip
    if kind in ("inc", "dec"):  # their order matters: any of the six may have been
        assert len({tuple(row) for row in (y, wanted)}) <= 2
        return
    np.testing.assert_array_equal(y.astype(wanted.dtype), wanted)


SHARED = r"""
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ alignas(128) int tile[32];
  __shared__ alignas(128) int part[3][32];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  if (t < 32) tile[t] = x[t];
  if (t < 96) part[t / 32][t % 32] = x[32 + t];
  proxy();
  __syncthreads();
  if (t == 0) {
    expect(&bar, 3 * 128);
    for (int i = 0; i < 3; ++i)
      ASM("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.OPERATION"
          " [%0], [%1], 128, [%2];" ::"r"(at(tile)), "r"(at(part[i])), "r"(at(&bar)) : "memory");
  }
  wait(&bar, 0);
  if (t < 32) y[t] = tile[t];
}"""


@pytest.mark.parametrize(
    ("operation", "function"),
    [("add.s32", np.add), ("min.s32", np.minimum), ("and.b32", np.bitwise_and),
     ("xor.b32", np.bitwise_xor)],
)  # fmt: skip
def test_reductions_into_shared_memory_meet_at_one_place(
    operation: str, function: np.ufunc
) -> None:
    x = random_bytes(RNG, (4, 32), "i4")
    y = np.zeros(32, "i4")
    launch(SHARED.replace("OPERATION", operation), Arg("x", x), Arg("y", y, True))
    np.testing.assert_array_equal(y, function.reduce(x, axis=0, dtype="i4"))


BUGS = r"""
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ alignas(128) int tile[64];
  __shared__ alignas(8) u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  __syncthreads();
  CODE
}"""


@pytest.mark.parametrize("checks", [Checks(), Checks(race=True)], ids=["mem", "race"])
@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("if (t == 0) { " + load("tile", "x", "100", "&bar") + " } // BUG",
         ["bad copy size: 100 bytes: not a multiple of 16"]),
        ("if (t == 0) { " + load("tile + 1", "x", "128", "&bar") + " } // BUG",
         ["misaligned shared access", "byte 4 of tile"]),
        ("if (t == 0) { " + load("tile", "x + 2", "128", "&bar") + " } // BUG",
         ["misaligned global access", "byte 8 of x"]),
        ("if (t == 0) { " + load("tile", "x + 64", "256", "&bar") + " } // BUG",
         ["out-of-bounds global read", "byte 400 of x (400 bytes"]),
        ("if (t == 0) { " + load("tile + 32", "x", "256", "&bar") + " } // BUG",
         ["out-of-bounds shared write", "byte 256 of tile"]),
        ("if (t == 0) { " + load("tile", "x", "128", "(u64*)tile + 20") + " } // BUG",
         ["uninitialised mbarrier"]),
        ("if (t == 0) { " + load("&bar - 1", "x", "16", "&bar") + " } // BUG", ["shared"]),
        ("if (t == 0) { expect(&bar, 128);" + load("tile", "x", "128", "&bar")
         + " }\ny[t] = tile[t % 32]; // BUG\nwait(&bar, 0);", ["tile"]),
        ("if (t == 0) { " + store("y", "tile", "16") + " } // BUG",
         ["block ended under an asynchronous copy", "wait_group.read 0 must stand"]),
        ("if (t == 0) { " + store("y + 512", "tile", "16") + " } // BUG",
         ["out-of-bounds global write", "of y"]),
        ("if (t == 0) { " + store("(int*)x", "tile", "16") + " } // BUG",
         ["write to a read-only argument"]),
        ("if (t < 32) tile[t] = t; proxy(); __syncthreads();\nif (t == 0) { "
         + store("y", "tile", "144") + " // BUG\ncommit(); waited<0>(); }",
         ["uninitialised shared read", "byte 128 of tile"]),
    ],
)  # fmt: skip
def test_planted_bugs(code: str, texts: list[str], checks: Checks) -> None:
    x, y = np.arange(100, dtype="i4"), np.zeros(128, "i4")
    report = fault(BUGS.replace("CODE", code), Arg("x", x), Arg("y", y, True), checks=checks)
    for text in texts:
        assert text in report, report


def test_what_a_copy_brings_is_what_stands_there_when_it_lands() -> None:
    """Writing the source of a copy that is under way is a race, and late data without the check."""
    code = """
      if (t == 0) {
        expect(&bar, 128);
        LOAD
        y[0] = 5; // BUG
      }
      wait(&bar, 0);
      if (t < 32) y[64 + t] = tile[t];""".replace("LOAD", load("tile", "y", "128", "&bar"))
    y = np.arange(128, dtype="i4")
    launch(
        BUGS.replace("CODE", code), Arg("x", np.zeros(4, "i4")), Arg("y", y, True), checks=Checks()
    )
    assert y[64] == 5 and (y[65:96] == np.arange(1, 32)).all()
    report = fault(BUGS.replace("CODE", code), Arg("x", np.zeros(4, "i4")), Arg("y", y, True))
    assert "y" in report
