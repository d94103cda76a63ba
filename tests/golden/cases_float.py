"""Floating-point arithmetic of one thread: roundings, flushing, NaN, infinities, approximations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import EXACT, Case, Tolerance
from tests.golden.forms import each
from tests.golden.values import STORED, Make, Random, mixed, uniform

MODES = ("rn", "rz", "rm", "rp")
HOPPER = "compute_90a"


def _op(
    name: str, kind: str, count: int, arch: str = "compute_80", tolerance: Tolerance = EXACT
) -> Case:
    """An instruction of `count` inputs and a result, all of one kind."""
    operands = ", ".join(f"%{i}" for i in range(count + 1))
    inputs = [(kind, mixed(kind))] * count if count > 1 else [kind]
    return each(name, f"{name} {operands};", kind, *inputs, arch=arch, tolerance=tolerance)


def _single() -> Iterator[Case]:
    for mode in MODES:
        for more in ("", ".ftz", ".sat", ".ftz.sat"):
            for op, count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
                yield _op(f"{op}.{mode}{more}.f32", "f32", count, "compute_75")
        for ftz in ("", ".ftz"):
            yield _op(f"div.{mode}{ftz}.f32", "f32", 2, "compute_75")
            yield _op(f"rcp.{mode}{ftz}.f32", "f32", 1, "compute_75")
            yield _op(f"sqrt.{mode}{ftz}.f32", "f32", 1, "compute_75")
        double = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "rcp": 1, "sqrt": 1}
        for op, count in double.items():
            yield _op(f"{op}.{mode}.f64", "f64", count, "compute_75")
    for op in ("min", "max"):
        for more in ("", ".ftz", ".NaN", ".xorsign.abs", ".ftz.NaN", ".ftz.NaN.xorsign.abs"):
            arch = "compute_86" if "xor" in more else "compute_80"
            yield _op(f"{op}{more}.f32", "f32", 2, arch)
        yield _op(f"{op}.f64", "f64", 2)
    for op in ("abs", "neg"):
        for name in (f"{op}.f32", f"{op}.ftz.f32", f"{op}.f64"):
            yield _op(name, name[-3:], 1)
    for kind in ("f32", "f64"):
        yield _op(f"copysign.{kind}", kind, 2)
        for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            test = f".reg .pred p; testp.{what}.{kind} p, %1; selp.u32 %0, 1, 0, p;"
            yield each(f"testp.{what}.{kind}", test, "u32", kind)


def _packed() -> Iterator[Case]:
    for kind in ("f16", "f16x2"):
        for op in ("add", "sub", "mul"):
            for more in ("", ".rn", ".ftz", ".sat", ".rn.ftz.sat"):
                yield _op(f"{op}{more}.{kind}", kind, 2, "compute_75")
        for more in ("", ".ftz", ".sat", ".relu", ".ftz.sat", ".ftz.relu"):
            yield _op(f"fma.rn{more}.{kind}", kind, 3)
        for more in ("", ".ftz", ".NaN", ".xorsign.abs", ".ftz.NaN.xorsign.abs"):
            arch = "compute_86" if "xor" in more else "compute_80"
            yield _op(f"min{more}.{kind}", kind, 2, arch)
            yield _op(f"max{more}.{kind}", kind, 2, arch)
        for name in (f"neg.{kind}", f"neg.ftz.{kind}", f"abs.{kind}", f"abs.ftz.{kind}"):
            yield _op(name, kind, 1)
    for kind in ("bf16", "bf16x2"):
        for op in ("add", "sub", "mul"):
            yield _op(f"{op}.{kind}", kind, 2, HOPPER)
            yield _op(f"{op}.rn.{kind}", kind, 2, HOPPER)
        for more in ("", ".relu"):
            yield _op(f"fma.rn{more}.{kind}", kind, 3)
        for more in ("", ".NaN", ".xorsign.abs"):
            arch = "compute_86" if "xor" in more else "compute_80"
            yield _op(f"min{more}.{kind}", kind, 2, arch)
            yield _op(f"max{more}.{kind}", kind, 2, arch)
        yield _op(f"neg.{kind}", kind, 1)
        yield _op(f"abs.{kind}", kind, 1)
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        for more in ("", ".relu"):
            text = f"fma.rn.oob{more}.{kind} %0, %1, %2, %3;"
            inputs = [(kind, _filled(kind))] * 3
            yield each(f"fma.rn.oob{more}.{kind}", text, kind, *inputs, arch=HOPPER)


def _filled(kind: str) -> Make:
    """Among the values is the NaN that tensor copies fill with."""

    def make(rng: Random) -> np.ndarray:
        values = mixed(kind)(rng)
        halves = values.view(np.uint16)
        halves[rng.randint(0, 4, halves.size) == 0] = 0x7FF7
        return values

    return make


def _around(kind: str, bits: int, steps: int = 1) -> Make:
    """Floats within 16 steps of the one with these bits, of either sign."""

    def make(rng: Random) -> np.ndarray:
        dtype = np.dtype(STORED[kind])
        sign = rng.randint(0, 2, 320).astype(dtype) << dtype.type(8 * dtype.itemsize - 1)
        near = bits + rng.randint(-16, 17, 320) * steps
        return near.astype(dtype) | sign

    return make


def _flushed() -> Iterator[Case]:
    """Results about the smallest normal number, which .ftz may or may not make zeros."""
    one, tiny = ("f32", _around("f32", 0x3F800000)), ("f32", _around("f32", 0x00800010))
    both = (one, tiny, ("f32", _around("f32", 0x00800010)))
    texts = [f"mul.{m}.ftz.f32 %0, %1, %2;" for m in MODES]
    texts += [f"div.{m}.ftz.f32 %0, %2, %1;" for m in MODES]
    texts += [f".reg .f32 t; add.f32 t, %2, %2; fma.{m}.ftz.f32 %0, %1, t, %3;" for m in MODES]
    texts += [f"fma.{m}.ftz.sat.f32 %0, %1, %2, 0f00000000;" for m in MODES]
    yield each("ftz.tiny.f32", texts, "f32", *both)
    large = ("f32", _around("f32", 0x7E800000))
    yield each("ftz.tiny.rcp.f32", [f"rcp.{m}.ftz.f32 %0, %1;" for m in MODES], "f32", large)
    for kind in ("f16", "f16x2"):
        pair = ((kind, _pairs(kind, 0x3C00)), (kind, _pairs(kind, 0x0410)))
        both = (*pair, (kind, _pairs(kind, 0x0410)))
        texts = [f"{op}.ftz{sat}.{kind} %0, %1, %2;" for op in ("mul", "add", "sub")
                 for sat in ("", ".sat")]  # fmt: skip
        texts += [f"fma.rn.ftz{more}.{kind} %0, %1, %2, %3;" for more in ("", ".sat", ".relu")]
        yield each(f"ftz.tiny.{kind}", texts, kind, *both)
    double = ("f64", _around("f64", 0x3810 << 48, 1 << 26))
    texts = [f"cvt.{m}.ftz.f32.f64 %0, %1;" for m in MODES]
    yield each("ftz.tiny.cvt.f32.f64", texts, "f32", double)


def _pairs(kind: str, bits: int) -> Make:
    """As _around, for f16 or two of them."""
    scalar = _around("f16", bits)
    if kind == "f16":
        return scalar
    return lambda rng: scalar(rng) | scalar(rng).astype(np.uint32) << np.uint32(16)


# Largest errors as the PTX ISA gives them for each instruction, plus the half unit by which a
# correctly rounded result may stand on the other side of the true value.
_HALF = 2.0**-24
_ONE_INPUT = {
    "rcp.approx.f32": Tolerance(ulps=1.5),
    "rcp.approx.ftz.f32": Tolerance(ulps=1.5),
    "sqrt.approx.f32": Tolerance(relative=2.0**-23 + _HALF, ulps=1),
    "sqrt.approx.ftz.f32": Tolerance(relative=2.0**-23 + _HALF),
    "rsqrt.approx.f32": Tolerance(relative=2.0**-22.9 + _HALF),
    "rsqrt.approx.ftz.f32": Tolerance(relative=2.0**-22.9 + _HALF),
    "ex2.approx.f32": Tolerance(relative=2.0**-22 + _HALF, ulps=2),
    "ex2.approx.ftz.f32": Tolerance(relative=2.0**-22 + _HALF),
    "lg2.approx.f32": Tolerance(relative=2.0**-22 + _HALF, absolute=2.0**-22),
    "lg2.approx.ftz.f32": Tolerance(relative=2.0**-22 + _HALF, absolute=2.0**-22),
    "tanh.approx.f32": Tolerance(relative=2.0**-11 + _HALF),
}


def _approximate() -> Iterator[Case]:
    for name, tolerance in _ONE_INPUT.items():
        yield _op(name, "f32", 1, "compute_80", tolerance)
    for function in ("sin", "cos"):
        for ftz in ("", ".ftz"):
            name = f"{function}.approx{ftz}.f32"
            turn = ("f32", uniform(-3.1415926, 3.1415926))
            bound = Tolerance(absolute=2.0**-20.5)
            yield each(name, f"{name} %0, %1;", "f32", turn, tolerance=bound)
    narrow = {
        "f16": (2.0**-9.9 + 2.0**-11, 2.0**-10.987 + 2.0**-12),
        "bf16": (2.0**-7 + 2.0**-9, 2.0**-8 + 2.0**-9),
    }
    for kind, (exponential, tangent) in narrow.items():
        arch = HOPPER if kind == "bf16" else "compute_80"
        for form in (kind, f"{kind}x2"):
            ftz = ".ftz" if kind == "bf16" else ""
            bound = Tolerance(relative=exponential, ulps=1)
            yield _op(f"ex2.approx{ftz}.{form}", form, 1, arch, bound)
            yield _op(f"tanh.approx.{form}", form, 1, arch, Tolerance(absolute=tangent))
    for ftz in ("", ".ftz"):
        for way in ("full", "approx"):
            name = f"div.{way}{ftz}.f32"
            pair = (("f32", uniform(-1e4, 1e4)), ("f32", uniform(1e-3, 1e6)))
            text = f"{name} %0, %1, %2;"
            yield each(name, text, "f32", *pair, tolerance=Tolerance(ulps=2.5))
        for name in ("div.full", "div.approx"):
            bound = Tolerance(ulps=2.5)
            yield each(f"{name}{ftz}.f32.edges", f"{name}{ftz}.f32 %0, %1, %2;", "f32",
                       ("f32", mixed("f32")), ("f32", mixed("f32")), tolerance=bound)  # fmt: skip
    for name in ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64"):
        yield _op(name, "f64", 1, "compute_80", Tolerance(relative=2.0**-19))


def _compare() -> Iterator[Case]:
    ordered = ("eq", "ne", "lt", "le", "gt", "ge")
    either = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    for kind, ftz, arch in (("f32", "", "compute_75"), ("f32", ".ftz", "compute_75"),
                            ("f64", "", "compute_75"), ("f16", "", "compute_75"),
                            ("f16", ".ftz", "compute_75"), ("bf16", "", HOPPER)):  # fmt: skip
        texts = [f".reg .pred p; setp.{o}{ftz}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p;"
                 for o in ordered + either]  # fmt: skip
        pair = ((kind, mixed(kind)), (kind, mixed(kind)))
        yield each(f"setp{ftz}.{kind}", texts, "u32", *pair, arch=arch)
        if kind in ("f32", "f64"):
            for to in ("u32", "s32", "f32"):
                texts = [f"set.{o}{ftz}.{to}.{kind} %0, %1, %2;" for o in ordered + either]
                yield each(f"set{ftz}.{to}.{kind}", texts, "u32", *pair, arch=arch)
        if kind in ("f16", "bf16"):
            texts = [f"set.{o}{ftz}.{kind}x2.{kind}x2 %0, %1, %2;" for o in ordered + either]
            both = [(f"{kind}x2", mixed(f"{kind}x2"))] * 2
            yield each(f"set{ftz}.{kind}x2.{kind}x2", texts, "u32", *both, arch=arch)
            texts = [f".reg .pred p, q; .reg .u32 r; setp.{o}{ftz}.{kind}x2 p|q, %1, %2; "
                     "selp.u32 %0, 1, 0, p; selp.u32 r, 2, 0, q; or.b32 %0, %0, r;"
                     for o in ordered + either]  # fmt: skip
            yield each(f"setp{ftz}.{kind}x2", texts, "u32", *both, arch=arch)
    triple = (("f32", mixed("f32")), ("f32", mixed("f32")), ("f32", mixed("f32")))
    for ftz in ("", ".ftz"):
        text = f"slct{ftz}.f32.f32 %0, %1, %2, %3;"
        yield each(f"slct{ftz}.f32.f32", text, "u32", *triple)


CASES = [*_single(), *_packed(), *_flushed(), *_approximate(), *_compare()]
