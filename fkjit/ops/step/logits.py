"""Calls of `fkjit.models`: the end of a decode step of up to 64 sequences on Hopper, logits and the
next tokens. No part of the public API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.op.checks import check_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.step.stream import INPUTS, Views, common, params_of, taken, tile_for, tile_of
from fkjit.ops.step.stream_kernel import HEAD, Tile
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register

_FOUR = 4  # logits of a store


def streamed_logits(x: Any, weight: Any, out: Any, tile: Tile | None = None) -> tuple[Any, Any]:
    """x weightᵀ in fp32, and what `pick_largest` takes.

    Args:
        x, weight, tile: as for `streamed_linear`; weight [vocabulary, k]. out: fp32
            [m, vocabulary], where logits are written: rows on 16-byte boundaries.

    Returns: out, and of each tile and row the largest logit with its column, int32 [tiles, m, 2].
    Raises ParameterError, ArgumentTypeError: shapes, strides, dtypes.
    """
    x, of_norm, eps = taken(x)
    return _LOGITS((x, weight, None, *of_norm, None), (out,), (eps, tile))


def prepare_logits(x: Any, weight: Any) -> None:
    """Compile and load what `streamed_logits` with the same arguments needs."""
    x, of_norm, eps = taken(x)
    _LOGITS.prepare((x, weight, None, *of_norm, None, None), (eps, None))


def pick_largest(largest: Any, tokens: Any, positions: Any, active: Any, advance: bool) -> Any:
    """The column of the largest logit of each row, as torch.argmax: int64 [m].

    Args:
        largest: of `streamed_logits`. advance: the tokens, int64 [m], become these, and positions,
            int32 [m], grow by `active`, int32 [m]; else these stay as they are.
    """
    return _PICK((largest, tokens, positions, active), (), (advance,))


def prepare_pick(largest: Any, tokens: Any, positions: Any, active: Any) -> None:
    """As `prepare_logits`, for `pick_largest`."""
    _PICK.prepare((largest, tokens, positions, active), (True,))


# ------------------------------------------------------------------ checks


def _check_logits(views: Views, eps: float, tile: Tile | None) -> Request:
    call = "streamed_logits"
    problem = common(call, views, eps)
    m, n, out = problem["m"], problem["n"], views["out"]
    if out is not None:
        check_dtype(call, "out", out, ("fp32",))
        check_shape(call, "out", out, (m, n), "[m, vocabulary], here")
        if out.strides[1] != 1 or out.strides[0] % _FOUR or out.pointer % 16:
            raise ParameterError(f"{call}: out has strides {tuple(out.strides)}; allowed: rows on "
                                 "16-byte boundaries, without gaps in them")  # fmt: skip
    chosen = tile_of(call, tile, tile_for(n, problem["k"]), problem["k"])
    problem |= {"head": True, "residual_stride": 0, "tile": chosen,
                "out_stride": n if out is None else out.strides[0]}  # fmt: skip
    outputs = {
        "out": Output((m, n), "fp32", out), "largest": Output((-(-n // chosen[0]), m, 2), "int32"),
    }  # fmt: skip
    return Request(views, outputs, (Launch(HEAD, params_of(HEAD, problem), problem),))


def _check_pick(views: Mapping[str, View | None], advance: bool) -> Request:
    seen = {name: view for name, view in views.items() if view is not None}
    tiles, m = seen["largest"].shape[:2]
    wanted = {"largest": ((tiles, m, 2), "int32"), "tokens": ((m,), "int64"),
              "positions": ((m,), "int32"), "active": ((m,), "int32")}  # fmt: skip
    for name, (shape, dtype) in wanted.items():
        check_dtype("pick_largest", name, seen[name], (dtype,))
        check_shape("pick_largest", name, seen[name], shape, "here")
    problem = {"m": m, "tiles": tiles, "advance": advance}
    launch = Launch(PICK, {"threads": _THREADS}, problem)
    return Request(views, {"best": Output((m,), "int64")}, (launch,))


# ------------------------------------------------------------------ the last kernel

_THREADS = 256


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {**arrays, **{name: problem[name] for name in ("m", "tiles", "advance")}}


PICK = register(
    KernelSpec(
        op="pick_largest",
        name="rows",
        source="step/pick.cu",
        entry="step_pick",
        pdl=True,
        doc="the largest logit of each row, out of those of tiles; tokens and positions go on",
        params=(Param("threads", (_THREADS,), "threads of a block", tunable=True),),
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (problem["m"], 1, 1),
        arguments=_arguments,
        work=Work(bytes=lambda problem: 8.0 * problem["m"] * problem["tiles"]),
        verification="fkjit.ops.step.stream_cases:PICK",
    )
)
_LOGITS = Op(
    "streamed_logits", inputs=(*INPUTS, "residual"), outputs=("out", "largest"),
    check=_check_logits, optional=(*INPUTS[2:], "residual"),
)  # fmt: skip
_PICK = Op(
    "pick_largest", inputs=("largest", "tokens", "positions", "active"), outputs=("best",),
    check=_check_pick, written=("tokens", "positions"),
)  # fmt: skip
