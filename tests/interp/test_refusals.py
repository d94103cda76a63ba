"""What PTX does not have, or the interpreter does not know, is one error with text and line."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import InterpreterError
from fkjit.interp import Arg, run

REFUSED = """
add.rna.f32 f, f, f; add.ftz.f64 fd, fd, fd; add.relu.f16 h, h, h; add.ftz.bf16 h, h, h
add.sat.u32 r, r, r; add.sat.s64 rd, rd, rd; add.b32 r, r, r; sub.u16x2 r, r, r
add.hi.s32 r, r, r; mul.s32 r, r, r; mul.lo.sat.s32 r, r, r; mul.wide.s64 rd, rd, rd
mul.sat.f64 fd, fd, fd; mad.lo.sat.s32 r, r, r, r; mad.s32 r, r, r, r; fma.sat.bf16 h, h, h, h
fma.rn.oob.sat.f16 h, h, h, h; fma.rn.s32 r, r, r, r; fma.ftz.f64 fd, fd, fd, fd
mul24.wide.s32 rd, r, r; mad24.lo.s64 rd, rd, rd, rd; div.full.f64 fd, fd, fd; div.sat.f32 f, f, f
div.b32 r, r, r; rem.f32 f, f, f; div.rn.f16 h, h, h; sqrt.rn.f16 h, h; sqrt.approx.f64 fd, fd
rsqrt.rn.f32 f, f; sin.f64 fd, fd; tanh.approx.ftz.f32 f, f; ex2.approx.f64 fd, fd
lg2.approx.f16 h, h; rcp.sat.f32 f, f; rcp.approx.f64 fd, fd; min.relu.u32 r, r, r
min.relu.u16x2 r, r, r; max.xorsign.f32 f, f, f; min.ftz.f64 fd, fd, fd; min.NaN.f64 fd, fd, fd
max.f16 h, h, h, h; max.u8 h, h, h; neg.u32 r, r; abs.u32 r, r; abs.ftz.f64 fd, fd
neg.ftz.bf16 h, h; sad.f32 f, f, f, f; copysign.f16 h, h, h; copysign.rn.f32 f, f, f
testp.finite.f16 p, h; testp.small.f32 p, f; dp4a.u32.s64 r, r, r, r; dp2a.u32.s32 r, r, r, r
dp4a.lo.u32.u32 r, r, r, r; madc.wide.u32 r, r, r, r; addc.sat.u32 r, r, r; and.u32 r, r, r
or.f32 f, f, f; not.s32 r, r; shl.s32 r, r, 1; shr.f32 f, f, 1; shr.wrap.u32 r, r, 1
shf.l.wrap.b64 rd, rd, rd, 1; shf.l.b32 r, r, r, 1; lop3.b64 rd, rd, rd, rd, 3
lop3.xor.b32 r|p, r, r, r, 3, p; prmt.b32.f8e r, r, r, r; prmt.b64 rd, rd, rd, rd; popc.u32 r, r
clz.b16 h, h; brev.s32 r, r; bfind.b32 r, r; bfe.b32 r, r, 1, 1; bfi.u32 r, r, r, 1, 1
bmsk.b32.up r, r, r; szext.clamp.b32 r, r, r; fns.b64 rd, rd, rd, rd; cnot.u32 r, r
setp.lo.s32 p, r, r; setp.lt.b32 p, r, r; setp.equ.s32 p, r, r; setp.lt.ftz.f64 p, fd, fd
setp.lt.nand.s32 p, r, r, p; setp.eq.f16x2 p, r, r; setp.hi.f32 p, f, f; setp.lt.and.s32 p, r, r
set.lt.f64.f32 fd, f, f; set.eq.f16x2.f32 r, f, f; set.lt.sat.u32.f32 r, f, f; selp.f16 h, h, h, p
selp.sat.u32 r, r, r, p; slct.u32.u32 r, r, r, r; slct.ftz.u32.s32 r, r, r, r; cvt.s32.f32 r, f
cvt.rn.s32.s64 r, rd; cvt.rzi.relu.s32.f32 r, f; cvt.rn.ftz.f64.s32 fd, r; cvt.rna.f32.f64 f, fd
cvt.rn.relu.f32.s32 f, r; cvt.rn.e4m3x2.f32 h, f, f; cvt.rn.relu.f16.f64 h, fd
cvt.rz.satfinite.e4m3x2.f32 h, f, f; cvt.rs.f16x2.f32 r, f, f, r; cvt.rn.sat.f16x2.f32 r, f, f
cvt.rm.bf16x2.f32 r, f, f; cvt.rn.f32.e4m3 f, h; cvt.pack.u16.s32 r, r, r
cvt.pack.sat.u16.f32 r, f, f; mov.sat.u32 r, r; cvta.tex.u64 rd, rd; mov.u64 rd, %clock
ld.global.u32.u32 r, [rd]; ld.global.v3.u32 {r, r, r}, [rd]; ld.tex.u32 r, [rd]
ld.shared.v8.f32 {f,f,f,f,f,f,f,f}, [rd]; st.global.near.u32 [rd], r
atom.global.add.s64 rd, [rd], rd; atom.global.add.b32 r, [rd], r; atom.global.and.u32 r, [rd], r
atom.global.cas.f32 f, [rd], f, f; atom.global.inc.u64 rd, [rd], rd
atom.global.sub.u32 r, [rd], r; red.global.max.f32 [rd], f; red.global.v2.u32.add [rd], {r, r}
red.global.add.v8.f32 [rd], {f,f}; red.global.min.v2.f32 [rd], {f, f}
atom.near.global.add.u32 r, [rd], r; min.f32x2 rd, rd, rd; setp.lt.f32x2 p, rd, rd
neg.f32x2 rd, rd; div.rn.f32x2 rd, rd, rd; fence.relaxed.gpu; membar.warp; fence.proxy.texture
prefetch.shared.L1 [rd]; nanosleep.u64 rd; shfl.down.b32 r, r, 1, 31; vote.ballot.b32 r, p
redux.sync.mul.u32 r, r, -1; match.sync.any.b32 r, r, -1; bra.div L; exit.uni; trap.now
activemask.b64 rd; vmad.u32.u32.u32 r, r, r, r; tex.1d.v4.f32.f32 {f,f,f,f}, [rd, {f}]
"""


def _cases() -> list[str]:
    return [
        text.strip() for line in REFUSED.split("\n") for text in line.split(";") if text.strip()
    ]


@pytest.mark.parametrize("instruction", _cases())
def test_unknown_forms_are_refused(instruction: str) -> None:
    text = f""".version 8.6
    .target sm_90
    .address_size 64
    .file 1 "x.cu"
    .visible .entry k(.param .u64 q) {{
    .reg .b32 r; .reg .f32 f; .reg .f64 fd; .reg .b64 rd; .reg .b16 h; .reg .pred p;
    .loc 1 7 0
    {instruction};
    L: ret; }}"""
    with pytest.raises(InterpreterError, match="not supported") as caught:
        run(text, "k", 1, 32, [Arg("q", np.zeros(1, "f4"))])
    shown = str(caught.value)
    assert instruction in shown and "x.cu:7" in shown and shown.count("not supported") == 1
