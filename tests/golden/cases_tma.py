"""cp.async.bulk.tensor: tiles of 1 to 5 dimensions in every swizzle, in, out and reduced.

A GPU stops with "illegal instruction" at a tile that does not begin at a multiple of 16 bytes along
the innermost dimension, and at a store or reduction that begins before the tensor in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from tests.golden.case import Case, Map
from tests.golden.hopper import block_case
from tests.golden.values import Make, Random, random_bits, small

_BYTES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4, "f64": 8}
Numbers = tuple[int, ...]


def _map(
    array: str, dtype: str, dims: Numbers, box: Numbers, swizzle: int = 0, fill: str = "zero",
    element_strides: Numbers | None = None,
) -> Map:  # fmt: skip
    """Rows follow one another with 16 to 31 bytes between them."""
    row = (dims[0] * _BYTES[dtype] // 16 + 1) * 16
    strides = tuple(accumulate((row, *dims[1:-1]), mul)) if len(dims) > 1 else ()
    return Map(array, dtype, dims, strides, box, element_strides, swizzle, fill)


def _box_bytes(m: Map) -> int:
    steps = (1, *(m.element_strides or (1,) * len(m.box))[1:])
    return prod(-(-b // s) for b, s in zip(m.box, steps, strict=True)) * _BYTES[m.dtype]


def _tile_words(m: Map) -> int:
    """Words of the box in shared memory: rows shorter than the swizzle's span lie a span apart."""
    row = m.box[0] * _BYTES[m.dtype]
    return _box_bytes(m) // row * max(row, m.swizzle) // 4


def _map_words(m: Map) -> int:
    """Words of an array that the map lies in."""
    return (m.strides[-1] * m.dims[-1] if m.strides else m.dims[0] * _BYTES[m.dtype]) // 4 + 16


def _corner(start: Numbers) -> str:
    return "{" + ", ".join(str(at) for at in start) + "}"


def _load(name: str, m: Map, start: Numbers) -> Case:
    """Brings a box whose first element is at `start` and writes the shared memory out."""
    bytes_, rank = _box_bytes(m), len(m.dims)
    words = _tile_words(m) + 32
    body = f"""  __shared__ __align__(1024) u32 tile[{words}];
  __shared__ u64 barrier;
  const u32 bar = shared_address(&barrier);
  for (u32 j = i; j < {words}; j += 32) tile[j] = 0xBEEF0000u + j;
  if (i == 0) {{ init(bar, 1); publish_init(); }}
  fence_async();
  __syncthreads();
  if (i == 0) {{
    expect(bar, {bytes_});
    asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes [%0], [%1, {_corner(start)}], [%2];"
                 :: "r"(shared_address(tile)), "l"(&map0), "r"(bar) : "memory");
  }}
  wait(bar, 0);
  for (u32 j = i; j < {words}; j += 32) result[j] = tile[j];"""
    return block_case(f"tma.load.{name}", body, _map_words(m), words, maps=(m,))


def _store(name: str, m: Map, start: Numbers, reduce: str = "", x: Make | None = None) -> Case:
    """Sends a box to `start` of the map over x; the box is what stands in x behind the map."""
    rank, words = len(m.dims), _map_words(m)
    box = _tile_words(m)
    form = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    if reduce:
        form = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduce}.tile.bulk_group"
    body = f"""  __shared__ __align__(1024) u32 tile[{box}];
  for (u32 j = i; j < {box}; j += 32) tile[j] = x[{words} + j];
  fence_async();
  __syncthreads();
  if (i == 0) {{
    asm volatile("{form} [%0, {_corner(start)}], [%1];"
                 :: "l"(&map0), "r"(shared_address(tile)) : "memory");
    commit_and_wait();
  }}
  __syncthreads();
  if (i == 0) result[0] = {words};"""
    written = {"x": m.dtype.replace("s32", "u32"), "result": "u32"}
    return block_case(f"tma.{name}", body, words + box, 1, x, written, maps=(m,))


_SHAPES: tuple[tuple[str, Numbers, Numbers, tuple[Numbers, ...]], ...] = (
    ("1d", (100,), (64,), ((0,), (-20,), (68,))),
    ("2d", (40, 20), (16, 8), ((0, 0), (8, 5), (-8, -3), (28, 17))),
    ("3d", (24, 7, 5), (8, 4, 3), ((0, 0, 0), (12, 2, 1), (-4, -2, -1), (20, 5, 3))),
    ("4d", (16, 5, 4, 3), (8, 3, 2, 2), ((4, 1, 1, 0), (-4, 3, -1, 2))),
    ("5d", (12, 4, 3, 4, 3), (8, 2, 2, 3, 2), ((0, 1, 1, 0, 1), (4, 3, -1, 2, -1))),
)


def _loads() -> Iterator[Case]:
    for rank, dims, box, starts in _SHAPES:
        for n, start in enumerate(starts):
            yield _load(f"{rank}.{n}", _map("x", "f32", dims, box), start)
    for dtype, size in _BYTES.items():
        m = _map("x", dtype, (64, 12), (max(32 // size, 16), 4))
        yield _load(f"{dtype}.zero", m, (48, 10))
    for dtype in ("f16", "bf16", "f32", "f64"):
        m = _map("x", dtype, (64, 12), (16, 4), fill="nan")
        yield _load(f"{dtype}.nan", m, (56, 10))
        yield _load(f"{dtype}.nan.before", m, (-8, -1))
    for swizzle in (32, 64, 128):
        for dtype in ("u8", "f16", "f32"):
            inner = swizzle // _BYTES[dtype]
            m = _map("x", dtype, (2 * inner, 40), (inner, 32), swizzle)
            yield _load(f"swizzle.{swizzle}.{dtype}", m, (inner // 2, 3))
        half = _map("x", "bf16", (swizzle, 40), (swizzle // 4, 16), swizzle)  # half a span wide
        yield _load(f"swizzle.{swizzle}.half", half, (8, 28))
        deep = _map("x", "f16", (swizzle, 9, 6), (swizzle // 2, 5, 3), swizzle, "nan")
        yield _load(f"swizzle.{swizzle}.3d", deep, (swizzle // 4, 6, 4))
    for steps, name in (((1, 2), "2"), ((1, 3), "3"), ((1, 8), "8")):
        m = _map("x", "f16", (48, 30), (16, 12), 0, "zero", steps)
        yield _load(f"steps.{name}", m, (8, 2))
        yield _load(f"steps.{name}.outside", m, (40, 23))
    m = _map("x", "f32", (64, 8), (16, 4))
    for n, start in enumerate(((4, 1), (-8, -9), (64, 8))):
        yield _prefetch(f"{n}", m, start)
    m = _map("x", "u16", (48, 10, 9), (16, 6, 5), 32, "zero", (1, 2, 2))
    yield _load("steps.3d.swizzle", m, (16, 1, 3))


def _stores() -> Iterator[Case]:
    for rank, dims, box, starts in _SHAPES:
        for n, start in enumerate(starts):
            if min(start) < 0:
                continue  # a fault: see _faults
            yield _store(f"store.{rank}.{n}", _map("x", "f32", dims, box), start)
    for swizzle in (32, 64, 128):
        half = _map("x", "bf16", (swizzle, 40), (swizzle // 4, 16), swizzle)
        yield _store(f"store.swizzle.{swizzle}.half", half, (8, 28))
        m = _map("x", "f16", (2 * swizzle, 24), (swizzle // 2, 16), swizzle)
        yield _store(f"store.swizzle.{swizzle}", m, (swizzle // 4, 5))
        yield _store(f"store.swizzle.{swizzle}.outside", m, (swizzle // 4 * 6, 15))
    for dtype in ("u8", "f64", "bf16"):
        m = _map("x", dtype, (40, 20), (16, 6))
        yield _store(f"store.{dtype}", m, (32, 16))
    m = _map("x", "f16", (48, 30), (16, 12), 0, "zero", (1, 3))
    yield _store("store.steps", m, (8, 2))


_REDUCED = {
    "add": ("u32", "s32", "f32", "f16", "bf16", "f64"), "min": ("u32", "s32", "f16", "bf16"),
    "max": ("u32", "s32", "f16", "bf16"), "inc": ("u32",), "dec": ("u32",), "and": ("u32",),
    "or": ("u32",), "xor": ("u32",),
}  # fmt: skip


def _numbers(m: Map) -> Make:
    def make(rng: Random) -> np.ndarray:
        words = _map_words(m) + _tile_words(m)
        if "f" not in m.dtype:
            return random_bits(rng, "u32", words)
        return small(rng, m.dtype, words * 4 // _BYTES[m.dtype], 100).view(np.uint32)

    return make


def _reductions() -> Iterator[Case]:
    for op, dtypes in _REDUCED.items():
        for dtype in dtypes:
            m = _map("x", dtype, (32, 12), (16, 8))
            yield _store(f"reduce.{op}.{dtype}", m, (24, 6), op, _numbers(m))
    m = _map("x", "f16", (64, 12), (64, 8), 128)
    yield _store("reduce.add.swizzle", m, (0, 7), "add", _numbers(m))
    m = _map("x", "f32", (12, 4, 3), (8, 3, 2))
    yield _store("reduce.add.3d", m, (8, 2, 1), "add", _numbers(m))


def _cluster() -> Case:
    """Each of two blocks brings half of a tile to both."""
    m = _map("x", "f16", (64, 16), (64, 8), 128)
    body = """  __shared__ __align__(1024) u32 tile[512];
  __shared__ u64 barrier;
  const u32 bar = shared_address(&barrier), rank = cluster_rank();
  if (i == 0) { init(bar, 1); publish_init(); expect(bar, 2048); }
  __syncthreads();
  cluster_sync();
  if (i == 0) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(shared_address(tile) + 1024 * rank), "l"(&map0), "r"(0), "r"(8 * rank),
                    "r"(bar), "h"((u16)3) : "memory");
  }
  wait(bar, 0);
  for (u32 j = i; j < 512; j += 32) result[rank * 512 + j] = tile[j];
  cluster_sync();"""
    return block_case("tma.multicast", body, _map_words(m), 1024, grid=2, cluster=2, maps=(m,))


def _ragged() -> Iterator[Case]:
    """Rows whose length is no multiple of 16 bytes."""
    for dtype in ("u8", "u16", "f16", "f32", "f64"):
        for length in (33, 40, 45) if dtype == "u8" else (33,):
            m = _map("x", dtype, (length, 9), (16, 6), fill="nan" if dtype[0] == "f" else "zero")
            yield _load(f"ragged.{dtype}.{length}", m, (32, 5))
            yield _store(f"store.ragged.{dtype}.{length}", m, (32, 5))
    for op, dtype in (("add", "u32"), ("add", "f16"), ("max", "f16"), ("xor", "u32")):
        m = _map("x", dtype, (33, 9), (16, 6))
        yield _store(f"reduce.ragged.{op}.{dtype}", m, (32, 5), op, _numbers(m))
    m = _map("x", "f16", (37, 24), (32, 16), 64)
    yield _load("ragged.swizzle", m, (8, 12))
    yield _store("store.ragged.swizzle", m, (8, 12))


def _prefetch(name: str, m: Map, start: Numbers) -> Case:
    form = f"cp.async.bulk.prefetch.tensor.{len(m.dims)}d.L2.global.tile"
    body = f"""  if (i == 0) {{
    asm volatile("{form} [%0, {_corner(start)}];" :: "l"(&map0) : "memory");
    result[0] = 1;
  }}"""
    return block_case(f"tma.prefetch.{name}", body, _map_words(m), 1, maps=(m,))


def _faults() -> Iterator[Case]:
    """Tiles that begin 8 bytes after a multiple of 16, and stores that begin before the tensor."""
    single, byte = _map("x", "f32", (64, 8), (16, 4)), _map("x", "u8", (64, 8), (16, 4))
    half = _map("x", "f16", (64, 8), (16, 4))
    for case in (
        _load("misaligned.f32", single, (2, 1)),
        _load("misaligned.u8", byte, (8, 0)),
        _store("store.misaligned.f32", single, (6, 0)),
        _store("reduce.misaligned.f16", half, (4, 1), "add", _numbers(half)),
        _prefetch("misaligned.f32", single, (2, 1)),
        _store("store.before.inner", single, (-4, 1)),
        _store("store.before.outer", single, (4, -1)),
        _store("reduce.before.f16", half, (8, -1), "add", _numbers(half)),
    ):
        yield replace(case, fault="illegal instruction")


CASES = [*_loads(), *_stores(), *_reductions(), _cluster(), *_ragged(), *_faults()]
