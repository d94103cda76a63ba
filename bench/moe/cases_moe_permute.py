"""Rows of tokens in the order of the experts that they go to."""

from __future__ import annotations

import fkjit
from fkjit.ops.moe.rows import PERMUTE
from fkjit.spec import Problem

from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from . import cases_moe_rows as rows
from .peers_moe import PERMUTE as PEERS


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    x, groups = arrays["x"], rows.groups(arrays)
    variant = (PERMUTE, rows.choose(PERMUTE, p, arch_of(x))) if x.is_cuda else None
    return Prepared(lambda: fkjit.moe_permute(x, groups), variant=variant)


OP = Op(
    name="moe_permute",
    sets=rows.SETS,
    label=rows.label,
    inputs=rows.inputs,
    expected=rows.expected_permute,
    ours=ours,
    choose=rows.choose,
    peers=PEERS,
)
