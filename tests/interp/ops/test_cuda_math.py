"""CUDA's arithmetic as NVRTC compiles it: double functions, __int128, rounding, SIMD and DPX."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx

RNG = np.random.default_rng(13)
ARCHS = ("compute_75", "compute_90", "compute_100")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def evaluate(expressions: list[str], inputs: dict[str, tuple[str, np.ndarray]], out: str,
             dtype: str, arch: str = "compute_80") -> list[np.ndarray]:  # fmt: skip
    """Expressions of the inputs' names (with their C type), one element a thread."""
    params = ", ".join(f"const {ctype}* p{name}" for name, (ctype, _) in inputs.items())
    loads = " ".join(f"{ctype} {name} = p{name}[i];" for name, (ctype, _) in inputs.items())
    body = "\n".join(f"y[{at} * n + i] = {text};" for at, text in enumerate(expressions))
    source = (
        f'extern "C" __global__ void k({params}, {out}* y, int n) {{\n'
        f"int i = blockIdx.x * blockDim.x + threadIdx.x;\nif (i < n) {{ {loads}\n{body}\n}} }}"
    )
    arrays = [values for _, values in inputs.values()]
    result = np.zeros((len(expressions), arrays[0].size), dtype)
    arguments = [Arg(name, a) for name, a in zip(inputs, arrays, strict=True)]
    arguments += [Arg("y", result, True), Arg("n", np.int32(arrays[0].size))]
    run(compile_ptx(source, arch), "k", -(-arrays[0].size // 128), 128, arguments)
    return list(result)


DOUBLE: dict[str, Callable[[float], float]] = {
    "exp(x)": math.exp, "exp2(x)": lambda x: 2.0**x, "expm1(x)": math.expm1,
    "log(fabs(x))": lambda x: math.log(abs(x)), "log2(fabs(x))": lambda x: math.log2(abs(x)),
    "log10(fabs(x))": lambda x: math.log10(abs(x)), "log1p(fabs(x))": lambda x: math.log1p(abs(x)),
    "sin(x)": math.sin, "cos(x)": math.cos, "tan(x)": math.tan, "sin(x * 1e12)":
    lambda x: math.sin(x * 1e12), "asin(x / 40)": lambda x: math.asin(x / 40),
    "atan(x)": math.atan, "sinh(x)": math.sinh, "cosh(x)": math.cosh, "tanh(x)": math.tanh,
    "sqrt(fabs(x))": lambda x: math.sqrt(abs(x)), "rsqrt(fabs(x))":
    lambda x: 1 / math.sqrt(abs(x)), "cbrt(x)": lambda x: math.copysign(abs(x) ** (1 / 3), x),
    "pow(fabs(x), 1.7)": lambda x: abs(x) ** 1.7, "pow(x, 3.0)": lambda x: x**3, "erf(x)": math.erf,
    "erfc(x)": math.erfc, "tgamma(fabs(x))": lambda x: math.gamma(abs(x)),
    "lgamma(fabs(x) + 3)": lambda x: math.lgamma(abs(x) + 3),
    "atan2(x, 2.0)": lambda x: math.atan2(x, 2.0),
    "fmod(x, 0.7)": lambda x: math.fmod(x, 0.7), "floor(x)": math.floor, "1.0 / x": lambda x: 1 / x,
    "hypot(x, 3.0)": lambda x: math.hypot(x, 3.0), "rint(x)": round, "trunc(x)": math.trunc,
}  # fmt: skip


def test_double_functions_are_within_some_units_in_the_last_place() -> None:
    x = np.concatenate([RNG.standard_normal(150) * 8, [0.5, 1.0, 2.0, 1e-9, 30.25, -20.5]])
    got = evaluate(list(DOUBLE), {"x": ("double", x)}, "double", "f8")
    for (text, function), values in zip(DOUBLE.items(), got, strict=True):
        want = np.array([function(v) for v in x.tolist()])
        error = np.abs(values - want) / np.spacing(np.abs(want))
        assert error.max() < (64 if "gamma" in text else 12), (text, error.max())


@pytest.mark.parametrize("arch", ARCHS)
def test_float_functions(arch: str) -> None:
    functions = {k: f for k, f in DOUBLE.items() if "1e12" not in k and "gamma" not in k}
    texts = [text.replace("(x", "f(x").replace("(fabs", "f(fabs").replace("fabs(", "fabsf(")
             .replace("fabsff", "fabsf").replace("1.7", "1.7f").replace("3.0", "3.0f")
             .replace("2.0", "2.0f").replace("0.7", "0.7f").replace("1.0", "1.0f")
             for text in functions]  # fmt: skip
    texts = [text.replace("f(fabsff(", "f(fabsf(").replace("ff(", "f(") for text in texts]
    texts = [text.replace("erf(", "erff(").replace("erfff(", "erff(") for text in texts]
    x = (RNG.standard_normal(200) * 6).astype("f4")
    got = evaluate(texts, {"x": ("float", x)}, "float", "f4", arch)
    for (text, function), values in zip(functions.items(), got, strict=True):
        want = np.array([function(v) for v in x.astype("f8").tolist()])
        error = np.abs(values - want) / np.spacing(np.abs(want).astype("f4"))
        if "fmod" not in text:  # the float nearest to 0.7 is another number
            assert error.max() < 12, (text, arch, error.max())


@pytest.mark.parametrize("arch", ARCHS)
def test_wide_integers(arch: str) -> None:
    a, b = (RNG.integers(-(1 << 62), 1 << 62, 200) for _ in range(2))
    b[::3] >>= 40
    b[b == 0] = 1
    both = {"a": ("long long", a), "b": ("long long", b)}
    big = "((__int128)a * b)"
    cases: dict[str, Callable[[int, int], int]] = {
        f"(long long)({big} >> 64)": lambda a, b: a * b >> 64,
        f"(long long)({big} + a - b)": lambda a, b: a * b + a - b,
        f"(long long)(({big} * 3 + a) >> 70)": lambda a, b: wrap(a * b * 3 + a, 128) >> 70,
        f"(long long)({big} / (b | 1))": lambda a, b: quotient(a * b, b | 1),
        f"(long long)({big} % 1000003)": lambda a, b: rest(a * b, 1000003),
        f"(long long)((unsigned __int128){big} >> (a & 127))":
        lambda a, b: (a * b % (1 << 128)) >> (a & 127),
        "a / b": quotient, "a % b": rest, "__mul64hi(a, b)": lambda a, b: a * b >> 64,
        "(long long)((unsigned long long)a / (unsigned long long)b)":
        lambda a, b: (a % (1 << 64)) // (b % (1 << 64)),
        f"(long long)({big} > a)": lambda a, b: int(a * b > a),
    }  # fmt: skip
    got = evaluate(list(cases), both, "long long", "i8", arch)
    for (text, function), values in zip(cases.items(), got, strict=True):
        want = [wrap(function(x, y), 64) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        np.testing.assert_array_equal(values, np.array(want, "i8"), text)


def wrap(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def rest(a: int, b: int) -> int:
    return a - quotient(a, b) * b


OPERATIONS: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "rcp": lambda a: 1 / a, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@pytest.mark.parametrize(
    ("letter", "ctype", "dtype"), [("f", "float", "f4"), ("d", "double", "f8")]
)
def test_every_rounding_of_every_operation(letter: str, ctype: str, dtype: str) -> None:
    arrays = [RNG.standard_normal(150).astype(dtype) for _ in range(3)]
    spread = 2.0 ** RNG.integers(-30, 30, 150)
    arrays[1][:100] *= spread[:100].astype(dtype)
    arrays[2][:50] = -(arrays[0][:50] * arrays[1][:50])  # cancellation
    arrays[2][50:75] *= dtype_tiny(dtype)  # far below the sum's last place
    given = {name: (ctype, values) for name, values in zip("abc", arrays, strict=True)}
    for name, function in OPERATIONS.items():
        count = function.__code__.co_argcount
        stem = {"f": "__f", "d": "__d"}[letter] + (name if name != "fma" else "ma")
        stem = {"__fma": "__fmaf", "__dma": "__fma"}.get(stem, stem)
        texts = [f"{stem}_{mode}({', '.join('abc'[:count])})" for mode in ("rn", "rz", "rd", "ru")]
        got = evaluate(texts, given, ctype, dtype)
        for mode, values in zip(("rn", "rz", "rd", "ru"), got, strict=True):
            for at, value in enumerate(values):
                exact = function(*(Fraction(float(v[at])) for v in arrays[:count]))
                check_direction(value, exact, mode, f"{name} {mode} {dtype}")


def dtype_tiny(dtype: str) -> Any:
    return np.dtype(dtype).type(2.0**-100)


def check_direction(value: Any, exact: Fraction, mode: str, what: str) -> None:
    low, high = (
        Fraction(float(np.nextafter(value, value.dtype.type(way)))) for way in (-np.inf, np.inf)
    )
    got = Fraction(float(value))
    if mode == "rn":
        assert abs(got - exact) <= min(abs(low - exact), abs(high - exact)), what
        return
    down = mode == "rd" or (mode == "rz" and exact > 0)
    assert (got <= exact < high) if down else (low < exact <= got), what


def test_roots_in_every_rounding() -> None:
    x = np.abs(RNG.standard_normal(200))
    for letter, ctype, dtype in (("f", "float", "f4"), ("d", "double", "f8")):
        values = x.astype(dtype)
        texts = [f"__{letter}sqrt_{mode}(x)" for mode in ("rn", "rz", "rd", "ru")]
        got = evaluate(texts, {"x": (ctype, values)}, ctype, dtype)
        for mode, roots in zip(("rn", "rz", "rd", "ru"), got, strict=True):
            for value, root in zip(values, roots, strict=True):
                square, exact = Fraction(float(root)) ** 2, Fraction(float(value))
                if mode in ("rz", "rd"):
                    above = Fraction(float(np.nextafter(root, root.dtype.type(np.inf)))) ** 2
                    assert square <= exact < above
                elif mode == "ru":
                    below = Fraction(float(np.nextafter(root, root.dtype.type(0)))) ** 2
                    assert below < exact <= square
                else:
                    assert root == np.sqrt(value)


def test_extreme_doubles_are_rounded_once() -> None:
    a = np.array([1e-200, 2.0**-1074, 1.5e300, 1e308, -1e308, 3e-308, 2.0**600, 0.0, -0.0, np.inf])
    b = np.array([1e-130, 0.5, 1e10, 10.0, 10.0, 0.3, 2.0**-700, 5.0, 5.0, 0.0])
    c = np.array([2.0**-1074, 2.0**-1074, -np.inf, -1.7e308, 1e308, 1e-310, 1.0, -0.0, -0.0, 1.0])
    inputs = {"a": ("double", a), "b": ("double", b), "c": ("double", c)}
    (got,) = evaluate(["fma(a, b, c)"], inputs, "double", "f8")
    for at in range(7):
        if math.isinf(c[at]):
            want = c[at]
        else:
            exact = Fraction(a[at]) * Fraction(b[at]) + Fraction(c[at])
            want = (
                math.inf if exact > 2**1024 else -math.inf if exact < -(2**1024) else float(exact)
            )
        assert got[at] == want, at
    assert got[7] == 0 and not np.signbit(got[7]) and np.signbit(got[8]) and np.isnan(got[9])


def split(values: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(values).view(kind).astype("i8").reshape(values.size, -1)


def join(parts: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(parts.astype(kind)).view("u4").reshape(-1)


SIMD: dict[str, Callable[[Any, Any], Any]] = {
    "__vadd2(a, b)": lambda a, b: join(split(a, "u2") + split(b, "u2"), "u2"),
    "__vsub4(a, b)": lambda a, b: join(split(a, "u1") - split(b, "u1"), "u1"),
    "__vabsdiffu4(a, b)": lambda a, b: join(np.abs(split(a, "u1") - split(b, "u1")), "u1"),
    "__vabsdiffs2(a, b)": lambda a, b: join(np.abs(split(a, "i2") - split(b, "i2")), "u2"),
    "__vsadu4(a, b)": lambda a, b: np.abs(split(a, "u1") - split(b, "u1")).sum(1),
    "__vmaxs4(a, b)": lambda a, b: join(np.maximum(split(a, "i1"), split(b, "i1")), "i1"),
    "__vminu2(a, b)": lambda a, b: join(np.minimum(split(a, "u2"), split(b, "u2")), "u2"),
    "__vavgu4(a, b)": lambda a, b: join((split(a, "u1") + split(b, "u1") + 1) >> 1, "u1"),
    "__vaddss2(a, b)": lambda a, b: join(
        np.clip(split(a, "i2") + split(b, "i2"), -32768, 32767), "i2"),
    "__vcmpgtu4(a, b)": lambda a, b: join(-(split(a, "u1") > split(b, "u1")).astype("i8"), "i1"),
    "__vimax_s16x2_relu(a, b)": lambda a, b: join(
        np.maximum(np.maximum(split(a, "i2"), split(b, "i2")), 0), "i2"),
    "__viaddmax_u16x2(a, b, a)": lambda a, b: join(
        np.maximum((split(a, "u2") + split(b, "u2")) & 0xFFFF, split(a, "u2")), "u2"),
    "__vimin3_s32_relu(a, b, 99)": lambda a, b: np.maximum(
        np.minimum(np.minimum(a.view("i4"), b.view("i4")), 99), 0),
    "__dp4a((int)a, (int)b, 7)": lambda a, b: (split(a, "i1") * split(b, "i1")).sum(1) + 7,
    "__dp2a_hi(a, b, 7u)": lambda a, b: (split(a, "u2") * split(b, "u1")[:, 2:]).sum(1) + 7,
    "__dp2a_lo((int)a, (int)b, 7)": lambda a, b: 7 + (
        split(a, "i2") * split(b, "i1")[:, :2]).sum(1),
    "__usad(a, b, 9u)": lambda a, b: np.abs(a.astype("i8") - b.astype("i8")) + 9,
    "__umul24(a, b)": lambda a, b: (a.astype("i8") & 0xFFFFFF) * (b.astype("i8") & 0xFFFFFF),
    "__fns(a, b & 31, 2)": lambda a, b: np.array([nth(x, y & 31, 2) for x, y in zip(
        a.tolist(), b.tolist(), strict=True)]),
}  # fmt: skip


def nth(mask: int, base: int, count: int) -> int:
    places = [bit for bit in range(base, 32) if mask >> bit & 1]
    return places[count - 1] if len(places) >= count else 0xFFFFFFFF


@pytest.mark.parametrize("arch", ARCHS)
def test_simd_and_dpx(arch: str) -> None:
    a, b = RNG.integers(0, 1 << 32, (2, 300), dtype="u4")
    both = {"a": ("unsigned", a), "b": ("unsigned", b)}
    got = evaluate(list(SIMD), both, "unsigned", "u4", arch)
    for (text, function), values in zip(SIMD.items(), got, strict=True):
        np.testing.assert_array_equal(values, function(a, b).astype("u4"), f"{text} {arch}")
