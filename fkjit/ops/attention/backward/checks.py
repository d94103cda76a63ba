"""Everything that can be wrong with a call of `fkjit.attention_backward`, found before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.backward import select as choice
from fkjit.ops.attention.shapes import LAYOUTS, MAX_HEAD_DIM
from fkjit.ops.op.checks import check_dtype, check_flag, check_same_dtype, check_shape
from fkjit.ops.op.op import Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, ITEMSIZE, View
from fkjit.spec import Problem

CALL = "attention_backward"
Views = Mapping[str, View | None]
_TENSORS = ("dout", "q", "k", "v", "o")  # of [batch, head, row, column]
_MAX_SCALE = 2e38  # times log2(e) it is still an fp32
_MAX_ROWS = 2**31 - 1 - shared.ROW_STEP


def check(
    views: Views, causal: Any, softmax_scale: Any, deterministic: Any, impl: Any, layout: Any
) -> Request:
    """The launches of a call, and its results."""
    for name, value, allowed in (
        ("impl", impl, choice.IMPLEMENTATIONS), ("layout", layout, tuple(LAYOUTS))
    ):  # fmt: skip
        if not isinstance(value, str) or value not in allowed:
            raise ParameterError(f"{CALL}: {name}={value!r} is not one of {', '.join(allowed)}")
    given = {name: _tensor(views, name, layout) for name in _TENSORS}
    problem = _sizes(given, layout)
    problem["dtype"] = check_same_dtype(CALL, given)
    problem["causal"] = check_flag(CALL, "causal", causal)
    problem["softmax_scale"] = check_scale(softmax_scale, problem["head_dim"])
    _check_rows(views, problem)
    problem["strides"] = _strides(given, problem, layout)
    q = given["q"]
    if q.device != CPU:
        problem["multiprocessors"] = multiprocessors(q.device)
    exact = check_flag(CALL, "deterministic", deterministic)
    chosen = choice.choose(problem, _aligned(given, problem), arch_of(q), impl, exact)
    outputs = {name: _result(problem, name, layout) for name in ("dq", "dk", "dv")}
    scratch = {name: Output(size, "fp32", returned=False) for name, size in chosen.scratch.items()}
    return Request(dict(views), outputs | scratch, chosen.launches, counters=chosen.counters)


def _tensor(views: Views, name: str, layout: str) -> View:
    view = views[name]
    assert view is not None
    if len(view.shape) != 4:
        raise ParameterError(
            f"{CALL}: {name} has {len(view.shape)} dimensions {tuple(view.shape)}; allowed: 4 "
            f"(layout {layout!r})"
        )
    if view.shape[3] > 1 and view.strides[3] != 1 and 0 not in view.shape:
        raise ParameterError(
            f"{CALL}: {name} has stride {view.strides[3]} in its last dimension; it must be "
            "contiguous: call .contiguous()"
        )
    return view


def _sizes(given: Mapping[str, View], layout: str) -> dict[str, Any]:
    """Batch, heads, lengths and head dimensions; all shapes fit one another."""
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
    for name, dim in (("head_dim", d), ("head_dim_v", dv)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ParameterError(f"{CALL}: {name}={dim} is not in 1 .. {MAX_HEAD_DIM}")
    for name, rows in (("q", sq), ("k", sk)):
        if rows > _MAX_ROWS:
            raise ParameterError(f"{CALL}: {name} has {rows} rows; allowed: up to {_MAX_ROWS}")
    if hq and (not hkv or hq % hkv):
        raise ParameterError(f"{CALL}: q has {hq} heads, not a multiple of k's {hkv}")
    return dict(zip(shared.SIZES, (b, hq, hkv, sq, sk, d, dv), strict=True))


def check_scale(scale: Any, head_dim: int) -> float:
    """1 / sqrt(head_dim) for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        if isinstance(scale, (str, bytes)) or getattr(scale, "requires_grad", False):
            raise TypeError
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"{CALL}: softmax_scale={scale!r} is not a plain number; None means 1/sqrt(head_dim)"
        ) from None
    if not abs(value) <= _MAX_SCALE:
        raise ParameterError(
            f"{CALL}: softmax_scale={value} is not a finite number up to {_MAX_SCALE:g}"
        )
    return value


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


def _strides(
    given: Mapping[str, View], problem: Problem, layout: str
) -> dict[str, tuple[int, ...]]:
    """Elements between batches, heads and rows of every array; new ones have no gaps."""
    order = LAYOUTS[layout]
    found = {n: tuple(view.strides[i] for i in order[:3]) for n, view in given.items()}
    for name in ("dq", "dk", "dv"):
        sizes = [shared.shape(problem, name)[i] for i in order]
        steps = [sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3]]
        found[name] = tuple(steps[order[i]] for i in range(3))
    return found


def _result(problem: Problem, name: str, layout: str) -> Output:
    sizes = shared.shape(problem, name)
    return Output(tuple(sizes[i] for i in LAYOUTS[layout]), problem["dtype"])


def _aligned(given: Mapping[str, View], problem: Problem) -> bool:
    """Whether every row, also of the results, starts on a 16-byte boundary."""
    size = ITEMSIZE[problem["dtype"]]
    numbers = [problem["head_dim"] * size, problem["head_dim_v"] * size]
    for view in given.values():
        pairs = zip(view.strides[:3], view.shape[:3], strict=True)
        numbers += [view.pointer, *(step * size for step, n in pairs if n > 1)]
    return all(number % 16 == 0 for number in numbers)
