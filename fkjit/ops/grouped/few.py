"""Whether the products of a layer of few tokens are left to a kernel of `routed.py`, which reads
the lists of `MoeGroups` itself, so that nothing is permuted before it; and the layout of others.

On an H200, of layers with one to 64 tokens: `stream` up to 16, `gather` above (docs/MOE.md).
"""

from __future__ import annotations

import sys
from typing import Any

from fkjit.ops.grouped.kernels import LEAST_BLOCK
from fkjit.ops.grouped.kernels_ragged import EVEN
from fkjit.ops.grouped.options import CALL
from fkjit.ops.op.op import arch_of
from fkjit.runtime import interop
from fkjit.runtime.interop import CPU, ITEMSIZE, View

MOST, STREAMED = 64, 16  # tokens
RAGGED_ROWS = 384  # of an expert: with more, tiles of 64 rows are as fast or faster
_CAPABILITY = (9, 0)  # what it was measured on
_ALIGNED = 16  # bytes


def implementation(impl: str, x: Any, *weights: Any) -> str:
    """What "auto" is for x [tokens, H] and the weights of both products: "auto" still with more
    tokens, a gradient to be made, another GPU, or arrays that these kernels do not take."""
    shape = getattr(x, "shape", ())
    tokens = shape[0] if impl == "auto" and len(shape) == 2 else 0
    if not 0 < tokens <= MOST or _wants_gradients(x, *weights) or not _on_hopper(x, *weights):
        return impl
    return "stream" if tokens <= STREAMED else "gather"


def block_size_of(
    given: int | None, impl: str, precision: str, rows: float, x: Any, *weights: Any
) -> int:
    """Of a layer's layout, unless one is asked for; `rows` of an expert on the mean."""
    if given is not None:
        return given
    if impl == "ragged" or precision == "short":
        return EVEN
    few = impl == "auto" and not _is_traced() and 0 < rows <= RAGGED_ROWS
    return EVEN if few and _on_hopper(x, *weights) else LEAST_BLOCK


def _on_hopper(x: Any, *weights: Any) -> bool:
    """Whether arrays are such as kernels for Hopper take that ask for whole 16 bytes."""
    if any(isinstance(weight, tuple) for weight in weights):
        return False
    views = [interop.view(array, CALL, "x") for array in (x, *weights)]
    if views[0].device == CPU or arch_of(views[0]).capability != _CAPABILITY:
        return False
    return len({view.dtype for view in views}) == 1 and all(map(_taken, views))


def _is_traced() -> bool:
    """By torch.compile, which knows no addresses."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _wants_gradients(*arrays: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if _is_traced():
        return True
    some = any(getattr(array, "requires_grad", False) for array in arrays)
    return some and torch.is_grad_enabled()


def _taken(view: View) -> bool:
    """16-bit elements, contiguous rows on 16-byte boundaries."""
    if ITEMSIZE.get(view.dtype) != 2 or view.pointer % _ALIGNED or view.strides[-1] != 1:
        return False
    return all(step * 2 % _ALIGNED == 0 for step in view.strides[:-1])
