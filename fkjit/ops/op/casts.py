"""Arrays in another form than kernels read: int64 lengths and bf16 tables are cast first, rows at
no one distance copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fkjit.errors import ParameterError
from fkjit.ops.op.request import Request
from fkjit.runtime.interop import torch_dtype

if TYPE_CHECKING:
    from fkjit.ops.op.op import Op

_FROM = {"int32": ("int64",), "fp32": ("bf16", "fp16")}
_NAMES = {"int32": "int32", "fp32": "float32"}  # NumPy's


class _Cast(NamedTuple):
    """A call of `op` with the arrays of `names` cast: what `Request.delegate` is."""

    op: Op
    dtypes: Mapping[str, str]

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any], options: Any) -> Any:
        return self.op(self._casts(inputs), tuple(outputs), options)

    def prepare(self, inputs: Sequence[Any], options: Any) -> None:
        self.op.prepare(self._casts(inputs), options)

    def _casts(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        arrays = zip(self.op.inputs, inputs, strict=False)
        return tuple(_cast(x, self.dtypes[n]) if n in self.dtypes else x for n, x in arrays)


def casting(
    op: Callable[[], Op], check: Callable[..., Request], dtypes: Mapping[str, str]
) -> Callable[..., Request]:
    """The op's check for arrays that may have wider integers or narrower floats than these dtypes.
    The caller's gradients of such an array are cast back by PyTorch."""

    @wraps(check)
    def checked(views: Mapping[str, Any], *options: Any) -> Request:
        others = {
            name: dtype
            for name, dtype in dtypes.items()
            if (view := views.get(name)) is not None and view.dtype in _FROM[dtype]
        }
        if others:
            return Request(views, {}, (), delegate=_Cast(op(), others))
        return check(views, *options)

    return checked


def _cast(array: Any, dtype: str) -> Any:
    torch_like = hasattr(array, "requires_grad") and hasattr(array, "to")
    if torch_like:
        return array.to(torch_dtype(dtype))
    if not hasattr(array, "astype"):
        array = import_module("cupy").from_dlpack(array)
    return array.astype(_NAMES[dtype])


def as_fp32(array: Any) -> Any:
    """The array in fp32, or None where there is none."""
    return None if array is None else _cast(array, "fp32")


def contiguous(call: str, name: str, array: Any) -> Any:
    """The array, or a contiguous copy of it."""
    torch = sys.modules.get("torch")
    if array is None or (torch is not None and isinstance(array, torch.Tensor)):
        return None if array is None else array.contiguous()
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    if type(array).__module__.partition(".")[0] == "cupy":
        return import_module("cupy").ascontiguousarray(array)
    raise ParameterError(
        f"{call}: {name} has rows at no one distance; pass a contiguous copy of {name}"
    )
