"""Moving 8x8 matrices between shared memory and registers: ldmatrix, stmatrix, movmatrix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import PREAMBLE, Case
from tests.golden.forms import random_result
from tests.golden.values import Random, random_bits


def _rows(rng: Random) -> np.ndarray:
    """Offsets of 32 rows of 16 bytes in 1 KiB of shared memory, in random order."""
    return (16 * rng.permutation(64)[:32]).astype(np.uint32)


def _registers(count: int, letter: str = "=r") -> str:
    return ", ".join(f'"{letter}"(r[{i}])' for i in range(count))


def _braces(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"


def _load(form: str, count: int, arch: str) -> Case:
    source = f"""{PREAMBLE}
K k(const u32* x, const u32* rows, u32* result) {{
  __shared__ __align__(16) u32 tile[256];
  const int lane = threadIdx.x;
  for (int j = lane; j < 256; j += 32) tile[j] = x[j];
  __syncthreads();
  u32 r[{count}];
  asm volatile("{form} {_braces(count)}, [%{count}];"
               : {_registers(count)} : "r"(shared_address(tile) + rows[lane]));
  for (int j = 0; j < {count}; ++j) result[32 * j + lane] = r[j];
}}
"""

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        return {"x": random_bits(rng, "u32", 256), "rows": _rows(rng),
                "result": random_result(rng, (count, 32), "u4")}  # fmt: skip

    return Case(form, source, arrays, {"result": "u32"}, arch)


def _store(form: str, count: int) -> Case:
    source = f"""{PREAMBLE}
K k(const u32* x, const u32* rows, u32* result) {{
  __shared__ __align__(16) u32 tile[256];
  const int lane = threadIdx.x;
  for (int j = lane; j < 256; j += 32) tile[j] = 0x5A5A0000u + j;
  __syncthreads();
  u32 r[{count}];
  for (int j = 0; j < {count}; ++j) r[j] = x[32 * j + lane];
  asm volatile("{form} [%0], {_braces(count, 1)};"
               :: "r"(shared_address(tile) + rows[lane]), {_registers(count, "r")} : "memory");
  __syncthreads();
  for (int j = lane; j < 256; j += 32) result[j] = tile[j];
}}
"""

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        return {"x": random_bits(rng, "u32", 32 * count), "rows": _rows(rng),
                "result": random_result(rng, (256,), "u4")}  # fmt: skip

    return Case(form, source, arrays, {"result": "u32"}, "compute_90a")


def _matrices() -> Iterator[Case]:
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            form = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            yield _load(form, count, "compute_75")
            yield _store(form.replace("ldmatrix", "stmatrix"), count)
    source = f"""{PREAMBLE}
K k(const u32* x, u32* result) {{
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x[threadIdx.x]));
  result[threadIdx.x] = r;
}}
"""
    yield Case(
        "movmatrix.m8n8.trans.b16", source,
        lambda rng: {"x": random_bits(rng, "u32", 32), "result": random_result(rng, (32,), "u4")},
        {"result": "u32"}, "compute_75",
    )  # fmt: skip


CASES = [*_matrices()]
