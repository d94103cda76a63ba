"""The router of a mixture of experts: top-k of softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fkjit
from fkjit.ops.moe_route import ROUTE
from fkjit.spec import KernelSpec, Params, Problem

from ..kernels import arch_of
from ..op import Arrays, Op, Prepared
from ..peers.moe import ROUTE as PEERS
from . import moe


def output(p: Problem) -> Any:
    """What is judged of (weights, ids)."""
    return lambda made: moe.routed(made[0], made[1], p["experts"])


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    logits, top_k = arrays["logits"], p["top_k"]
    variant = (ROUTE, moe.tile(ROUTE, p, arch_of(logits))) if logits.is_cuda else None
    return Prepared(lambda: fkjit.moe_route(logits, top_k), output(p), variant=variant)


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """One variant."""
    names = ("topk_weights", "topk_ids")
    return replace(moe.launch(spec, params, problem, arrays, device, names), output=output(problem))


OP = Op(
    name="moe_route",
    sets=moe.SETS,
    label=moe.label,
    inputs=moe.inputs,
    expected=moe.expected_route,
    ours=ours,
    choose=moe.tile,
    launch=launch,
    peers=PEERS,
)
