"""Machine code counted by what executes it: a static instruction mix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from fkjit.jit.disassemble import Line

# The first pattern that an opcode begins with decides. Source: CUDA binary utilities, instruction
# sets of Turing to Blackwell.
_CLASSES = (
    ("tensor", r"HMMA|IMMA|BMMA|DMMA|QMMA|OMMA|[HIQB]GMMA|WARPGROUP|UTC"),
    ("async copy", r"LDGSTS|LDGDEPBAR|DEPBAR|UTMA|UBLKCP|UBLKPF|SYNCS|ARRIVES"),
    ("shared memory", r"LDS|STS|ATOMS|LDSM|STSM"),
    ("local memory", r"LDL|STL"),
    ("global memory", r"LDG|STG|LD\b|ST\b|ATOM|RED\b|REDG|CCTL|LD\.|ST\."),
    ("constants", r"LDC|ULDC"),
    (
        "barriers",
        r"BAR|MEMBAR|ERRBAR|WARPSYNC|FENCE|UCGABAR|ELECT|NANOSLEEP|BSYNC|BSSY|BREAK",
    ),
    ("special functions", r"MUFU"),
    ("conversions", r"F2F|I2F|F2I|F2FP|I2I|FRND|I2FP|F2IP"),
    (
        "floating point",
        r"FADD|FMUL|FFMA|FMNMX|FSEL|FSET|FCHK|FSWZ|H[AFMS]|DADD|DMUL|DFMA|DSET",
    ),
    ("warp", r"SHFL|VOTE|MATCH|REDUX|MOVM|VOTEU|CREDUX"),
    ("control", r"BRA|BRX|JMP|CALL|RET|EXIT|KILL|BPT|RTT|CS2R|S2R|S2UR|NOP|USETMAXREG|ACQBULK"),
    ("moves", r"MOV|UMOV|SEL|PRMT|UPRMT|USEL|R2UR|R2P|P2R|PLOP3|UPLOP3|UP2UR|R2B"),
    ("integer", r".*"),
)
_OPCODE = re.compile(r"(?:@!?U?P[T\d]\s+)?([A-Z][\w.]*)")


def kind(text: str) -> str:
    """What executes an instruction: "@!P1 IMAD.IADD R9, …" -> "integer"."""
    found = _OPCODE.match(text)
    opcode = found[1] if found else text
    return next(name for name, pattern in _CLASSES if re.match(pattern, opcode))


def mix(lines: Iterable[Line]) -> dict[str, int]:
    """Instructions of each kind, the most frequent first; what pads the end is left out."""
    code = [line.text for line in lines if line.address is not None]
    while code and re.match(r"NOP|BRA", code[-1]):
        code.pop()
    return dict(Counter(map(kind, code)).most_common())
