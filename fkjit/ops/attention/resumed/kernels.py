"""Attention that goes on where it stopped: flash and flash_sm90 whose rows begin with what other
keys left (templates/attention/row_state.cuh).

A problem is attention's with `done`: (first, end), the rows whose o is rounded at the end. Arrays
besides q, k, v and o: sums [batch, heads_q, seqlen_q, head_dim_v], o so far in fp32, and lse, which
are read and written; rows of o that are not done are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.attention import problem as shared
from fkjit.ops.attention.kernels import FLASH
from fkjit.ops.attention.kernels_sm90 import FLASH_SM90
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, register

OP = "attention_resumed"
HEAD_DIMS = (64, 128, 256)  # of flash; q and k are as wide as v, padded
TILES = {64: (128, 64, 32), 128: (64, (64, 32), 32), 256: ((64, 32), 32)}
# Many queries: tiles of the most rows.
TILES_SM90: dict[int, tuple[Any, ...]] = {
    64: ((256, 64), 128), 96: ((192, 96), 128), 128: (128,), 192: ((128, 96),), 256: ((128, 80),),
}  # fmt: skip
_NUMBERS = ", const int lse_rows, const int done_first, const int done_end"
_FP32 = 4


def _values(params: Params, base: KernelSpec) -> dict[str, Any]:
    """What the templates name."""
    sm90 = base is FLASH_SM90
    own = {
        "resumed": True, "state_array": ", float* __restrict__ sums",
        "state_numbers": ", const Strides sums_strides" + _NUMBERS,
    }  # fmt: skip
    if not sm90:
        return {**base.derive(params), **own}
    numbers = ", const Strides o_strides, const int head_dim_v" + own["state_numbers"]
    usual = base.derive(params)
    return {**usual, **own, "staged": False, "o_scalars": numbers}


def _arguments(base: KernelSpec) -> Callable[..., dict[str, Any]]:
    def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        lse, places = arrays["lse"], shared.axes(problem)
        first, end = problem["done"]
        return {
            **base.arguments(params, problem, arrays), "sums": arrays["sums"],
            "sums_strides": shared.row_strides(places, arrays["sums"]),
            "lse_rows": lse.strides[1] // _FP32, "done_first": first, "done_end": end,
        }  # fmt: skip

    return arguments


def _traffic(problem: Problem) -> float:
    """Bytes: as of attention, but o so far is read, and written unless it is done."""
    rows = problem["batch"] * problem["heads_q"] * problem["head_dim_v"]
    first, end = problem["done"]
    left = problem["seqlen_q"] - (end - first)
    more = _FP32 * (problem["seqlen_q"] + left) - ITEMSIZE[problem["dtype"]] * left
    return shared.traffic(problem) + rows * more


def _illegal_flash(params: Params) -> str | None:
    dims = params["head_dim"], params["head_dim_v"]
    if dims[0] != dims[1]:
        return "is compiled for head_dim_v = head_dim only, both padded"
    if params["block"] not in TILES[dims[0]]:
        return f"is not a tile for head_dim={dims[0]}"
    return FLASH.illegal(params)


def _illegal_sm90(params: Params) -> str | None:
    if params["block"] not in TILES_SM90[params["head_dim"]]:
        return f"is not a tile for head_dim={params['head_dim']}"
    return FLASH_SM90.illegal(params)


def _values_of(base: KernelSpec, **values: tuple[Any, ...]) -> tuple[Param, ...]:
    return tuple(replace(p, values=values[p.name]) if p.name in values else p for p in base.params)


def _tiles(tiles: Mapping[int, tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(tile for some in tiles.values() for tile in some))


def _resumed(base: KernelSpec, cases: str, illegal: Any, params: tuple[Param, ...]) -> KernelSpec:
    return register(
        replace(
            base,
            op=OP,
            doc=f"{base.name} whose rows begin with what other keys left",
            params=params,
            illegal=illegal,
            derive=lambda params: _values(params, base),
            arguments=_arguments(base),
            work=replace(base.work, bytes=_traffic),
            verification=f"fkjit.ops.attention.resumed.cases:{cases}",
        )
    )


_NARROW = {"head_dim": HEAD_DIMS, "head_dim_v": HEAD_DIMS, "aligned": (True,)}
RESUMED_SM90 = _resumed(
    FLASH_SM90, "SM90", _illegal_sm90, _values_of(FLASH_SM90, block=_tiles(TILES_SM90))
)
RESUMED = _resumed(
    FLASH, "PORTABLE", _illegal_flash, _values_of(FLASH, block=_tiles(TILES), **_NARROW)
)
