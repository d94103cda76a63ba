"""`fkjit.models.torch_attention`: PyTorch's calls reach fkjit inside the context, only there."""

from __future__ import annotations

import pytest

from fkjit.errors import ParameterError
from fkjit.models import torch_attention

torch = pytest.importorskip("torch", reason="needs torch")


def inputs(head_dim: int = 16):
    torch.manual_seed(1)
    return [torch.randn(1, 2, 5, head_dim) for _ in range(3)]


def sdpa(*args, **named):
    return torch.nn.functional.scaled_dot_product_attention(*args, **named)


def test_a_causal_call_is_ours_inside_and_pytorchs_behind():
    before, given = torch.nn.functional.scaled_dot_product_attention, inputs()
    wanted = sdpa(*given, is_causal=True)
    with torch_attention():
        assert torch.nn.functional.scaled_dot_product_attention is not before
        torch.testing.assert_close(sdpa(*given, is_causal=True), wanted, rtol=1e-4, atol=1e-5)
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_a_refusal_is_raised_or_falls_back():
    before, given = torch.nn.functional.scaled_dot_product_attention, inputs()
    with pytest.raises(ParameterError, match="dropout_p"), torch_attention():
        sdpa(*given, dropout_p=0.5)
    assert torch.nn.functional.scaled_dot_product_attention is before
    with torch_attention(fallback=True):
        wide = inputs(264)
        torch.testing.assert_close(sdpa(*wide), before(*wide))
        assert sdpa(*given, dropout_p=0.5).shape == given[0].shape
