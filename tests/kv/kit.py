"""What tests of the paged KV cache share: a small cache, fresh tokens, appending them."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.jit.build import quiet
from fkjit.runtime.interop import numpy_dtype

HEADS, DIM = 2, 8


def small(**options):
    """A cache in NumPy: 12 pages of 16 tokens."""
    given = {
        **{"num_pages": 12, "page_size": 16, "num_kv_heads": HEADS, "head_dim": DIM},
        **{"dtype": "fp16", "device": "cpu", "framework": "numpy", "max_sequences": 6},
    }
    return fkjit.PagedKVCache(**{**given, **options})


def tokens(count, seed, dtype="fp16", heads=HEADS, dim=DIM):
    """[count, heads, dim], fresh."""
    rng = np.random.default_rng([seed, count])
    x = rng.standard_normal((count, heads, dim), dtype=np.float32)
    return x.astype(numpy_dtype(dtype))


def append(cache, sequences, counts, seed, layer=0, dtype="fp16"):
    """Append fresh tokens; their k and v, in one piece."""
    slots = cache.extend(sequences, counts)
    k, v = tokens(sum(counts), seed, dtype), tokens(sum(counts), seed + 1, dtype)
    fkjit.kv_append(k, v, cache, slots, layer=layer)
    return k, v


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield
