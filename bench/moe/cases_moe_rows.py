"""What the benchmarks of moe_permute and moe_combine share."""

from __future__ import annotations

from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.moe import rows as rows
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays
from .cases_moe import choose as variant

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def problem(
    tokens: int, top_k: int = 8, columns: int = 7168, dtype: str = "bf16", experts: int = 128
) -> dict[str, Any]:
    """Every choice has a place, without tiles."""
    return rows.problem_of(dtype, tokens, top_k, columns, experts)


def label(p: Problem) -> str:
    """ "bf16 T4096 K8 H7168"."""
    return f"{p['dtype']} T{p['tokens']} K{p['top_k']} H{p['columns']}"


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        problem(4096),
        problem(4096, dtype="fp32"),
        problem(32_768, 2, 4096, experts=64),
        problem(64),
        problem(1),
    ],
    "quick": [problem(4096), problem(64)],
}


def inputs(p: Problem, device: Any) -> Arrays:
    """Fresh rows and weights, and the groups of random choices."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    dtype = getattr(torch, _DTYPES[p["dtype"]])
    scores = torch.rand(p["tokens"], p["groups"], device=place)
    weights, ids = scores.topk(p["top_k"])
    found = fkjit.moe_regroup(ids.int(), p["groups"])
    made = {"x": (p["tokens"], p["columns"]), "y": (p["places"], p["columns"])}
    fresh = {n: torch.randn(shape, dtype=dtype, device=place) for n, shape in made.items()}
    return {**fresh, "weights": weights, **found._asdict()}


def groups(arrays: Arrays) -> fkjit.MoeGroups:
    """What the calls take."""
    return fkjit.MoeGroups(*(arrays[name] for name in fkjit.MoeGroups._fields))


def expected_permute(p: Problem, arrays: Arrays) -> Expected:
    """Some rows, exactly."""
    some = slice(None, None, 97)
    tokens = arrays["sorted_token_ids"][some].long() // p["top_k"]
    return Expected([(some, arrays["x"][tokens].double())], 0.0)


def expected_combine(p: Problem, arrays: Arrays) -> Expected:
    """Some rows, in float64."""
    some = slice(None, None, 97)
    y = arrays["y"][arrays["inverse"][some].long()].double()
    made = (y * arrays["weights"][some, :, None].double()).sum(1)
    return Expected([(some, made)], LIMITS[p["dtype"]])


def choose(spec: KernelSpec, p: Problem, arch: Arch) -> Params:
    """What the public calls would take of this kernel."""
    if spec is rows.COMBINE:
        return rows.combine_variant(p)
    return variant({"dtype": p["dtype"], "vector": p["vector"]}, spec, arch)
