"""Scales of quantized keys and values as kernels read them: one for each head."""

from __future__ import annotations

import sys
from importlib import import_module
from math import prod
from typing import Any

from fkjit.runtime.interop import torch_dtype

CODES = {"float8_e4m3fn": "fp8", "uint8": "fp8", "int8": "int8"}  # storage by the pages' dtype


def dtype_name(array: Any) -> str:
    """NumPy's and PyTorch's name of its dtype; "" of what has none."""
    return str(getattr(array, "dtype", "")).removeprefix("torch.")


def as_codes(array: Any, dtype: str = "float8_e4m3fn") -> Any:
    """e4m3 (or another fp8) as bytes, which every framework has; anything else as it is."""
    if dtype_name(array) != dtype:
        return array
    return array.view(torch_dtype("uint8") if _is_torch(array) else "uint8")


def for_heads(scale: Any, pages: Any, heads: int) -> Any:
    """A number, or an fp32 array of one, as fp32 [heads] beside `pages`; else what it is."""
    number = type(scale) in (int, float)
    shape = tuple(getattr(scale, "shape", (2,)))
    one = prod(shape) == 1 and shape != (heads,) and dtype_name(scale) == "float32"
    if not number and not (one and hasattr(scale, "reshape")):
        return scale
    if _is_torch(pages):
        if number:
            return pages.new_full((heads,), scale, dtype=torch_dtype("fp32"))
        return scale.reshape(1).expand(heads).contiguous()
    library = import_module(type(pages).__module__.partition(".")[0])
    if not hasattr(library, "full"):
        return scale
    return library.full(heads, scale if number else scale.reshape(1), dtype="float32")


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
