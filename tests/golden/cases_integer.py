"""Integer and bit instructions of one thread."""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.forms import Input, each
from tests.golden.values import below, mixed

U16, U32, U64 = ("u16", mixed("u16")), ("u32", mixed("u32")), ("u64", mixed("u64"))
WORDS = {"16": U16, "32": U32, "64": U64}
HOPPER = "compute_90a"


def _op(name: str, out: str, *inputs: Input, arch: str = "compute_75") -> Case:
    operands = ", ".join(f"%{i}" for i in range(len(inputs) + 1))
    return each(name, f"{name} {operands};", out, *inputs, arch=arch)


def _arithmetic() -> Iterator[Case]:
    for sign in "su":
        for bits, word in WORDS.items():
            kind, out = f"{sign}{bits}", f"u{bits}"
            for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
                yield _op(f"{op}.{kind}", out, word, word)
            for op in ("mad.lo", "mad.hi"):
                yield _op(f"{op}.{kind}", out, word, word, word)
            yield _op(f"sad.{kind}", out, word, word, word)
            if bits != "64":
                wide = "32" if bits == "16" else "64"
                yield _op(f"mul.wide.{kind}", f"u{wide}", word, word)
                yield _op(f"mad.wide.{kind}", f"u{wide}", word, word, WORDS[wide])
            divide = f".reg .u{bits} b; or.b{bits} b, %2, 1;"  # by zero is undefined
            for op in ("div", "rem"):
                name = f"{op}.{kind}"
                yield each(name, f"{divide} {name} %0, %1, b;", out, word, word, arch="compute_75")
        for op in ("mul24.lo", "mul24.hi"):
            yield _op(f"{op}.{sign}32", "u32", U32, U32)
        for op in ("mad24.lo", "mad24.hi"):
            yield _op(f"{op}.{sign}32", "u32", U32, U32, U32)
        for op in ("add", "min", "max"):
            yield _op(f"{op}.{sign}16x2", "u32", U32, U32, arch=HOPPER)
    for name in ("min.relu.s32", "max.relu.s32", "min.relu.s16x2", "max.relu.s16x2"):
        yield _op(name, "u32", U32, U32, arch=HOPPER)
    for name in ("add.sat.s32", "sub.sat.s32"):
        yield _op(name, "u32", U32, U32)
    for name in ("mad.hi.sat.s32", "mad24.hi.sat.s32"):
        yield _op(name, "u32", U32, U32, U32)
    for op in ("abs", "neg"):
        for bits in WORDS:
            yield _op(f"{op}.s{bits}", f"u{bits}", f"u{bits}")


def _carries() -> Iterator[Case]:
    """Chains of carries: the high word of a sum, and what is carried out of it."""
    for kind, word in (("u32", U32), ("u64", U64)):
        start = f".reg .b{kind[1:]} t;"
        for op, more in (("add", "addc"), ("sub", "subc")):
            yield each(
                f"{more}.cc.{kind}",
                [f"{start} {op}.cc.{kind} t, %1, %2; {more}.{kind} %0, %3, %2;",
                 f"{start} {op}.cc.{kind} t, %1, %2; {more}.cc.{kind} t, %3, %2; "
                 f"{more}.{kind} %0, %1, %3;"],
                kind, word, word, word, arch="compute_75",
            )  # fmt: skip
        for part, other in (("lo", "hi"), ("hi", "lo")):
            text = (
                f"{start} mad.{part}.cc.{kind} t, %1, %2, %3; madc.{other}.cc.{kind} t, %2, %3, t; "
                f"madc.{other}.{kind} %0, %1, %3, t;"
            )
            yield each(f"madc.{part}.cc.{kind}", text, kind, word, word, word, arch="compute_75")


def _bits() -> Iterator[Case]:
    for bits in ("32", "64"):
        word, out = WORDS[bits], f"u{bits}"
        for op in ("and", "or", "xor"):
            yield _op(f"{op}.b{bits}", out, word, word)
        for op in ("not", "cnot", "brev"):
            yield _op(f"{op}.b{bits}", out, f"u{bits}")
        for op in ("popc", "clz"):
            yield _op(f"{op}.b{bits}", "u32", f"u{bits}")
        for sign in "su":
            for more in ("", ".shiftamt"):
                yield _op(f"bfind{more}.{sign}{bits}", "u32", f"u{bits}")
            yield _op(f"bfe.{sign}{bits}", out, word, ("u32", below(300)), ("u32", below(300)))
            yield _op(f"bfe.{sign}{bits}", out, word, ("u32", below(70)), ("u32", below(70)))
        yield _op(f"bfi.b{bits}", out, word, word, ("u32", below(80)), ("u32", below(80)))
    for bits, word in WORDS.items():
        for name in (f"shl.b{bits}", f"shr.u{bits}", f"shr.s{bits}"):
            yield _op(name, f"u{bits}", word, ("u32", below(80)))
    for side in "lr":
        for way in ("clamp", "wrap"):
            yield _op(f"shf.{side}.{way}.b32", "u32", U32, U32, ("u32", below(100)))
    for way in ("clamp", "wrap"):
        lengths = ("u32", below(40)), ("u32", below(40))
        yield _op(f"bmsk.{way}.b32", "u32", *lengths, arch="compute_80")
        for sign in "su":
            yield _op(f"szext.{way}.{sign}32", "u32", U32, ("u32", below(40)), arch="compute_80")
    signed = (".reg .s32 n; sub.s32 n, %3, 6; .reg .u32 base; and.b32 base, %2, 31; "
              "fns.b32 %0, %1, base, n;")  # fmt: skip
    yield each("fns.b32", signed, "u32", U32, U32, ("u32", below(13)))
    for table in (0x00, 0x1B, 0x6A, 0x96, 0xE8, 0xCA, 0xFE, 0xFF):
        text = f"lop3.b32 %0, %1, %2, %3, {table};"
        yield each(f"lop3.{table:02x}", text, "u32", U32, U32, U32)
    yield _op("prmt.b32", "u32", U32, U32, U32)
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        text = f"prmt.b32.{mode} %0, %1, %2, %3;"
        yield each(f"prmt.b32.{mode}", text, "u32", U32, U32, U32)
    for a in "su":
        for b in "su":
            yield _op(f"dp4a.{a}32.{b}32", "u32", U32, U32, U32)
            for half in ("lo", "hi"):
                yield _op(f"dp2a.{half}.{a}32.{b}32", "u32", U32, U32, U32)


def _compare() -> Iterator[Case]:
    operators = {"s": ("eq", "ne", "lt", "le", "gt", "ge"), "b": ("eq", "ne"),
                 "u": ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs")}  # fmt: skip
    for sign, names in operators.items():
        for bits, word in WORDS.items():
            texts = [f".reg .pred p; setp.{o}.{sign}{bits} p, %1, %2; selp.u32 %0, 1, 0, p;"
                     for o in names]  # fmt: skip
            yield each(f"setp.{sign}{bits}", texts, "u32", word, word, arch="compute_75")
    combined = [
        ".reg .pred p, q, c; setp.gt.s32 c, %3, 0; "
        f"setp.lt.{logic}.s32 p|q, %1, %2, {negated}c; "
        ".reg .u32 r; selp.u32 %0, 1, 0, p; selp.u32 r, 2, 0, q; or.b32 %0, %0, r;"
        for logic in ("and", "or", "xor")
        for negated in ("", "!")
    ]
    yield each("setp.combined.s32", combined, "u32", U32, U32, U32, arch="compute_75")
    for kind, word in (("u32", U32), ("u64", U64)):
        yield _op(f"slct.{kind}.s32", kind, word, word, U32)


def _unique(cases: list[Case]) -> list[Case]:
    """A second form of an instruction (other ranges of its inputs) gets a name of its own."""
    seen: dict[str, int] = {}
    out = []
    for case in cases:
        seen[case.name] = count = seen.get(case.name, 0) + 1
        name = case.name if count == 1 else f"{case.name}.{count}"
        out.append(Case(**{**vars(case), "name": name}))
    return out


CASES = _unique([*_arithmetic(), *_carries(), *_bits(), *_compare()])
