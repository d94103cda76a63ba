"""The gradient of a product in Triton: the kernel of triton_linear.py, on transposed operands."""

from __future__ import annotations

from .triton_linear import prepare

__all__ = ["prepare"]
