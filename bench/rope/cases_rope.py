"""Rotary position embedding of q and k, in one launch: cases, and how ours is called and checked.

`source` is the kernel that the public call takes: "fused", or "table" where it is given one.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.rope import kernels as kernels
from fkjit.ops.rope.cases import shape_of
from fkjit.spec import KernelSpec, Params, Problem
from fkjit.tuning import tuned

from ..core.accuracy import Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from .peers_rope import PEERS, in_place

_LIMITS = {"fp32": 3e-6, "fp16": 1e-3, "bf16": 8e-3}  # peers' angles are fp32's
_ROWS = 128  # checked, of the first and the last batch


def problem(
    layout: str, batch: int, length: int, heads_q: int, heads_k: int, dtype: str = "bf16",
    *, source: str = "fused", interleaved: bool = False, head_dim: int = 128,
    inplace: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Flat q ("thd") has an array of positions, others begin at 0."""
    return {
        "source": source,
        "dtype": dtype,
        "layout": layout,
        "batch": batch,
        "length": length,
        "heads_q": heads_q,
        "heads_k": heads_k,
        "head_dim": head_dim,
        "rotary_dim": head_dim,
        "interleaved": interleaved,
        "inplace": inplace,
        "inverse": False,
        "positions": "ids" if layout == "thd" else "none",
        "start": 0,
        "theta": 10_000.0,
        "scaling": None,
    }


def label(p: Problem) -> str:
    """ "bf16 bshd B4 S4096 H32/32 D128", "bf16 thd S8 H32/8 D128 interleaved table"."""
    batch = [] if p["layout"] == "thd" else [f"B{p['batch']}"]
    words = [p["dtype"], p["layout"], *batch, f"S{p['length']}", f"H{p['heads_q']}/{p['heads_k']}"]
    words += [f"D{p['head_dim']}", *["interleaved"] * p["interleaved"]]
    words += ["table"] * (p["source"] == "table")
    return " ".join([*words, *["in", "place"] * p["inplace"]])


_LARGE = (("bshd", 4, 4096, 32, 32), ("bhsd", 4, 4096, 32, 32), ("thd", 1, 16_384, 32, 8))
SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        *(problem(*shape, source=source) for source in ("fused", "table") for shape in _LARGE),
        *(problem(*_LARGE[2], source=source, inplace=True) for source in ("fused", "table")),
        problem(*_LARGE[2], interleaved=True),
        problem("thd", 1, 16_384, 32, 8, "fp32"),
        problem("thd", 1, 16_384, 32, 8, head_dim=64),
    ],
    "quick": [problem(*_LARGE[0]), problem(*_LARGE[2]), problem("thd", 1, 32, 32, 8)],
    "decode": [
        problem("thd", 1, tokens, 32, 8, source=source)
        for source in ("fused", "table")
        for tokens in (1, 8, 32, 256)
    ],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) q and k, positions in order from 0, a table where it is the source."""
    torch = device.torch
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem["dtype"]]
    place = getattr(device, "place", "cuda")
    made = {
        name: torch.randn(shape_of(problem, heads), dtype=dtype, device=place)
        for name, heads in (("q", problem["heads_q"]), ("k", problem["heads_k"]))
    }
    if problem["positions"] == "ids":
        made["positions"] = torch.arange(problem["length"], device=place)
    if problem["source"] == "table":
        made["table"] = fkjit.rope_table(problem["length"], problem["rotary_dim"], like=made["q"])
    return made


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Rows of q, of the first and the last batch: the last ones, and some of all others."""
    length, step = problem["length"], max(1, problem["length"] // _ROWS)
    rows = sorted({*range(0, length, step), length - 1})
    index: list[Any] = [(batch, slice(None), rows) for batch in {0, problem["batch"] - 1}]
    if problem["layout"] == "bshd":
        index = [(batch, rows) for batch in {0, problem["batch"] - 1}]
    if problem["layout"] == "thd":
        index = [rows]
    return Expected(
        [(at, _turned(problem, arrays["q"][at], rows)) for at in index], _LIMITS[problem["dtype"]]
    )


def _turned(problem: Problem, x: Any, rows: list[int]) -> Any:
    """Some rows of one batch in float64: [heads, rows, columns] of "bhsd", else rows first."""
    torch = import_module("torch")
    dim, x = problem["head_dim"], x.double()
    pair = torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim
    position = torch.tensor(rows, dtype=torch.float64, device=x.device)
    angle = position[:, None] * problem["theta"] ** -pair
    angle = angle if problem["layout"] == "bhsd" else angle[:, None]
    one = slice(0, dim, 2) if problem["interleaved"] else slice(0, dim // 2)
    two = slice(1, dim, 2) if problem["interleaved"] else slice(dim // 2, dim)
    made = torch.empty_like(x)
    made[..., one] = x[..., one] * angle.cos() - x[..., two] * angle.sin()
    made[..., two] = x[..., two] * angle.cos() + x[..., one] * angle.sin()
    return made


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    q, k = arrays["q"], arrays["k"]
    ids, table = arrays.get("positions"), arrays.get("table")
    options = {"interleaved": problem["interleaved"], "table": table}
    options |= {"layout": problem["layout"]} if problem["layout"] != "thd" else {}
    at = 0 if ids is None else ids
    spec = kernels.FUSED if table is None else kernels.TABLE
    variant = (spec, _parameters(spec, problem, arch_of(q))) if q.is_cuda else None
    if problem["inplace"]:
        made = in_place(q, k, lambda q, k: fkjit.rope(q, k, at, inplace=True, **options))
        return replace(made, variant=variant)
    return Prepared(lambda: fkjit.rope(q, k, at, **options), lambda made: made[0], variant=variant)


def _parameters(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    fixed = {name: problem[name] for name in ("dtype", "interleaved")}
    return tuned(spec, kernels.default({**fixed, "vector": True}, problem), problem, arch)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call takes."""
    if spec.name != problem["source"]:
        raise ParameterError(f"{spec.id} is not for cases of rope.{problem['source']}")
    return _parameters(spec, problem, arch)


OP = Op(
    name="rope",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=PEERS,
)
