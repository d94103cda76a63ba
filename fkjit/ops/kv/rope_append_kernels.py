"""The kernels behind `fkjit.rope_kv_append`: parameters, tiling and arguments, references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.kv import append as kv_append
from fkjit.ops.kv import problem as kv
from fkjit.ops.rope import kernels
from fkjit.ops.rope.frequencies import THETA, Llama3Scaling, fixed_point, rope_table
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, register

_TABLE_ROWS = 400  # of a test's table


def _as_rope(problem: Problem) -> dict[str, Any]:
    """The problem as rope's tiling knows it: v's heads are k's to it."""
    return {
        **{"layout": "thd", "batch": 1, "length": problem["tokens"]},
        **{"heads_q": problem["heads_q"], "heads_k": 2 * problem["heads"]},
        "rotary_dim": problem["rotary_dim"],
    }


def parameters(fixed: Params, problem: Problem) -> dict[str, Any]:
    """Of a problem; nothing is left free."""
    fixed_of_rope = {name: fixed[name] for name in ("dtype", "vector", "interleaved")}
    threads = kernels.default(fixed_of_rope, _as_rope(problem))["threads"]
    return {**fixed, "threads": threads}


def grid(params: Params, problem: Problem) -> Dim3:
    """Tiles of tokens by pieces of the heads."""
    return kernels.grid(params, _as_rope(problem))


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Of both kernels."""
    size = {**params, "threads": kv.THREADS}
    common = kv.arguments(size, problem, arrays)
    tiling = kernels.tiling(params, _as_rope(problem))
    steps: dict[str, Any] = {}
    for name, prefix in (("q", "q"), ("out_q", "out")):
        array: Any = arrays[name]
        token, head = (step // array.itemsize for step in array.strides[:2])
        steps |= {f"{prefix}_token": token, f"{prefix}_head": head}
    ids: Any = arrays["positions"]
    return {
        **{**common, **tiling, **steps},
        **{name: arrays[name] for name in ("q", "out_q", "positions")},
        **{"position_step": ids.strides[0] // 4, "position_words": ids.itemsize // 4},
        **{"heads_q": problem["heads_q"], "heads_k": problem["heads"]},
        **{"head_dim": problem["head_dim"], "rotary_dim": problem["rotary_dim"]},
    }


def computed_arguments(
    params: Params, problem: Problem, arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Kernel arguments by name."""
    of = (problem["rotary_dim"], problem["theta"], problem["scaling"])
    return {**_arguments(params, problem, arrays), "frequencies": fixed_point(*of)}


def tabled_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    table: Any = arrays["table"]
    return {
        **_arguments(params, problem, arrays),
        **{"table": table, "table_rows": table.shape[0]},
        "table_stride": table.strides[0] // table.itemsize,
    }


def traffic(problem: Problem) -> float:
    """Bytes of q on both sides, and of the append."""
    q = 2.0 * ITEMSIZE[problem["dtype"]] * problem["tokens"] * problem["heads_q"]
    return q * problem["head_dim"] + kv.traffic(problem)


# ------------------------------------------------------------------ for tests


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Whole and partial rotation, one token and several, both layouts."""
    many = 1 if scale == "small" else 60
    whole, part = (64, 32) if params["vector"] else (14, 6)
    found = []
    for tokens, heads_q, heads, rotary, layout, words in (
        (1, 4, 1, whole, "nhd", 1),
        (13 * many, 5, 2, part, "hnd", 2),
    ):
        pages = -(-tokens // 16) + 2
        one = kv.problem_of(params, tokens, heads, whole, 16, pages, layout, slot_step=words)
        found.append(
            {
                **one,
                **{"heads_q": heads_q, "rotary_dim": rotary, "theta": THETA},
                **{"interleaved": params["interleaved"], "skipped": 0.2 * (tokens > 1)},
                "scaling": Llama3Scaling() if tokens > 1 else None,
            }
        )
    return found


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh q, k, v, slots, scales; positions up to a million."""
    return _inputs(params, problem, rng, 1_000_001)


def tabled_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """The same with a table."""
    table = rope_table(_TABLE_ROWS, problem["rotary_dim"])
    return {**_inputs(params, problem, rng, _TABLE_ROWS), "table": table}


def _inputs(params: Params, problem: Problem, rng: np.random.Generator, limit: int) -> Arrays:
    shape = (problem["tokens"], problem["heads_q"], problem["head_dim"])
    kind = np.int64 if problem["slot_step"] == 2 else np.int32
    return {
        "q": rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(problem["dtype"])),
        **kv_append.inputs(params, problem, rng),
        "positions": rng.integers(0, limit, shape[:1], kind),
    }


def outputs(params: Params, problem: Problem) -> Arrays:
    """out_q, poisoned with NaN, and pages with the same number everywhere."""
    shape = (problem["tokens"], problem["heads_q"], problem["head_dim"])
    q = np.full(shape, np.nan, numpy_dtype(problem["dtype"]))
    return {"out_q": q, **kv_append.outputs(params, problem)}


def turned(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """out_q and out_k in float64."""
    turning = {
        **{"layout": "thd", "batch": 1, "length": problem["tokens"], "start": 0},
        **{name: problem[name] for name in ("rotary_dim", "theta", "scaling", "interleaved")},
        **{"inverse": False, "positions": "ids"},
    }
    return kernels.reference(turning, arrays)


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """out_q and v_pages; k_pages where they hold numbers and not codes, of which a last bit of k
    may make the next one."""
    k = kv.seen_tokens(problem, np.asarray(arrays["k"]), "k")
    names = {name: arrays.get(name) for name in ("q", "positions", "table")}
    found = turned(problem, {**names, "k": k})
    pages = kv_append.reference(problem, arrays)
    if problem["storage"] == "same":
        slots = np.asarray(arrays["slot_mapping"])
        kept = kv.by_slot(problem, pages["k_pages"]).copy()
        kept[slots[slots >= 0]] = found["out_k"][slots >= 0]
        pages["k_pages"] = kv.from_slots(problem, kept)
    else:
        del pages["k_pages"]
    return {"out_q": found["out_q"], **pages}


def _spec(name: str, doc: str, **rest: Any) -> KernelSpec:
    return register(
        KernelSpec(
            op="rope_kv_append",
            name=name,
            source="kv/rope_append.cu",
            entry="rope_kv_append",
            pdl=True,
            doc=doc,
            params=(
                *kv.PARAMS[:3],
                Param("interleaved", (False, True), "pairs are neighbours, not in two halves"),
                Param("threads", (128, 256), "threads of a block: 256 for single elements"),
            ),
            illegal=lambda params: kernels.illegal({**params, "unroll": 1}),
            derive=lambda params: {
                **kv.derive(params),
                "tabled": name == "tabled",
                "unroll": 2 if params["vector"] else 1,
            },
            block=lambda params: (params["threads"], 1, 1),
            grid=grid,
            flops=lambda problem: kernels.work({**_as_rope(problem), "heads_k": 0}),
            bytes=traffic,
            interpreter_work=lambda params, problem: 12 * kv.work(params, problem),
            problems=problems,
            outputs=outputs,
            reference=reference,
            tolerance=lambda params: {"fp16": 6e-4, "bf16": 4.5e-3, "fp32": 4e-7}[params["dtype"]],
            **rest,
        )
    )


COMPUTED = _spec(
    "computed", "q and k turned by angles computed in the kernel, k and v to their slots",
    arguments=computed_arguments, inputs=inputs,
)  # fmt: skip
TABLED = _spec(
    "tabled", "q and k turned by a table, k and v to their slots",
    arguments=tabled_arguments, inputs=tabled_inputs,
)  # fmt: skip
