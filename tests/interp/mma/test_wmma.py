"""wmma.load, wmma.mma and wmma.store in every shape and type against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fkjit.errors import InterpreterError, SanitizerError
from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx
from tests.interp.mma.mma_kit import TYPES

RNG = np.random.default_rng(21)
THREE = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16)}
EXTENTS = {**THREE, "m16n16k8": (16, 16, 8), "m8n8k4": (8, 8, 4), "m8n8k32": (8, 8, 32)}
FORMS = [
    *((s, "f16", c, d) for s in THREE for c in ("f16", "f32") for d in ("f16", "f32")),
    *((s, k, "s32", "s32") for s in THREE for k in ("s8", "u8")),
    *((s, "bf16", "f32", "f32") for s in THREE),
    ("m16n16k8", "tf32", "f32", "f32"), ("m8n8k4", "f64", "f64", "f64"),
    ("m8n8k32", "s4", "s32", "s32"), ("m8n8k32", "u4", "s32", "s32"),
]  # fmt: skip
LIMITS = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7), "u4": (0, 15)}
LAYOUTS = [
    ("row", "col", "row"),
    ("col", "row", "col"),
    ("row", "row", "col"),
    ("col", "col", "row"),
]


def count(kind: str, elements: int, multiplied: bool) -> int:
    """Registers of an operand, as the manual lists them."""
    if kind == "f16":
        return 8 if multiplied else elements // 64
    bits = {"f64": 32, "bf16": 16, "s8": 8, "u8": 8, "s4": 4, "u4": 4}.get(kind, 32)
    return elements * bits // 1024


def kernel(
    shape: str, kind: str, c: str, d: str, layouts: tuple[str, str, str], space: str = "",
    strides: dict[str, int] | None = None, before: str = "", suffix: str = "",
) -> str:  # fmt: skip
    """PTX: one tile for each warp; arrays follow each other by `strides` times their lines."""
    m, n, k = EXTENTS[shape]
    sizes = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}
    kinds = {"a": kind, "b": kind, "c": c, "d": d}
    orders = dict(zip("abcd", (*layouts[:2], layouts[2], layouts[2]), strict=True))
    text = [".version 8.7\n.target sm_90a\n.address_size 64"]
    text.append(".visible .entry k(.param .u64 p_a, .param .u64 p_b, .param .u64 p_c, ")
    text.append(".param .u64 p_d, .param .u32 sa, .param .u32 sb, .param .u32 sc)\n{")
    text.append(".reg .b32 %w, %t, %s; .reg .b64 %p, %o; .reg .pred %q; mov.u32 %t, %tid.x;")
    text.append(f"shr.u32 %w, %t, 5; {before}")
    vectors = {}
    for name, (rows, columns) in sizes.items():
        registers = count(kinds[name], rows * columns, name in "ab")
        text.append(f".reg .b{64 if kind == 'f64' else 32} %{name}<{registers}>;")
        vectors[name] = "{" + ", ".join(f"%{name}{i}" for i in range(registers)) + "}"
    for name, (rows, columns) in sizes.items():
        if name == "d":
            types = f"{d}.{c}" if kind == "f16" else f"{d}.{kind}.{kind}.{c}"
            operands = ", ".join(vectors[x] for x in "dabc")
            text.append(f"wmma.mma.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{types}{suffix} "
                        f"{operands};")  # fmt: skip
        lines = rows if orders[name] == "row" else columns
        stride = f"s{name}" if name != "d" else "sc"
        bits = 4 if kinds[name][1:] == "4" else 8 * np.dtype(TYPES[kinds[name]]).itemsize
        text.append(f"ld.param.u32 %s, [{stride}]; ld.param.u64 %p, [p_{name}];")
        text.append(f"mul.lo.u32 %t, %s, {lines}; mul.lo.u32 %t, %t, %w;")
        text.append(f"mul.wide.u32 %o, %t, {bits}; shr.u64 %o, %o, 3; add.s64 %p, %p, %o;")
        which = f"{orders[name]}.{shape}{space}.{kinds[name]}"
        if name == "d":
            text.append(f"wmma.store.d.sync.aligned.{which} [%p], {vectors[name]}, %s;")
        else:
            text.append(f"wmma.load.{name}.sync.aligned.{which} {vectors[name]}, [%p], %s;")
    return "\n".join([*text, "ret;\n}"])


def in_memory(values: np.ndarray, kind: str, order: str, pad: int) -> np.ndarray:
    """[warps, rows, columns] as lines of memory with `pad` elements of padding each."""
    lines = values if order == "row" else values.swapaxes(1, 2)
    lines = np.pad(lines, ((0, 0), (0, 0), (0, pad))).astype(TYPES[kind])
    if kind[1:] != "4":
        return np.ascontiguousarray(lines)
    nibbles = lines.view("u1") & 15
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def random(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    low, high = LIMITS.get(kind, (-3, 3))
    return RNG.integers(low, high, shape, endpoint=True)


def run_wmma(
    form: tuple[str, str, str, str], layouts: tuple[str, str, str], pad: int, limit: int = 100,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What three warps compute, and what NumPy does (in int64, of random integers)."""
    shape, kind, c_kind, d_kind = form
    m, n, k = EXTENTS[shape]
    a, b = random(kind, (3, m, k)), random(kind, (3, k, n))
    c = RNG.integers(limit - 200, limit, (3, m, n))
    out = in_memory(np.full_like(c, 99), d_kind, layouts[2], pad)
    padded = {"a": (m, k)[layouts[0] == "row"] + pad, "b": (k, n)[layouts[1] == "row"] + pad,
              "c": (m, n)[layouts[2] == "row"] + pad}  # fmt: skip
    arguments = [Arg("a", in_memory(a, kind, layouts[0], pad)),
                 Arg("b", in_memory(b, kind, layouts[1], pad)),
                 Arg("c", in_memory(c, c_kind, layouts[2], pad)), Arg("d", out, True),
                 *(Arg(f"s{x}", np.int32(padded[x])) for x in "abc")]  # fmt: skip
    run(kernel(*form, layouts, **more), "k", 1, 96, arguments)
    if pad:
        assert (out[..., -pad:] == 0).all()
        out = out[..., :-pad]
    return out if layouts[2] == "row" else out.swapaxes(1, 2), a @ b + c


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_products_are_exact(form: tuple[str, str, str, str], layouts: tuple[str, str, str]) -> None:
    got, want = run_wmma(form, layouts, pad=0)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_strides(form: tuple[str, str, str, str]) -> None:
    got, want = run_wmma(form, ("row", "col", "col"), pad=32, space=".global")
    np.testing.assert_array_equal(got, want)


def test_integers_wrap_or_saturate() -> None:
    form = ("m16n16k16", "u8", "s32", "s32")
    got, want = run_wmma(form, LAYOUTS[0], 0, limit=2**31 - 1)
    np.testing.assert_array_equal(got, want.astype("i4"))
    assert (got != want).any()
    got, want = run_wmma(form, LAYOUTS[0], 0, limit=2**31 - 1, suffix=".satfinite")
    np.testing.assert_array_equal(got, want.clip(-(2**31), 2**31 - 1))


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("setp.eq.u32 %q, %t, 40; @%q ret;", "incomplete warp"),
        ("setp.eq.u32 %q, %t, 40; @%q mov.u32 %w, 0;", "address differs"),
        ("add.u32 %w, %w, 3;", "out of bounds|out-of-bounds"),
    ],
)
def test_faults(before: str, why: str) -> None:
    with pytest.raises(SanitizerError, match=why):
        run_wmma(FORMS[0], LAYOUTS[0], 0, before=before)


@pytest.mark.parametrize(
    "text",
    [
        "wmma.mma.sync.aligned.row.col.m16n16k16.f16.f16.satfinite {%a}, {%a}, {%a}, {%a};",
        "wmma.mma.xor.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 {%a}, {%a}, {%a}, {%a};",
        "wmma.load.a.sync.aligned.row.m16n16k8.f16 {%a}, [%g];",
        "wmma.load.a.sync.aligned.row.m32n8k16.s8 {%a, %b}, [%g];",
        "wmma.load.b.sync.aligned.row.m8n8k128.b1 {%a}, [%g];",
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    ptx = f".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k()\n{{\n" \
          f".reg .b32 %a, %b; .reg .b64 %g;\n{text}\nret;\n}}"  # fmt: skip
    with pytest.raises(InterpreterError, match="not supported"):
        run(ptx, "k", 1, 32, [])


CUDA = """
extern "C" {
__device__ void __hmma_m16n16k16_ld_a(int*, const int*, unsigned, int);
__device__ void __hmma_m16n16k16_ld_b(int*, const int*, unsigned, int);
__device__ void __hmma_m16n16k16_mma_f32f32(float*, const int*, const int*, const float*, int, int);
__device__ void __hmma_m16n16k16_st_c_f32(float*, const float*, unsigned, int);
}
/* d[16 x 16 a warp] = 2 a b, with k = 48; b in columns, through shared memory */
extern "C" __global__ void k(const short* a, const short* b, float* d) {
  __shared__ __align__(32) short tile[3][16 * 48];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = lane; i < 16 * 48; i += 32) tile[warp][i] = a[warp * 768 + i];
  __syncwarp();
  int fa[8], fb[8];
  float c[8] = {};
  for (int step = 0; step < 48; step += 16) {
    __hmma_m16n16k16_ld_a(fa, (const int*)(tile[warp] + step), 48, 0);
    __hmma_m16n16k16_ld_b(fb, (const int*)(b + warp * 768 + step), 48, 1);
    __hmma_m16n16k16_mma_f32f32(c, fa, fb, c, 1, 0);
  }
  for (int i = 0; i < 8; ++i) c[i] *= 2;
  __hmma_m16n16k16_st_c_f32(d + warp * 256, c, 16, 0);
}"""


@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_89"])
def test_compiled_cuda(arch: str) -> None:
    """The functions behind nvcuda::wmma, whose header NVRTC's wheel lacks."""
    a, b = RNG.standard_normal((2, 3, 16, 48)).astype("f2")
    out = np.zeros((3, 16, 16), "f4")
    ptx = compile_ptx(CUDA, arch)
    assert "wmma.load.a.sync.aligned.row.m16n16k16.shared" in ptx
    run(ptx, "k", 1, 96, [Arg("a", a), Arg("b", b), Arg("d", out, True)])
    want = 2 * (a.astype("f8") @ b.astype("f8").swapaxes(1, 2))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
