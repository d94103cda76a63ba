"""Everything that can be wrong with a call of attention's backward, found before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arguments import one_of
from fkjit.errors import ParameterError
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.backward.features import Views
from fkjit.ops.attention.backward.problem import PACKED, Options
from fkjit.ops.attention.backward.select import IMPLEMENTATIONS, select
from fkjit.ops.attention.features import POINTERS
from fkjit.ops.attention.shapes import (
    LAYOUTS,
    are_rows_aligned,
    check_columns,
    check_dims,
    check_heads,
    check_scale,
)
from fkjit.ops.op.checks import check_dtype, check_flag, check_same_dtype, check_shape
from fkjit.ops.op.op import Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.spec import Problem

CALL = "attention_backward"
ROWS = ("q", "k", "v")
DIFFERENTIABLE = (*ROWS, "alibi_slopes", "bias", "sinks")
PLAIN_INPUTS = ("dout", *ROWS, "o", "lse", "dlse")
INPUTS = (*PLAIN_INPUTS, *POINTERS)
GRADIENTS = tuple(f"d{name}" for name in DIFFERENTIABLE)
SCRATCH = ("lse_log2", "delta", "dq_sum", "dalibi_rows", "dbias_parts", "turns", "mask_bits")
OUTPUTS = (*GRADIENTS, *SCRATCH)
PLAIN_OUTPUTS = ("dq", "dk", "dv", "lse_log2", "delta", "dq_sum", "turns")
_TENSORS = PLAIN_INPUTS[:5]  # of [batch, head, row, column]
_MAX_ROWS = 2**31 - 1 - shared.ROW_STEP


def check_plain(
    views: Views, causal: Any, softmax_scale: Any, deterministic: Any, impl: Any, layout: Any
) -> Request:
    """`check` for `fkjit.attention_backward`, whose options may be anything."""
    one_of(CALL, "impl", impl, IMPLEMENTATIONS)
    one_of(CALL, "layout", layout, tuple(LAYOUTS))
    return check(views, Options(
        causal=causal, softmax_scale=softmax_scale, deterministic=deterministic, impl=impl,
        layout=layout,
    ))  # fmt: skip


def check(views: Views, options: Options) -> Request:
    """The launches of a call, and its results.

    What a forward with score features or packed sequences has looked at is not looked at again.
    """
    given = {name: view for name in _TENSORS if (view := views[name]) is not None}
    problem = _packed(given, views, options) if options.layout == PACKED else _dense(given, options)
    if options.layout != PACKED:
        _check_rows(views, problem)
    problem["causal"] = check_flag(CALL, "causal", options.causal)
    problem["softmax_scale"] = check_scale(CALL, options.softmax_scale, problem["head_dim"])
    problem["strides"] = _strides(given, options.layout)
    deterministic = check_flag(CALL, "deterministic", options.deterministic)
    q = given["q"]
    if q.device != CPU:
        problem["multiprocessors"] = multiprocessors(q.device)
    if options.features:
        _add_features(problem, views, options)
    options = options._replace(deterministic=deterministic)
    chosen = select(problem, options, views, are_rows_aligned(given.values()), arch_of(q))
    outputs = _outputs(views, options.wanted)
    scratch = {name: Output(size, "fp32", returned=False) for name, size in chosen.scratch.items()}
    return Request(dict(views), outputs | scratch, chosen.launches, counters=chosen.counters)


# ------------------------------------------------------------------ sizes


def _dense(given: Mapping[str, View], options: Options) -> dict[str, Any]:
    """Batch, heads, lengths and head dimensions, and the dtype; all shapes fit one another."""
    for name, view in given.items():
        if len(view.shape) != 4:
            raise ParameterError(
                f"{CALL}: {name} has {len(view.shape)} dimensions {tuple(view.shape)}; allowed: 4 "
                f"(layout {options.layout!r})"
            )
        check_columns(CALL, name, view)
    problem = _sizes(given, options.layout)
    return {**problem, "dtype": check_same_dtype(CALL, given)}


def _sizes(given: Mapping[str, View], layout: str) -> dict[str, Any]:
    seen = {name: tuple(view.shape[i] for i in LAYOUTS[layout]) for name, view in given.items()}
    (b, hq, sq, d), (_, hkv, sk, _), dv = seen["q"], seen["k"], seen["v"][3]
    wanted = {
        "q": (b, hq, sq, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv), "o": (b, hq, sq, dv),
        "dout": (b, hq, sq, dv),
    }  # fmt: skip
    for name, size in wanted.items():
        if seen[name] != size:
            order = LAYOUTS[layout]
            raise ParameterError(
                f"{CALL}: {name} has shape {tuple(given[name].shape)}; allowed: "
                f"{tuple(size[i] for i in order)}, beside q {tuple(given['q'].shape)}, k "
                f"{tuple(given['k'].shape)} and v {tuple(given['v'].shape)} in layout={layout!r}"
            )
    check_dims(CALL, d, dv)
    for name, rows in (("q", sq), ("k", sk)):
        if rows > _MAX_ROWS:
            raise ParameterError(f"{CALL}: {name} has {rows} rows; allowed: up to {_MAX_ROWS}")
    check_heads(CALL, given, hq, hkv)
    return dict(zip(shared.SIZES, (b, hq, hkv, sq, sk, d, dv), strict=True))


def _packed(given: Mapping[str, View], views: Views, options: Options) -> dict[str, Any]:
    """The same of packed sequences, which a forward has seen; lengths are those of the longest."""
    q, k, v, ends = given["q"], given["k"], given["v"], views["cu_seqlens_q"]
    assert ends is not None
    longest = options.max_seqlen_q, options.max_seqlen_k
    sizes = (ends.shape[0] - 1, q.shape[1], k.shape[1], *longest, q.shape[2], v.shape[2])
    problem: dict[str, Any] = dict(zip(shared.SIZES, sizes, strict=True))
    return {**problem, "total_q": q.shape[0], "dtype": q.dtype}


# ------------------------------------------------------------------ options and rows


def _check_rows(views: Views, problem: Problem) -> None:
    """lse, and its gradient if there is one."""
    size = tuple(problem[name] for name in ("batch", "heads_q", "seqlen_q"))
    for name in ("lse", "dlse"):
        view = views[name]
        if view is None:
            continue
        check_dtype(CALL, name, view, ("fp32",))
        check_shape(CALL, name, view, size, "q's batch, heads and rows")
        steps = (size[1] * size[2], size[2], 1)
        pairs = zip(view.strides, steps, size, strict=True)
        if 0 not in size and any(found != step and n > 1 for found, step, n in pairs):
            raise ParameterError(f"{CALL}: {name} is not contiguous; call .contiguous()")


def _add_features(problem: dict[str, Any], views: Views, options: Options) -> None:
    """The band of keys in place of causal, and what else score features bring along."""
    wide = max(problem["seqlen_q"], problem["seqlen_k"])
    left, right = (wide if side < 0 else min(side, wide) for side in options.window)
    problem["window"] = (left, 0 if problem["causal"] else right)
    problem["softcap"] = options.softcap
    problem["score_scalars"] = {name: value for name, _, value in options.score_scalars}
    slopes = views.get("alibi_slopes")
    if slopes is not None:
        problem["alibi_batches"] = slopes.shape[0] if len(slopes.shape) == 2 else 1


# ------------------------------------------------------------------ strides and results


def _strides(given: Mapping[str, View], layout: str) -> dict[str, tuple[int, ...]]:
    """Elements between batches, heads and rows of every array, 0 between batches of packed ones;
    gradients have no gaps."""
    found = {name: _by_rows(view.strides, layout) for name, view in given.items()}
    for name in ROWS:
        steps, step = [], 1
        for extent in reversed(given[name].shape):
            steps.insert(0, step)
            step *= extent
        found[f"d{name}"] = _by_rows(steps, layout)
    return found


def _by_rows(steps: Any, layout: str) -> tuple[int, ...]:
    if layout == PACKED:
        return (0, steps[1], steps[0])
    return tuple(steps[axis] for axis in LAYOUTS[layout][:3])


def _outputs(views: Views, wanted: tuple[str, ...]) -> dict[str, Output]:
    """What is returned, written to where the caller has an array for it; and what kernels make
    besides."""
    together = (("k", "v"), ("v", "k"), ("alibi_slopes", "q"))  # one kernel makes both
    besides = [other for one, other in together if one in wanted and other not in wanted]
    made = {}
    for name in (*wanted, *besides):
        view = views[name]
        assert view is not None
        given = views.get(f"d{name}") if name in wanted else None
        made[f"d{name}"] = Output(tuple(view.shape), view.dtype, given, name in wanted)
    return made
