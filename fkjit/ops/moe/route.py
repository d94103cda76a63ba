"""`fkjit.moe_route`: the experts of each token of a mixture of experts, and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arguments import one_of, shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.moe import problem as moe
from fkjit.ops.op.checks import FLOATS, check_dtype, check_flag, check_shape
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.interop import View
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register
from fkjit.types import Scoring

_CALL = "moe_route"
_THREADS = 128

_MAX_SCALE = 3e38  # that fp32 holds


def moe_route(
    logits: Any,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Any = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    group_topk: int | None = None,
) -> tuple[Any, Any]:
    """The top_k experts of each token and their weights, in one kernel that reads logits once.

    Args:
        logits: fp16, bf16 or fp32 [tokens, experts]: torch, CuPy, NumPy or any DLPack array. Up to
            1024 experts; rows are contiguous and at one distance from each other.
        top_k: experts of a token, up to 32.
        scoring: "softmax" over all experts, or of each logit "sigmoid" or "sqrtsoftplus", the
            square root of log(1 + exp(logit)); in fp32.
        renormalize: divide a token's weights by their sum; where that is 0 they stay 0.
        bias: fp32 [experts], added to scores for the choice only, not to weights.
        num_groups, topk_groups: choose among the best `topk_groups` of `num_groups` groups of
            neighbouring experts only. A group counts as much as its best expert; with a bias as
            much as its best two together (DeepSeek-V3). Up to 32 groups.
        routed_scaling_factor: what weights are multiplied with at last.
        group_topk: a group counts as much as so many of its best experts' scores together, bias
            included: TransformerEngine's is top_k // topk_groups. Default: 1, with a bias 2.

    Returns:
        (topk_weights fp32 [tokens, top_k], topk_ids int32 [tokens, top_k]), the best expert first,
        in the framework of `logits`. Of equals the lower expert comes first. NaN and -inf count as
        the least finite fp32 number: such an expert is chosen where nothing else is left, with
        weight 0 (softmax of a row of nothing else: 1 / experts). +inf comes first; several share a
        softmax equally.

    Raises:
        ParameterError: top_k or groups that do not fit, shapes, strides, tensors that require grad.
        ArgumentTypeError: not arrays, other dtypes. DeviceError: mixed devices. CaptureError: first
        call of a geometry under CUDA graph capture; see `fkjit.prepare`.

    Example:
        >>> logits = np.array([[0, 1, 3, 2], [5, 0, 0, 4]], np.float32)  # two tokens, four experts
        >>> weights, ids = fkjit.moe_route(logits, 2, renormalize=True)
        >>> ids
        array([[2, 3],
               [0, 3]], dtype=int32)
        >>> weights[0].round(3)
        array([0.731, 0.269], dtype=float32)
    """
    options = (
        top_k, scoring, renormalize, num_groups, topk_groups, routed_scaling_factor, group_topk,
    )  # fmt: skip
    return _OP((logits, bias), (None, None), options)


def describe(
    call: str,
    views: Mapping[str, View | None],
    *options: Any,  # without the last one where PyTorch leaves a default out
    quick: bool = False,
    blocks: int = 0,
    staged: bool = False,
) -> dict[str, Any]:
    """The routing problem of `logits`, `bias` and moe_route's options, checked; with its tile."""
    logits, bias = views["logits"], views["bias"]
    assert logits is not None
    _check_logits(call, logits)
    tokens, experts, step = rows_of(call, "logits", logits)
    top_k, scoring, renormalize, num_groups, topk_groups, scale, *last = options
    one_of(call, "scoring", scoring, moe.SCORINGS)
    if bias is not None:
        check_dtype(call, "bias", bias, ("fp32",))
        check_shape(call, "bias", bias, (experts,), "[experts], here")
        rows_of(call, "bias", bias)
    problem = {
        **{"dtype": logits.dtype, "tokens": tokens, "experts": experts, "row_stride": step},
        **_choice(call, experts, top_k, num_groups, topk_groups),
        **{"scoring": scoring, "renormalize": check_flag(call, "renormalize", renormalize)},
        **{"biased": bias is not None, "scale": _scale(call, scale)},
    }
    problem["group_topk"] = _group_topk(call, last[0] if last else None, problem)
    groups = problem["num_groups"]
    problem["vector"] = moe.is_vector(logits.dtype, experts, groups, step, logits.pointer)
    problem["tile"] = moe.choose_tile(problem, quick, blocks, staged)
    if problem["tile"] is None:
        raise ParameterError(
            f"{call}: {groups} groups of {experts // groups} experts do not fit a kernel; allowed: "
            "up to 1024 experts where num_groups, rounded up to a power of two, is counted"
        )
    return problem


def _check_logits(call: str, logits: View) -> None:
    check_dtype(call, "logits", logits)
    if len(logits.shape) != 2 or not 1 <= logits.shape[1] <= moe.MAX_EXPERTS:
        raise ParameterError(
            f"{call}: logits has shape {tuple(logits.shape)}; allowed: [tokens, experts] with 1 to "
            f"{moe.MAX_EXPERTS} experts"
        )


def _choice(call: str, experts: int, top_k: Any, groups: Any, best: Any) -> dict[str, int]:
    """How many are chosen, and out of what."""
    most = min(experts, moe.MAX_TOP_K)
    top_k = whole(call, "top_k", top_k, 1, most, f" ({experts} experts)")
    if groups is None and best is None:
        return {"top_k": top_k, "num_groups": 1, "topk_groups": 1}
    if groups is None or best is None:
        raise ParameterError(f"{call}: num_groups and topk_groups go together: pass both or none")
    groups = whole(call, "num_groups", groups, 1, 32)
    if experts % groups:
        raise ParameterError(
            f"{call}: num_groups={groups} does not divide {experts} experts into equal groups"
        )
    best = whole(call, "topk_groups", best, 1, groups)
    if best * (experts // groups) < top_k:
        raise ParameterError(
            f"{call}: topk_groups={best} groups have {best * (experts // groups)} experts, fewer "
            f"than top_k={top_k}"
        )
    if best == groups:
        groups = best = 1
    return {"top_k": top_k, "num_groups": groups, "topk_groups": best}


def _group_topk(call: str, value: Any, p: Problem) -> int:
    """Of how many experts a group's score is the sum, as many as it has at most; 1 where no group
    is chosen."""
    if value is not None:
        value = whole(call, "group_topk", value, 1, moe.MAX_EXPERTS)
    if p["num_groups"] == 1:
        return 1
    value = (2 if p["biased"] else 1) if value is None else value
    return min(value, p["experts"] // p["num_groups"])


def _scale(call: str, value: Any) -> float:
    plain = type(value) is float  # as nearly always
    if not plain and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ArgumentTypeError(
            f"{call}: routed_scaling_factor={shown(value)} is not a plain number"
        )
    if not abs(value) <= _MAX_SCALE:
        raise ParameterError(
            f"{call}: routed_scaling_factor={shown(value)} is not finite, or above {_MAX_SCALE:g}"
        )
    return float(value)


def chosen(p: Mapping[str, Any]) -> dict[str, Output]:
    """The outputs that every router has."""
    shape = (p["tokens"], p["top_k"])
    return {"topk_weights": Output(shape, "fp32"), "topk_ids": Output(shape, "int32")}


def _check(views: Mapping[str, View | None], *options: Any) -> Request:
    problem = describe(_CALL, views, *options, quick=True)
    params = {**moe.variant(problem), "threads": _THREADS}
    launches = (Launch(ROUTE, params, problem),) if problem["tokens"] else ()
    inputs = {"logits": views["logits"], "bias": views["bias"]}
    return Request(inputs, chosen(problem), launches)


def _grid(params: Params, p: Problem) -> Dim3:
    """All tokens at once."""
    return (-(-p["tokens"] * params["tile"][0] // params["threads"]), 1, 1)


_ABSENT = dict.fromkeys(("logits", "bias", "topk_weights", "topk_ids"))

ROUTE = register(
    KernelSpec(
        op=_CALL,
        name="lanes",
        source="moe/route.cu",
        entry="moe_route",
        doc="top-k of softmax or sigmoid, a token's logits in the registers of a few lanes",
        params=(
            Param("dtype", FLOATS, "element type of logits"),
            Param("tile", moe.TILES, "(lanes of a warp on a token, logits of each)"),
            Param("plain", (True, False), "softmax of one group of experts, in whole chunks"),
            Param("threads", (_THREADS,), "threads of a block", tunable=True),
        ),
        derive=lambda params: dict(zip(("lanes", "values"), params["tile"], strict=True)),
        illegal=moe.illegal,
        pdl=True,
        block=lambda params: (params["threads"], 1, 1),
        grid=_grid,
        arguments=lambda params, p, arrays: {
            **{**_ABSENT, **arrays, "row_stride": p["row_stride"], "tokens": p["tokens"]},
            "how": moe.routing(params, p),
        },
        work=Work(
            flops=lambda p: float(p["tokens"] * p["experts"] * (4 + p["top_k"])),
            bytes=moe.route_traffic,
        ),
        verification="fkjit.ops.moe.cases:ROUTE",
    )
)

OPTIONS = "int top_k, str scoring, bool renormalize, int? num_groups, int? topk_groups, float scale"
GROUP_TOPK = "int? group_topk=None"  # the last one of operators


def fake(logits: Any, bias: Any, top_k: int, *options: Any) -> list[Any]:
    """Weights and ids without data."""
    shape = (logits.shape[0], top_k)
    return [of_dtype(logits, shape, "fp32"), of_dtype(logits, shape, "int32")]


_OP = Op(
    _CALL,
    inputs=("logits", "bias"),
    outputs=("topk_weights", "topk_ids"),
    check=_check,
    optional=("bias",),
    node=Node(fake, f"{OPTIONS}, {GROUP_TOPK}", 2),
)
moe_route.prepare = _OP.preparing(moe_route)  # type: ignore[attr-defined]
