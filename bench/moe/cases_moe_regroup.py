"""Choices sorted by expert, padded to tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.moe.regroup import REGROUP, TILES
from fkjit.spec import KernelSpec, Params, Problem

from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from . import cases_moe
from .peers_moe import REGROUP as PEERS


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call would take."""
    tile = next(tile for tile in TILES if tile[1] >= problem["groups"])
    return cases_moe.choose({"ids": "int32", "tile": tile}, spec, arch)


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    ids, experts, size = arrays["topk_ids"], p["experts"], p["block_size"]
    variant = (REGROUP, choose(REGROUP, p, arch_of(ids))) if ids.is_cuda else None
    return Prepared(
        lambda: fkjit.moe_regroup(ids, experts, size),
        lambda made: made.sorted_token_ids,
        variant=variant,
    )


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """One variant."""
    made = cases_moe.launch(spec, params, problem, arrays, device, ("sorted_token_ids",))
    return replace(made, output=lambda found: found[0])


OP = Op(
    name="moe_regroup",
    sets=cases_moe.SETS,
    label=cases_moe.label,
    inputs=cases_moe.inputs,
    expected=cases_moe.expected_places,
    ours=ours,
    choose=choose,
    launch=launch,
    peers=PEERS,
)
