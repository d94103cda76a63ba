"""What the tests of Triton twins share: problems of attention, references, Triton's interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def normal(*shape, dtype="fp16", device="cpu", seed=0):
    """N(0, 1), other numbers for another seed or shape."""
    generator = torch.Generator(device).manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, device=device, generator=generator).to(DTYPES[dtype])


def hidden(sq, sk, device):
    """[Sq, Sk]: keys behind the bottom-right diagonal."""
    return torch.ones(sq, sk, dtype=torch.bool, device=device).triu(1 + sk - sq)


def attention(q, k, v, causal, scale=None, exact=True):
    """(o, lse) the textbook way: in float64, or in q's own dtype, as PyTorch computes it."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if exact:
        q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(hidden(q.shape[2], k.shape[2], q.device), float("-inf"))
    return torch.softmax(scores, -1).nan_to_num() @ v, torch.logsumexp(scores, -1)


def assert_right(found, q, k, v, causal, scale=None):
    """o at most twice as wrong as PyTorch's own in q's dtype, by norm and at the worst element."""
    o, lse = found
    expected, expected_lse = attention(q, k, v, causal, scale)
    theirs = attention(q, k, v, causal, scale, exact=False)[0].double() - expected
    ours = o.double() - expected
    assert o.dtype == q.dtype and o.shape == expected.shape
    floor = 2e-6 if q.dtype == torch.float32 else 1e-6
    assert ours.norm() <= 2 * theirs.norm() + floor
    if o.numel():
        assert ours.abs().max() <= 2 * theirs.abs().max() + floor
    visible = torch.isfinite(expected_lse)
    assert lse.dtype == torch.float32 and torch.equal(torch.isneginf(lse), ~visible)
    assert torch.allclose(lse[visible].double(), expected_lse[visible], rtol=1e-5, atol=1e-5)


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter, which keeps bf16 as integers: its products take them for numbers, and
    its conversions cut off where a GPU rounds. Both are mended here."""
    triton = pytest.importorskip("triton", reason="needs triton: pip install 'fkjit[twins]'")
    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply, convert = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(handle):
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        numbers = handle.data.view(ml_dtypes.bfloat16).astype(np.float32)
        return TensorHandle(numbers, tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, wide(a), wide(b), *rest)

    def cast_impl(self, handle, dtype):
        if dtype.scalar is tl.bfloat16 and handle.dtype.scalar is tl.float32:
            rounded = handle.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return TensorHandle(rounded, tl.bfloat16)
        return convert(self, handle, dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    with np.errstate(divide="ignore"):  # log2(0) where a row sees nothing
        yield
