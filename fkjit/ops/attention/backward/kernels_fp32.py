"""The kernels of `fkjit.attention_backward` in fp32 FMAs: for fp32, and for 16 bits on sm_75."""

from __future__ import annotations

from typing import Any

from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.backward.kernels import (
    ALIGNED,
    OP,
    kernel_arguments,
    kernel_reference,
    rows_in_blocks,
)
from fkjit.ops.attention.features import PLAIN
from fkjit.ops.attention.problem import shape_class
from fkjit.spec import KernelSpec, Param, Params, SharedLayout, register

# (rows of a block, rows of a tile of the others, warps), fastest first; the last one fits on sm_75
TILES: dict[int, tuple[Any, ...]] = {
    64: ((64, 32, 4), (32, 32, 2)),
    128: ((32, 32, 2), (16, 16, 1)),
    256: ((16, 16, 2), (8, 16, 1)),
}
PAIRS = tuple((dim, dim) for dim in TILES)
_ALL = tuple(dict.fromkeys(tile for tiles in TILES.values() for tile in tiles))
_PARAMS = (
    Param("dtype", ("fp32", "bf16", "fp16"), "element type of all arrays but lse and delta"),
    Param("head_dim", tuple(TILES), "of q and k, padded to this in shared memory"),
    Param("head_dim_v", tuple(TILES), "of v and dout, padded to this in shared memory"),
    Param("tile", _ALL, "rows of a block and of the others' tile, warps", tunable=True),
    ALIGNED,
)


def _illegal(params: Params) -> str | None:
    dims = (params["head_dim"], params["head_dim_v"])
    if dims not in PAIRS:
        return "is compiled for head_dim_v = head_dim only, both padded"
    if params["tile"] not in TILES[dims[0]]:
        return f"is not a tile for head_dim={dims[0]}"
    if not params["aligned"] and params["tile"] != TILES[dims[0]][-1]:
        return "copies whole 16-byte chunks, and these rows do not start on 16-byte boundaries"
    if params["aligned"] and params["dtype"] != "fp32":
        return "is not compiled for 16 bits: aligned or not, they are fetched one by one"
    return None


def _derive(params: Params) -> dict[str, Any]:
    names = ("own", "other", "num_warps")
    return {**PLAIN, **dict(zip(names, params["tile"], strict=True))}


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
    name: str, file: str, wanted: tuple[str, ...], heads: str, rows: str, layout: Any
) -> KernelSpec:
    def problems(params: Params, scale: str) -> list[dict[str, Any]]:
        own, other, _ = params["tile"]
        pair = (other, own) if name == "keys_fp32" else (own, other)
        return shared.problems(*pair, params, scale)

    return register(
        KernelSpec(
            op=OP,
            name=name,
            source=f"attention/{file}.cu",
            entry=f"attention_backward_{name}",
            doc=f"{' and '.join(wanted)} in fp32 FMAs: exact products; also 16 bits on sm_75",
            params=_PARAMS,
            derive=_derive,
            illegal=_illegal,
            superseded=lambda params: frozenset({"bf16_mma"} if params["dtype"] != "fp32" else ()),
            shared_layout=layout,
            block=lambda params: (32 * params["tile"][2], 1, 1),
            grid=rows_in_blocks(heads, rows, lambda params: params["tile"][0]),
            flops=lambda problem: shared.products(problem, 2, len(wanted)),
            bytes=shared.traffic,
            shape_class=shape_class,
            interpreter_flops=6e8,
            problems=problems,
            inputs=shared.inputs,
            outputs=shared.outputs(wanted),
            arguments=kernel_arguments(shared.GIVEN, wanted),
            reference=kernel_reference(wanted),
            tolerance=shared.tolerance,
        )
    )


KEYS_FP32 = _spec(
    "keys_fp32", "backward_dkdv_fp32", ("dk", "dv"), "heads_kv", "seqlen_k",
    _layout(("K", "V"), ("Q", "dO"), ("P", "dS")),
)  # fmt: skip
QUERIES_FP32 = _spec(
    "queries_fp32", "backward_dq_fp32", ("dq",), "heads_q", "seqlen_q",
    _layout(("Q", "dO"), ("K", "V"), ("dS",)),
)  # fmt: skip
