"""Whether the products of a layer of few tokens are left to a kernel of `routed.py`, which reads
the lists of `MoeGroups` itself, so that nothing is permuted before it.

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
_CAPABILITY = (9, 0)  # what it was measured on
_ALIGNED = 16  # bytes


def implementation(impl: str, x: Any, *weights: Any) -> str:
    """What "auto" is for x [tokens, H] and the weights of both products: "auto" still with more
    tokens, a gradient to be made, another GPU, or arrays that these kernels do not take."""
    shape = getattr(x, "shape", ())
    tokens = shape[0] if impl == "auto" and len(shape) == 2 else 0
    coded = any(isinstance(weight, tuple) for weight in weights)
    if not 0 < tokens <= MOST or coded or _wants_gradients(x, *weights):
        return impl
    views = [interop.view(array, CALL, "x") for array in (x, *weights)]
    device = views[0].device
    if device == CPU or arch_of(views[0]).capability != _CAPABILITY:
        return impl
    if len({view.dtype for view in views}) > 1 or not all(map(_taken, views)):
        return impl
    return "stream" if tokens <= STREAMED else "gather"


def block_size_of(given: int | None, impl: str, precision: str) -> int:
    """Of a layer's layout, unless one is asked for: the least that its products take."""
    if given is not None:
        return given
    return EVEN if impl == "ragged" or precision == "short" else LEAST_BLOCK


def _wants_gradients(*arrays: Any) -> bool:
    """Or torch.compile traces, which knows no addresses."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    some = any(getattr(array, "requires_grad", False) for array in arrays)
    return some and torch.is_grad_enabled()


def _taken(view: View) -> bool:
    """16-bit elements, contiguous rows on 16-byte boundaries."""
    if ITEMSIZE.get(view.dtype) != 2 or view.pointer % _ALIGNED or view.strides[-1] != 1:
        return False
    return all(step * 2 % _ALIGNED == 0 for step in view.strides[:-1])
