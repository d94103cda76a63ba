"""What cuda_fp16.h, cuda_bf16.h and cuda_fp8.h compile to, on every architecture, against NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fkjit.interp import Arg, run
from tests.core.sampling import one_in
from tests.interp.interp_kit import EDGES, compile_ptx

RNG = np.random.default_rng(7)
ARCHS = ("compute_75", "compute_80", "compute_89", "compute_90", "compute_100")
HALF: dict[str, Any] = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}
Expected = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def evaluate(kind: str, out: str, expressions: list[str], inputs: list[np.ndarray], arch: str,
             dtype: Any) -> list[np.ndarray]:  # fmt: skip
    """Every expression of a, b, c (of type `kind`, one a thread) as an array of `dtype`."""
    names = ["a", "b", "c"][: len(inputs)]
    params = ", ".join(f"const {kind}* p{n}" for n in names)
    lines = [f"    y[{at} * n + i] = {text};" for at, text in enumerate(expressions)]
    loads = " ".join(f"{kind} {n} = p{n}[i];" for n in names)
    text = kind + out + "".join(expressions)  # each header takes a while, and has the one before
    header = next((name for name in ("fp8", "bf") if name in text), "fp")
    source = (
        f"#include <cuda_{header}{'' if header == 'fp8' else 16}.h>\n"
        f'extern "C" __global__ void k({params}, {out}* y, int n) {{\n'
        f"  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) {{ {loads}\n"
        + "\n".join(lines) + "\n  }\n}"
    )  # fmt: skip
    size = inputs[0].size
    result = np.zeros((len(expressions), size), dtype)
    arguments = [Arg(n, values.view(np.uint8)) for n, values in zip(names, inputs, strict=True)]
    arguments += [Arg("y", result.view(np.uint8), True), Arg("n", np.int32(size))]
    run(compile_ptx(source, arch), "k", -(-size // 128), 128, arguments)
    return list(result)


def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equal values; every NaN equals every NaN, and zeros have the same sign."""
    x, y = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(x, y, what)
    np.testing.assert_array_equal(np.signbit(x) & (x == 0), np.signbit(y) & (y == 0), what)


def narrowed_once(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float64 -> halves with one rounding (ml_dtypes goes through float32, rounding twice)."""
    if dtype == np.float16:
        return values.astype(dtype)
    near = values.astype(dtype)
    odd = near.view(np.uint16) & 1
    for way in (-np.inf, np.inf):
        other = np.nextafter(near, dtype(way))
        mine, its = (np.abs(v.astype(np.float64) - values) for v in (near, other))
        closer = (its < mine) | ((its == mine) & (odd == 1))
        finite = np.isfinite(near.astype(np.float64)) & np.isfinite(other.astype(np.float64))
        near = np.where(closer & finite, other, near)
    return near


def inputs_of(kind: str) -> list[np.ndarray]:
    dtype = HALF[kind]
    many = [np.concatenate([np.tile(EDGES, 12), RNG.standard_normal(400) * 4]) for _ in range(3)]
    return [RNG.permutation(values).astype(np.float32).astype(dtype) for values in many]


def sat(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 0, np.clip(x, 0, 1) + np.float64(0))


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x <= 0, 0.0, x)


ARITHMETIC: dict[str, Expected] = {
    "__hadd(a, b)": lambda a, b, c: a + b,
    "__hsub(a, b)": lambda a, b, c: a - b,
    "__hmul(a, b)": lambda a, b, c: a * b,
    "__hadd_rn(a, b)": lambda a, b, c: a + b,
    "__hmul_rn(a, b)": lambda a, b, c: a * b,
    "__hadd_sat(a, b)": lambda a, b, c: sat(a + b),
    "__hmul_sat(a, b)": lambda a, b, c: sat(a * b),
    "__hfma(a, b, c)": lambda a, b, c: a * b + c,
    "__hfma_sat(a, b, c)": lambda a, b, c: sat(a * b + c),
    "__hfma_relu(a, b, c)": lambda a, b, c: relu(a * b + c),
    "__hneg(a)": lambda a, b, c: -a,
    "__habs(a)": lambda a, b, c: np.abs(a),
    "__hmax(a, b)": lambda a, b, c: np.fmax(a, b),
    "__hmin(a, b)": lambda a, b, c: np.fmin(a, b),
    "__hmax_nan(a, b)": lambda a, b, c: np.maximum(a, b),
    "__hmin_nan(a, b)": lambda a, b, c: np.minimum(a, b),
    "hrint(a)": lambda a, b, c: np.rint(a),
    "hfloor(a)": lambda a, b, c: np.floor(a),
    "hceil(a)": lambda a, b, c: np.ceil(a),
    "htrunc(a)": lambda a, b, c: np.trunc(a),
    "a + b": lambda a, b, c: a + b,
    "-a * b": lambda a, b, c: -a * b,
}


def with_signs_of_zeros(text: str, a: np.ndarray, b: np.ndarray, want: np.ndarray) -> np.ndarray:
    """NumPy's max and min do not order -0 and +0; PTX does."""
    if not text.startswith(("__hmax", "__hmin")):
        return want
    zeros = (a == 0) & (b == 0)
    both = np.signbit(a) & np.signbit(b) if "max" in text else np.signbit(a) | np.signbit(b)
    return np.where(zeros, np.where(both, -0.0, 0.0), want)


@one_in(2, kind=HALF, arch=ARCHS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", list(HALF))
def test_half_arithmetic(kind: str, arch: str) -> None:
    dtype = HALF[kind]
    arrays = inputs_of(kind)
    wide = [values.astype(np.float64) for values in arrays]
    known = {
        text: f for text, f in ARITHMETIC.items()
        if arch != "compute_75" or not ("relu" in text or "fma" in text)
    }  # fmt: skip
    got = evaluate(kind, kind, list(known), arrays, arch, dtype)
    for text, value in zip(known, got, strict=True):
        want = with_signs_of_zeros(text, wide[0], wide[1], known[text](*wide))
        if "fma" in text:  # a far smaller c would decide ties, but is lost in NumPy's float64
            lost = (wide[2] != 0) & (np.abs(wide[2]) < np.abs(wide[0] * wide[1]) * 2.0**-40)
            want, value = np.where(lost, 0.0, want), np.where(lost, 0.0, value.astype(np.float64))
        expected = narrowed_once(np.asarray(want), dtype).astype(np.float64)
        if arch == "compute_75":  # emulated by code that does not care for signs of zeros
            value, expected = value.astype(np.float64) + 0.0, expected + 0.0
        same(value, expected, f"{text} {arch}")
    pair = "__half2" if kind == "__half" else "__nv_bfloat162"
    twice = [re.sub(r"^(__h[a-z]+)", r"\g<1>2", text) for text in known]
    twice = [t.replace("hrint", "h2rint").replace("hfloor", "h2floor").replace("hceil", "h2ceil")
             .replace("htrunc", "h2trunc") for t in twice]  # fmt: skip
    packed = [values.view(np.uint32) for values in arrays]
    pairs = evaluate(pair, pair, twice, packed, arch, np.uint32)
    for text, one, two in zip(twice, got, pairs, strict=True):
        if arch != "compute_75":
            same(two.view(dtype), one, f"{text} {arch}")
        np.testing.assert_array_equal(two.view(dtype).astype(float), one.astype(float), text)


COMPARISONS: dict[str, Expected] = {
    "__heq(a, b)": np.equal, "__hlt(a, b)": np.less, "__hle(a, b)": np.less_equal,
    "__hgt(a, b)": np.greater, "__hge(a, b)": np.greater_equal,
    "__hne(a, b)": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "__hequ(a, b)": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "__hltu(a, b)": lambda a, b: (a < b) | np.isnan(a) | np.isnan(b),
    "__hneu(a, b)": np.not_equal,
    "__hisnan(a)": lambda a, b: np.isnan(a), "__hisinf(a) != 0": lambda a, b: np.isinf(a),
    "a < b": np.less, "(bool)(a != b)": np.not_equal,
}  # fmt: skip


@one_in(2, kind=HALF, arch=ARCHS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", list(HALF))
def test_half_comparisons(kind: str, arch: str) -> None:
    arrays = inputs_of(kind)[:2]
    wide = [values.astype(np.float64) for values in arrays]
    got = evaluate(kind, "int", list(COMPARISONS), arrays, arch, np.int32)
    for text, value in zip(COMPARISONS, got, strict=True):
        np.testing.assert_array_equal(value != 0, COMPARISONS[text](*wide), f"{text} {arch}")
    pair = "__half2" if kind == "__half" else "__nv_bfloat162"
    packed = [values.view(np.uint32) for values in arrays]
    lower, upper = ([w[0::2] for w in wide], [w[1::2] for w in wide])
    both = ["__hbeq2(a, b)", "__hblt2(a, b)", "__hbge2(a, b)", "__hbneu2(a, b)"]
    tests = [np.equal, np.less, np.greater_equal, np.not_equal]
    for test, value in zip(tests, evaluate(pair, "int", both, packed, arch, np.int32), strict=True):
        np.testing.assert_array_equal(value != 0, test(*lower) & test(*upper))
    masks = ["__hlt2_mask(a, b)", "__heq2_mask(a, b)", "__hgeu2_mask(a, b)"]
    tests = [np.less, np.equal, lambda a, b: ~(a < b)]
    found = evaluate(pair, "unsigned", masks, packed, arch, np.uint32)
    for test, value in zip(tests, found, strict=True):
        np.testing.assert_array_equal(value.view(np.uint16) != 0, test(*wide))
    (ones,) = evaluate(pair, pair, ["__hlt2(a, b)"], packed, arch, np.uint32)
    same(ones.view(HALF[kind]), np.less(*wide).astype(HALF[kind]), arch)


@one_in(2, kind=HALF, arch=ARCHS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", list(HALF))
def test_half_functions(kind: str, arch: str) -> None:
    dtype, (a, *_) = HALF[kind], inputs_of(kind)
    wide = a.astype(np.float64)
    functions: dict[str, Expected] = {
        "hsqrt(a)": np.sqrt, "hrsqrt(a)": lambda x: 1 / np.sqrt(x), "hrcp(a)": lambda x: 1 / x,
        "hexp2(a)": np.exp2, "hlog2(a)": np.log2, "hexp(a)": np.exp, "hlog(a)": np.log,
        "hexp10(a)": lambda x: 10.0**x, "hlog10(a)": np.log10, "htanh(a)": np.tanh,
        "a / a": lambda x: x / x,
    }  # fmt: skip
    got = evaluate(kind, kind, list(functions), [a], arch, dtype)
    for text, value in zip(functions, got, strict=True):
        want = functions[text](wide).astype(dtype).astype(np.float64)
        x = value.astype(np.float64)
        tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
        normal = ~((np.abs(want) < tiny) | (np.abs(wide) < tiny))
        step = np.abs(np.spacing(want[normal].astype(dtype)).astype(np.float64))
        fine = np.isfinite(want[normal]) & np.isfinite(x[normal])
        difference = np.abs(x[normal] - want[normal])[fine]
        assert (difference <= 2 * step[fine]).all(), (text, arch)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(want), f"{text} {arch}")


@one_in(4)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", list(HALF))
def test_half_conversions(kind: str, arch: str) -> None:
    dtype, (a, *_) = HALF[kind], inputs_of(kind)
    wide, name = a.astype(np.float64), "half" if kind == "__half" else "bfloat16"
    rounding = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
    for short, ctype, np_type in (
        ("int", "int", "i4"), ("uint", "unsigned", "u4"), ("short", "short", "i2"),
        ("ushort", "unsigned short", "u2"), ("ll", "long long", "i8"),
        ("ull", "unsigned long long", "u8"),
    ):  # fmt: skip
        texts = [f"__{name}2{short}_{mode}(a)" for mode in rounding]
        limits = np.iinfo(np_type)
        for text, value in zip(
            texts, evaluate(kind, ctype, texts, [a], arch, np_type), strict=True
        ):
            whole = rounding[text[-5:-3]](wide)
            fine = (np.abs(whole) < 2.0**62) & ~np.isnan(whole)
            want = np.clip([int(v) for v in whole[fine]], limits.min, limits.max).astype(np_type)
            np.testing.assert_array_equal(value[fine], want, f"{text} {arch}")
        numbers = RNG.integers(limits.min, limits.max, 500, np_type, endpoint=True)
        numbers = numbers >> RNG.integers(0, 8 * limits.dtype.itemsize, 500).astype(np_type)
        texts = [f"__{short}2{name}_{mode}(a)" for mode in rounding]
        values = evaluate(ctype, kind, texts, [numbers], arch, dtype)
        for mode, value in zip(rounding, values, strict=True):
            check_rounding(value, numbers.tolist(), mode, f"{short} {mode} {arch}")
    singles = np.concatenate([EDGES, RNG.standard_normal(400)]).astype(np.float32)
    texts = [f"__float2{name}_{mode}(a)" for mode in rounding]
    values = evaluate("float", kind, texts, [singles], arch, dtype)
    for mode, value in zip(rounding, values, strict=True):
        check_rounding(value, singles.astype(float).tolist(), mode, f"float {mode} {arch}")
    doubles = RNG.standard_normal(400) * (1 + 2.0**-40)
    (value,) = evaluate("double", kind, [f"__double2{name}(a)"], [doubles], arch, dtype)
    check_rounding(value, doubles.tolist(), "rn", f"double {arch}")
    (value,) = evaluate(kind, "float", [f"__{name}2float(a)"], [a], arch, np.float32)
    same(value, a.astype(np.float32), arch)


def check_rounding(value: np.ndarray, exact: list[Any], mode: str, what: str) -> None:
    """Each value is the neighbour of the exact number that the mode asks for."""
    below = np.nextafter(value, value.dtype.type(-np.inf)).astype(np.float64)
    above = np.nextafter(value, value.dtype.type(np.inf)).astype(np.float64)
    largest = float(ml_dtypes.finfo(value.dtype).max)
    for got, low, high, number in zip(value.astype(float), below, above, exact, strict=True):
        if abs(number) > largest or number != number or np.isinf(got):
            continue  # overflow and NaN are looked at elsewhere
        if mode == "rn":
            assert abs(got - number) <= min(abs(low - number), abs(high - number)), what
        else:
            down = mode == "rd" or (mode == "rz" and number > 0)
            assert (got <= number < high) if down else (low < number <= got), (what, number, got)


FP8: dict[str, Any] = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


@one_in(2, form=FP8, arch=ARCHS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", list(FP8))
def test_fp8(form: str, arch: str) -> None:
    dtype = FP8[form]
    values = np.concatenate([EDGES, RNG.standard_normal(500) * 50, [447.9, 449, 464, 465, -1e6]])
    values = values.astype(np.float32)
    largest = float(ml_dtypes.finfo(dtype).max)
    nan = np.isnan(values)

    def narrowed(numbers: np.ndarray) -> np.ndarray:
        return np.clip(numbers.astype(np.float64), -largest, largest).astype(dtype)

    for ctype, np_type, call in (
        ("float", np.float32, "__nv_cvt_float_to_fp8(a, __NV_SATFINITE, __NV_{})"),
        ("double", np.float64, "__nv_cvt_double_to_fp8(a, __NV_SATFINITE, __NV_{})"),
        ("__half", np.float16, "__nv_cvt_halfraw_to_fp8(a, __NV_SATFINITE, __NV_{})"),
        ("__nv_bfloat16", ml_dtypes.bfloat16,
         "__nv_cvt_bfloat16raw_to_fp8(a, __NV_SATFINITE, __NV_{})"),
    ):  # fmt: skip
        given = values.astype(np_type)
        (got,) = evaluate(ctype, "unsigned char", [call.format(form)], [given], arch, np.uint8)
        want = narrowed(given)
        same(got.view(dtype), want, f"{ctype} {form} {arch}")
        assert np.isnan(got.view(dtype).astype(float))[nan].all()
    codes = np.arange(256, dtype=np.uint8)
    text = f"__nv_cvt_fp8_to_halfraw(a, __NV_{form})"
    (wide,) = evaluate("unsigned char", "__half", [text], [codes], arch, np.float16)
    same(wide, codes.view(dtype).astype(np.float16), f"{form} {arch}")
    pairs = RNG.standard_normal((300, 2)).astype(np.float32) * 20
    text = f"__nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_{form})"
    (got,) = evaluate("float2", "unsigned short", [text], [pairs.view(np.float64).ravel()], arch,
                      np.uint16)  # fmt: skip
    same(got.view(np.uint8).view(dtype), narrowed(pairs.ravel()), f"x2 {form} {arch}")
