"""The list of a mixed batch's sequences that are prefilled."""

from __future__ import annotations

from fkjit.ops.attention.features import LISTED
from fkjit.spec import KernelSpec, Param, register

_THREADS = 256

MIXED_PLAN = register(
    KernelSpec(
        op="attention_form",
        name="mixed_plan",
        source="attention/mixed_plan.cu",
        entry="attention_mixed_plan",
        doc="which sequences of a mixed batch have more than one new token",
        params=(Param("threads", (_THREADS,), "threads of the block"),),
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (1, 1, 1),
        arguments=lambda params, problem, arrays: {
            "cu_seqlens_q": arrays["cu_seqlens_q"],
            LISTED: arrays[LISTED],
            "batch": problem["batch"],
        },
        verification="fkjit.ops.attention.cases_mixed:MIXED_PLAN",
    )
)
