"""Tensor copies against NumPy: loads and stores of 1 to 5 dimensions, swizzles, ragged boxes."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from fkjit.errors import InterpreterError
from fkjit.interp import Arg, TensorMap
from tests.interp.copies.hopper_kit import launch, random_bytes

DTYPES = ["u1", "u2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", ml_dtypes.bfloat16]
SPANS = {"none": 0, "32B": 32, "64B": 64, "128B": 128}

COPY = r"""
extern "C" __global__ void k(const __grid_constant__ Map from, const __grid_constant__ Map to,
                             int4* y, int size, int row, int pitch, COORDINATES) {
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ u64 bar;
  if (threadIdx.x == 0) {
    init(&bar, 1);
    ready();
    ASM("prefetch.tensormap [%0];" ::"l"(&from) : "memory");
    ASM("cp.async.bulk.prefetch.tensor.RANKd.L2.global.tile [%0, {LIST}];" ::"l"(&from), ASMARGS);
    expect(&bar, size);
    ASM("cp.async.bulk.tensor.RANKd.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {LOADLIST}], [%2];" ::"r"(at(tile)), "l"(&from), "r"(at(&bar)), ASMARGS
        : "memory");
  }
  __syncthreads();
  wait(&bar, 0);
  for (int i = 16 * threadIdx.x; i < size; i += 16 * blockDim.x) {
    int at = i / row * pitch + i % row;  // of the chunk in the box, then where the swizzle puts it
    at ^= (at >> 7 & SWIZZLE) << 4;
    y[i / 16] = *(int4*)(tile + at);
  }
  if (threadIdx.x == 0) {
    ASM("cp.async.bulk.tensor.RANKd.global.shared::cta.tile.bulk_group [%0, {STORELIST}], [%1];"
        ::"l"(&to), "r"(at(tile)), STOREARGS : "memory");
    commit();
    waited<0>();
  }
}"""


def copy_kernel(rank: int, swizzle: str = "none") -> str:
    names = [f"c{axis}" for axis in range(rank)]
    lists = {
        "LOADLIST": (3, names), "STORELIST": (2, names), "LIST": (1, names),
    }  # fmt: skip
    source = COPY
    for key, (first, _) in lists.items():
        source = source.replace(key, ", ".join(f"%{first + axis}" for axis in range(rank)))
    source = source.replace("STOREARGS", ", ".join(f'"r"(max({name}, 0))' for name in names))
    source = source.replace("ASMARGS", ", ".join(f'"r"({name})' for name in names))
    source = source.replace("COORDINATES", ", ".join(f"int {name}" for name in names))
    source = source.replace("SWIZZLE", str(max(SPANS[swizzle] // 16 - 1, 0)))
    return source.replace("RANK", str(rank))


def padded_strides(dims: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Strides of dimensions 1 … with some bytes between rows, and all bytes."""
    strides, step = [], -(-dims[0] * itemsize // 16) * 16
    for count in dims[1:]:
        step = -(-step // 16) * 16 + 16
        strides.append(step)
        step *= count
    return strides, step


def tensor_view(
    raw: np.ndarray, dims: Sequence[int], strides: Sequence[int], dtype: object
) -> np.ndarray:
    """The tensor as an array, dimension 0 last."""
    typed = np.dtype(dtype)  # type: ignore[call-overload]
    steps = (typed.itemsize, *strides)
    return np.ndarray(tuple(dims)[::-1], typed, raw, 0, steps[::-1])


def box_of(view: np.ndarray, at: Sequence[int], counts: Sequence[int], steps: Sequence[int],
           fill: object) -> np.ndarray:  # fmt: skip
    """The elements of a box, dimension 0 last; `fill` outside the tensor."""
    out = np.full(tuple(counts)[::-1], fill, view.dtype)
    for index in np.ndindex(out.shape):
        place = [a + i * s for a, i, s in zip(at[::-1], index, steps[::-1], strict=True)]
        if all(0 <= p < n for p, n in zip(place, view.shape, strict=True)):
            out[index] = view[tuple(place)]
    return out


def check_copy(
    dtype: object, dims: Sequence[int], box: Sequence[int], at: Sequence[int],
    steps: Sequence[int] | None = None, swizzle: str = "none", seed: int = 0,
) -> None:  # fmt: skip
    """Load a box, compare it; store it elsewhere (within the tensor), compare that."""
    rng = np.random.default_rng(seed)
    itemsize, rank = np.dtype(dtype).itemsize, len(dims)  # type: ignore[call-overload]
    strides, size = padded_strides(dims, itemsize)
    kind = {"bfloat16": "bf16"}.get(np.dtype(dtype).name, "")  # type: ignore[call-overload]
    source, target = (rng.integers(0, 120, size).astype(np.uint8) for _ in range(2))
    name = kind or f"{np.dtype(dtype).kind}{8 * itemsize}".replace("i", "s")  # type: ignore[call-overload]
    maps = [TensorMap(raw, dims, strides, box, steps, swizzle, dtype=name)
            for raw in (source, target)]  # fmt: skip
    counts, steps = maps[0].counts, (1, *(steps or ())[1:]) if steps else (1,) * rank
    inside = int(np.prod(counts)) * itemsize
    row = counts[0] * itemsize
    pitch = max(row, SPANS[swizzle])
    y = np.zeros(inside, np.uint8)
    wanted = target.copy()
    launch(
        copy_kernel(rank, swizzle),
        Arg("source", maps[0]), Arg("target", maps[1], True), Arg("y", y, True),
        Arg("size", np.int32(inside)), Arg("row", np.int32(row)), Arg("pitch", np.int32(pitch)),
        *(Arg(f"c{i}", np.int32(c)) for i, c in enumerate(at)),
        shared=-(-inside // row * pitch // 1024) * 1024,
    )  # fmt: skip
    expected = box_of(tensor_view(source, dims, strides, dtype), at, counts, steps, 0)
    np.testing.assert_array_equal(y, expected.view(np.uint8).reshape(-1))
    whole = -(-dims[0] * itemsize // 16) * 16 // itemsize  # chunks of 16 bytes are stored whole
    view = tensor_view(wanted, (whole, *dims[1:]), strides, dtype)
    for index in np.ndindex(expected.shape):
        place = [max(a, 0) + i * s for a, i, s in zip(at[::-1], index, steps[::-1], strict=True)]
        if all(0 <= p < n for p, n in zip(place, view.shape, strict=True)):
            view[tuple(place)] = expected[index]
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("swizzle", list(SPANS))
def test_boxes_of_every_type_and_swizzle(dtype: object, swizzle: str) -> None:
    itemsize = np.dtype(dtype).itemsize  # type: ignore[call-overload]
    rows, chunk = (SPANS[swizzle] or 48) // itemsize, 16 // itemsize
    for seed, at in enumerate(((0, 0), (chunk, 5), (-chunk, 18), (rows + chunk, -3))):
        check_copy(dtype, (2 * rows + 3, 23), (rows, 11), at, swizzle=swizzle, seed=seed)


@pytest.mark.parametrize("swizzle", ["64B", "128B"])
def test_rows_shorter_than_the_swizzle_span(swizzle: str) -> None:
    check_copy("f4", (9, 40), (4, 32), (4, 3), swizzle=swizzle)


@pytest.mark.parametrize(
    ("dims", "box", "at"),
    [
        ((72,), (32,), (48,)),
        ((72,), (256,), (-104,)),
        ((20, 9, 7), (16, 4, 3), (8, -1, 5)),
        ((12, 5, 4, 6), (8, 3, 2, 5), (8, 3, -1, 2)),
        ((8, 3, 4, 3, 5), (8, 2, 3, 2, 2), (0, 2, 2, -1, 4)),
        ((8, 3, 4, 3, 5), (8, 2, 3, 2, 2), (8, 0, 0, 0, 0)),
    ],
)
def test_boxes_of_every_rank(
    dims: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...]
) -> None:
    check_copy("f2", dims, box, at, seed=len(dims))
    check_copy("i8", dims, box, at, seed=len(dims))


def test_element_strides_thin_a_box_out() -> None:
    check_copy("f2", (40, 30, 9), (16, 9, 4), (8, 20, 1), steps=(1, 4, 3))
    check_copy("u4", (40, 30), (8, 8), (-4, -3), steps=(8, 2), swizzle="32B")


def test_a_view_keeps_its_other_elements() -> None:
    rng = np.random.default_rng(5)
    whole = rng.standard_normal((20, 64)).astype("f4")
    before = whole.copy()
    half = whole[:, 16:48]
    maps = [TensorMap(half, (32, 20), (256,), (32, 20))] * 2
    y = np.zeros((20, 32), "f4")
    launch(
        copy_kernel(2), Arg("a", maps[0]), Arg("b", maps[1], True), Arg("y", y, True),
        Arg("size", np.int32(y.nbytes)), Arg("row", np.int32(128)), Arg("pitch", np.int32(128)),
        Arg("c0", np.int32(4)), Arg("c1", np.int32(2)),
        shared=4096,
    )  # fmt: skip
    np.testing.assert_array_equal(whole, before)
    np.testing.assert_array_equal(y[:18, :28], half[2:, 4:])
    assert (y[18:] == 0).all() and (y[:, 28:] == 0).all()


LOAD = r"""
extern "C" __global__ void k(const __grid_constant__ Map m, float* y, Map* copy, int x0, int y0) {
  __shared__ alignas(1024) float tile[8][32];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  if (t < 8) ((int4*)copy)[t] = ((const int4*)&m)[t];
  if (t < 8) { __threadfence(); proxy(); }
  __syncthreads();
  if (t == 0) {
    ASM("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(copy) : "memory");
    expect(&bar, sizeof tile);
    load2(tile, WHICH, x0, y0, &bar);
  }
  wait(&bar, 0);
  for (int i = t; i < 256; i += 128) y[i] = tile[i / 32][i % 32];
}"""


@pytest.mark.parametrize("which", ["&m", "copy"])
def test_a_copy_of_the_map_in_global_memory_works_too(which: str) -> None:
    x = np.random.default_rng(6).standard_normal((30, 40)).astype("f4")
    y, copy = np.zeros((8, 32), "f4"), np.zeros(256, np.uint8)
    launch(LOAD.replace("WHICH", which), Arg("m", TensorMap(x, (40, 30), (160,), (32, 8))),
           Arg("y", y, True), Arg("copy", copy, True), Arg("x0", np.int32(8)),
           Arg("y0", np.int32(9)))  # fmt: skip
    np.testing.assert_array_equal(y, x[9:17, 8:40])


MANY = r"""
extern "C" __global__ void k(const Map* maps, float* y, int number) {
  __shared__ alignas(1024) float tile[8][32];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  __syncthreads();
  if (t == 0) {
    ASM("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(maps + number) : "memory");
    expect(&bar, sizeof tile);
    load2(tile, maps + number, 8, 1, &bar);
  }
  wait(&bar, 0);
  for (int i = t; i < 256; i += 128) y[i] = tile[i / 32][i % 32];
}"""


def test_maps_side_by_side_in_global_memory() -> None:
    x = np.random.default_rng(7).standard_normal((3, 20, 40)).astype("f4")
    y = np.zeros((8, 32), "f4")
    maps = tuple(TensorMap(one, (40, 20), (160,), (32, 8)) for one in x)
    launch(MANY, Arg("maps", maps), Arg("y", y, True), Arg("number", np.int32(2)))
    np.testing.assert_array_equal(y, x[2, 1:9, 8:40])


@pytest.mark.parametrize(("dtype", "kind"), [("f4", "f32"), ("f4", "tf32")])
def test_nan_outside_and_tf32_inside(dtype: str, kind: str) -> None:
    x = np.random.default_rng(7).standard_normal((30, 40)).astype(dtype)
    y, copy = np.zeros((8, 32), "f4"), np.zeros(256, np.uint8)
    tensor = TensorMap(x, (40, 30), (160,), (32, 8), fill="nan", dtype=kind)
    launch(LOAD.replace("WHICH", "&m"), Arg("m", tensor), Arg("y", y, True),
           Arg("copy", copy, True), Arg("x0", np.int32(20)), Arg("y0", np.int32(-2)))  # fmt: skip
    assert np.isnan(y[:2]).all() and np.isnan(y[:, 20:]).all()
    expected = x[:6, 20:]
    if kind == "tf32":
        bits = expected.astype("f8") * 2.0**0
        mantissa, exponent = np.frexp(bits)
        expected = np.ldexp(
            np.trunc(mantissa * 2**11 + np.copysign(0.5, mantissa)) / 2**11, exponent
        )
        assert (expected != x[:6, 20:]).any()
    np.testing.assert_array_equal(y[2:, :20], expected.astype("f4"))


REDUCE = r"""
extern "C" __global__ void k(const __grid_constant__ Map to, const ELEMENT* x, int x0, int y0) {
  __shared__ alignas(128) ELEMENT tile[16 * 32];
  for (int i = threadIdx.x; i < 512; i += 128) tile[i] = x[i];
  proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    ASM("cp.reduce.async.bulk.tensor.2d.global.shared::cta.OPERATION.tile.bulk_group"
        " [%0, {%1, %2}], [%3];" ::"l"(&to), "r"(x0), "r"(y0), "r"(at(tile)) : "memory");
    commit();
    waited<0>();
  }
}"""


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("add", "u4"), ("add", "i4"), ("add", "u8"), ("add", "f4"), ("add", "f2"), ("min", "i8"),
     ("max", "i4"), ("max", "f2"), ("min", ml_dtypes.bfloat16), ("add", ml_dtypes.bfloat16),
     ("inc", "u4"), ("dec", "u4"), ("and", "u4"), ("or", "i8"), ("xor", "u8")],
)  # fmt: skip
def test_reductions_of_ragged_boxes_by_two_blocks(operation: str, dtype: object) -> None:
    rng = np.random.default_rng(8)
    x, y = (random_bytes(rng, (16, 32), dtype), random_bytes(rng, (20, 40), dtype))
    if np.dtype(dtype).kind in "ui" and operation in ("inc", "dec"):  # type: ignore[call-overload]
        x, y = x % 9, y % 9
    name = {2: "unsigned short", 4: "unsigned", 8: "u64"}[x.itemsize]
    box = y[12:, 24:]
    part, wanted = x[:8, :16], y.copy()
    wide = np.float32 if np.dtype(dtype).kind in "fV" else np.dtype(dtype)  # type: ignore[call-overload]
    old = box
    for _ in range(2):
        a, b = old.astype(wide), part.astype(wide)
        old = {
            "add": lambda a=a, b=b: a + b, "min": lambda a=a, b=b: np.minimum(a, b),
            "max": lambda a=a, b=b: np.maximum(a, b), "and": lambda a=a, b=b: a & b,
            "or": lambda a=a, b=b: a | b, "xor": lambda a=a, b=b: a ^ b,
            "inc": lambda a=a, b=b: np.where(a >= b, 0, a + 1),
            "dec": lambda a=a, b=b: np.where((a == 0) | (a > b), b, a - 1),
        }[operation]().astype(dtype)  # fmt: skip
    wanted[12:, 24:] = old
    to = TensorMap(y, (40, 20), (40 * x.itemsize,), (32, 16))
    launch(REDUCE.replace("ELEMENT", name).replace("OPERATION", operation), Arg("y", to, True),
           Arg("x", x.view(f"u{x.itemsize}")), Arg("x0", np.int32(24)), Arg("y0", np.int32(12)),
           grid=2)  # fmt: skip
    np.testing.assert_array_equal(y, wanted)


def test_im2col_and_gather_are_refused() -> None:
    for form in (".im2col", ".tile::gather4"):
        source = COPY.replace(".tile", form)
        for old, new in (
            ("RANK", "3"),
            ("COORDINATES", "int c"),
            ("SWIZZLE", "0"),
            ("STOREARGS", '"r"(c)'),
        ):
            source = source.replace(old, new)
        source = source.replace("STORELIST", "%2,%2,%2").replace("LOADLIST", "%3,%3,%3")
        source = source.replace("LIST", "%1,%1,%1").replace("ASMARGS", '"r"(c)')
        x = np.zeros((4, 4, 4), "f4")
        tensor = TensorMap(x, (4, 4, 4), (16, 64), (4, 4, 4))
        with pytest.raises(InterpreterError, match="not supported"):
            launch(source, Arg("a", tensor), Arg("b", tensor), Arg("y", x),
                   *(Arg(name, np.int32(0)) for name in ("size", "row", "pitch", "c")))  # fmt: skip
