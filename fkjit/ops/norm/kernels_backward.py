"""The backward kernels of LayerNorm and RMSNorm, and which of them a row takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.norm.kernels import (
    DTYPES,
    Tile,
    capacity,
    parameters,
    shape_class,
    threads,
    wrong_weight,
)
from fkjit.ops.op.checks import FLOATS
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, SharedLayout, Work, register

TILES: tuple[Tile, ...] = ((32, 1, 1), (128, 1, 1), (128, 2, 1), (256, 2, 1), (512, 2, 1))
SCALAR_TILES: tuple[Tile, ...] = ((32, 1, 1), (256, 2, 1))
STAGED_TILE: Tile = (512, 4, 1)  # its next row travels in shared memory
WIDE_THREADS, PART_THREADS, SUM_WARPS = 512, 128, 32
_SUM_COLUMNS = 32  # of a block
NAMES = ("dy", "dsum", "x", "weight", "mean", "rstd", "dx", "dweight_parts", "dbias_parts")
STRIDED = ("dy", "dsum", "x", "dx")


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name; arrays that are not there are null pointers."""
    strides = problem.get("strides", {})
    return {
        **{name: arrays.get(name) for name in NAMES},
        **{f"{name}_stride": strides.get(name, problem["stride"]) for name in STRIDED},
        "rows": problem["rows"],
        "columns": problem["columns"],
    }


def parts_of(tile: Tile, rows: int, multiprocessors: int) -> int:
    """Groups of threads that take rows in turns: whole blocks, as many as run at once."""
    size = threads(tile)
    groups = size // tile[0]
    most = multiprocessors * max(1, _AT_ONCE.get(tile, 512) // size)
    return min(-(-rows // groups), most) * groups


# Threads of a multiprocessor; more hide more latency, and leave more parts to add.
_AT_ONCE: dict[Tile, int] = {(32, 1, 1): 256, (128, 1, 1): 768}


def traffic(p: Problem) -> float:
    """Bytes of dy, x and dsum read and dx written."""
    streams = 4 if p["residual"] else 3
    return float(streams * ITEMSIZE[p["dtype"]]) * p["rows"] * p["columns"]


def _shared(op: str, cases: str) -> dict[str, Any]:
    """What the kernels that read rows say of themselves."""
    return {
        "op": op,
        "pdl": True,
        "shape_class": shape_class,
        "arguments": arguments,
        "work": Work(flops=lambda p: 16.0 * p["rows"] * p["columns"], bytes=traffic),
        "verification": f"fkjit.ops.norm.cases_backward:{op.upper()}_{cases}",
    }


def _rows(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            name="backward",
            source="norm/backward.cu",
            entry="norm_backward",
            doc="dx, and parts of dweight and dbias, of rows that fit into registers",
            params=(*DTYPES, Param("tile", TILES, "(threads, vectors of each, 1) of a row", True)),
            derive=lambda params: {
                "centered": centered,
                **dict(zip(("lanes", "vectors"), params["tile"], strict=False)),
            },
            illegal=lambda params: (
                wrong_weight(params)
                if params["vector"] or params["tile"] in SCALAR_TILES
                else "is for 16-byte accesses"
            ),
            block=lambda params: (threads(params["tile"]), 1, 1),
            grid=lambda params, problem: (
                problem["parts"] * params["tile"][0] // threads(params["tile"]),
                1,
                1,
            ),
            **_shared(op, "ROWS"),
        )
    )


def _staged_layout(params: Params) -> SharedLayout:
    lanes, vectors, _ = params["tile"]
    names = (f"{name} stage {i}" for i in range(2) for name in ("dy", "x", "dsum"))
    return [(name, 16 * lanes * vectors) for name in ("weight", *names)]


def _staged(op: str, centered: bool) -> KernelSpec:
    """Weights of the rows' own type: wider ones leave no room."""
    return register(
        KernelSpec(
            name="backward_staged",
            source="norm/backward_staged.cu",
            entry="norm_backward_staged",
            doc="dx, and parts of dweight and dbias, of rows that travel through shared memory",
            params=(*DTYPES[:2], Param("tile", (STAGED_TILE,), "(threads, vectors of each, 1)")),
            derive=lambda params: {
                "centered": centered,
                **dict(zip(("lanes", "vectors"), params["tile"], strict=False)),
            },
            illegal=lambda params: (
                None
                if params["weight_dtype"] == params["dtype"]
                else "has room for weights of the rows' own type"
            ),
            features=lambda params: frozenset({"cp_async"}),
            shared_layout=_staged_layout,
            block=lambda params: (params["tile"][0], 1, 1),
            grid=lambda params, problem: (problem["parts"], 1, 1),
            **_shared(op, "STAGED"),
        )
    )


def _wide(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            name="backward_wide",
            source="norm/backward_wide.cu",
            entry="norm_backward_wide",
            doc="dx of rows of any width: a block looks at a row twice",
            params=(*DTYPES, Param("threads", (WIDE_THREADS,), "threads of a block", True)),
            derive=lambda params: {"centered": centered},
            illegal=wrong_weight,
            block=lambda params: (params["threads"], 1, 1),
            grid=lambda params, problem: (problem["rows"], 1, 1),
            **_shared(op, "WIDE"),
        )
    )


def _weight_parts(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            name="weight_parts",
            source="norm/weight_partials.cu",
            entry="norm_weight_parts",
            doc="parts of dweight and dbias of rows of any width",
            params=(
                DTYPES[0],
                DTYPES[2],
                Param("threads", (PART_THREADS,), "threads of a block", True),
            ),
            derive=lambda params: {"centered": centered},
            block=lambda params: (params["threads"], 1, 1),
            grid=lambda params, problem: (
                -(-problem["columns"] // capacity(params["dtype"], (params["threads"], 1, 1))),
                problem["parts"],
                1,
            ),
            **_shared(op, "WEIGHT_PARTS"),
        )
    )


def _sum_arguments(
    params: Params, problem: Problem, arrays: Mapping[str, Any]
) -> Mapping[str, Any]:
    names = ("dweight_parts", "dbias_parts", "dweight", "dbias")
    sizes = {name: problem[name] for name in ("parts", "columns")}
    return {**{name: arrays.get(name) for name in names}, **sizes}


def _sum(op: str) -> KernelSpec:
    return register(
        KernelSpec(
            op=op,
            name="sum_parts",
            source="norm/sum_partials.cu",
            entry="norm_sum_parts",
            pdl=True,
            doc="dweight and dbias out of their parts, in a fixed order",
            params=(
                Param("weight_dtype", FLOATS, "element type of dweight and dbias"),
                Param("warps", (SUM_WARPS,), "warps of a block", True),
            ),
            block=lambda params: (32 * params["warps"], 1, 1),
            grid=lambda params, problem: (-(-problem["columns"] // _SUM_COLUMNS), 2, 1),
            arguments=_sum_arguments,
            work=Work(
                flops=lambda p: 2.0 * p["parts"] * p["columns"],
                bytes=lambda p: 8.0 * p["parts"] * p["columns"],
            ),
            verification="fkjit.ops.norm.cases_backward:SUM_PARTS",
        )
    )


BACKWARD = {"layer_norm": _rows("layer_norm", True), "rms_norm": _rows("rms_norm", False)}
BACKWARD_STAGED = {
    "layer_norm": _staged("layer_norm", True),
    "rms_norm": _staged("rms_norm", False),
}
BACKWARD_WIDE = {"layer_norm": _wide("layer_norm", True), "rms_norm": _wide("rms_norm", False)}
WEIGHT_PARTS = {
    "layer_norm": _weight_parts("layer_norm", True),
    "rms_norm": _weight_parts("rms_norm", False),
}
SUM_PARTS = {op: _sum(op) for op in ("layer_norm", "rms_norm")}


def choose(dtype: str, columns: int, vector: bool) -> Tile | None:
    """The tile of `backward` for rows of this width; None: they are for the wide kernels."""
    fitting = [t for t in (TILES if vector else SCALAR_TILES) if capacity(dtype, t) >= columns]
    return fitting[0] if fitting else None


def tile(op: str, kinds: Params, problem: Problem, arch: Arch) -> Tile | None:
    """The same, or the one that was found by `fkjit tune`, if it holds the row."""
    default = choose(problem["dtype"], problem["columns"], kinds["vector"])
    if default is None:
        return None
    return parameters(BACKWARD[op], {**kinds, "tile": default}, problem, arch)["tile"]


def takes_staged(op: str, kinds: Params, problem: Problem, arch: Arch) -> bool:
    """Whether rows too wide for a tile go through shared memory."""
    if not kinds["vector"] or capacity(problem["dtype"], STAGED_TILE) < problem["columns"]:
        return False
    params = {"tile": STAGED_TILE, **{n: kinds[n] for n in ("dtype", "weight_dtype")}}
    return BACKWARD_STAGED[op].why_not(params, arch) is None


def parts_of_wide(problem: Problem, multiprocessors: int) -> int:
    """Blocks of `weight_parts` on one piece of the rows: as many as fill the GPU."""
    pieces = -(-problem["columns"] // capacity(problem["dtype"], (PART_THREADS, 1, 1)))
    return max(1, min(problem["rows"], multiprocessors * _WIDE_BLOCKS // pieces))


_WIDE_BLOCKS = 16  # of a multiprocessor
