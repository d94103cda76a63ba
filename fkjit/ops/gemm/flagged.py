"""Products whose rows of x come, or whose rows of out are taken away, while they run: the product
for Hopper, whose tiles wait for flags, or count (templates/gemm/sm90/arrivals.cuh).

A problem is a product's with `chunk_rows`, the rows that a flag is of, and `from_row`, the first
one. Array `flags`, u32 [m / chunk_rows]. WAITS: not 0 where rows of x are there. TELLS: counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fkjit.arch import Arch
from fkjit.arguments import one_of
from fkjit.errors import ParameterError
from fkjit.ops.gemm.cost import SMS, Shape
from fkjit.ops.gemm.kernels_sm90 import MAX_SHARED, WGMMA_ALL
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.gemm.select import estimate
from fkjit.ops.op.checks import check_dtype, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View, view
from fkjit.spec import KernelSpec, Param, Params, Problem, register

_CALL = "linear_flagged"
WAITS, TELLS = "waits", "tells"
# Tile, schedule, cluster: those of long products.
TILES = (
    ((128, 256), "cooperative", 1), ((128, 256), "cooperative", 2), ((128, 128), "pingpong", 1),
    ((128, 128), "pingpong", 2),
)  # fmt: skip
MOST_ROWS = max(rows * cluster for (rows, _), _, cluster in TILES)  # of a tile
_FIXED = {
    "x_layout": "mk", "residual": False, "pre": False, "tma_store": True, "split": 1,
    "shares": False,
}  # fmt: skip
_WARPS = {"cooperative": 8, "pingpong": 4}  # that store a tile
_CHUNK = 8  # elements of 16 bytes
SPARE = [0]  # SMs that are left to copies inside the GPU, for rehearsals on one
_FIRST = dict(zip(("block", "schedule", "cluster"), TILES[0], strict=True))


def _whole(params: Params) -> dict[str, Any]:
    """The parameters that the product without flags has."""
    return {**params, **_FIXED, "out_dtype": params["dtype"]}


def _derive(params: Params) -> dict[str, Any]:
    waits = params["how"] == WAITS
    both = "flags, chunk_rows"
    return {
        **WGMMA_ALL.derive(_whole(params)), "waits": waits, "tells": not waits,
        "out_dtype": params["dtype"],
        **{name: _FIXED[name] for name in ("residual", "pre", "tma_store", "split", "shares")},
        "flags": ", u32* __restrict__ flags",
        "flag_numbers": ", const int chunk_rows, const int from_row", "first_row": "from_row",
        "arrived" if waits else "finished": both,
    }  # fmt: skip


def _illegal(params: Params) -> str | None:
    if (params["block"], params["schedule"], params["cluster"]) not in TILES:
        return "is never the fastest of long products"
    return WGMMA_ALL.illegal(_whole(params))


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(WGMMA_ALL.arguments(_whole(params), problem, arrays))
    return found | {
        "flags": arrays["flags"], "chunk_rows": problem["chunk_rows"],
        "from_row": problem["from_row"],
    }  # fmt: skip


_OWN = {
    "block": tuple(dict.fromkeys(tile for tile, *_ in TILES)),
    "schedule": tuple(_WARPS),
}  # fmt: skip
_PARAMS = (
    Param("how", (WAITS, TELLS), "of rows of x that they are there, or that rows of out are"),
    *(
        replace(p, values=_OWN.get(p.name, p.values))
        for p in WGMMA_ALL.params
        if p.name not in (*_FIXED, "out_dtype")
    ),
)
_SHOWN = tuple(
    {"how": how, "dtype": "bf16", "weight_layout": layout, "activation": act, "gate": gate,
     "block": tile, "schedule": schedule, "cluster": cluster}
    for (tile, schedule, cluster), how, layout, act, gate in (
        (TILES[0], WAITS, "nk", "none", False), (TILES[0], TELLS, "nk", "none", False),
        (TILES[1], WAITS, "kn", "none", False), (TILES[2], TELLS, "kn", "none", False),
        (TILES[3], WAITS, "nk", "silu", True), (TILES[3], TELLS, "nk", "none", False),
    )
)  # fmt: skip


def _spec(ahead: tuple[Any, ...] = ()) -> KernelSpec:
    return replace(
        WGMMA_ALL,
        op=_CALL,
        doc="products for Hopper whose rows come, or are taken away, while they run",
        params=_PARAMS,
        derive=_derive,
        illegal=_illegal,
        ahead=ahead,
        shared_layout=lambda params: (WGMMA_ALL.shared_layout or (lambda p: []))(_whole(params)),
        shared_bytes=lambda params: WGMMA_ALL.shared_bytes(_whole(params)),
        block=lambda params: WGMMA_ALL.block(_whole(params)),
        grid=lambda params, problem: WGMMA_ALL.grid(_whole(params), problem),
        arguments=_arguments,
        verification="fkjit.ops.gemm.cases_flagged:FLAGGED",
    )


FLAGGED_ALL = _spec()
FLAGGED = register(_spec(_SHOWN))


def counted(params: Params, problem: Problem) -> int:
    """What each flag is when all tiles of its rows are stored: a warp counts each of its own."""
    (rows, columns), warps = params["block"], _WARPS[params["schedule"]]
    columns //= 2 if params["gate"] else 1
    return problem["chunk_rows"] // rows * -(-problem["n"] // columns) * warps


def takes(x: Any, weight: Any, out_columns: int) -> bool:
    """Whether there is a kernel for tensors of these shapes: 16 bits, rows of whole 16 bytes; on
    Hopper. Ranks that agree on shapes agree on this."""
    if x.element_size() != 2 or any(n % _CHUNK for n in (x.shape[1], weight.shape[1], out_columns)):
        return False
    arch = arch_of(view(x, _CALL, "x"))
    return arch.features >= WGMMA_ALL.features({}) and arch.shared_per_block >= MAX_SHARED


def choose(problem: Problem, how: str, arch: Arch) -> dict[str, Any]:
    """The tile of the least estimated cost."""
    given = {**Shape._field_defaults, **problem, "sms": problem.get("multiprocessors", SMS)}
    shape = Shape(**{name: given[name] for name in Shape._fields})
    fixed = {name: problem[name] for name in ("dtype", "weight_layout", "activation", "gate")}
    legal = [
        {"how": how, **fixed, "block": tile, "schedule": schedule, "cluster": cluster}
        for tile, schedule, cluster in TILES
    ]
    legal = [params for params in legal if FLAGGED_ALL.why_not(params, arch) is None]
    if not legal:
        FLAGGED_ALL.check({"how": how, **fixed, **_FIRST}, arch)
    return min(legal, key=lambda params: estimate("wgmma", shape, _whole(params), arch))


# ------------------------------------------------------------------ the call


class FlaggedOptions(NamedTuple):
    """What a call says besides its arrays."""

    how: str
    chunk_rows: int
    from_row: int
    weight_layout: str = "nk"
    activation: str | None = None
    gate: bool = False


def linear_flagged(
    x: Any, weight: Any, bias: Any, flags: Any, out: Any, *, how: str, chunk_rows: int,
    from_row: int = 0, weight_layout: str = "nk", activation: str | None = None,
    gate: bool = False,
) -> None:  # fmt: skip
    """`fkjit.linear` into `out`, in step with whoever brings rows of x, or takes rows of out away.

    Args:
        x: [m, k], weight, bias, activation, gate, weight_layout: as in `fkjit.linear`; fp16, bf16.
        flags: int32 [m / chunk_rows]. how="waits": rows of x are read when theirs is not 0; own
            rows' are set before the call, the others by another stream while it runs. "tells": 0
            before the call; each is `finished_count` when its rows of out are stored.
        from_row: the rows that come first; behind the last row the first ones follow.

    chunk_rows and from_row are multiples of `MOST_ROWS`. Who writes flags must not need an SM: the
    product has all of them. No gradient.
    """
    said = FlaggedOptions(how, chunk_rows, from_row, weight_layout, activation, gate)
    _OP((x, weight, bias, flags, out), (), tuple(said))


def finished_count(x: Any, weight: Any, out: Any, *, chunk_rows: int, **options: Any) -> int:
    """What flags of how="tells" come to in such a call."""
    said = FlaggedOptions(TELLS, chunk_rows, 0, **options)
    views = {
        name: view(array, _CALL, name)
        for name, array in (("x", x), ("weight", weight), ("out", out))
    }
    problem = _problem({**views, "bias": None}, said)
    return counted(choose(problem, TELLS, arch_of(views["x"])), problem)


def _problem(seen: Mapping[str, View | None], said: FlaggedOptions) -> dict[str, Any]:
    x, weight, out = seen["x"], seen["weight"], seen["out"]
    assert x is not None and weight is not None and out is not None  # the op has looked
    dtype = check_same_dtype(_CALL, {"x": x, "weight": weight, "out": out}, ("fp16", "bf16"))
    for name, array in (("x", x), ("weight", weight), ("out", out)):
        if len(array.shape) != 2 or array.strides != (array.shape[1], 1) or array.pointer % 16:
            raise ParameterError(
                f"{_CALL}: {name} has shape {tuple(array.shape)}, strides {tuple(array.strides)}; "
                "allowed: two dimensions, contiguous, on a 16-byte boundary"
            )
    wide, k = weight.shape if said.weight_layout == "nk" else weight.shape[::-1]
    m, n = x.shape[0], wide // 2 if said.gate else wide
    if x.shape[1] != k or tuple(out.shape) != (m, n) or 0 in (m, n, k):
        raise ParameterError(
            f"{_CALL}: x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)}; "
            "allowed: [m, k], [n, k] (or [k, n] by weight_layout) and [m, n]"
        )
    for name, rows, of in (
        ("chunk_rows", said.chunk_rows, MOST_ROWS),
        ("from_row", said.from_row, MOST_ROWS),
        ("rows", m, said.chunk_rows),
    ):
        if of < 1 or rows % of or (name == "from_row" and not 0 <= rows < m):
            raise ParameterError(f"{_CALL}: {name}={rows}; allowed: a multiple of {of}, below {m}")
    if n % _CHUNK or k % _CHUNK:
        raise ParameterError(f"{_CALL}: n={n}, k={k}; allowed: multiples of {_CHUNK}")
    made = {
        "m": m, "n": n, "k": k, "dtype": dtype, "out_dtype": dtype, "x_layout": "mk",
        "weight_layout": said.weight_layout, "activation": said.activation or "none",
        "gate": said.gate, "scale": 1.0, "residual": False, "pre": False, "aligned": True,
        "aligned_out": True, "bias": seen["bias"] is not None, "precision": "ieee",
        "x_stride": k, "weight_stride": weight.shape[1], "out_stride": n, "residual_stride": n,
        "chunk_rows": said.chunk_rows, "from_row": said.from_row,
    }  # fmt: skip
    if x.device != CPU:
        made["multiprocessors"] = max(multiprocessors(x.device) - SPARE[0], 2)
    return made


def _check(views: Mapping[str, View | None], said: FlaggedOptions) -> Request:
    one_of(_CALL, "how", said.how, (WAITS, TELLS))
    one_of(_CALL, "weight_layout", said.weight_layout, ("nk", "kn"))
    problem = _problem(views, said)
    flags, bias = views["flags"], views["bias"]
    assert flags is not None  # the op has looked
    check_dtype(_CALL, "flags", flags, ("int32",))
    check_shape(_CALL, "flags", flags, (problem["m"] // said.chunk_rows,), "one for each chunk,")
    if bias is not None:
        check_shape(_CALL, "bias", bias, (outputs_of(problem),), "the weight's outputs,")
    view_of_x = views["x"]
    assert view_of_x is not None
    params = choose(problem, said.how, arch_of(view_of_x))
    seen = {name: array for name, array in views.items() if array is not None}
    return Request(seen, {}, (Launch(FLAGGED_ALL, params, problem),))


_OP = Op(
    _CALL, inputs=("x", "weight", "bias", "flags", "out"), check=_check, options=FlaggedOptions,
    optional=("bias",), written=("flags", "out"),
)  # fmt: skip
