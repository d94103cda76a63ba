"""The router and the sorting of its choices in Triton: the two other twins, three launches."""

from __future__ import annotations

from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from .triton_moe_regroup import moe_regroup, ordered
from .triton_moe_route import moe_route


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twins on a problem of the benchmark."""
    logits, experts = arrays["logits"], problem["experts"]
    top_k, size = problem["top_k"], problem["block_size"]

    def call() -> Any:
        return moe_regroup(moe_route(logits, top_k)[1], experts, size)

    return Prepared(call, ordered)
