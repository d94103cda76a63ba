"""Weighted sums of the rows of each token's choices."""

from __future__ import annotations

import fkjit
from fkjit.ops.moe.rows import COMBINE
from fkjit.spec import Problem

from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from . import cases_moe_rows as rows
from .peers_moe import COMBINE as PEERS


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    y, groups, weights = arrays["y"], rows.groups(arrays), arrays["weights"]
    variant = (COMBINE, rows.choose(COMBINE, p, arch_of(y))) if y.is_cuda else None
    return Prepared(lambda: fkjit.moe_combine(y, groups, weights), variant=variant)


OP = Op(
    name="moe_combine",
    sets=rows.SETS,
    label=rows.label,
    inputs=rows.inputs,
    expected=rows.expected_combine,
    ours=ours,
    choose=rows.choose,
    peers=PEERS,
    kernel=COMBINE.id,
)
