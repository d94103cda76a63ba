"""The router of a mixture of experts: top-k of softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fkjit
from fkjit.ops.moe.route import ROUTE
from fkjit.spec import KernelSpec, Params, Problem

from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from . import cases_moe
from .peers_moe import ROUTE as PEERS


def output(p: Problem) -> Any:
    """What is judged of (weights, ids)."""
    return lambda made: cases_moe.routed(made[0], made[1], p["experts"])


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    logits, top_k = arrays["logits"], p["top_k"]
    variant = (ROUTE, cases_moe.tile(ROUTE, p, arch_of(logits))) if logits.is_cuda else None
    return Prepared(lambda: fkjit.moe_route(logits, top_k), output(p), variant=variant)


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """One variant."""
    names = ("topk_weights", "topk_ids")
    return replace(
        cases_moe.launch(spec, params, problem, arrays, device, names), output=output(problem)
    )


OP = Op(
    name="moe_route",
    sets=cases_moe.SETS,
    label=cases_moe.label,
    inputs=cases_moe.inputs,
    expected=cases_moe.expected_route,
    ours=ours,
    choose=cases_moe.tile,
    launch=launch,
    peers=PEERS,
)
