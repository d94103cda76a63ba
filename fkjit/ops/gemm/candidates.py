"""The kernels among which a product chooses: what each takes, its tiles, and how fast it is.

Another kernel is another row of `CANDIDATES`. Its rates are measured on a GPU (bench/gemm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fkjit.ops.gemm import kernels
from fkjit.ops.gemm.cost import Rates, Shape, Tile
from fkjit.spec import KernelSpec, Params, Problem

Scratch = tuple[int, int]  # bytes of workspace, counters


def _nothing(params: Params, problem: Problem) -> Scratch:
    return 0, 0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel.

    spec: with every variant that a call may take. refuses: why it does not take a shape, or None.
    fixed: the parameters that follow from a shape, among those that the spec has. tile: what one
    block does. rates: on a GPU that has the spec's features. tile_name: of its parameter.
    """

    spec: KernelSpec
    tile: Callable[[Params, Shape], Tile]
    rates: Callable[[Params], Rates]
    refuses: Callable[[Shape], str | None] = lambda shape: None
    fixed: Callable[[Shape], Mapping[str, Any]] = lambda shape: {}
    scratch: Callable[[Params, Problem], Scratch] = _nothing
    tile_name: str = "block"


# ------------------------------------------------------------------ tiled


def _tiled_tile(params: Params, shape: Shape) -> Tile:
    block = params["block"]
    return Tile(block, block * (2 if shape.gate else 1), 16)


# ------------------------------------------------------------------ the table

CANDIDATES: dict[str, Candidate] = {
    "tiled": Candidate(
        spec=kernels.TILED,
        tile=_tiled_tile,
        rates=lambda params: Rates(
            flops=128.0 if params["block"] == 64 else 64.0, start=2000, epilogue=0.05, resident=2
        ),
    ),
}
