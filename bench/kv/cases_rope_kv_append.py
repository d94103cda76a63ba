"""The rotary embedding and the append to a paged KV cache in one launch: prompts and decoding."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

import fkjit
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.kv import rope_append_kernels as kernels
from fkjit.ops.kv.cases_rope_append import turned
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays, Candidate, Op, Prepared
from . import cases_kv_append


def problem(tokens: int, **options: Any) -> dict[str, Any]:
    """Tokens of one sequence, 32 heads of q."""
    whole = cases_kv_append.problem(tokens, **options)
    return {
        **whole,
        **{"heads_q": 32, "rotary_dim": whole["head_dim"], "theta": 5e5, "scaling": None},
        "interleaved": False,
    }


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        *(problem(tokens) for tokens in (1, 64, 1024, 16_384)),
        problem(16_384, layout="hnd"),
        problem(16_384, storage="fp8"),
    ],
    "quick": [problem(16_384), problem(64)],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh q, k and v, positions in order, zeros in the pages."""
    made = cases_kv_append.inputs(problem, device)
    torch, k = device.torch, made["k"]
    shape = (problem["tokens"], problem["heads_q"], problem["head_dim"])
    positions = torch.arange(problem["tokens"], dtype=torch.int32, device=k.device)
    return {**made, "q": torch.randn(shape, device=k.device).to(k.dtype), "positions": positions}


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """q turned, in float64."""
    names = ("q", "k", "v", "positions", "slot_mapping", "k_scale", "v_scale")
    rows = slice(max(0, problem["tokens"] - 256), None)  # those at the highest positions
    part = {n: arrays[n][rows] if n in names[:5] else arrays[n] for n in names if n in arrays}
    given = {n: (x.float() if x.is_floating_point() else x).cpu().numpy() for n, x in part.items()}
    small = {**problem, "tokens": len(given["positions"])}
    want = turned(small, given)["out_q"]
    device = arrays["q"].device
    whole = import_module("torch").from_numpy(np.asarray(want)).to(device)
    return Expected([(rows, whole)], LIMITS[problem["dtype"]])


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call would take of this kernel."""
    fixed = {**cases_kv_append.fixed(problem), "interleaved": problem["interleaved"]}
    params = kernels.parameters(fixed, problem)
    if spec.why_not(params, arch):
        raise ParameterError(f"{spec.id} has no variant for {params}")
    return params


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    cache = cases_kv_append.held(problem, arrays)
    q, k, v, slots, at = (arrays[n] for n in ("q", "k", "v", "slot_mapping", "positions"))
    call = fkjit.rope_kv_append
    variant = (kernels.COMPUTED, choose(kernels.COMPUTED, problem, _arch(q))) if q.is_cuda else None
    return Prepared(
        lambda: call(q, k, v, cache, slots, at, theta=problem["theta"]), variant=variant
    )


def _arch(q: Any) -> Arch:
    from fkjit.runtime.device import device_target

    return device_target(q.get_device()).arch


def _two(problem: Problem, arrays: Arrays) -> Prepared:
    """`rope` and `kv_append`, one after the other."""
    cache, theta = cases_kv_append.held(problem, arrays), problem["theta"]
    q, k, v, slots, at = (arrays[n] for n in ("q", "k", "v", "slot_mapping", "positions"))

    def call() -> Any:
        turned, k_turned = fkjit.rope(q, k, at, theta=theta)
        fkjit.kv_append(k_turned, v, cache, slots)
        return turned

    return Prepared(call)


OP = Op(
    name="rope_kv_append",
    sets=SETS,
    label=cases_kv_append.label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=(Candidate(name="rope + kv_append", prepare=_two),),
)
