"""PTX text: operands, declarations, scopes, line numbers, and texts that cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fkjit.errors import InterpreterError
from fkjit.interp.core.declare import variable
from fkjit.interp.core.parse import operand, parse, split_commas
from fkjit.interp.core.ptx import Float, Imm, Mem, Not, Pair, Reg, Sym, Vec, reads_and_writes
from tests.interp.interp_kit import apply, compile_ptx


@pytest.mark.parametrize(
    ("text", "expected"),
    [("%r1", Reg("%r1")), ("-12", Imm(-12)), ("0x1fU", Imm(31)), ("017", Imm(15)),
     ("0f3F800000", Float(0x3F800000, 4)), ("0d3FF0000000000000", Float(0x3FF0000000000000, 8)),
     ("!%p3", Not(Reg("%p3"))), ("table+8", Sym("table", 8)), ("_", Reg("_")),
     ("%r1|%p2", Pair(Reg("%r1"), Reg("%p2"))), ("{%r1, %r2}", Vec((Reg("%r1"), Reg("%r2")))),
     ("[%rd4+-16]", Mem(Reg("%rd4"), -16)), ("[smem]", Mem(Sym("smem"), 0)),
     ("(param0, param1)", Vec((Sym("param0"), Sym("param1"))))],
)  # fmt: skip
def test_operands(text: str, expected: object) -> None:
    assert operand(text) == expected


def test_commas_inside_brackets_do_not_split() -> None:
    assert split_commas("{a, b}, [c, {d, e}], f") == ["{a, b}", "[c, {d, e}]", "f"]


def test_variables_with_initial_values() -> None:
    table = variable(".const .align 4 .u16 t[2][2] = {{1, 2}, {0x3, -1}}")
    assert (table.size, table.align, table.data) == (8, 4, b"\1\0\2\0\3\0\xff\xff")
    pointers = variable(".global .align 8 .u64 p[2] = {generic(t)+4, 7}")
    assert pointers.relocations == ((0, "t", 4),) and pointers.data[8:] == b"\7" + bytes(7)
    dynamic = variable(".extern .shared .align 16 .b8 smem[]")
    assert dynamic.external and dynamic.size == 0 and dynamic.align == 16
    text = variable(".global .align 1 .b8 name[4] = {97, 98, 0}")
    assert text.size == 4 and text.data == b"ab\0"


def test_a_deleted_working_directory_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    text = '.version 8.0\n.target sm_80\n.file 1 "/src/own.cu"\n.visible .entry gone() { ret; }'
    assert parse(text).files == {"1": "/src/own.cu"}


def test_names_in_scopes_are_apart() -> None:
    body = parse(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() {\n"
        ".reg .b32 r; .reg .pred p;\nmov.u32 r, 1;\n"
        "{ .reg .b32 r; L: mov.u32 r, 2; setp.eq.u32 p, r, 3; @p bra L; }\n"
        "L: mov.u32 r, 3; @!p bra L; ret; }"
    ).functions["k"]
    first, inner, compare, back, last, again, _ = body.instructions
    assert first.args[0] == last.args[0] != inner.args[0]
    names = [ins.args[0].name for ins in (inner, compare, back, again)]  # type: ignore[union-attr]
    assert reads_and_writes(compare) == ([names[0]], [names[1]])
    assert [body.labels[name] for name in names[2:]] == [1, 4]
    assert again.guard is not None and again.guard[1]


def test_lines_of_the_source_and_of_headers() -> None:
    source = """
    #line 40 "device/helper.cuh"
    __device__ __forceinline__ float twice(float x) {
      return x * 2.5f;
    }
    #line 100 "kernels_cu/attention/k.cu"
    extern "C" __global__ void k(float* y) {
      y[0] = twice(y[1]);
    }"""
    body = parse(compile_ptx(source, name="kernels_cu/attention/k.cu")).functions["k"]
    (product,) = [ins for ins in body.instructions if ins.op[0] == "mul"]
    assert product.location == "device/helper.cuh:41 (inlined at kernels_cu/attention/k.cu:101)"
    (store,) = [ins for ins in body.instructions if ins.op[0] == "st"]
    assert store.location == "kernels_cu/attention/k.cu:101"


@pytest.mark.parametrize(
    ("text", "message"),
    [(".version 8.0\n.target sm_80\n", "none"),
     (".version 8.0\n.target sm_80\n.visible .entry k() {\n ret;\n", "ends inside a function"),
     (".version 8.0\n.target sm_80\n.global .q7 x;\n", "x"),
     (".version 8.0\n.target sm_80\n.entry k() {\n.reg .b32 %r; mov.u32 %r, 1*2;}", "1\\*2")],
)  # fmt: skip
def test_texts_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InterpreterError, match=message):
        parse(text)


def test_decimal_binary_and_negative_literals() -> None:
    a = np.zeros(3, "u4")
    for text, want in (("1.5", 1.5), ("-2.25", -2.25), ("1e3", 1000.0), ("2.5e-1", 0.25)):
        got = apply(f"mov.f32 %d, {text};", a, out=np.float32)
        np.testing.assert_array_equal(got, np.float32(want))
    got = apply("mov.f32 %d, -0f3F800000;", a, out=np.float32)
    np.testing.assert_array_equal(got, -1)
    np.testing.assert_array_equal(apply("mov.u32 %d, 0b1011;", a), 11)


def test_an_operand_that_cannot_be_read_is_shown_with_its_line() -> None:
    text = """.version 8.0
    .target sm_80
    .address_size 64
    .file 1 "x.cu"
    .visible .entry k() {
    .reg .b32 %r;
    .loc 1 33 0
    mov.u32 %r, ?what;
    ret; }"""
    with pytest.raises(InterpreterError, match=r"operand '\?what' cannot be read: mov.u32 %r") as e:
        parse(text)
    assert "x.cu:33" in str(e.value)
