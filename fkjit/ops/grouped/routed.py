"""The op of kernels that read the lists of `MoeGroups`: tiles of experts that have rows, and whose
choice each place has. Nothing is permuted before.

    stream    few rows of each expert, whose weights are read once
    gather    Hopper's wgmma, whose producer fetches rows of tokens
"""

from __future__ import annotations

from typing import Any

from fkjit import tuning
from fkjit.errors import ParameterError
from fkjit.ops.gemm.epilogue import kernel_for
from fkjit.ops.grouped import checks, select
from fkjit.ops.grouped.kernels_stream import ROWS, STREAM_ALL, tiles_of
from fkjit.ops.grouped.options import CALL, RoutedOptions, Views
from fkjit.ops.grouped.select import Chosen
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.op.checks import check_dtype, check_same_dtype
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View

IMPLEMENTATIONS = ("stream", "gather")
_INPUTS = ("x", "weight", "bias", "residual", *MoeGroups._fields)  # no residual, but in pointers


def _check(views: Views, said: RoutedOptions) -> Request:
    x, weight, places = views["x"], views["weight"], views["sorted_token_ids"]
    assert x is not None and weight is not None and places is not None
    checks.check_options(said)
    dtype = check_same_dtype(CALL, {"x": x, "weight": weight, "bias": views["bias"]})
    sizes = checks.sizes_of(x, weight, said)
    checks.check_bias(views["bias"], sizes["experts"], sizes["n"] * (2 if said.gate else 1))
    problem = checks.problem_of(x, weight, views["bias"], said, sizes) | _lists(views, sizes, said)
    inputs = {name: views[name] for name in _INPUTS}
    outputs = {"out": Output((problem["m"], sizes["n"]), dtype), "pre": None}
    if not problem["m"] * problem["tokens"] * sizes["k"]:
        return Request(inputs, outputs, ())
    if x.device != CPU:
        problem["multiprocessors"] = multiprocessors(x.device)
    spec, params = _gather(problem, said, x) if said.impl == "gather" else _stream(problem, said, x)
    return Request(inputs, outputs, (Launch(spec, params, problem),))


def _lists(views: Views, sizes: dict[str, int], said: RoutedOptions) -> dict[str, Any]:
    """What a problem has of the groups."""
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
    rows = tokens if said.gather else places.shape[0]
    if len(x.shape) != 2 or x.shape[0] != rows:
        raise ParameterError(
            f"{CALL}: x has shape {tuple(x.shape)}; allowed: {rows} rows, one for each "
            f"{'token' if said.gather else 'place'} of groups (gather={said.gather})"
        )
    return {
        "m": places.shape[0], "tokens": tokens, "top_k": top_k, "block_size": block,
        "groups": "ROWS", "gather": said.gather, "pre": False,
    }  # fmt: skip


def _gather(problem: dict[str, Any], said: RoutedOptions, x: View) -> Chosen:
    try:
        return select.choose(problem, "wgmma", said.block, arch_of(x))
    except ParameterError as error:
        raise ParameterError(str(error).replace("impl='wgmma'", "impl='gather'")) from None


def _stream(problem: dict[str, Any], said: RoutedOptions, x: View) -> Chosen:
    """The tile asked for, or the first one."""
    given, tiles = dict(problem), tiles_of(said.weight_layout)
    given["tile"] = tiles[0] if said.block is None else tuple(said.block)
    if given["tile"] not in tiles:
        legal = ", ".join(map(str, tiles))
        raise ParameterError(
            f"{CALL}: block={said.block!r} is not one of [{legal}] (impl='stream')"
        )
    few = problem["tokens"] <= ROWS[0] or said.weight_layout == "kn"
    given["rows"] = ROWS[0] if few else ROWS[-1]
    spec, arch = kernel_for(STREAM_ALL, problem["activation"]), arch_of(x)
    params = {p.name: given[p.name] for p in spec.params}
    legal = problem["dtype"] != "fp32" and problem["aligned"]
    if not legal or spec.why_not(params, arch) is not None:
        raise ParameterError(
            f"{CALL}: impl='stream' does not take this {problem['dtype']} product on {arch.name}; "
            "allowed: rows of 16-bit elements on 16-byte boundaries from sm_80 on, or impl='auto'"
        )
    tuned = params if said.block else tuning.tuned(spec, params, problem, arch)
    return Chosen(spec, tuned)


def _fake(x: Any, weight: Any, bias: Any, residual: Any, places: Any, *rest: Any) -> list[Any]:
    said = RoutedOptions(*rest[-len(RoutedOptions._fields) :])
    wide = weight.shape[1 if said.weight_layout == "nk" else 2]
    return [x.new_empty(places.shape[0], wide // 2 if said.gate else wide)]


def _packed(*options: Any) -> tuple[Any, ...]:
    """Options as the operator's schema has them: a tile is a list."""
    said = RoutedOptions(*options)
    return tuple(said._replace(block=None if said.block is None else list(said.block)))


def _unpacked(*options: Any) -> tuple[Any, ...]:
    said = RoutedOptions(*options)
    return tuple(said._replace(block=None if said.block is None else tuple(said.block)))


ROUTED = Op(
    f"{CALL} (stream, gather)", inputs=_INPUTS, outputs=("out", "pre"), check=_check,
    options=RoutedOptions, optional=("bias", "residual"), autocast=3,
    node=Node(
        _fake,
        "str? activation, bool gate, int[]? block, str impl, str weight_layout, bool gather", 1,
        "grouped_linear_routed", _packed, _unpacked,
    ),
)  # fmt: skip
