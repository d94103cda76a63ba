"""Few queries of many keys on Hopper: flash_sm90 with several heads in a tile of queries and its
keys in parts, and the kernel that puts what the parts found together.

A problem has `parts`, how many, besides what attention's have; what they found is o_parts
[parts, batch, heads_q, seqlen_q, width] and lse_parts [parts, batch, heads_q, seqlen_q], width the
padded head_dim_v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.attention import problem as shared
from fkjit.ops.attention.kernels_sm90 import FLASH_SM90, PAIRS, SMS, ways
from fkjit.ops.attention.problem import split_block
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

# The tile of each padded head_dim: two consumers, one's exponentials under the other's products.
TILE = {64: 128, 96: 128, 128: 128, 192: (128, 96), 256: (128, 80)}
HEADS = (1, 2, 4, 8)  # a warp's 16 rows belong to one head
MOST_PARTS = 64
_THREADS = 128
_COLUMNS = 4  # of a thread


def _illegal(params: Params) -> str | None:
    dims = params["head_dim"], params["head_dim_v"]
    if dims not in PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if params["block"] != TILE[dims[0]]:
        return f"is not the tile of head_dim={dims[0]}"
    if params["optimistic"] not in ways(dims[0], params["block"]):
        return f"is not compiled with optimistic={params['optimistic']}"
    if params["heads"] == 1 and not params["parts"]:
        return "is flash_sm90 itself"
    return None


def works(params: Params, problem: Problem) -> int:
    """Tiles of queries, each as often as its keys have parts."""
    rows = split_block(params["block"])[0] // params["heads"]
    heads = problem["heads_q"] // params["heads"] * problem["batch"]
    return -(-problem["seqlen_q"] // rows) * heads * problem.get("parts", 1)


def _grid(params: Params, problem: Problem) -> Dim3:
    return (min(works(params, problem), problem.get("multiprocessors", SMS)), 1, 1)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of flash_sm90. Where keys have parts, o is theirs and so is lse."""
    found = dict(FLASH_SM90.arguments(params, problem, arrays))
    found["section_heads"] = max(found["section_heads"] // params["heads"], 1)
    if not params["parts"]:
        return found
    own = {name: arrays[name] for name in ("o_parts", "lse_parts")}
    return found | own | {"parts": problem["parts"]}


FEW = register(
    replace(
        FLASH_SM90,
        op="attention_few",
        doc="flash_sm90 for few queries: a group's heads in a tile, keys in parts",
        params=(
            *(replace(p, values=tuple(TILE.values())) if p.name == "block" else p
              for p in FLASH_SM90.params),
            Param("heads", HEADS, "of a group, whose queries share a tile"),
            Param("parts", (False, True), "whether keys are seen in parts"),
        ),
        illegal=_illegal,
        grid=_grid,
        arguments=_arguments,
        verification="fkjit.ops.attention.cases_few:FEW",
    )
)  # fmt: skip


# ------------------------------------------------------------------ parts put together


def _rows(problem: Problem) -> int:
    return problem["batch"] * problem["heads_q"] * problem["seqlen_q"]


def _combine_grid(params: Params, problem: Problem) -> Dim3:
    return (-(-_rows(problem) * (problem["width"] // _COLUMNS) // _THREADS), 1, 1)


def _combine_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> Any:
    o = arrays["o"]
    return {
        "o_parts": arrays["o_parts"], "lse_parts": arrays["lse_parts"], "o": o,
        "lse": arrays.get("lse"), "o_strides": shared.row_strides(shared.axes(problem), o),
        "parts": problem["parts"], "heads_q": problem["heads_q"],
        "seqlen_q": problem["seqlen_q"], "rows": _rows(problem), "columns": problem["head_dim_v"],
    }  # fmt: skip


def _combine_bytes(problem: Problem) -> float:
    """Bytes of the parts read and of o written."""
    rows, parts, width = _rows(problem), problem["parts"], problem["width"]
    return float(rows * (parts * 4 * (width + 1) + 2 * problem["head_dim_v"]))


COMBINE = register(
    KernelSpec(
        op="attention_few",
        name="combine",
        source="attention/combine.cu",
        entry="attention_combine",
        doc="what attention found in parts of the keys, put together",
        params=(
            Param("dtype", ("fp16", "bf16"), "element type of o"),
            Param("head_dim_v", (64, 96, 128, 192, 256), "columns of a part's rows"),
        ),
        pdl=True,
        block=lambda params: (_THREADS, 1, 1),
        grid=_combine_grid,
        arguments=_combine_arguments,
        work=Work(
            flops=lambda p: 2.0 * p["parts"] * _rows(p) * p["head_dim_v"], bytes=_combine_bytes
        ),
        verification="fkjit.ops.attention.cases_few:COMBINE",
    )
)
