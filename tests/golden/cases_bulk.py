"""cp.async.bulk and cp.reduce.async.bulk between global, shared and another block's memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import Case
from tests.golden.hopper import block_case
from tests.golden.values import Make, Random, random_bits, small

WORDS = 256


def _load(name: str, bytes_: int, of: int, to: int) -> Case:
    body = f"""  __shared__ __align__(128) u32 tile[{WORDS}];
  __shared__ u64 barrier;
  const u32 bar = shared_address(&barrier);
  for (u32 j = i; j < {WORDS}; j += 32) tile[j] = 0xC3C30000u + j;
  if (i == 0) {{ init(bar, 1); publish_init(); }}
  fence_async();
  __syncthreads();
  if (i == 0) {{
    expect(bar, {bytes_});
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(tile) + {to}), "l"(x + {of // 4}), "r"({bytes_}), "r"(bar)
                 : "memory");
  }}
  wait(bar, 0);
  for (u32 j = i; j < {WORDS}; j += 32) result[j] = tile[j];"""
    return block_case(name, body, WORDS, WORDS)


def _store() -> Case:
    body = f"""  __shared__ __align__(128) u32 tile[{WORDS}];
  for (u32 j = i; j < {WORDS}; j += 32) {{ tile[j] = x[j] * 3; result[j] = j; }}
  fence_async();
  __syncthreads();
  if (i == 0) {{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 320;"
                 :: "l"(result + 16), "r"(shared_address(tile) + 32) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 16;"
                 :: "l"(result + 128), "r"(shared_address(tile)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }}"""
    return block_case("cp.async.bulk.store", body, WORDS, WORDS)


_REDUCED = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16.noftz", "bf16.noftz"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",), "dec": ("u32",),
    "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"),
}  # fmt: skip


def _words(type_: str) -> Make:
    """Words of elements of the type: small integers for floats, else random bits."""

    def make(rng: Random) -> np.ndarray:
        if "f" not in type_:
            return random_bits(rng, "u32", 2 * WORDS)
        count = 2 * WORDS * 4 // {"f64": 8, "f32": 4}.get(type_, 2)
        return small(rng, type_, count, 100).view(np.uint32)

    return make


def _reduce(op: str, type_: str) -> Case:
    """x's second half is reduced into its first."""
    noftz = ".noftz" if type_.endswith(".noftz") else ""
    form = type_.removesuffix(".noftz")
    body = f"""  __shared__ __align__(128) u32 tile[{WORDS}];
  for (u32 j = i; j < {WORDS}; j += 32) {{ tile[j] = x[{WORDS} + j]; result[j] = j; }}
  fence_async();
  __syncthreads();
  if (i == 0) {{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{noftz}.{form}"
                 " [%0], [%1], 960;"
                 :: "l"(x + 8), "r"(shared_address(tile) + 16) : "memory");
    commit_and_wait();
  }}"""
    return block_case(
        f"cp.reduce.async.bulk.{op}.{type_}", body, 2 * WORDS, WORDS, _words(form),
        {"x": form if "f" in form else "u32", "result": "u32"},
    )  # fmt: skip


def _to_neighbour(reduced: str = "") -> Case:
    """Each of two blocks sends half of its tile to the other block's shared memory."""
    form = "cp.async.bulk"
    tail = ""
    if reduced:
        form, tail = "cp.reduce.async.bulk", f".{reduced}"
    body = f"""  extern __shared__ __align__(128) u32 dynamic[];
  u32 *tile = dynamic, *inbox = dynamic + {WORDS};
  __shared__ u64 barrier;
  const u32 bar = shared_address(&barrier), rank = cluster_rank();
  for (u32 j = i; j < {WORDS}; j += 32) {{ tile[j] = x[rank * {WORDS} + j]; inbox[j] = 7 * j; }}
  if (i == 0) {{ init(bar, 1); publish_init(); expect(bar, 512); }}
  fence_async();
  __syncthreads();
  cluster_sync();
  if (i == 0) {{
    const u32 there = mapa(shared_address(inbox) + 128, rank ^ 1);
    asm volatile("{form}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{tail}"
                 " [%0], [%1], 512, [%2];"
                 :: "r"(there), "r"(shared_address(tile) + 64), "r"(mapa(bar, rank ^ 1))
                 : "memory");
  }}
  wait(bar, 0);
  for (u32 j = i; j < {WORDS}; j += 32) result[rank * {WORDS} + j] = inbox[j];
  cluster_sync();"""
    name = "cp.async.bulk.cluster" if not reduced else f"cp.reduce.async.bulk.cluster.{reduced}"
    return block_case(name, body, 2 * WORDS, 2 * WORDS, grid=2, cluster=2, shared=8 * WORDS)


def _multicast() -> Case:
    body = f"""  __shared__ __align__(128) u32 tile[{WORDS}];
  __shared__ u64 barrier;
  const u32 bar = shared_address(&barrier), rank = cluster_rank();
  for (u32 j = i; j < {WORDS}; j += 32) tile[j] = 11 * j;
  const u32 mine = rank == 2 ? 0 : 512;
  if (i == 0) {{ init(bar, 1); publish_init(); expect(bar, mine); }}
  fence_async();
  __syncthreads();
  cluster_sync();
  if (i == 0 && rank == 1) {{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], 512, [%2], %3;"
                 :: "r"(shared_address(tile) + 256), "l"(x + 4), "r"(bar), "h"((u16)0xB)
                 : "memory");
  }}
  wait(bar, 0);
  for (u32 j = i; j < {WORDS}; j += 32) result[rank * {WORDS} + j] = tile[j];
  cluster_sync();"""
    return block_case("cp.async.bulk.multicast", body, WORDS, 4 * WORDS, grid=4, cluster=4)


def _all() -> Iterator[Case]:
    for bytes_, of, to in ((16, 0, 0), (1024, 0, 0), (272, 48, 112), (512, 16, 512)):
        yield _load(f"cp.async.bulk.load.{bytes_}", bytes_, of, to)
    yield _store()
    for op, types in _REDUCED.items():
        for type_ in types:
            yield _reduce(op, type_)
    yield _to_neighbour()
    for reduced in ("add.u32", "add.u64", "min.s32", "max.u32", "inc.u32", "dec.u32", "and.b32",
                    "or.b32", "xor.b32"):  # fmt: skip
        yield _to_neighbour(reduced)
    yield _multicast()


CASES = [*_all()]
