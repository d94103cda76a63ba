"""What rows add to the gradient of ALiBi slopes on Hopper, beside flash_sm90: TMA and wgmma.

It takes what flash_sm90 takes beside slopes: a band of keys, a bias or a mask, packed sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.attention.backward import kernels_sm90 as sm90
from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.backward.kernels import rows_in_blocks
from fkjit.ops.attention.backward.kernels_preprocess import CASES, OP_FEATURES
from fkjit.ops.attention.features import parse
from fkjit.ops.attention.problem import shape_class
from fkjit.spec import KernelSpec, Param, Params, Problem, SharedLayout, Work

_BLOCK, _STAGES = 128, 2  # queries of a block, keys of a tile; tiles of K and V
_BARRIER_BYTES = 8 * (1 + 2 * _STAGES)


def _shared(params: Params) -> SharedLayout:
    """Q, dO, rings of K and V; the mbarriers."""
    size = 2 * _BLOCK * sm90.width(params["head_dim"])
    rings = (("Q", 1), ("dO", 1), ("K", _STAGES), ("V", _STAGES))
    tiles = [(f"{name} stage {i}", size) for name, count in rings for i in range(count)]
    return [*tiles, ("mbarriers", _BARRIER_BYTES)]


def _arguments(params: Params, one: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    names = ("q", "dout", "k", "v")
    maps = {f"{name}_map": sm90.rows_map(one, arrays, name, _BLOCK) for name in names}
    return {**problem.arguments(params, one, arrays), **maps}


SLOPES_SM90 = KernelSpec(
    op=OP_FEATURES,
    name="slopes_sm90",
    source="attention/backward_slopes_sm90.cu",
    entry="attention_backward_slopes_sm90",
    doc="what rows add to the gradient of ALiBi slopes, for Hopper: TMA, wgmma",
    params=(
        Param("dtype", ("fp16", "bf16"), "element type of q, k, v and dout"),
        Param("head_dim", sm90.HEAD_DIMS, "of all arrays, padded to this in shared memory"),
    ),
    derive=lambda params: parse(params["form"]).values(),
    features=lambda params: frozenset({"wgmma"}),
    shared_layout=_shared,
    block=lambda params: (3 * 128, 1, 1),
    grid=rows_in_blocks("heads_q", "seqlen_q", lambda params: _BLOCK),
    shape_class=shape_class,
    arguments=_arguments,
    work=Work(
        flops=lambda one: problem.products(one, 1, 1),
        bytes=problem.traffic,
        interpreter_flops=2e9,
    ),
    verification=f"{CASES}_sm90:SLOPES_SM90",
)
