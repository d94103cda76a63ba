"""What the tests of wgmma share: canonical layouts, fragments, CUDA around single instructions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx

TYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
    "s32": np.int32,
}  # fmt: skip
DEPTH = {2: 16, 4: 8, 1: 32}  # k by bytes of an element
MODE = {0: 0, 128: 1, 64: 2, 32: 3}  # the descriptor's field by the swizzle's bytes


@dataclass(frozen=True)
class Place:
    """One operand's layout in shared memory: bytes; swizzle 0, 32, 64 or 128."""

    swizzle: int
    mn_major: bool
    leading: int
    stride: int
    start: int = 0

    @property
    def descriptor(self) -> int:
        """The matrix descriptor for a start address relative to that of shared memory."""
        low = self.start >> 4 | self.leading >> 4 << 16
        return low | self.stride >> 4 << 32 | MODE[self.swizzle] << 62

    def addresses(self, rows: int, size: int) -> np.ndarray:
        """Byte address of every element [rows, k], by the canonical layouts of the PTX manual.

        T elements are 16 bytes, S pieces of 16 bytes a swizzled row:
        K-major   ((8,m),(T,2)) : ((S*T, stride), (1, T, or leading where S is 1))
        MN-major  ((T,S,m),(8,k)) : ((1, T, leading), (S*T, stride)); S = 1 swaps the two
        """
        t, s = 16 // size, max(self.swizzle // 16, 1)
        leading, stride = self.leading // size, self.stride // size
        row, col = np.indices((rows, DEPTH[size]))
        if not self.mn_major:
            second = t if self.swizzle else leading
            at = row % 8 * s * t + row // 8 * stride + col % t + col // t * second
        else:
            across, along = (leading, stride) if self.swizzle else (stride, leading)
            at = row % t + row // t % s * t + row // (t * s) * across
            at = at + col % 8 * s * t + col // 8 * along
        address = self.start + at * size
        return address ^ ((address >> 7 & s - 1) << 4)  # Swizzle<log2 s, 4, 3>


def tight(swizzle: int, mn_major: bool, rows: int, start: int = 0) -> Place:
    """A layout whose atoms follow each other with some room between."""
    span = swizzle or 16
    atom = 8 * span
    if not mn_major:
        return Place(swizzle, False, 16 if swizzle else -(-rows // 8) * atom, atom, start)
    if not swizzle:
        return Place(0, True, -(-rows // 8) * 128, 128, start)
    across = -(-rows * 2 // span)  # atoms along rows
    return Place(swizzle, True, atom, across * atom, start)


def stored(image: np.ndarray, place: Place, matrix: np.ndarray) -> None:
    """Put a matrix [rows, k] where `place` says."""
    at = place.addresses(matrix.shape[0], matrix.itemsize)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, matrix.itemsize)
    for byte in range(matrix.itemsize):
        image[at + byte] = raw[:, :, byte]


WARP, GROUP, IN_GROUP = (  # by thread of a warpgroup
    np.arange(128) // 32, np.arange(128) % 32 // 4, np.arange(128) % 4,
)  # fmt: skip


def accumulator_place(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every element of D: [128 threads, n // 2]."""
    i = np.arange(n // 2)
    row = 16 * WARP[:, None] + GROUP[:, None] + 8 * (i // 2 % 2)
    return row, 8 * (i // 4) + 2 * IN_GROUP[:, None] + i % 2


def fragment_place(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every element of A in registers: [128 threads, 16 / size]."""
    i, each = np.arange(16 // size), 4 // size
    row = 16 * WARP[:, None] + GROUP[:, None] + 8 * (i // each % 2)
    return row, each * IN_GROUP[:, None] + i % each + 4 * each * (i // (2 * each))


def values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random small integers: every product and sum of them is exact in every type."""
    low, high = {"u8": (0, 256), "s8": (-128, 128)}.get(kind, (-2, 3))
    return rng.integers(low, high, shape).astype(TYPES[kind])


def kernel(op: str, n: int, to: str, from_registers: bool, tail: str) -> str:
    """CUDA: every warpgroup multiplies once, on accumulators that it loads and stores.

    `op`: what follows wgmma.mma_async.sync.aligned; `tail`: immediates after scale-d.
    """
    count = n // 4 if to == "f16" else n // 2
    inputs = 4 if from_registers else 1
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if from_registers else f"%{count}"
    loads = ", ".join(f'"r"(r[{i}])' for i in range(4)) if from_registers else '"l"(da)'
    return f"""
    extern "C" __global__ void k(const uint4* image, const unsigned long long* desc,
                                 const unsigned* a, const int* keep, unsigned* d, int bytes) {{
      extern __shared__ __align__(1024) uint4 sm[];
      for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        sm[i] = image[blockIdx.x * (bytes / 16) + i];
      asm volatile("fence.proxy.async;" ::: "memory");
      __syncthreads();
      int group = blockIdx.x * (blockDim.x / 128) + threadIdx.x / 128;
      unsigned long long base = (unsigned)__cvta_generic_to_shared(sm) >> 4;
      unsigned long long da = desc[2 * group] + base, db = desc[2 * group + 1] + base;
      int at = group * 128 + threadIdx.x % 128;
      unsigned r[4], acc[{count}];
      for (int i = 0; i < 4; ++i) r[i] = a[at * 4 + i];
      for (int i = 0; i < {count}; ++i) acc[i] = d[at * {count} + i];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + inputs + 1}, 0;\\n"
        "wgmma.mma_async.sync.aligned.{op} {{"
        "{", ".join(f"%{i}" for i in range(count))}}}, {a}, %{count + inputs}, p{tail};\\n}}"
        : {", ".join(f'"+r"(acc[{i}])' for i in range(count))}
        : {loads}, "l"(db), "r"(keep[group]));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      for (int i = 0; i < {count}; ++i) d[at * {count} + i] = acc[i];
    }}"""


@dataclass
class Case:
    """One multiplication by every warpgroup, each with operands and descriptors of its own."""

    op: str  # after wgmma.mma_async.sync.aligned: m64n8k16.f32.f16.f16
    n: int
    to: str
    a: np.ndarray  # [blocks, warpgroups, 64, k]
    b: np.ndarray  # [blocks, warpgroups, n, k]
    d: np.ndarray  # [blocks, warpgroups, 64, n]
    keep: np.ndarray  # [blocks, warpgroups]
    place_a: Place | None  # None: in registers
    place_b: Place
    tail: str = ", 1, 1"

    def run(self, rng: np.random.Generator) -> np.ndarray:
        """D afterwards."""
        blocks, groups = self.keep.shape
        size = self.a.itemsize
        room = -(-max(
            int(place.addresses(rows, size).max()) + size
            for place, rows in ((self.place_a, 64), (self.place_b, self.n)) if place
        ) // 1024) * 1024  # fmt: skip
        image = rng.integers(0, 256, (blocks, groups, 2, room)).astype("u1")
        descriptors = np.zeros((blocks, groups, 2), "u8")
        for block, group in np.ndindex(blocks, groups):
            for which, (place, matrix) in enumerate(
                ((self.place_a, self.a), (self.place_b, self.b))
            ):
                if place:
                    stored(image[block, group, which], place, matrix[block, group])
                    descriptors[block, group, which] = place.descriptor + (
                        (2 * group + which) * room >> 4
                    )
        row, col = fragment_place(size)
        fragments = np.ascontiguousarray(self.a[:, :, row, col]).view("u4")
        row, col = accumulator_place(self.n)
        registers = np.ascontiguousarray(self.d[:, :, row, col]).view("u4")
        source = kernel(self.op, self.n, self.to, self.place_a is None, self.tail)
        bytes_ = 2 * groups * room
        arguments = [Arg("image", image), Arg("desc", descriptors), Arg("a", fragments),
                     Arg("keep", self.keep.astype("i4")), Arg("d", registers, True),
                     Arg("bytes", np.int32(bytes_))]  # fmt: skip
        ptx = compile_ptx(source, "compute_90a")
        run(ptx, "k", blocks, 128 * groups, arguments, bytes_)
        out = np.zeros_like(self.d)
        out[:, :, row, col] = registers.view(self.d.dtype)
        return out


PRELUDE = """
typedef unsigned long long u64;
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ u64 descriptor(unsigned at) {  // swizzle 128, groups of 8 rows adjacent
  return (u64)(at >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ unsigned swizzled(unsigned at) { return at ^ (at >> 7 & 7) << 4; }
__device__ __forceinline__ void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void store(float (&d)[N], float* to, int stride) {
  const int t = threadIdx.x % 128, row = t / 32 * 16 + t % 32 / 4, col = t % 4 * 2;
#pragma unroll
  for (int i = 0; i < N; ++i)
    to[(row + i / 2 % 2 * 8) * stride + i / 4 * 8 + col + i % 2] = d[i];
}
"""


def mma_function(
    name: str, n: int, types: str, tail: str, from_registers: bool = False, k: int = 16
) -> str:
    """`name(d, a, b, scale_d)` in CUDA: one wgmma on accumulators that it reads and writes."""
    count = n // 2
    inputs = 4 if from_registers else 1
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if from_registers else f"%{count}"
    loads = ", ".join(f'"r"(a[{i}])' for i in range(4)) if from_registers else '"l"(a)'
    results = ", ".join(f"%{i}" for i in range(count))
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}],
                                       {"unsigned (&a)[4]" if from_registers else "u64 a"}, u64 b,
                                       int scale_d) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + inputs + 1}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} {{{results}}}, "
    "{a}, %{count + inputs}, p{tail};\\n}}"
    : {", ".join(f'"+f"(d[{i}])' for i in range(count))}
    : {loads}, "l"(b), "r"(scale_d));
}}
"""
