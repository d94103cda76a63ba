"""The kernels of `fkjit.attention_backward` on tensor cores of sm_80 and newer, and what comes
before them: one spec a `.cu` file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention import problem as forward
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.features import PLAIN
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, KernelSpec, Param, Params, Problem, SharedLayout, register

OP = "attention_backward"
PAIRS = ((64, 64), (128, 128), (192, 128), (256, 256))  # (head_dim, head_dim_v) that are compiled
TURN_ROWS = 16  # of dq that blocks add to in turn, where they do
ROW_THREADS = 256
_DIMS = (
    Param("head_dim", (64, 128, 192, 256), "of q and k, padded to this in shared memory"),
    Param("head_dim_v", (64, 128, 256), "of v and dout, padded to this in shared memory"),
)
_HALF = Param("dtype", ("fp16", "bf16"), "element type of all arrays but lse and delta")
ALIGNED = Param("aligned", (True, False), "rows of all arrays start on 16-byte boundaries")
_NEEDS = frozenset({"cp_async", "ldmatrix", "bf16_mma"})

# ------------------------------------------------------------------ delta and lse of each row


def row_lanes(problem: Problem) -> int:
    """Lanes that share a row: 16 bytes each, or several times 16."""
    vectors = -(-problem["head_dim_v"] * ITEMSIZE[problem["dtype"]] // 16)
    return min(32, 1 << (vectors - 1).bit_length())


def row_blocks(problem: Problem, length: int) -> int:
    """Thread blocks for `length` rows of each head; none has rows of two."""
    return problem["batch"] * problem["heads_q"] * -(-length * row_lanes(problem) // ROW_THREADS)


def _row_arguments(
    params: Params, problem: Problem, arrays: Mapping[str, Any]
) -> Mapping[str, Any]:
    names = ("dout", "o", "lse", "dlse", "lse_log2", "delta", "dq_sum", "turns")
    return {
        **{name: arrays.get(name) for name in names},
        **{f"{name}_strides": shared.strides(problem, name, arrays) for name in ("dout", "o")},
        **{name: problem[name] for name in ("heads_q", "seqlen_q", "head_dim_v")},
        "rows_padded": shared.rows_padded(problem),
        "sum_columns": problem.get("sum_columns", 0),
        "lanes": row_lanes(problem),
    }


def _row_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    sizes = [(2, 3, 70, 64), (1, 2, 130, 200), (1, 1, 5, 24)]
    if not params["aligned"]:
        sizes = [(2, 3, 70, 61), (1, 1, 3, 1)]
    names = ("batch", "heads_q", "seqlen_q", "head_dim_v")
    return [
        {"dtype": params["dtype"], "dlse": i != 1, "sum_columns": 64 * (i % 2)}
        | dict(zip(names, one, strict=True))
        for i, one in enumerate(sizes)
    ]


def _row_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    dtype = numpy_dtype(problem["dtype"])
    sizes = shared.shape({**problem, "seqlen_k": 0}, "o")
    made: Arrays = {n: rng.standard_normal(sizes, np.float32).astype(dtype) for n in ("dout", "o")}
    made["lse"] = rng.standard_normal(sizes[:3], np.float32)
    made["lse"][..., ::5] = -np.inf
    if problem["dlse"]:
        made["dlse"] = rng.standard_normal(sizes[:3], np.float32)
    return made


def _row_outputs(params: Params, problem: Problem) -> Arrays:
    rows = shared.rows_shape(problem)
    sizes: dict[str, tuple[int, ...]] = {"lse_log2": rows, "delta": rows}
    if problem["sum_columns"]:
        sizes["dq_sum"] = (*rows, problem["sum_columns"])
        sizes["turns"] = (*rows[:2], rows[2] // TURN_ROWS)
    return {name: np.full(size, np.nan, np.float32) for name, size in sizes.items()}


def _row_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    double = {n: np.asarray(a).astype(np.float64) for n, a in arrays.items() if a is not None}
    delta = (double["dout"] * double["o"]).sum(-1) - double.get("dlse", 0.0)
    lse = double["lse"] * math.log2(math.e)
    past = ((0, 0), (0, 0), (0, shared.rows_padded(problem) - problem["seqlen_q"]))
    made: Arrays = {
        "lse_log2": np.pad(np.where(np.isneginf(lse), np.inf, lse), past, constant_values=np.inf),
        "delta": np.pad(delta, past),
    }
    if problem["sum_columns"]:
        made["dq_sum"] = np.zeros((*shared.rows_shape(problem), problem["sum_columns"]))
        *more, rows = shared.rows_shape(problem)
        made["turns"] = np.zeros((*more, rows // TURN_ROWS))
    return made


ROWS = register(
    KernelSpec(
        op=OP,
        name="rows",
        source="attention/backward_preprocess.cu",
        entry="attention_backward_rows",
        doc="delta = rowsum(dout * o) - dlse, and lse in powers of two",
        params=(Param("dtype", ("fp16", "bf16", "fp32"), "element type of dout and o"), ALIGNED),
        derive=lambda params: {"threads": ROW_THREADS, "varlen": False, **PLAIN},
        block=lambda params: (ROW_THREADS, 1, 1),
        grid=lambda params, problem: (row_blocks(problem, shared.rows_padded(problem)), 1, 1),
        bytes=lambda problem: 8.0 * math.prod(shared.rows_shape(problem)),
        problems=_row_problems,
        inputs=_row_inputs,
        outputs=_row_outputs,
        arguments=_row_arguments,
        reference=_row_reference,
        tolerance=lambda params: 4e-6,
    )
)

# ------------------------------------------------------------------ dk and dv: a block owns keys

# (keys of a block, queries of a tile, warps along the keys, warps that share the same keys, stages)
KEY_TILES: dict[int, tuple[Any, ...]] = {
    64: ((128, 128, 4, 1, 2), (64, 64, 4, 1, 2)),
    128: ((64, 64, 2, 2, 2), (64, 32, 2, 2, 2)),
    192: ((64, 32, 2, 2, 2),),
    256: ((32, 32, 2, 2, 2), (32, 32, 2, 2, 1)),
}
# The same where dq is added up as well
SUM_TILES: dict[int, tuple[Any, ...]] = {
    64: ((128, 64, 4, 1, 2),),
    128: ((128, 64, 4, 2, 2), (64, 32, 2, 2, 2)),
    256: ((32, 32, 2, 2, 2), (32, 32, 2, 2, 1)),
}
# (queries of a block, keys of a tile, warps, stages)
QUERY_TILES: dict[int, tuple[Any, ...]] = {
    64: ((128, 128, 4, 2),),
    128: ((128, 32, 4, 2),),
    192: ((64, 32, 4, 2),),
    256: ((32, 32, 2, 2),),
}


def _tiles(of: Mapping[int, tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(tile for tiles in of.values() for tile in tiles))


def _illegal(of: Mapping[int, tuple[Any, ...]]) -> Callable[[Params], str | None]:
    def illegal(params: Params) -> str | None:
        dims = (params["head_dim"], params["head_dim_v"])
        if dims not in PAIRS:
            return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
        if params["tile"] not in of.get(dims[0], ()):
            return f"is not a tile for head_dim={dims[0]}"
        if not params.get("aligned", True) and (
            dims[0] == 192 or params["tile"] != of[dims[0]][-1]
        ):
            return "copies whole 16-byte chunks, and these rows do not start on 16-byte boundaries"
        return None

    return illegal


def _key_derive(sums: bool) -> Callable[[Params], dict[str, Any]]:
    def derive(params: Params) -> dict[str, Any]:
        names = ("block_k", "block_q", "warps_k", "warps_c", "stages")
        tile = dict(zip(names, params["tile"], strict=True))
        fixed = {**PLAIN, **({"aligned": True} if sums else {})}
        return {**fixed, **tile, "step_q": 32, "min_blocks": 1, "sums": sums}

    return derive


def _key_shared(sums: bool) -> Callable[[Params], SharedLayout]:
    def layout(params: Params) -> SharedLayout:
        """K, V, P and dS where other warps read them, and stages of Q, dO, lse and delta."""
        block_k, block_q, _, warps_c, count = params["tile"]
        d, dv = params["head_dim"], params["head_dim_v"]
        scores = ("P", "dS") if warps_c > 1 else ("dS",) if sums else ()
        stages = [
            (f"{name} stage {i}", size)
            for i in range(count)
            for name, size in (
                ("Q", 2 * block_q * d), ("dO", 2 * block_q * dv), ("lse", 4 * block_q),
                ("delta", 4 * block_q),
            )
        ]  # fmt: skip
        exchanged = [(name, 2 * block_k * block_q) for name in scores]
        return [("K", 2 * block_k * d), ("V", 2 * block_k * dv), *exchanged, *stages]

    return layout


def kernel_arguments(
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda arrays: {},
) -> Callable[..., Mapping[str, Any]]:
    """`names`: arrays with strides; those `wanted` are the results; `more` of them without."""

    def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        strided = (*names, *wanted)
        return {
            **{name: arrays[name] for name in (*strided, "lse_log2", "delta")},
            **more(arrays),
            **{f"{name}_strides": shared.strides(problem, name, arrays) for name in strided},
            **shared.scalars(problem),
        }

    return arguments


def kernel_reference(wanted: tuple[str, ...]) -> Callable[[Problem, Mapping[str, Any]], Arrays]:
    def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
        found = shared.reference(problem, arrays)
        return {name: found[name] for name in wanted}

    return reference


def rows_in_blocks(heads: str, rows: str, step: Callable[[Params], int]) -> Callable[..., Any]:
    def grid(params: Params, problem: Problem) -> tuple[int, int, int]:
        blocks = -(-problem[rows] // step(params))
        return (blocks * problem[heads] * problem["batch"], 1, 1)

    return grid


def _key_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    block_k, block_q, *_ = params["tile"]
    return shared.problems(block_q, block_k, {"aligned": True, **params}, scale)


def _keys(name: str, doc: str, tiles: Mapping[int, tuple[Any, ...]], **more: Any) -> KernelSpec:
    """`keys`, or `sums`, which adds up dq as well."""
    sums = name == "sums"
    tile = Param("tile", _tiles(tiles), "keys, queries, warps of keys, warps alike, stages", True)
    return register(
        KernelSpec(
            **{
                "op": OP,
                "name": name,
                "source": "attention/backward_dkdv.cu",
                "entry": "attention_backward_keys",
                "doc": doc,
                "params": (_HALF, *_DIMS, tile, *(() if sums else (ALIGNED,))),
                "derive": _key_derive(sums),
                "illegal": _illegal(tiles),
                "features": lambda params: _NEEDS,
                "shared_layout": _key_shared(sums),
                "block": lambda params: (32 * params["tile"][2] * params["tile"][3], 1, 1),
                "grid": rows_in_blocks("heads_kv", "seqlen_k", lambda params: params["tile"][0]),
                "flops": lambda problem: shared.products(problem, 2 + sums, 2),
                "bytes": shared.traffic,
                "shape_class": forward.shape_class,
                "interpreter_flops": 3.6e9,
                "problems": _key_problems,
                "inputs": shared.inputs,
                "outputs": shared.outputs(("dk", "dv")),
                "arguments": kernel_arguments(
                    shared.GIVEN, ("dk", "dv"), lambda arrays: {"dq_sum": arrays.get("dq_sum")}
                ),
                "reference": kernel_reference(("dk", "dv")),
                "tolerance": shared.tolerance,
                **more,
            }
        )
    )


KEYS = _keys(
    "keys",
    "dk and dv on tensor cores (mma.sync): a block owns keys and walks over queries",
    KEY_TILES,
)

# ------------------------------------------------------------------ dq as sums by atomics


def fragments(x: np.ndarray) -> np.ndarray:
    """[..., rows, columns] in the order of templates/attention/backward/sum_fragments.cuh."""
    *more, rows, columns = x.shape
    cut = x.reshape(*more, rows // 16, 2, 8, columns // 8, 4, 2)
    last = len(more)
    order = (0, 3, 2, 4, 1, 5)  # row block, column block, g, t, half, pair
    turned = cut.transpose(*range(last), *(last + i for i in order))
    return np.ascontiguousarray(turned).reshape(x.shape)


def _padded_dq(problem: Problem, dq: np.ndarray) -> np.ndarray:
    """As sums have it: whole tiles of rows and padded columns, not yet scaled."""
    rows = shared.rows_padded(problem) - problem["seqlen_q"]
    columns = problem["sum_columns"] - problem["head_dim"]
    return np.pad(dq / problem["softmax_scale"], ((0, 0), (0, 0), (0, rows), (0, columns)))


def _sum_outputs(params: Params, problem: Problem) -> Arrays:
    size = (*shared.rows_shape(problem), problem["sum_columns"])
    made = shared.outputs(("dk", "dv"))(params, problem)
    return {**made, "dq_sum": np.zeros(size, np.float32)}


def _sum_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    found = shared.reference(problem, arrays)
    sums = fragments(_padded_dq(problem, found["dq"]))
    return {"dk": found["dk"], "dv": found["dv"], "dq_sum": sums}


SUMS = _keys(
    "sums",
    "keys, with dq added up by atomics: five products, but not the same bits at every call",
    SUM_TILES,
    problems=lambda params, scale: [
        {**problem, "sum_columns": params["head_dim"]} for problem in _key_problems(params, scale)
    ],
    outputs=_sum_outputs,
    reference=_sum_reference,
)


def _dq_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    sizes = [(1, 2, 37, 64, 64), (2, 1, 130, 72, 128)]
    names = ("batch", "heads_q", "seqlen_q", "head_dim", "sum_columns")
    return [
        {"dtype": params["dtype"], "softmax_scale": 0.3, **dict(zip(names, one, strict=True))}
        for one in sizes
    ]


def _dq_shape(problem: Problem) -> tuple[int, ...]:
    return tuple(problem[name] for name in ("batch", "heads_q", "seqlen_q", "head_dim"))


def _dq_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    dq = rng.standard_normal(_dq_shape(problem), np.float32)
    return {"dq_sum": fragments(_padded_dq(problem, dq)).astype(np.float32), "exact": dq}


def _dq_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: arrays[name] for name in ("dq_sum", "dq")},
        "dq_strides": shared.strides(problem, "dq", arrays),
        **{name: problem[name] for name in ("heads_q", "seqlen_q", "head_dim")},
        **{"rows_padded": shared.rows_padded(problem), "sum_columns": problem["sum_columns"]},
        "softmax_scale": float(np.float32(problem["softmax_scale"])),
    }


DQ = register(
    KernelSpec(
        op=OP,
        name="dq",
        source="attention/backward_dq_convert.cu",
        entry="attention_backward_dq",
        doc="dq out of its sums",
        params=(_HALF,),
        derive=lambda params: {"threads": ROW_THREADS, "varlen": False, **PLAIN},
        features=lambda params: _NEEDS,
        block=lambda params: (ROW_THREADS, 1, 1),
        grid=lambda params, problem: (
            -(-math.prod(shared.rows_shape(problem)) * problem["sum_columns"] // 32 // ROW_THREADS),
            1,
            1,
        ),
        bytes=lambda problem: 6.0 * math.prod(_dq_shape(problem)),
        problems=_dq_problems,
        inputs=_dq_inputs,
        outputs=lambda params, problem: {
            "dq": np.full(_dq_shape(problem), np.nan, numpy_dtype(problem["dtype"]))
        },
        arguments=_dq_arguments,
        reference=lambda problem, arrays: {"dq": np.asarray(arrays["exact"], np.float64)},
        tolerance=lambda params: {"fp16": 1e-3, "bf16": 8e-3}[params["dtype"]],
    )
)

# ------------------------------------------------------------------ dq: a block owns queries


def _query_derive(params: Params) -> dict[str, Any]:
    block_q, block_k, warps, stages = params["tile"]
    return {
        "block_q": block_q,
        "block_k": block_k,
        "num_warps": warps,
        "step_k": 32,
        "in_registers": params["head_dim"] <= 64,
        **PLAIN,
        "stages": stages,
        "min_blocks": 1,
    }


def _query_shared(params: Params) -> SharedLayout:
    """Q, dO, and stages of K and V."""
    (block_q, block_k, _, count), d, dv = params["tile"], params["head_dim"], params["head_dim_v"]
    stages = [
        (f"{name} stage {i}", 2 * block_k * dim)
        for i in range(count)
        for name, dim in zip("KV", (d, dv), strict=True)
    ]
    return [("Q", 2 * block_q * d), ("dO", 2 * block_q * dv), *stages]


QUERIES = register(
    KernelSpec(
        op=OP,
        name="queries",
        source="attention/backward_dq.cu",
        entry="attention_backward_queries",
        doc="dq on tensor cores (mma.sync): a block owns queries and walks over keys",
        params=(
            _HALF,
            *_DIMS,
            Param("tile", _tiles(QUERY_TILES), "queries, keys, warps, stages", tunable=True),
            ALIGNED,
        ),
        derive=_query_derive,
        illegal=_illegal(QUERY_TILES),
        features=lambda params: _NEEDS,
        shared_layout=_query_shared,
        block=lambda params: (32 * params["tile"][2], 1, 1),
        grid=rows_in_blocks("heads_q", "seqlen_q", lambda params: params["tile"][0]),
        flops=lambda problem: shared.products(problem, 2, 1),
        bytes=shared.traffic,
        shape_class=forward.shape_class,
        interpreter_flops=3.6e9,
        problems=lambda params, scale: shared.problems(
            params["tile"][0], params["tile"][1], params, scale
        ),
        inputs=shared.inputs,
        outputs=shared.outputs(("dq",)),
        arguments=kernel_arguments(shared.GIVEN, ("dq",)),
        reference=kernel_reference(("dq",)),
        tolerance=shared.tolerance,
    )
)
