"""The backward kernels of LayerNorm and RMSNorm, and which of them a row takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.ops.norm import problem as norm_problem
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
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, KernelSpec, Param, Params, Problem, SharedLayout, register

TILES: tuple[Tile, ...] = ((32, 1, 1), (128, 1, 1), (128, 2, 1), (256, 2, 1), (512, 2, 1))
SCALAR_TILES: tuple[Tile, ...] = ((32, 1, 1), (256, 2, 1))
STAGED_TILE: Tile = (512, 4, 1)  # its next row travels in shared memory
WIDE_THREADS, PART_THREADS, SUM_WARPS = 512, 128, 32
_SUM_COLUMNS = 32  # of a block
NAMES = ("dy", "dsum", "x", "weight", "mean", "rstd", "dx", "dweight_parts", "dbias_parts")
STRIDED = ("dy", "dsum", "x", "dx")
_DX_TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 4e-6}


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


def _problem(params: Params, rows: int, columns: int, gap: int, parts: int) -> dict[str, Any]:
    made = norm_problem.problem(params, rows, columns, gap, "weight", residual=gap > 0)
    return {**made, "parts": parts}


def _problems(params: Params, full: int, group: int) -> list[dict[str, Any]]:
    """Rows that fill a tile, and some that do not, with gaps between them and dsum."""
    step = norm_problem.size(params["dtype"])
    less = max(step, full - 3 * step) if params["vector"] else full - 13
    return [
        _problem(params, 2, full, 0, 2 * group),
        _problem(params, 5, less, step, group),
        {**_problem(params, 1, max(step, full // 3 // step * step), 0, group), "affine": "none"},
    ]


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    made = norm_problem.inputs(params, {**p, "residual": False}, rng)
    seen = norm_problem.seen(p, made["x"])
    _, mean, rstd = norm_problem.normalised(seen, params["centered"], p["eps"])
    for name in ("dy", *(("dsum",) if p["residual"] else ())):
        made[name] = norm_problem.normal(rng, made["x"].size, p["dtype"])
    return {**made, "mean": mean.astype(np.float32), "rstd": rstd.astype(np.float32)}


def _reference(centered: bool, p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """dx, and the parts of dweight and dbias: row i belongs to part i % parts."""
    double = {n: np.asarray(a).astype(np.float64) for n, a in arrays.items() if a is not None}
    x, dy = (norm_problem.seen(p, double[name]) for name in ("x", "dy"))
    mean = double["mean"][:, None] if centered else 0.0
    rstd = double["rstd"][:, None]
    h, g = (x - mean) * rstd, dy * double.get("weight", 1.0)
    dx = g - h * (g * h).mean(-1, keepdims=True)
    dx = (dx - g.mean(-1, keepdims=True) if centered else dx) * rstd
    if "dsum" in double:
        dx = dx + norm_problem.seen(p, double["dsum"])
    made: Arrays = {"dx": np.full(norm_problem.extent(p), np.nan)}
    norm_problem.seen(p, made["dx"])[...] = dx
    for name, terms in (("dweight_parts", dy * h), ("dbias_parts", dy)):
        made[name] = np.zeros((p["parts"], p["columns"]))
        np.add.at(made[name], np.arange(p["rows"]) % p["parts"], terms)
    return made


def _outputs(centered: bool, wanted: tuple[str, ...], p: Problem) -> Arrays:
    shapes: dict[str, tuple[int, ...]] = {"dx": (norm_problem.extent(p),)}
    for name in ("dweight_parts", *(("dbias_parts",) if centered else ())):
        shapes[name] = (p["parts"], p["columns"])
    kinds = {"dx": numpy_dtype(p["dtype"])}
    return {
        name: np.full(shape, np.nan, kinds.get(name, np.float32))
        for name, shape in shapes.items()
        if name in wanted
    }


def traffic(p: Problem) -> float:
    """Bytes of dy, x and dsum read and dx written."""
    streams = 4 if p["residual"] else 3
    return float(streams * ITEMSIZE[p["dtype"]]) * p["rows"] * p["columns"]


def _shared(centered: bool, wanted: tuple[str, ...]) -> dict[str, Any]:
    """What the kernels that read rows say of themselves; `wanted`: the outputs of one."""

    def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
        found = _reference(centered, p, arrays)
        return {name: found[name] for name in _outputs(centered, wanted, p)}

    return {
        "flops": lambda p: 16.0 * p["rows"] * p["columns"],
        "bytes": traffic,
        "shape_class": shape_class,
        "inputs": lambda params, p, rng: _inputs({**params, "centered": centered}, p, rng),
        "outputs": lambda params, p: _outputs(centered, wanted, p),
        "reference": reference,
        "arguments": arguments,
        "tolerance": lambda params: _DX_TOLERANCE[params["dtype"]],
    }


def _rows(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            op=op,
            name="backward",
            source="norm/backward.cu",
            entry="norm_backward",
            pdl=True,
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
            problems=lambda params, scale: _problems(
                params,
                capacity(params["dtype"], params["tile"]),
                threads(params["tile"]) // params["tile"][0],
            ),
            **_shared(centered, ("dx", "dweight_parts", "dbias_parts")),
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
            op=op,
            name="backward_staged",
            source="norm/backward_staged.cu",
            entry="norm_backward_staged",
            pdl=True,
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
            problems=lambda params, scale: _problems(
                {**params, "vector": True}, capacity(params["dtype"], params["tile"]), 1
            )[1:],
            **_shared(centered, ("dx", "dweight_parts", "dbias_parts")),
        )
    )


def _wide(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            op=op,
            name="backward_wide",
            source="norm/backward_wide.cu",
            entry="norm_backward_wide",
            pdl=True,
            doc="dx of rows of any width: a block looks at a row twice",
            params=(*DTYPES, Param("threads", (WIDE_THREADS,), "threads of a block", True)),
            derive=lambda params: {"centered": centered},
            illegal=wrong_weight,
            block=lambda params: (params["threads"], 1, 1),
            grid=lambda params, problem: (problem["rows"], 1, 1),
            problems=lambda params, scale: _problems(
                params, capacity(params["dtype"], (params["threads"], 2, 1)) + 72, 1
            ),
            **_shared(centered, ("dx",)),
        )
    )


def _weight_parts(op: str, centered: bool) -> KernelSpec:
    return register(
        KernelSpec(
            op=op,
            name="weight_parts",
            source="norm/weight_partials.cu",
            entry="norm_weight_parts",
            pdl=True,
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
            problems=lambda params, scale: _problems(
                {**params, "weight_dtype": params["dtype"]},
                capacity(params["dtype"], (params["threads"], 1, 1)) + 72,
                2,
            ),
            **_shared(centered, ("dweight_parts", "dbias_parts")),
        )
    )


def _sum_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    return [
        {"weight_dtype": params["weight_dtype"], "parts": parts, "columns": columns}
        for parts, columns in ((1, 7), (70, 72))
    ]


def _sum_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    shape = (p["parts"], p["columns"])
    names = ("dweight_parts", "dbias_parts")
    return {name: rng.standard_normal(shape, np.float32) for name in names}


def _sum_outputs(params: Params, p: Problem) -> Arrays:
    kind = numpy_dtype(p["weight_dtype"])
    return {name: np.full(p["columns"], np.nan, kind) for name in ("dweight", "dbias")}


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
            flops=lambda p: 2.0 * p["parts"] * p["columns"],
            bytes=lambda p: 8.0 * p["parts"] * p["columns"],
            problems=_sum_problems,
            inputs=_sum_inputs,
            outputs=_sum_outputs,
            arguments=_sum_arguments,
            reference=lambda p, arrays: {
                name: np.asarray(arrays[f"{name}_parts"]).astype(np.float64).sum(0)
                for name in ("dweight", "dbias")
            },
            tolerance=lambda params: {"fp16": 1e-3, "bf16": 8e-3, "fp32": 2e-6}[
                params["weight_dtype"]
            ],
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
