"""What can be wrong with the arrays of any simple op: frameworks, dtypes, overlaps, gradients."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.runtime.interop import CPU, ITEMSIZE, View
from fkjit.symbolic import cached

FLOATS = ("fp16", "bf16", "fp32")
Views = Mapping[str, View | None]
Pair = tuple[str, View, str, View]  # what is written, and what stands beside it


def check_alike(call: str, views: Views) -> None:
    """One framework and one device."""
    one: View | None = None
    first = ""
    for name, view in views.items():
        if view is None:
            continue
        if one is None:
            first, one = name, view
        if view.device != one.device:
            raise DeviceError(
                f"{call}: {name} is on {place(view)} but {first} is on {place(one)}; move them to "
                "one device (fkjit never copies between devices)"
            )
        if view.kind != one.kind:
            raise ArgumentTypeError(
                f"{call}: {name} is a {_framework(view)} array but {first} is a "
                f"{_framework(one)} array; "
                "pass arrays of one framework"
            )


def _framework(view: View) -> str:
    """ "torch", "jax": whose array it is."""
    if view.source is None:
        return view.kind
    module = type(view.source).__module__.partition(".")[0]
    return {"jaxlib": "jax"}.get(module, module)


def place(view: View) -> str:
    """ "the CPU" or "cuda:0"."""
    return "the CPU" if view.device == CPU else f"cuda:{view.device}"


def check_dtype(call: str, name: str, view: View, allowed: Collection[str] = FLOATS) -> None:
    """ArgumentTypeError for any other."""
    if view.dtype not in allowed:
        raise ArgumentTypeError(f"{call}: {name} is {view.dtype}; allowed: {', '.join(allowed)}")


def check_same_dtype(call: str, views: Views, allowed: Collection[str] = FLOATS) -> str:
    """The dtype that all of them have."""
    first = dtype = ""
    for name, view in views.items():
        if view is None:
            continue
        if view.dtype not in allowed:
            check_dtype(call, name, view, allowed)
        if not dtype:
            first, dtype = name, view.dtype
        if view.dtype != dtype:
            raise ArgumentTypeError(
                f"{call}: {name} is {view.dtype} but {first} is {dtype}; convert them to one dtype"
            )
    return dtype


def check_shape(call: str, name: str, view: View, shape: tuple[int, ...], of: str) -> None:
    """ParameterError unless `name` has this shape; `of` says whose or which: "a's"."""
    if tuple(view.shape) != tuple(shape):
        raise ParameterError(
            f"{call}: {name} has shape {tuple(view.shape)}; allowed: {of} {tuple(shape)}"
        )


def check_output(
    call: str, view: View | None, shape: tuple[int, ...], dtype: str, name: str = "out"
) -> None:
    """An output that the caller gave: shape, dtype, writable, no element twice in memory."""
    if view is None:
        return
    check_dtype(call, name, view, (dtype,))
    check_shape(call, name, view, shape, "the result's")
    check_writable(call, name, view)


def check_writable(call: str, name: str, view: View) -> None:
    """ParameterError for read-only arrays, and for those with an element twice in memory."""
    if view.kind == "numpy" and not view.array.flags.writeable:
        raise ParameterError(f"{call}: {name} is read-only; it is written")
    if _folded(tuple(view.shape), tuple(view.strides)):
        raise ParameterError(
            f"{call}: {name} (shape {tuple(view.shape)}, strides {tuple(view.strides)}) has "
            "elements that share memory; it is written: pass an array of its own"
        )


@cached(256)
def _folded(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether an element may be there twice."""
    reach = 0  # elements from the first to the last one of the dimensions so far
    steps = sorted([(abs(step), n) for step, n in zip(strides, shape, strict=True)])
    for step, n in steps if 0 not in shape else ():
        if n > 1 and step <= reach:
            return True
        reach += (n - 1) * step
    return False


def requires_grad(views: Iterable[View | None]) -> bool:
    """Whether torch would want a gradient of the result."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and torch.is_grad_enabled()
        and any(v is not None and v.kind == "torch" and v.array.requires_grad for v in views)
    )


def refuse_grad(call: str, views: Views) -> NoReturn:
    """ParameterError that names the array."""
    tensors = {n: v.array for n, v in views.items() if v is not None and v.kind == "torch"}
    name = next(n for n, tensor in tensors.items() if tensor.requires_grad)
    raise ParameterError(
        f"{call}: {name} requires grad, but {call} has no backward; call it under "
        "torch.no_grad() or pass detached tensors"
    )


def check_flag(call: str, name: str, value: Any) -> bool:
    """True or False, in whatever form of 0 and 1."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    try:
        number = operator.index(value)
    except Exception:  # a tensor's own errors, too
        number = -1
    if number not in (0, 1):
        raise ArgumentTypeError(f"{call}: {name}={shown(value)} is not True or False")
    return bool(number)


def check_overlaps(call: str, pairs: Iterable[Pair], in_place: Collection[tuple[str, str]]) -> None:
    """ParameterError where something that is written shares memory in a way not allowed."""
    spans: dict[str, tuple[int, int]] = {}  # addresses of arrays, from and up to
    for name, view, other, beside in pairs:
        for each, seen in ((name, view), (other, beside)):
            if each not in spans:
                low, high = extent(seen)
                spans[each] = seen.pointer + low, seen.pointer + high
        if spans[name][1] <= spans[other][0] or spans[other][1] <= spans[name][0]:
            continue  # as nearly all are
        same = (name, other) in in_place or (other, name) in in_place
        if same and _identical(view, beside):
            continue
        if shares_memory(view, beside):
            fix = "only the very same memory is allowed, or" if same else "pass"
            raise ParameterError(f"{call}: {name} overlaps {other} in memory; {fix} a copy")


def _identical(one: View, two: View) -> bool:
    return (one.pointer, tuple(one.shape), tuple(one.strides), one.dtype) == (
        two.pointer, tuple(two.shape), tuple(two.strides), two.dtype,
    )  # fmt: skip


def shares_memory(one: View, two: View) -> bool:
    """Whether any byte belongs to both, exactly (or True where that is too hard to tell)."""
    if 0 in one.shape or 0 in two.shape:
        return False
    try:
        limit: Any = 100_000  # candidates, of what may be an exponential search
        return np.shares_memory(_addresses(one), _addresses(two), max_work=limit)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _addresses(view: View) -> np.ndarray:
    """An array of the same addresses, in whatever memory, which nobody may look into."""
    size = itemsize(view)
    strides = tuple(step * size for step in view.strides)
    return np.asarray(
        _Addresses(
            {
                "shape": tuple(view.shape),
                "strides": strides,
                "typestr": f"|V{size}",
                "data": (view.pointer, True),
                "version": 3,
            }
        )
    )


def itemsize(view: View) -> int:
    """Bytes of an element, of any dtype."""
    return ITEMSIZE.get(view.dtype) or int(view.array.dtype.itemsize)


def extent(view: View) -> tuple[int, int]:
    """Bytes from the pointer to the first and past the last element in memory."""
    return _extent(tuple(view.shape), tuple(view.strides), itemsize(view))


@cached(256)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, int]:
    if 0 in shape:
        return 0, 0
    low, high = 0, size
    for n, step in zip(shape, strides, strict=True):
        end = (n - 1) * step * size
        if end < 0:
            low += end
        else:
            high += end
    return low, high
