"""TensorMap: what cuTensorMapEncodeTiled makes, for kernels that take a `const __grid_constant__
CUtensorMap`; and how the kernel's 128 bytes lead back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fkjit.errors import ParameterError
from fkjit.interp.spaces.strides import extent, misaligned, own_bytes

BYTES, ALIGN = 128, 64  # of a CUtensorMap
MAGIC = int.from_bytes(b"fkjitmap", "little")
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}  # bytes of the span
FILLS = ("zero", "nan")
DTYPES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8,
    "f16": 2, "f32": 4, "f64": 8, "bf16": 2, "tf32": 4,
}  # fmt: skip
_FLOATS = ("f16", "f32", "f64", "bf16", "tf32")
_OF_NUMPY = {
    "uint8": "u8", "int8": "u8", "uint16": "u16", "uint32": "u32", "int32": "s32", "uint64": "u64",
    "int64": "s64", "float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A tiled tensor map over a NumPy array; the first dimension is the innermost one.

    dims: elements of each of 1 to 5 dimensions. strides: bytes from one element to the next in
    dimensions 1, 2, … (the first is contiguous). box: elements that one copy moves in each.
    element_strides: of the box's elements (default: all 1; the first is ignored, as in CUDA).
    swizzle: "none", "32B", "64B", "128B". fill: "zero" or "nan", for elements outside. dtype: u8,
    u16, u32, s32, u64, s64, f16, f32, f64, bf16, tf32 (default: the array's). l2_promotion is
    accepted and has no effect; interleave must be "none". origin: bytes, from the array's first
    element to the map's; where it is not 0, each copy is looked at by itself.

    Raises ParameterError for what cuTensorMapEncodeTiled refuses, and for elements that are not in
    the array, unless the map has an origin.
    """

    array: np.ndarray
    dims: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    element_strides: Sequence[int] | None = None
    swizzle: str = "none"
    fill: str = "zero"
    dtype: str = ""
    l2_promotion: Any = None
    interleave: str = "none"
    origin: int = 0
    itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("dims", "strides", "box", "element_strides"):
            given = getattr(self, name)
            default = (1,) * len(self.dims)
            self._set(name, default if given is None else tuple(int(n) for n in given))
        self._set("dtype", self.dtype or _OF_NUMPY.get(self.array.dtype.name, ""))
        self._one_of("dtype", tuple(DTYPES))
        self._one_of("swizzle", tuple(SWIZZLES))
        self._one_of("fill", FILLS)
        self._one_of("interleave", ("none",))
        self._set("itemsize", DTYPES[self.dtype])
        self._check_shape()
        self._check_box()
        self._check_array()

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that a copy moves in each dimension."""
        assert self.element_strides is not None
        pairs = zip(self.box, (1, *self.element_strides[1:]), strict=True)
        return tuple(-(-extent // stride) for extent, stride in pairs)

    @property
    def steps(self) -> tuple[int, ...]:
        """Bytes from one element to the next in each dimension."""
        return (self.itemsize, *self.strides)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refuse(self, name: str, why: str) -> ParameterError:
        return ParameterError(f"TensorMap: {name}={getattr(self, name)!r} {why}")

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise self._refuse(name, f"is not one of {list(allowed)}")

    def _check_shape(self) -> None:
        rank = len(self.dims)
        if not 1 <= rank <= 5:
            raise self._refuse("dims", f"has {rank} dimensions; 1 to 5 are possible")
        for name, length in (("strides", rank - 1), ("box", rank), ("element_strides", rank)):
            if len(getattr(self, name)) != length:
                raise self._refuse(name, f"must have {length} elements for {rank} dimensions")
        if any(not 1 <= n <= 1 << 32 for n in self.dims):
            raise self._refuse("dims", "is not within 1 … 2^32")
        if any(s % 16 or not 0 <= s < 1 << 40 for s in self.strides):
            raise self._refuse("strides", "must be multiples of 16 bytes, from 0 to below 2^40")

    def _check_box(self) -> None:
        assert self.element_strides is not None
        if any(not 1 <= n <= 256 for n in self.box):
            raise self._refuse("box", "is not within 1 … 256")
        if any(not 1 <= n <= 8 for n in self.element_strides):
            raise self._refuse("element_strides", "is not within 1 … 8")
        inner, span = self.box[0] * self.itemsize, SWIZZLES[self.swizzle]
        if inner % 16:
            raise self._refuse(
                "box", f"has rows of {inner} bytes ({self.dtype}); they must be multiples of 16"
            )
        if span and inner > span:
            raise self._refuse(
                "box", f"has rows of {inner} bytes; swizzle={self.swizzle!r} allows {span} at most"
            )
        if self.fill == "nan" and self.dtype not in _FLOATS:
            raise self._refuse("fill", f"needs a floating type; dtype is {self.dtype}")

    def _check_array(self) -> None:
        low, size = extent(self.array)
        if (misaligned(self.array, low) - low + self.origin) % 16:
            raise ParameterError(
                "TensorMap: array does not begin at a multiple of 16 bytes of its owner's memory"
            )
        if self.origin:
            return
        self._check_own_elements(low)
        last = sum((n - 1) * step for n, step in zip(self.dims, self.steps, strict=True))
        if last + self.itemsize > size + low:
            raise self._refuse(
                "dims",
                f"with strides={self.strides} ends at byte {last + self.itemsize:,} of an array of "
                f"{size + low:,} bytes",
            )

    def _check_own_elements(self, low: int) -> None:
        """A view's bytes that are no element's are not the map's either."""
        array = self.array
        valid = own_bytes(array.shape, array.strides, array.itemsize)
        if valid is None:
            return
        shape, steps = (*self.dims[::-1], self.itemsize), (*self.steps[::-1], 1)
        bytes_ = np.lib.stride_tricks.as_strided(valid[-low:], shape, steps)
        if extent(bytes_)[1] <= valid.size + low and bytes_.all():
            return
        raise self._refuse("dims", f"with strides={self.strides} has elements outside the view")


def handle(number: int) -> bytes:
    """The 128 bytes that stand for the launch's tensor map of that number."""
    words = np.zeros(BYTES // 8, np.uint64)
    words[:2] = MAGIC, number
    return words.tobytes()


def number_of(raw: bytes) -> int | None:
    """The number of the map that these 128 bytes stand for; None: they are no tensor map."""
    words = np.frombuffer(raw, np.uint64)
    return int(words[1]) if int(words[0]) == MAGIC and not words[2:].any() else None
