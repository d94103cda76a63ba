"""`fkjit.merge_states`: partial results of attention, over different keys, put together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from math import prod
from typing import Any

from fkjit.arguments import one_of, shown
from fkjit.errors import ParameterError
from fkjit.ops.attention.merge.kernels import ROW_AXES, describe, is_vector, kernel, parameters
from fkjit.ops.op.autograd import Differentiable
from fkjit.ops.op.checks import check_dtype, check_output, check_same_dtype, check_shape
from fkjit.ops.op.node import Node, like
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.runtime.interop import View
from fkjit.types import Layout

_CALL = "merge_states"
_LIMIT = 2**31
_ALLOWED = (
    "o [N, B, H, S, Dv] and lse [N, B, H, S], or o, other [B, H, S, Dv] and lse, other_lse "
    "[B, H, S]; without S for one token"
)


def merge_states(
    o: Any, lse: Any, other: Any = None, other_lse: Any = None, *, layout: Layout = "bhsd",
    mask: Any = None, out: Any = None,
) -> Any:  # fmt: skip
    """Attention of the same queries over different keys, put together in one kernel.

    With the log-sum-exp of each the result is what attention over all keys at once would give: for
    a prefix that many sequences share, and keys that lie on several devices.

    Example:
        >>> q, k, v = np.ones((3, 1, 1, 8, 16), np.float16)
        >>> v[:, :, 4:] = 3
        >>> halves = [slice(0, 4), slice(4, 8)]
        >>> parts = [fkjit.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in halves]
        >>> o, lse = fkjit.merge_states(*parts[0], *parts[1])
        >>> float(o.min()), float(o.max())  # the mean of 1 and 3
        (2.0, 2.0)

    Args:
        o: N partial results, [N, B, H, S, Dv] or for one token [N, B, H, Dv]; fp16, bf16 or fp32:
            torch, CuPy, NumPy or any DLPack array, contiguous in the last dimension. With
            layout="bshd" H and S trade places, but not in lse. Or, where there is an `other`, one
            of them, without N.
        lse: fp32 [N, B, H, S], or [N, B, H] for one token; natural logarithms, of any strides. An
            infinite one, of either sign, says that no key was seen: its o is not looked at.
        other, other_lse: the second partial result, as o and lse.
        mask: bool, of a shape that broadcasts to lse's: where it is False, a row keeps o and lse,
            as though other had seen no key. Only with an `other`.
        out: where the merged o is written; default: a new contiguous array. It may be o, or other,
            of two; any other overlap is refused.

    Returns:
        (o, lse) of one partial result's shapes, o in its dtype: weighed and added in fp32, in their
        order, and rounded once. Rows for which no key was seen are 0, with lse -inf. With
        torch it has gradients of all four, by PyTorch's own kernels.

    Raises:
        ParameterError: shapes, strides, layout or overlaps. ArgumentTypeError: not arrays, other
        dtypes. DeviceError: mixed devices. CaptureError: first call of a geometry under CUDA graph
        capture; see `fkjit.prepare`.

    Rows of whole 16 bytes on 16-byte boundaries are fastest.
    """
    if mask is not None:
        other_lse = _masked(other_lse, mask)
    return _OP((o, lse, other, other_lse), (out, None), (layout,))


def _masked(other_lse: Any, mask: Any) -> Any:
    """-inf, of a part that saw no key, where the mask is False."""
    shape, own = (tuple(getattr(x, "shape", ())) for x in (mask, other_lse))
    sizes = zip(shape[::-1], own[::-1], strict=False)
    fits = len(shape) <= len(own) and all(size in (1, whole) for size, whole in sizes)
    if other_lse is None or not fits or not str(getattr(mask, "dtype", "")).endswith("bool"):
        raise ParameterError(
            f"{_CALL}: mask={shown(mask)}; allowed: bool of a shape that broadcasts to lse's, with "
            "other and other_lse"
        )
    if hasattr(other_lse, "masked_fill"):
        return other_lse.masked_fill(~mask, float("-inf"))
    return import_module(type(other_lse).__module__.partition(".")[0]).where(
        mask, other_lse, other_lse.dtype.type("-inf")
    )


def _prepare(
    o: Any, lse: Any, other: Any = None, other_lse: Any = None, *, layout: Layout = "bhsd",
    mask: Any = None, out: Any = None,
) -> None:  # fmt: skip
    """Compile and load what the call with the same arguments needs, without running it."""
    _OP.prepare([o, lse, other, other_lse, out, None], (layout,))


def _check(views: Mapping[str, View | None], layout: Any) -> Request:
    o, lse, other, other_lse = (views[name] for name in _OP.inputs)
    assert o is not None and lse is not None
    one_of(_CALL, "layout", layout, ROW_AXES)
    if (other is None) != (other_lse is None):
        raise ParameterError(f"{_CALL}: other and other_lse are given together or not at all")
    dtype = check_same_dtype(_CALL, {"o": o} if other is None else {"o": o, "other": other})
    check_dtype(_CALL, "lse", lse, ("fp32",))
    parts, shape, columns = _sizes(o, lse, layout, other is not None)
    if other is not None and other_lse is not None:
        check_shape(_CALL, "other", other, tuple(o.shape), "o's")
        check_dtype(_CALL, "other_lse", other_lse, ("fp32",))
        check_shape(_CALL, "other_lse", other_lse, tuple(lse.shape), "lse's")
    given = views["out"]
    one = tuple(o.shape) if other is not None else tuple(o.shape[1:])
    check_output(_CALL, given, one, dtype)
    made = {"out": Output(one, dtype, given), "out_lse": Output(shape, "fp32")}
    inputs = {name: views[name] for name in _OP.inputs}
    if 0 in shape:
        return Request(inputs, made, ())
    problem = _problem(views, dtype, layout, (parts, shape, columns), one)
    pointers = [view.pointer for view in (o, other, given) if view is not None]
    params = parameters(problem, is_vector(problem, pointers))
    return Request(inputs, made, (Launch(kernel(params["parts"]), params, problem),))


def _sizes(o: View, lse: View, layout: str, pair: bool) -> tuple[int, tuple[int, ...], int]:
    """(partial results, shape of one's lse, columns)."""
    rows = tuple(lse.shape) if pair else tuple(lse.shape[1:])
    parts = 2 if pair else (lse.shape[0] if lse.shape else 0)
    expected = (*(() if pair else (parts,)), *_swapped(rows, layout))
    if len(rows) not in (2, 3) or tuple(o.shape[:-1]) != expected or o.shape[-1:] == (0,):
        raise ParameterError(
            f"{_CALL}: o has shape {tuple(o.shape)}, lse {tuple(lse.shape)}; allowed: {_ALLOWED} "
            f"(layout={layout!r})"
        )
    if max(prod(rows), parts) >= _LIMIT:
        raise ParameterError(f"{_CALL}: lse has shape {tuple(lse.shape)}; allowed: below 2^31 rows")
    return parts, rows, o.shape[-1]


def _swapped(rows: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """[B, H, S] and [B, S, H] for each other; [B, H] as it is."""
    return rows if len(rows) < 3 else tuple(rows[axis] for axis in ROW_AXES[layout])


def _problem(
    views: Mapping[str, View | None], dtype: str, layout: str,
    sizes: tuple[int, tuple[int, ...], int], one: tuple[int, ...],
) -> dict[str, Any]:  # fmt: skip
    parts, shape, columns = sizes
    pair = views["other"] is not None
    strides = {"out_lse": _contiguous(shape)}
    for name in ("o", "other", "out"):
        view = views[name]
        if view is None and name == "other":
            continue
        steps = _contiguous(one) if view is None else tuple(view.strides)
        if steps[-1] != 1 and columns > 1 and (view is None or 0 not in view.shape):
            raise ParameterError(
                f"{_CALL}: {name} has stride {steps[-1]} in its last dimension; it must be "
                f"contiguous: pass a contiguous copy of {name}"
            )
        strides[name] = _swapped(steps[-1 - len(shape) : -1], layout)
    for name in ("lse", "other_lse"):
        view = views[name]
        if view is not None:
            strides[name] = tuple(view.strides[-len(shape) :])
    o, lse = views["o"], views["lse"]
    assert o is not None and lse is not None
    steps = (0, 0) if pair else (o.strides[0], lse.strides[0])
    return describe(dtype, shape, strides, parts, columns, *steps)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _with_gradients(inputs: tuple[Any, ...], outputs: tuple[Any, ...], options: Any) -> Any:
    if outputs[0] is not None:
        raise ParameterError(
            f"{_CALL}: out is given and an input requires grad; call it under torch.no_grad(), or "
            "without out"
        )
    return _MERGE(inputs, options)


def _forward(inputs: tuple[Any, ...], options: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    made = _OP(inputs, (None, None), options)
    return made, (*inputs, *made)


def _backward(
    saved: tuple[Any, ...], gradients: tuple[Any, ...], needed: tuple[bool, ...], options: Any
) -> list[Any]:
    """do_i = w_i do; dlse_i = w_i (do · (o_i - o) + dlse)."""
    (do, dlse), (o, lse, other, other_lse, whole, whole_lse) = gradients, saved
    where = sys.modules["torch"].where
    swap = options[0] == "bshd" and whole_lse.dim() == 3

    def as_lse(rows: Any) -> Any:
        """[B, S, H] and [B, H, S] for each other, where o has them in another order than lse."""
        return rows.transpose(-1, -2) if swap else rows

    found = []
    for part, sums in ((o, lse), (other, other_lse)):
        if part is None:
            found += [None, None]
            continue
        seen, d_part, along = sums.isfinite(), None, dlse
        weight = where(seen, (sums - whole_lse).exp(), 0.0)
        if do is not None:
            d_part = (as_lse(weight).unsqueeze(-1) * do.float()).to(part.dtype)
            dot = as_lse((do.float() * (part.float() - whole.float())).sum(-1))
            along = dot if dlse is None else dot + dlse
        found += [d_part, where(seen, weight * along, 0.0)]
    return [gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True)]


_MERGE = Differentiable("Merge", _forward, _backward)


def _fake(o: Any, lse: Any, other: Any, other_lse: Any, layout: str) -> list[Any]:
    return [like(o if other is not None else o[0]), like(lse if other is not None else lse[0])]


_OP = Op(
    _CALL,
    inputs=("o", "lse", "other", "other_lse"),
    outputs=("out", "out_lse"),
    check=_check,
    optional=("other", "other_lse"),
    in_place=(("out", "o"), ("out", "other")),
    autograd=_with_gradients,
    node=Node(_fake, "str layout", 2),
)
merge_states.prepare = _prepare  # type: ignore[attr-defined]
