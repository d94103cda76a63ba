"""RMSNorm in Triton: the kernel of layer_norm.py without its mean."""

from __future__ import annotations

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from . import triton_layer_norm


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    return triton_layer_norm.prepare(problem, arrays, centered=False)
