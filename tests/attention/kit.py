"""What the attention tests share: problems, references, the accuracy rule."""

from __future__ import annotations

import numpy as np

from fkjit.ops.attention import cases as attention_cases
from fkjit.runtime.interop import numpy_dtype


def normal(shape, dtype="fp16", seed=0):
    """N(0, 1) in a NumPy array of "fp16", "bf16" or "fp32"."""
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))


def reference(q, k, v, causal=False, scale=None):
    """(o, lse) in float64 for [B, H, S, D] arrays."""
    problem = {
        "heads_q": q.shape[1],
        "heads_kv": k.shape[1],
        "softmax_scale": q.shape[3] ** -0.5 if scale is None else scale,
        "causal": causal,
    }
    found = attention_cases.reference(problem, {"q": q, "k": k, "v": v})
    return found["o"], found["lse"]


def rounding_bound(dtype, expected):
    """What rounding alone may cost: two half-ulps of the largest output, and 1e-3 of a unit."""
    ulp = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-21}[dtype]
    largest = float(np.abs(expected).max(initial=0.0))
    return 2 * ulp * max(largest, 0.25)


def assert_close(o, lse, expected_o, expected_lse, dtype):
    """o within rounding of float64, finite where it should be; lse to fp32, -inf where due."""
    assert o.shape == expected_o.shape
    error = np.abs(np.asarray(o, np.float64) - expected_o).max(initial=0.0)
    assert error <= rounding_bound(dtype, expected_o), error
    if lse is not None:
        assert lse.dtype == np.float32 and lse.shape == expected_lse.shape
        hidden = np.isneginf(expected_lse)
        assert np.array_equal(np.isneginf(lse), hidden)
        assert np.allclose(lse[~hidden], expected_lse[~hidden], rtol=1e-5, atol=1e-5)
