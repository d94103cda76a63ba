"""dk, dv and dq in fp32 FMAs, with any score features: for fp32, and for 16 bits on sm_75."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.backward.kernels import feature_values, rows_in_blocks
from fkjit.ops.attention.backward.kernels_preprocess import ALIGNED, CASES, OP
from fkjit.ops.attention.backward.tiles import PAIRS_FP32, every_tile, why_illegal
from fkjit.ops.attention.problem import shape_class
from fkjit.spec import KernelSpec, Param, Params, SharedLayout, Work

_DIMS = tuple(dim for dim, _ in PAIRS_FP32)
_PARAMS = (
    Param("dtype", ("fp32", "bf16", "fp16"), "element type of all arrays but lse and delta"),
    Param("head_dim", _DIMS, "of q and k, padded to this in shared memory"),
    Param("head_dim_v", _DIMS, "of v and dout, padded to this in shared memory"),
    Param("tile", every_tile("keys_fp32"), "rows of a block and of the others' tile, warps", True),
    ALIGNED,
)


def derive(params: Params) -> dict[str, Any]:
    """Template values."""
    own, other, warps = params["tile"]
    return feature_values("fp32", params, {"own": own, "other": other, "num_warps": warps})


def _layout(own: tuple[str, str], other: tuple[str, str], exchanged: tuple[str, ...]) -> Any:
    """Tiles of the block's own rows and of the others', padded by four floats a row, and scores."""

    def layout(params: Params) -> SharedLayout:
        (rows, others, _), dims = params["tile"], (params["head_dim"], params["head_dim_v"])
        return [
            *((name, 4 * rows * (dim + 4)) for name, dim in zip(own, dims, strict=True)),
            *((name, 4 * others * (dim + 4)) for name, dim in zip(other, dims, strict=True)),
            *((name, 4 * rows * (others + 4)) for name in exchanged),
        ]

    return layout


def _spec(
    name: str, file: str, wanted: tuple[str, ...], heads: str, rows: str,
    layout: Callable[..., SharedLayout],
) -> KernelSpec:  # fmt: skip
    return KernelSpec(
        op=OP,
        name=name,
        source=f"attention/{file}.cu",
        entry=f"attention_backward_{name}",
        doc=f"{' and '.join(wanted)} in fp32 FMAs: exact products; also 16 bits on sm_75",
        params=_PARAMS,
        derive=derive,
        illegal=lambda params: why_illegal(name, params),
        superseded=lambda params: frozenset({"bf16_mma"} if params["dtype"] != "fp32" else ()),
        shared_layout=layout,
        block=lambda params: (32 * params["tile"][2], 1, 1),
        grid=rows_in_blocks(heads, rows, lambda params: params["tile"][0]),
        shape_class=shape_class,
        arguments=problem.arguments,
        work=Work(
            flops=lambda one: problem.products(one, 2, len(wanted)),
            bytes=problem.traffic,
            interpreter_flops=6e8,
        ),
        verification=f"{CASES}:{'DQ' if wanted == ('dq',) else 'DKDV'}",
    )


DKDV_FP32 = _spec(
    "keys_fp32", "backward_dkdv_fp32", ("dk", "dv"), "heads_kv", "seqlen_k",
    _layout(("K", "V"), ("Q", "dO"), ("P", "dS")),
)  # fmt: skip
DQ_FP32 = _spec(
    "queries_fp32",
    "backward_dq_fp32",
    ("dq",),
    "heads_q",
    "seqlen_q",
    _layout(("Q", "dO"), ("K", "V"), ("dS",)),
)
