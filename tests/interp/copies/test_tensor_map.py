"""TensorMap refuses what cuTensorMapEncodeTiled refuses, and shares memory with other arguments."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fkjit.errors import ParameterError, SanitizerError
from fkjit.interp import Arg, TensorMap, run
from tests.interp.copies.hopper_kit import compiled, launch

X = np.zeros((32, 64), np.float16)
GOOD = {"array": X, "dims": (64, 32), "strides": (128,), "box": (32, 8)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dims": ()}, "dims=() has 0 dimensions; 1 to 5"),
        ({"dims": (1,) * 6}, "has 6 dimensions"),
        ({"dims": (0, 32)}, "dims=(0, 32) is not within 1 … 2^32"),
        ({"strides": ()}, "strides=() must have 1 elements for 2 dimensions"),
        ({"strides": (120,)}, "strides=(120,) must be multiples of 16 bytes"),
        ({"strides": (1 << 40,)}, "from 0 to below 2^40"),
        ({"box": (32,)}, "box=(32,) must have 2 elements"),
        ({"box": (0, 8)}, "box=(0, 8) is not within 1 … 256"),
        ({"box": (32, 257)}, "is not within 1 … 256"),
        ({"box": (4, 8)}, "box=(4, 8) has rows of 8 bytes (f16); they must be multiples of 16"),
        ({"swizzle": "32B"}, "rows of 64 bytes; swizzle='32B' allows 32 at most"),
        ({"swizzle": 128}, "swizzle=128 is not one of ['none', '32B', '64B', '128B']"),
        ({"element_strides": (1, 9)}, "element_strides=(1, 9) is not within 1 … 8"),
        ({"element_strides": (1,)}, "must have 2 elements"),
        ({"fill": "one"}, "fill='one' is not one of ['zero', 'nan']"),
        ({"fill": "nan", "dtype": "u16"}, "needs a floating type; dtype is u16"),
        ({"dtype": "f8"}, "dtype='f8' is not one of"),
        ({"array": X.astype("c8")}, "dtype='' is not one of"),
        ({"interleave": "16B"}, "interleave='16B' is not one of ['none']"),
        ({"dims": (64, 33)}, "ends at byte 4,224 of an array of 4,096 bytes"),
        ({"array": X.reshape(-1)[4:], "dims": (64, 31)}, "does not begin at a multiple of 16"),
        ({"array": X[:, ::2]}, "has elements outside the view"),
        ({"array": X[:, :32]}, "has elements outside the view"),
    ],
)
def test_what_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        TensorMap(**{**GOOD, **change})  # type: ignore[arg-type]
    assert str(caught.value).startswith("TensorMap: ") and text in str(caught.value)


def test_defaults() -> None:
    tensor = TensorMap(**GOOD)  # type: ignore[arg-type]
    assert (tensor.dtype, tensor.counts, tensor.steps) == ("f16", (32, 8), (2, 128))
    assert TensorMap(X.astype(ml_dtypes.bfloat16), (64, 32), (128,), (32, 8)).dtype == "bf16"
    thin = TensorMap(X, (64, 32), (128,), (32, 7), (4, 3))
    assert thin.counts == (32, 3)
    assert TensorMap(X[:, :32], (32, 32), (128,), (32, 8)).dims == (32, 32)


SHIFT = r"""
extern "C" __global__ void k(const __grid_constant__ Map from, float* x,
                             const __grid_constant__ Map to) {
  __shared__ alignas(128) float tile[8][32];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  __syncthreads();
  if (t == 0) { expect(&bar, sizeof tile); load2(tile, &from, 0, 0, &bar); }
  wait(&bar, 0);
  x[t] += tile[0][t % 32];
  __syncthreads();
  if (t == 0) { store2(&to, 0, 8, tile); commit(); waited<0>(); }
}"""


def test_a_map_and_a_pointer_to_one_array_share_its_memory() -> None:
    x = np.random.default_rng(3).standard_normal((16, 32)).astype("f4")
    before = x.copy()
    tensor = TensorMap(x, (32, 16), (128,), (32, 8))
    launch(SHIFT, Arg("from", tensor), Arg("x", x, True), Arg("to", tensor, True))
    expected = before.copy()
    expected[:4] += before[0]
    expected[8:] = before[:8]
    np.testing.assert_array_equal(x, expected)


def test_of_an_input_that_is_the_output_as_well_a_map_has_the_output() -> None:
    x = np.random.default_rng(5).standard_normal((16, 32)).astype("f4")
    before = x.copy()
    tensor = TensorMap(x, (32, 16), (128,), (32, 8))
    arguments = (Arg("from", tensor), Arg("added", x), Arg("x", x, True), Arg("to", tensor, True))
    launch(SHIFT.replace("float* x,", "const float* added, float* x,"), *arguments)
    expected = before.copy()
    expected[:4] += before[0]
    expected[8:] = before[:8]
    np.testing.assert_array_equal(x, expected)


def test_a_map_of_a_part_of_another_argument_shares_its_memory() -> None:
    x = np.random.default_rng(4).standard_normal((20, 64)).astype("f4")
    before = x.copy()
    part = x[4:, 16:48]
    tensor = TensorMap(part, (32, 16), (256,), (32, 8))
    launch(SHIFT, Arg("from", tensor), Arg("x", x, True), Arg("to", tensor, True))
    expected = before.copy()
    expected.reshape(-1)[:128] += np.tile(before[4, 16:48], 4)
    expected[12:, 16:48] = before[4:12, 16:48]
    np.testing.assert_array_equal(x, expected)


def test_a_map_needs_a_parameter_of_128_bytes() -> None:
    x = np.zeros((16, 32), "f4")
    tensor = TensorMap(x, (32, 16), (128,), (32, 8))
    with pytest.raises(ParameterError, match="'x' has 128 bytes; the kernel's parameter has 8"):
        run(
            compiled(SHIFT), "k", 1, 128, [Arg("from", tensor), Arg("x", tensor), Arg("to", tensor)]
        )


RAGGED = r"""
extern "C" __global__ void k(const __grid_constant__ Map from, const __grid_constant__ Map to,
                             float* seen, int count, int row, int row_to) {
  __shared__ alignas(128) float tile[8][32];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); ready(); }
  __syncthreads();
  if (t == 0) {
    expect(&bar, sizeof tile);
    ASM("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(at(tile)), "l"(&from), "r"(0), "r"(8 - count),
        "r"(row + count), "r"(at(&bar)) : "memory");
  }
  wait(&bar, 0);
  for (int i = 0; i < 8; ++i) seen[i * 32 + t] = tile[i][t];
  if (t == 0) {
    ASM("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
        ::"l"(&to), "r"(0), "r"(8 - count), "r"(row_to + count), "r"(at(tile)) : "memory");
    commit();
    waited<0>();
  }
}"""


def ragged(x: np.ndarray) -> TensorMap:
    """Rows twice, the first time 8 of them that begin 8 rows before the array."""
    return TensorMap(x, (32, 8, len(x) + 1), (128, 128), (32, 8, 1), origin=-8 * 128)


@pytest.mark.parametrize(("count", "row", "to"), [(3, 0, 9), (8, 8, 2), (1, 15, 0), (0, 4, 4)])
def test_a_map_that_begins_before_its_array_cuts_boxes_anywhere(
    count: int, row: int, to: int
) -> None:
    x = np.random.default_rng(5).standard_normal((16, 32)).astype("f4")
    y, seen = np.zeros_like(x), np.full((8, 32), np.nan, "f4")
    sizes = [Arg(name, np.int32(n)) for name, n in (("n", count), ("row", row), ("to", to))]
    made = Arg("from", ragged(x)), Arg("to", ragged(y), True), Arg("seen", seen, True)
    run(compiled(RAGGED), "k", 1, 32, [*made, *sizes])
    expected, stored = np.zeros_like(seen), np.zeros_like(y)
    expected[:count] = stored[to : to + count] = x[row : row + count]
    np.testing.assert_array_equal(seen, expected)
    np.testing.assert_array_equal(y, stored)


@pytest.mark.parametrize(("row", "to", "kind"), [(-1, 0, "read"), (0, -1, "write")])
def test_what_such_a_map_has_outside_its_array_is_nobodys(row: int, to: int, kind: str) -> None:
    x = np.ones((16, 32), "f4")
    y, seen = np.zeros_like(x), np.zeros((8, 32), "f4")
    sizes = [Arg(name, np.int32(n)) for name, n in (("n", 8), ("row", row), ("to", to))]
    made = Arg("from", ragged(x)), Arg("to", ragged(y), True), Arg("seen", seen, True)
    with pytest.raises(SanitizerError, match=f"out-of-bounds global {kind}"):
        run(compiled(RAGGED), "k", 1, 32, [*made, *sizes])
