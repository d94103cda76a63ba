"""FlashAttention-4 (package flash-attn-4), which takes [B, S, H, D]."""

from __future__ import annotations

from importlib import import_module

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused

_MODULE = "flash_attn.cute.interface"


def _prepare(problem: Problem, arrays: Arrays) -> Prepared:
    if problem["dtype"] == "fp32":
        raise Refused("takes fp16 and bf16")
    attention = import_module(_MODULE).flash_attn_func
    q, k, v = (arrays[name].transpose(1, 2).contiguous() for name in "qkv")
    scale, causal = problem["softmax_scale"], problem["causal"]

    def output(returned):
        made = returned[0] if isinstance(returned, tuple) else returned
        return made.transpose(1, 2)

    return Prepared(lambda: attention(q, k, v, softmax_scale=scale, causal=causal), output)


PEERS = (Candidate(name="fa4", package="flash-attn-4", module=_MODULE, prepare=_prepare),)
