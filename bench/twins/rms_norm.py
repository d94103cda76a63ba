"""RMSNorm in Triton: the kernel of layer_norm.py without its mean."""

from __future__ import annotations

from fkjit.spec import Problem

from ..op import Arrays, Prepared
from . import layer_norm


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    return layer_norm.prepare(problem, arrays, centered=False)
