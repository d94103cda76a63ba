"""The kernels behind `fkjit.rope_kv_append`: parameters, tiling, arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.kv import problem as kv
from fkjit.ops.rope import kernels
from fkjit.ops.rope.frequencies import fixed_point
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register


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


def _spec(name: str, doc: str, arguments: kernels.Arguments) -> KernelSpec:
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
            arguments=arguments,
            work=Work(
                flops=lambda problem: kernels.flops({**_as_rope(problem), "heads_k": 0}),
                bytes=traffic,
                interpreter_work=lambda params, problem: 12 * kv.moved(params, problem),
            ),
            verification=f"fkjit.ops.kv.cases_rope_append:{name.upper()}",
        )
    )


COMPUTED = _spec(
    "computed", "q and k turned by angles computed in the kernel, k and v to their slots",
    computed_arguments,
)  # fmt: skip
TABLED = _spec("tabled", "q and k turned by a table, k and v to their slots", tabled_arguments)
