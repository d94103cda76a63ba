"""The op behind impl="stream": few rows of each expert, weights read once.

It takes the lists of `MoeGroups` as they are: tiles of experts with rows, and whose choice a place
has. Nothing is permuted before, and what is read does not depend on how many experts there are.
"""

from __future__ import annotations

from typing import Any

from fkjit import tuning
from fkjit.errors import ParameterError
from fkjit.ops.gemm.epilogue import kernel_for
from fkjit.ops.grouped import checks
from fkjit.ops.grouped.kernels_stream import LISTS, ROWS, STREAM_ALL, tiles_of
from fkjit.ops.grouped.options import CALL, StreamOptions, Views
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.op.checks import check_dtype, check_flag, check_same_dtype
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.spec import KernelSpec, Params

_INPUTS = ("x", "weight", "bias", *MoeGroups._fields)


def _check(views: Views, said: StreamOptions) -> Request:
    x, weight, places = views["x"], views["weight"], views["sorted_token_ids"]
    assert x is not None and weight is not None and places is not None
    checks.check_options(said)
    gather = check_flag(CALL, "gather", said.gather)
    dtype = check_same_dtype(CALL, {"x": x, "weight": weight, "bias": views["bias"]})
    sizes = checks.sizes_of(x, weight, said)
    checks.check_bias(views["bias"], sizes["experts"], sizes["n"] * (2 if said.gate else 1))
    tokens, top_k, block = _check_lists(views, sizes, gather)
    problem: dict[str, Any] = {
        **sizes, "m": places.shape[0], "dtype": dtype, "block_size": block, "top_k": top_k,
        "activation": said.activation or "none", "gate": said.gate, "gather": gather,
        "weight_layout": said.weight_layout, "x_stride": rows_of(CALL, "x", x)[2],
        "bias": views["bias"] is not None,
    }  # fmt: skip
    inputs = {name: views[name] for name in ("x", "weight", "bias", *LISTS)}
    outputs = {"out": Output((problem["m"], sizes["n"]), dtype)}
    if not problem["m"] * tokens * sizes["k"]:
        return Request(inputs, outputs, ())
    if x.device != CPU:
        problem["multiprocessors"] = multiprocessors(x.device)
    aligned = checks.is_aligned(x, weight, sizes, problem["x_stride"], said.weight_layout == "nk")
    spec, params = _variant(problem, said.block, tokens, aligned, x)
    return Request(inputs, outputs, (Launch(spec, params, problem),))


def _check_lists(views: Views, sizes: dict[str, int], gather: bool) -> tuple[int, int, int]:
    """(tokens, choices of each, places of a tile) of the groups."""
    for name in MoeGroups._fields:
        view = views[name]
        assert view is not None
        check_dtype(CALL, f"groups.{name}", view, ("int32",))
    x, places, tiles, inverse = (
        views[name] for name in ("x", "sorted_token_ids", "expert_ids", "inverse")
    )
    assert x is not None and places is not None and tiles is not None and inverse is not None
    block = places.shape[0] // tiles.shape[0] if tiles.shape[0] else 0
    checks.check_groups(views["offsets"], places.shape[0], sizes["experts"], block)
    tokens, top_k = inverse.shape
    rows = tokens if gather else places.shape[0]
    if len(x.shape) != 2 or x.shape[0] != rows:
        raise ParameterError(
            f"{CALL}: x has shape {tuple(x.shape)}; allowed: {rows} rows, one for each "
            f"{'token' if gather else 'place'} of groups (gather={gather})"
        )
    return tokens, top_k, block


def _variant(
    problem: dict[str, Any], block: Any, tokens: int, aligned: bool, x: View
) -> tuple[KernelSpec, Params]:
    """The kernel, with the tile asked for or the first one."""
    given, tiles = dict(problem), tiles_of(problem["weight_layout"])
    given["tile"] = tiles[0] if block is None else tuple(block)
    if given["tile"] not in tiles:
        legal = ", ".join(map(str, tiles))
        raise ParameterError(f"{CALL}: block={block!r} is not one of [{legal}] (impl='stream')")
    spec, arch = kernel_for(STREAM_ALL, problem["activation"]), arch_of(x)
    most = ROWS[0] if tokens <= ROWS[0] or problem["weight_layout"] == "kn" else ROWS[-1]
    params = {p.name: {**given, "rows": most}[p.name] for p in spec.params}
    if problem["dtype"] == "fp32" or not aligned or spec.why_not(params, arch) is not None:
        raise ParameterError(
            f"{CALL}: impl='stream' does not take this {problem['dtype']} product on {arch.name}; "
            "allowed: rows of 16-bit elements on 16-byte boundaries from sm_80 on, or impl='auto'"
        )
    return spec, tuning.tuned(spec, params, problem, arch) if block is None else params


def _fake(x: Any, weight: Any, bias: Any, places: Any, *rest: Any) -> list[Any]:
    said = StreamOptions(*rest[-len(StreamOptions._fields) :])
    wide = weight.shape[1 if said.weight_layout == "nk" else 2]
    return [x.new_empty(places.shape[0], wide // 2 if said.gate else wide)]


def _packed(*options: Any) -> tuple[Any, ...]:
    said = StreamOptions(*options)
    return tuple(said._replace(block=None if said.block is None else list(said.block)))


def _unpacked(*options: Any) -> tuple[Any, ...]:
    said = StreamOptions(*options)
    return tuple(said._replace(block=None if said.block is None else tuple(said.block)))


STREAM = Op(
    f"{CALL} (impl='stream')", inputs=_INPUTS, outputs=("out",), check=_check,
    options=StreamOptions, optional=("bias",), autocast=3,
    node=Node(
        _fake, "str? activation, bool gate, int[]? block, str weight_layout, bool gather", 1,
        "grouped_linear_stream", _packed, _unpacked,
    ),
)  # fmt: skip
