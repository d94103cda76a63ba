"""Partial attention put together: two parts and stacks, of decoding and of prompts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.attention.merge.cases import problem_of
from fkjit.ops.attention.merge.kernels import ROW_AXES, kernel, parameters
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays, Op, Prepared
from .peers_merge_states import PEERS

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_STEP = 61  # one row in so many is compared


def problem(
    batch: int, rows: int, parts: int = 2, pair: bool = True, dtype: str = "bf16",
    heads: int = 32, dim: int = 128,
) -> dict[str, Any]:  # fmt: skip
    """o [B, S, H, D], as FlashInfer has it; every part saw keys."""
    return problem_of(dtype, (batch, heads, rows), dim, parts, pair, "bshd", empty=0.0)


def label(p: Problem) -> str:
    """ "bf16 B1 S16384 H32 D128 x2", "… stack of 8"."""
    batch, heads, rows = p["shape"]
    kind = "x2" if p["pair"] else f"stack of {p['parts']}"
    return f"{p['dtype']} B{batch} S{rows} H{heads} D{p['columns']} {kind}"


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        problem(1, 16_384),
        problem(1, 16_384, dtype="fp32"),
        problem(1, 4096, 8, False),
        problem(64, 1),
        problem(64, 1, 8, False),
        problem(1, 1),
    ],
    "quick": [problem(1, 16_384), problem(64, 1)],
}


def inputs(p: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) parts, and sums of exponentials of like size."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    dtype = getattr(torch, _DTYPES[p["dtype"]])
    rows = p["shape"]
    shape = [rows[axis] for axis in ROW_AXES[p["layout"]]]
    names = (("o", "lse"), ("other", "other_lse")) if p["pair"] else (("o", "lse"),)
    parts = [] if p["pair"] else [p["parts"]]
    made = {}
    for o, lse in names:
        made[o] = torch.randn(*parts, *shape, p["columns"], dtype=dtype, device=place)
        made[lse] = torch.randn(*parts, *rows, device=place)
    return made


def stacked(p: Problem, arrays: Arrays) -> tuple[Any, Any]:
    """All parts in one array each."""
    if not p["pair"]:
        return arrays["o"], arrays["lse"]
    torch = import_module("torch")
    pairs = (("o", "other"), ("lse", "other_lse"))
    o, lse = (torch.stack([arrays[name] for name in names]) for names in pairs)
    return o, lse


def expected(p: Problem, arrays: Arrays) -> Expected:
    """Some rows, in float64."""
    o, lse = stacked(p, arrays)
    weights = lse.transpose(-1, -2).double().softmax(0).flatten(1, 3)[:, ::_STEP]
    made = (weights[..., None] * o.flatten(1, 3)[:, ::_STEP].double()).sum(0)
    return Expected([(slice(None, None, _STEP), made)], LIMITS[p["dtype"]])


def rows_of(made: Any) -> Any:
    """o [B, S, H, D] of what a call returns as rows."""
    return made[0].flatten(0, 2)


def choose(spec: KernelSpec, p: Problem, arch: Arch) -> Params:
    """What the public call takes."""
    return parameters(p, True)


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    given = [arrays[name] for name in ("o", "lse", "other", "other_lse") if name in arrays]
    params = parameters(p, True)
    variant = (kernel(params["parts"]), params) if given[0].is_cuda else None
    return Prepared(lambda: fkjit.merge_states(*given, layout="bshd"), rows_of, variant=variant)


OP = Op(
    name="merge_states",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=PEERS,
)
