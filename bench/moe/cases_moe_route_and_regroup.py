"""The router and the sorting of its choices by expert: in one launch, and in two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fkjit
from fkjit.ops.moe.route_and_regroup import KERNEL
from fkjit.spec import KernelSpec, Params, Problem

from ..core.kernels import arch_of
from ..core.op import Arrays, Candidate, Op, Prepared
from . import cases_moe
from .peers_moe import BOTH as PEERS


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    logits, top_k, size = arrays["logits"], p["top_k"], p["block_size"]
    variant = (KERNEL, cases_moe.tile(KERNEL, p, arch_of(logits))) if logits.is_cuda else None
    return Prepared(
        lambda: fkjit.moe_route_and_regroup(logits, top_k, size),
        lambda made: made.groups.sorted_token_ids,
        variant=variant,
    )


def _two_launches(p: Problem, arrays: Arrays) -> Prepared:
    """The two other public calls, one after the other."""
    logits, experts = arrays["logits"], p["experts"]
    top_k, size = p["top_k"], p["block_size"]

    def call() -> Any:
        _, ids = fkjit.moe_route(logits, top_k)
        return fkjit.moe_regroup(ids, experts, size)

    return Prepared(call, lambda made: made.sorted_token_ids)


def _torch_sorts(p: Problem, arrays: Arrays) -> Prepared:
    """Our router, and PyTorch's sort."""
    logits, top_k, experts = arrays["logits"], p["top_k"], p["experts"]
    return Prepared(
        lambda: cases_moe.sort(fkjit.moe_route(logits, top_k)[1], experts),
        lambda made: cases_moe.padded(*made, p),
    )


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """One variant."""
    made = cases_moe.launch(spec, params, problem, arrays, device, ("sorted_token_ids",))
    return replace(made, output=lambda found: found[0])


OP = Op(
    name="moe_route_and_regroup",
    sets=cases_moe.SETS,
    label=cases_moe.label,
    inputs=cases_moe.inputs,
    expected=cases_moe.expected_places,
    ours=ours,
    choose=cases_moe.tile,
    launch=launch,
    peers=(
        *PEERS,
        Candidate(name="route + torch", prepare=_torch_sorts),
        Candidate(name="route + regroup", prepare=_two_launches),
    ),
)
