"""What one golden case is: a kernel, its seeded arguments, what it writes and how close to come."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

ENTRY = "k"
Dim3 = int | tuple[int, ...]

# Names and helpers that every kernel starts from.
PREAMBLE = """
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u8 bytes[128]; };

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
#define K extern "C" __global__ void
"""


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the GPU's: nothing, or the largest of the three.

    `ulps` are of the expected value in its own format.
    """

    ulps: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0


EXACT = Tolerance()


@dataclass(frozen=True)
class Map:
    """A tiled tensor map over one of the kernel's arrays; the innermost dimension is first.

    `dims` and `box` in elements, `strides` in bytes for all dimensions but the first, `swizzle` in
    bytes (0, 32, 64, 128), `fill` "zero" or "nan", `dtype` "u8", "u16", "u32", "s32", "f16",
    "bf16", "f32" or "f64".
    """

    array: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: int = 0
    fill: str = "zero"


@dataclass(frozen=True)
class Case:
    """One kernel launch. The kernel's arguments are its arrays in order, then its tensor maps.

    `arrays` makes every array's contents before the launch from a seeded generator; `outputs` names
    those that the kernel writes, with the format of their elements (see `compare.FORMATS`).
    `arch` is what the PTX for the interpreter is compiled for; the GPU's kernel is for sm_90a.
    `fault` is what the GPU's error says where the launch must fail; the interpreter's is a
    SanitizerError.
    """

    name: str
    source: str
    arrays: Callable[[np.random.RandomState], Mapping[str, np.ndarray]]
    outputs: Mapping[str, str]
    arch: str = "compute_80"
    grid: Dim3 = 1
    block: Dim3 = 32
    cluster: Dim3 = 1
    shared: int = 0
    maps: tuple[Map, ...] = field(default=())
    tolerance: Tolerance = EXACT
    fault: str = ""

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Fresh arrays, the same at every call: RandomState's streams are frozen by NumPy."""
        made = self.arrays(np.random.RandomState(zlib.crc32(self.name.encode())))
        return {name: np.ascontiguousarray(array) for name, array in made.items()}

    def digest(self) -> str:
        """Of all that decides the result: the kernel, the launch and the arrays before it."""
        launch = (self.source, self.grid, self.block, self.cluster, self.shared, self.maps)
        sha = hashlib.sha256(repr(launch).encode())
        for name, array in self.make_arrays().items():
            sha.update(f"{name} {array.dtype} {array.shape}".encode())
            sha.update(array.tobytes())
        return sha.hexdigest()[:32]


def three(value: Dim3) -> tuple[int, int, int]:
    """One to three extents as three."""
    x, y, z = (*((value,) if isinstance(value, int) else value), 1, 1)[:3]
    return x, y, z
