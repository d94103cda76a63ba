"""The forward kernels of LayerNorm and RMSNorm, and which of their tiles a row takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.op.checks import FLOATS
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register, size_class
from fkjit.symbolic import decision
from fkjit.tuning import lookup

# Threads of a block on one row, 16-byte vectors of each, blocks of a row.
Tile = tuple[int, int, int]

TILES: tuple[Tile, ...] = (
    (32, 1, 1), (32, 4, 1), (128, 2, 1), (128, 4, 1), (256, 2, 1), (256, 4, 1), (512, 2, 1),
    (512, 4, 1), (512, 1, 4), (512, 4, 2), (512, 4, 4),
)  # fmt: skip
SCALAR_TILES: tuple[Tile, ...] = ((32, 4, 1), (512, 2, 1))
# Tiles whose blocks take several rows, each with the next one's loads under way.
PIPELINED: tuple[Tile, ...] = ((32, 1, 1), (256, 2, 1), (512, 2, 1))
# Blocks on a multiprocessor that registers have to suffice for; of pipelined ones these are all.
# LayerNorm's and RMSNorm's; 1 where it is not said.
_RESIDENT: dict[Tile, tuple[int, int]] = {
    **{(32, 1, 1): (8, 8), (32, 4, 1): (8, 8), (128, 2, 1): (8, 8), (128, 4, 1): (8, 8)},
    **{(256, 2, 1): (3, 4), (512, 2, 1): (1, 2), (512, 4, 1): (2, 2), (512, 4, 2): (2, 2)},
    **{(256, 4, 1): (4, 4), (512, 4, 4): (2, 2)},
}
WIDE_THREADS = 512
_MOST_ROWS = 1 << 14  # more make no difference to what is the fastest
_WARP_BLOCK = 128  # threads of a block whose warps have a row each
NAMES = ("x", "residual", "weight", "bias", "out", "sum", "mean", "rstd")
STRIDED = ("x", "residual", "out", "sum")
_ABSENT = dict.fromkeys(NAMES)

DTYPES = (
    Param("dtype", FLOATS, "element type of x, residual, out and sum"),
    Param("weight_dtype", FLOATS, "element type of weight and bias: dtype or fp32"),
    Param("vector", (True, False), "16-byte accesses: rows that allow them"),
)


def size(dtype: str) -> int:
    """Elements of 16 bytes."""
    return 16 // ITEMSIZE[dtype]


def capacity(dtype: str, tile: Tile) -> int:
    """The widest row that a tile holds."""
    lanes, vectors, cluster = tile
    return lanes * vectors * cluster * size(dtype)


def threads(tile: Tile) -> int:
    """Threads of a block: a row's, or those of four rows of a warp each."""
    return max(tile[0], _WARP_BLOCK)


def blocks(tile: Tile, problem: Problem) -> int:
    """Blocks for all rows at once, or the `most` that the problem allows; whole clusters."""
    groups = -(-problem["rows"] // (threads(tile) // tile[0]))
    return min(groups, problem["most"] or groups) * tile[2]


def resident(op: str, tile: Tile) -> int:
    """Blocks of this tile that a multiprocessor has at once, at least."""
    return _RESIDENT.get(tile, (1, 1))[op == "rms_norm"]


def _asked(params: Params, op: str) -> int:
    """What ptxas is asked for; single elements and wider weights would spill for more."""
    tile = params["tile"]
    if params["vector"] and params["weight_dtype"] == params["dtype"]:
        return resident(op, tile)
    return resident("layer_norm", tile) if tile in PIPELINED else 1


def wrong_weight(params: Params) -> str | None:
    """Why these dtypes do not go together, or None."""
    if params["weight_dtype"] in (params["dtype"], "fp32"):
        return None
    return f"weight_dtype={params['weight_dtype']} is neither dtype={params['dtype']} nor fp32"


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name; arrays that are not there are null pointers."""
    steps = dict.fromkeys(STRIDED, problem["stride"])
    steps.update(problem.get("strides", {}))
    return {
        **_ABSENT,
        **arrays,
        "x_stride": steps["x"],
        "residual_stride": steps["residual"],
        "out_stride": steps["out"],
        "sum_stride": steps["sum"],
        "rows": problem["rows"],
        "columns": problem["columns"],
        "eps": problem["eps"],
    }


def _illegal(params: Params) -> str | None:
    if not params["vector"] and params["tile"] not in SCALAR_TILES:
        return "is for 16-byte accesses"
    return wrong_weight(params)


def shape_class(problem: Problem) -> dict[str, Any]:
    """Problems that share their tuned values, those of the backward too."""
    return {
        "rows": size_class(problem["rows"], _MOST_ROWS),
        "columns": size_class(problem["columns"], 1 << 16),
        "residual": problem["residual"],
    }


def traffic(p: Problem) -> float:
    """Bytes of the rows read and written, and of the weights."""
    streams = 4 if p["residual"] else 2
    rows = float(streams * ITEMSIZE[p["dtype"]]) * p["rows"] * p["columns"]
    given = {"none": 0, "weight": 1, "both": 2}[p["affine"]]
    return rows + given * ITEMSIZE[p["weight_dtype"]] * p["columns"]


def _shared(op: str, cases: str) -> dict[str, Any]:
    """What both forward kernels say of themselves."""
    return {
        "op": op,
        "pdl": True,
        "shape_class": shape_class,
        "arguments": arguments,
        "work": Work(flops=lambda p: 8.0 * p["rows"] * p["columns"], bytes=traffic),
        "verification": f"fkjit.ops.norm.cases:{op.upper()}_{cases}",
    }


def _rows(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            name="rows",
            source="norm/rows.cu",
            entry="norm_rows",
            doc="rows that fit into registers: one pass",
            params=(
                *DTYPES,
                Param("tile", TILES, "(threads, vectors of each, blocks) of a row", tunable=True),
            ),
            derive=lambda params: {
                "centered": centered,
                "pipelined": params["tile"] in PIPELINED,
                "resident": _asked(params, op),
                **dict(zip(("lanes", "vectors", "cluster"), params["tile"], strict=True)),
            },
            illegal=_illegal,
            features=lambda params: frozenset({"cluster"} if params["tile"][2] > 1 else ()),
            block=lambda params: (threads(params["tile"]), 1, 1),
            grid=lambda params, problem: (blocks(params["tile"], problem), 1, 1),
            **_shared(op, "ROWS"),
        )
    )


def _wide(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            name="wide",
            source="norm/wide.cu",
            entry="norm_wide",
            doc="rows of any width: a block looks at a row twice",
            params=(*DTYPES, Param("threads", (WIDE_THREADS,), "threads of a block", tunable=True)),
            derive=lambda params: {"centered": centered},
            illegal=wrong_weight,
            block=lambda params: (params["threads"], 1, 1),
            grid=lambda params, problem: (problem["rows"], 1, 1),
            **_shared(op, "WIDE"),
        )
    )


ROWS = {
    "layer_norm": _rows("layer_norm", True),
    "rms_norm": _rows("rms_norm", False),
}
WIDE = {
    "layer_norm": _wide("layer_norm", True),
    "rms_norm": _wide("rms_norm", False),
}


def choose(
    op: str, dtype: str, columns: int, rows: int, vector: bool, clusters: bool
) -> tuple[KernelSpec, dict[str, Any]]:
    """The kernel, and its tile or threads, for `rows` rows of `columns`; measured on an H200."""
    tiles = _tightest(dtype, columns, vector, clusters, rows <= _ROWS_OF_CLUSTERS)
    if not tiles:
        return WIDE[op], {"threads": WIDE_THREADS}
    few = rows <= _FEW_ROWS.get(tiles[-1], _MOST_FEW_ROWS)
    return ROWS[op], {"tile": tiles[-1 if few else 0]}


@decision(1024)
def _tightest(
    dtype: str, columns: int, vector: bool, clusters: bool, single: bool
) -> tuple[Tile, ...]:
    """The tiles that hold rows of `columns` with the least to spare; none where no tile does."""
    tiles = [t for t in (TILES if vector else SCALAR_TILES) if clusters or t[2] == 1]
    if not single:
        tiles = [t for t in tiles if t != _FOR_SINGLE_ROWS]
    room = {t: capacity(dtype, t) for t in tiles if capacity(dtype, t) >= columns}
    return tuple(t for t in room if room[t] == min(room.values()))


def parameters(spec: KernelSpec, params: Params, problem: Problem, arch: Arch) -> dict[str, Any]:
    """What `choose` found, or the tile that was found by `fkjit tune`, if it holds the row."""
    found = lookup(spec, params, problem, arch)
    if found is None or "tile" not in found:
        return dict(params)
    holds = capacity(params["dtype"], found["tile"]) >= problem["columns"]
    return {**params, **found} if holds else dict(params)


_FOR_SINGLE_ROWS: Tile = (512, 1, 4)  # more SMs on one row
_ROWS_OF_CLUSTERS = 32  # up to here they are there for it
_FEW_ROWS: dict[Tile, int] = {(512, 2, 1): 32}  # up to here a row is better off with more threads
_MOST_FEW_ROWS = 4096
