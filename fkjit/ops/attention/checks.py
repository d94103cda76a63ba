"""Everything that can be wrong with a call of attention's forward, found before it runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fkjit.arguments import one_of
from fkjit.errors import ArgumentTypeError, CaptureError, ParameterError
from fkjit.ops.attention import select, select_few
from fkjit.ops.attention.feature_checks import check_features
from fkjit.ops.attention.features import ScoreFeatures
from fkjit.ops.attention.kernels_few import COMBINE, FEW, works
from fkjit.ops.attention.kernels_sm90 import COUNTERS, FLASH_SM90, counters
from fkjit.ops.attention.options import AttentionOptions, Options, VarlenOptions
from fkjit.ops.attention.shapes import (
    LAYOUTS,
    Sizes,
    are_rows_aligned,
    check_block,
    check_columns,
    check_scale,
    dense_sizes,
    packed_sizes,
)
from fkjit.ops.op.checks import (
    FLOATS,
    check_dtype,
    check_flag,
    check_output,
    check_same_dtype,
)
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.runtime import interop
from fkjit.runtime.device import is_capturing, multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.spec import Params

IMPLEMENTATIONS = ("auto", "flash", "tiled", "naive")
_WITH_FEATURES = ("auto", "flash")
_LIMIT = 2**31
_OUTPUTS = ("o", "lse")

Views = Mapping[str, View | None]


def check(views: Views, options: AttentionOptions) -> Request:
    """A call of attention."""
    call = "attention"
    has_features = _has_features(views, options)
    allowed = _WITH_FEATURES if has_features else IMPLEMENTATIONS
    one_of(call, "impl", options.impl, allowed)
    one_of(call, "layout", options.layout, tuple(LAYOUTS))
    rows = _rows(call, views)
    problem = dense_sizes(call, rows, options.layout)
    first, second, third, _ = rows["q"].shape
    shape = (first, second, third, problem["head_dim_v"])
    lse = (problem["batch"], problem["heads_q"], problem["seqlen_q"])
    seen = present(views) if has_features else rows
    given = _given(call, views, problem, (shape, lse))
    return request(call, seen, problem, (shape, lse), options, has_features, given)


def _given(
    call: str, views: Views, problem: Sizes, shapes: Sequence[tuple[int, ...]]
) -> Sequence[View | None]:
    """o, of rows at any distance, and a contiguous lse, where they are to be written."""
    o, lse = views.get("o"), views.get("lse")
    if o is lse is None:
        return None, None
    check_output(call, o, shapes[0], views["q"].dtype, "o")  # type: ignore[union-attr]
    check_output(call, lse, shapes[1], "fp32", "lse")
    if o is not None and o.strides[-1] != 1:
        check_columns(call, "o", o)
    if lse is not None and tuple(lse.strides) != interop.contiguous(lse.shape):
        raise ParameterError(f"{call}: lse has strides {tuple(lse.strides)}; allowed: contiguous")
    return o, lse


def check_varlen(views: Views, options: VarlenOptions) -> Request:
    """A call of attention_varlen."""
    call = "attention_varlen"
    problem = packed_sizes(call, _rows(call, views))
    problem["batch"] = sequences(call, views)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        problem[name.removeprefix("max_")] = length(call, name, getattr(options, name))
    check_grid(call, problem)
    total, heads = problem["total_q"], problem["heads_q"]
    shapes = ((total, heads, problem["head_dim_v"]), (heads, total))
    return request(call, present(views), problem, shapes, options, True)


def _has_features(views: Views, options: AttentionOptions) -> bool:
    """Whether scores meet anything but the scale and causality."""
    if options.window is not None or options.softcap is not None or options.score_mod:
        return True
    get = views.get
    return not (get("alibi_slopes") is get("bias") is get("mask") is get("sinks") is None)


def request(
    call: str, seen: Mapping[str, View], problem: Sizes, shapes: Sequence[tuple[int, ...]],
    options: Options, has_features: bool, given: Sequence[View | None] = (None, None),
) -> Request:  # fmt: skip
    """What both calls have in common; `seen`: the arrays that there are; `shapes` of o and lse, and
    those that were given (`attention_into`)."""
    features = _complete(call, seen, problem, options, has_features)
    o, lse = Output(shapes[0], problem["dtype"], given[0]), Output(shapes[1], "fp32", given[1])
    made = {"o": o, "lse": lse if check_flag(call, "return_lse", options.return_lse) else None}
    block = check_block(call, options.block)
    if 0 in (*shapes[0], problem["batch"], problem["seqlen_q"]):
        return Request(seen, made, ())
    rows = (seen["q"], seen["k"], seen["v"], *(x for x in given[:1] if x is not None))
    aligned = are_rows_aligned(rows, problem["head_dim_v"])
    impl, arch = "flash", arch_of(seen["q"])
    if isinstance(options, AttentionOptions):
        impl = options.impl
        if select.decodes(problem, seen, features, options, aligned, arch):
            return Request(seen, made, (), delegate=select.to_decode)
        if features is None:
            few = select_few.choice(problem, seen, impl, block, aligned, arch)
            if few is not None:
                return _few_queries(seen, problem, made, *few)
    try:
        spec, params = select.variant(problem, seen, features, impl, block, aligned, arch)
    except ParameterError as error:
        raise ParameterError(str(error).replace("attention_form:", f"{call}:", 1)) from None
    drawn = counters(params, problem) if spec.name == FLASH_SM90.name else 0
    return Request(seen, made, (Launch(spec, params, problem),), counters=drawn)


def _few_queries(
    seen: Mapping[str, View], problem: Sizes, made: dict[str, Output | None], params: Params,
    parts: int,
) -> Request:  # fmt: skip
    """Several heads in a tile of queries, or keys in parts, which another kernel puts together."""
    if parts == 1:
        launches = (Launch(FEW, params, problem),)
    else:
        width = params["head_dim_v"]
        problem = {**problem, "parts": parts, "width": width}
        shape = (parts, *(problem[name] for name in ("batch", "heads_q", "seqlen_q")))
        made["o_parts"] = Output((*shape, width), "fp32", returned=False)
        made["lse_parts"] = Output(shape, "fp32", returned=False)
        columns = {"dtype": params["dtype"], "head_dim_v": width}
        launches = (Launch(FEW, params, problem), Launch(COMBINE, columns, problem))
    drawn = COUNTERS if works(params, problem) > problem["multiprocessors"] else 0
    return Request(seen, made, launches, counters=drawn)


def _complete(
    call: str, seen: Mapping[str, View], problem: Sizes, options: Options, has_features: bool
) -> ScoreFeatures | None:
    """What a problem has besides sizes; the features that are to be compiled, if there are any."""
    problem["dtype"] = seen["q"].dtype
    problem["softmax_scale"] = check_scale(call, options.softmax_scale, problem["head_dim"])
    if seen["q"].device != CPU:
        problem["multiprocessors"] = multiprocessors(seen["q"].device)
    if has_features:
        return check_features(call, seen, problem, options)
    problem["causal"] = check_flag(call, "causal", options.causal)
    return None


def check_grid(call: str, problem: Sizes) -> None:
    if problem["seqlen_q"] * problem["heads_q"] * max(problem["batch"], 1) >= _LIMIT:
        raise ParameterError(
            f"{call}: max_seqlen_q={problem['seqlen_q']} for so many sequences is no grid"
        )


# ------------------------------------------------------------------ arrays


def present(views: Views) -> dict[str, View]:
    """The inputs that there are."""
    return {n: view for n, view in views.items() if view is not None and n not in _OUTPUTS}


def _rows(call: str, views: Views) -> dict[str, View]:
    """q, k and v, of one dtype."""
    q, k, v = views["q"], views["k"], views["v"]
    assert q is not None and k is not None and v is not None  # the op has looked
    rows = {"q": q, "k": k, "v": v}
    if not (q.dtype == k.dtype == v.dtype and q.dtype in FLOATS):
        check_same_dtype(call, rows)
    return rows


def sequences(call: str, views: Views) -> int:
    """Sequences, of which cu_seqlens say where they begin and end."""
    lengths = [ends(call, views, name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if lengths[0] != lengths[1]:
        raise ParameterError(
            f"{call}: cu_seqlens_q has {lengths[0]} elements, cu_seqlens_k {lengths[1]}; allowed: "
            "one more than there are sequences, in both"
        )
    return lengths[0] - 1


def ends(call: str, views: Views, name: str) -> int:
    """How many there are of where sequences end, 0 before them."""
    view = views[name]
    assert view is not None  # the op has looked
    check_dtype(call, name, view, ("int32",))
    if len(view.shape) != 1 or not view.shape[0] or (view.shape[0] > 1 and view.strides[0] != 1):
        raise ParameterError(
            f"{call}: {name} has shape {tuple(view.shape)}, strides {tuple(view.strides)}; "
            "allowed: [sequences + 1], contiguous: 0 and the running sums of the lengths"
        )
    return view.shape[0]


def look_at_ends(inputs: Sequence[Any], call: str = "attention_varlen", axis: int = 0) -> None:
    """The numbers in cu_seqlens, read from wherever they are: ParameterError for rows that are not
    there, along this axis. What they are, and whether they are arrays at all, the check says."""
    for name, rows, ends in zip(("q", "k"), inputs[:2], inputs[3:5], strict=True):
        whole, seen = (interop.view(x, call, name) for x in (rows, ends))
        if seen.dtype not in ("int32", "int64") or len(seen.shape) != 1 or axis >= len(whole.shape):
            continue
        if seen.device != CPU and is_capturing(interop.current_stream(seen)):
            raise CaptureError(
                f"{call}: fkjit.sanitize(indices=True) reads cu_seqlens_{name}, which cannot be "
                "done while the stream is being captured into a CUDA graph"
            )
        values = [0, *seen.array.tolist()]
        for place, (before, value) in enumerate(pairwise(values)):
            if not before <= value <= whole.shape[axis] or (place == 0 and value):
                raise ParameterError(
                    f"{call}: cu_seqlens_{name}[{place}]={value} after {before}; allowed: 0, then "
                    f"rising, up to the {whole.shape[axis]} rows of {name}"
                )


def length(call: str, name: str, value: Any) -> int:
    try:
        length = value if isinstance(value, int) else operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{call}: {name}={value!r} is not a whole number") from None
    if not 0 <= length < _LIMIT:
        raise ParameterError(f"{call}: {name}={length} is not in 0 .. {_LIMIT - 1}")
    return length
