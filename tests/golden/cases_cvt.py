"""cvt between every pair of types, in every rounding mode and saturation."""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.forms import each
from tests.golden.values import mixed

FLOAT = ("rn", "rz", "rm", "rp")
INTEGRAL = ("rni", "rzi", "rmi", "rpi")
INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")


def _stored(kind: str, other: str) -> str:
    """How a value travels through a register: narrow integers in 32 bits, 16 beside a bf16."""
    if kind in ("f16", "bf16", "f32", "f64"):
        return kind
    if kind.endswith("64"):
        return "u64"
    return "u16" if other == "bf16" and not kind.endswith("32") else "u32"


def _narrows(to: str, of: str) -> bool:
    """Whether some value of the integer type `of` is none of `to`: there .sat is allowed."""
    bits_to, bits_of = int(to[1:]), int(of[1:])
    if to[0] == of[0]:
        return bits_to < bits_of
    return to[0] == "u" or bits_to <= bits_of


def _form(to: str, of: str, *modifiers: str) -> str:
    return f"cvt{''.join('.' + m for m in modifiers if m)}.{to}.{of} %0, %1;"


def _case(to: str, of: str, *modifiers: tuple[str, ...], arch: str = "compute_80", label: str = ""):
    texts = [_form(to, of, *m) for m in modifiers]
    return each(f"cvt.{to}.{of}{label}", texts, _stored(to, of), _stored(of, to), arch=arch)


def _floats() -> Iterator[Case]:
    hopper = "compute_90a"
    modes = tuple((m,) for m in FLOAT)
    for to, of, arch in [("f16", "f32", "compute_75"), ("f32", "f64", "compute_75"),
                         ("f16", "f64", "compute_75"), ("bf16", "f32", hopper),
                         ("bf16", "f64", hopper), ("f16", "bf16", hopper),
                         ("bf16", "f16", hopper)]:  # fmt: skip
        yield _case(to, of, *modes, arch=arch)
        if "bf16" not in (to, of):
            yield _case(to, of, *((m, "sat") for m in FLOAT), arch=arch, label=".sat")
    yield _case("f16", "f32", *((m, "ftz") for m in FLOAT), label=".ftz")
    yield _case("f16", "f32", *((m, "ftz", "sat") for m in FLOAT), label=".ftz.sat")
    yield _case("f32", "f64", *((m, "ftz") for m in FLOAT), label=".ftz")
    yield _case("bf16", "f32", ("rn",), ("rz",), label=".ampere")
    for to in ("f16", "bf16"):
        yield _case(to, "f32", ("rn", "relu"), ("rz", "relu"), label=".relu")
    for to, of, arch in [("f32", "f16", "compute_75"), ("f64", "f16", "compute_75"),
                         ("f64", "f32", "compute_75"), ("f32", "bf16", hopper),
                         ("f64", "bf16", hopper)]:  # fmt: skip
        yield _case(to, of, ("",), *([("sat",)] if of != "bf16" else []), arch=arch)
    yield _case("f32", "f16", ("ftz",), ("ftz", "sat"), label=".ftz")
    yield _case("f64", "f32", ("ftz",), ("ftz", "sat"), label=".ftz")
    for kind, arch in [("f16", "compute_75"), ("f32", "compute_75"), ("f64", "compute_75"),
                       ("bf16", hopper)]:  # fmt: skip
        yield _case(kind, kind, *((m,) for m in INTEGRAL), arch=arch)
        if kind != "bf16":
            yield _case(kind, kind, *((m, "sat") for m in INTEGRAL), arch=arch, label=".sat")
    flushed = ((m, "ftz") for m in INTEGRAL)
    yield _case("f32", "f32", ("ftz",), ("ftz", "sat"), *flushed, label=".ftz")


def _packed() -> Iterator[Case]:
    for to in ("f16x2", "bf16x2"):
        for mode in ("rn", "rz"):
            for more in ("", ".relu"):
                text = f"cvt.{mode}{more}.{to}.f32 %0, %1, %2;"
                pair = (("f32", mixed("f32")), ("f32", mixed("f32")))
                yield each(f"cvt.{mode}{more}.{to}.f32", text, to, *pair)
    yield each("cvt.rna.tf32.f32", "cvt.rna.tf32.f32 %0, %1;", "u32", "f32")
    for mode in ("rn", "rz", "rn.relu", "rz.relu"):
        text = f"cvt.{mode}.tf32.f32 %0, %1;"
        yield each(f"cvt.{mode}.tf32.f32", text, "u32", "f32", arch="compute_90a")
    words = [("u32", mixed("u32"))] * 3
    for to in ("s16", "u16"):
        yield each(f"cvt.pack.sat.{to}.s32", f"cvt.pack.sat.{to}.s32 %0, %1, %2;", "u32", *words)
    for to in ("s8", "u8"):
        text = f"cvt.pack.sat.{to}.s32.b32 %0, %1, %2, %3;"
        yield each(f"cvt.pack.sat.{to}.s32.b32", text, "u32", *words)


def _fp8() -> Iterator[Case]:
    ada = "compute_89"
    for to in ("e4m3x2", "e5m2x2"):
        for more in ("", ".relu"):
            start = f"cvt.rn.satfinite{more}.{to}"
            pair = (("f32", mixed("f32")), ("f32", mixed("f32")))
            yield each(f"{start}.f32", f"{start}.f32 %0, %1, %2;", to, *pair, arch=ada)
            yield each(f"{start}.f16x2", f"{start}.f16x2 %0, %1;", to, "f16x2", arch=ada)
            start = f"cvt.rn{more}.f16x2.{to}"
            yield each(start, f"{start} %0, %1;", "f16x2", "fp8x2", arch=ada)


def _integers() -> Iterator[Case]:
    for of in ("f16", "f32", "f64"):
        for to in INTEGERS:
            yield _case(to, of, *((m,) for m in INTEGRAL), arch="compute_75")
    for to in INTEGERS:
        yield _case(to, "f32", *((m, "ftz", "sat") for m in INTEGRAL), label=".ftz.sat")
        yield _case(to, "f32", *((m, "ftz") for m in INTEGRAL), label=".ftz")
        if not to.endswith("8"):
            yield _case(to, "bf16", *((m,) for m in INTEGRAL), arch="compute_90a")
    for of in INTEGERS:
        for to in ("f16", "f32", "f64"):
            yield _case(to, of, *((m,) for m in FLOAT), arch="compute_75")
        if not of.endswith("8"):
            yield _case("bf16", of, *((m,) for m in FLOAT), arch="compute_90a")
        for to in INTEGERS:
            yield _case(to, of, ("",), *([("sat",)] if _narrows(to, of) else []), arch="compute_75")
    yield _case("f32", "s64", ("rn", "sat"), ("rz", "sat"), label=".sat")
    yield _case("f32", "u32", ("rn", "sat"), ("rz", "sat"), label=".sat")


CASES = [*_floats(), *_packed(), *_fp8(), *_integers()]
