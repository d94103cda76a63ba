"""fkjit's own kernels in the study: those of Hopper in the interpreter, whose sums of e4m3 are the
tensor cores' to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import fkjit
from fkjit.jit.build import quiet
from fkjit.settings import settings

if TYPE_CHECKING:
    from .attention import Seen

MOST_KEYS = 16_384  # of a call: the interpreter takes a second for some hundred keys
_TARGET = "FKJIT_TARGET"


@contextmanager
def as_hopper() -> Iterator[None]:
    """Calls on CPU arrays run the kernels of compute capability 9.0."""
    before = os.environ.get(_TARGET)
    os.environ[_TARGET] = "compute_90a"
    settings.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TARGET]
        else:
            os.environ[_TARGET] = before
        settings.cache_clear()


def attention(seen: Seen, **said: Any) -> torch.Tensor | None:
    """`fkjit.quantized_attention`; None with a mask, which it has not, or above MOST_KEYS."""
    if seen.mask is not None or seen.k.shape[-2] > MOST_KEYS:
        return None
    q, k, v = (x.bfloat16()[None] for x in seen[:3])
    with as_hopper(), quiet(), fkjit.sanitize(mem=False, race=False):
        return fkjit.quantized_attention(q, k, v, **said)[0].float()
