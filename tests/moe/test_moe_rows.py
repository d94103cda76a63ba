"""fkjit.moe_permute and moe_combine in the interpreter: values, gradients, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from tests.core.sampling import one_in

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ERROR = {"fp16": 2e-3, "bf16": 2e-2, "fp32": 2e-6}


def normal(*shape, dtype="fp32", seed=0):
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator).to(DTYPES[dtype])


def groups_of(tokens, top_k, experts=5, block_size=4, **options):
    ids = torch.randint(
        0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)
    ).int()
    with quiet():
        return fkjit.moe_regroup(ids, experts, block_size, **options)


def by_torch(x, groups, weights, factor):
    """combine(permute(x) * factor) of each choice that has a place."""
    here = (groups.inverse >= 0).to(x)
    rows = x[:, None] * factor[groups.inverse.clamp(min=0).long()][..., None] * here[..., None]
    return (rows * weights[..., None]).sum(1)


@one_in(2)
@pytest.mark.parametrize("columns", [8, 40, 37])
@pytest.mark.parametrize("options", [{}, {"capacity": 3}, {"block_size": 1}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_with_gradients(dtype, options, columns):
    tokens, top_k = 13, 3
    groups = groups_of(tokens, top_k, **options)
    x = normal(tokens, columns, dtype=dtype).requires_grad_()
    weights = torch.rand(tokens, top_k, requires_grad=True)
    places = groups.sorted_token_ids.shape[0]
    factor = torch.arange(1, places + 1) % 3 - 1.0
    given = normal(tokens, columns, dtype=dtype, seed=1)
    with quiet():
        rows = fkjit.moe_permute(x, groups)
        assert rows.shape == (places, columns)
        made = rows * factor[:, None].to(rows)
        made.retain_grad()
        out = fkjit.moe_combine(made, groups, weights)
        out.backward(given)
    known = groups.sorted_token_ids < tokens * top_k
    assert torch.equal(rows[known], x[groups.sorted_token_ids[known].long() // top_k])
    assert not rows[~known].any() and not made.grad[~known].any()
    a, w = (t.detach().double().requires_grad_() for t in (x, weights))
    exact = by_torch(a, groups, w, factor.double())
    exact.backward(given.double())
    for found, right in ((out, exact), (x.grad, a.grad), (weights.grad, w.grad)):
        assert (found.double() - right).abs().max() <= ERROR[dtype] * right.abs().max().clamp(min=1)


def test_with_the_inverse_alone_the_gradients_are_the_same():
    groups = groups_of(20, 2, capacity=6)
    rows = normal(groups.sorted_token_ids.shape[0], 24)
    found = []
    for lists in (groups, groups.inverse):
        y, weights = rows.clone().requires_grad_(), torch.rand(20, 2).fill_(0.5).requires_grad_()
        with quiet():
            fkjit.moe_combine(y, lists, weights).sum().backward()
        found.append((y.grad, weights.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_strided_rows_into_arrays_of_the_callers():
    groups = groups_of(9, 2)
    wide = normal(9, 48).numpy()
    x, places = wide[:, 4:36], groups.sorted_token_ids.shape[0]
    numpy_groups = fkjit.MoeGroups(*(t.numpy() for t in groups))
    out, back = np.full((places, 32), np.nan, "f4"), np.full((9, 32), np.nan, "f4")
    with quiet():
        assert fkjit.moe_permute(x, numpy_groups, out=out) is out
        assert fkjit.moe_combine(out, numpy_groups, out=back) is back
    assert np.array_equal(back, x + x)


def test_no_tokens_and_no_places():
    groups = groups_of(0, 2)
    with quiet():
        assert fkjit.moe_permute(normal(0, 8), groups).shape == (0, 8)
        assert fkjit.moe_combine(normal(0, 8), groups).shape == (0, 8)
        nobody = groups_of(3, 2, capacity=0)
        assert not fkjit.moe_permute(normal(3, 8), nobody).any()
        assert not fkjit.moe_combine(normal(6, 8), nobody).any()


@pytest.mark.parametrize("kept", [0, 5, 21, 10**6])
def test_no_more_places_than_asked_for(kept):
    groups = groups_of(9, 2)  # with places that nobody has
    x = normal(9, 16).requires_grad_()
    with quiet(), fkjit.sanitize():
        whole = fkjit.moe_permute(x, groups)
        rows = fkjit.moe_permute(x, groups, num_out_tokens=kept)
        assert torch.equal(rows, whole[:kept])
        given = normal(*whole.shape)
        (found,) = torch.autograd.grad(rows, x, given[:kept])
        given[kept:] = 0
        (wanted,) = torch.autograd.grad(whole, x, given)
    assert torch.equal(found, wanted)


def test_bad_input():
    groups = groups_of(9, 2)
    y = normal(groups.sorted_token_ids.shape[0], 8)
    with pytest.raises(ArgumentTypeError, match="allowed: the MoeGroups"):
        fkjit.moe_permute(normal(9, 8), groups.inverse)
    with pytest.raises(ParameterError, match="num_out_tokens=-1"):
        fkjit.moe_permute(normal(9, 8), groups, num_out_tokens=-1)
    with pytest.raises(ParameterError, match="with 8 tokens"):
        fkjit.moe_permute(normal(8, 8), groups)
    with pytest.raises(ParameterError, match="weights has shape"):
        fkjit.moe_combine(y, groups, torch.ones(9, 3))
    with pytest.raises(ArgumentTypeError, match="weights is fp16"):
        fkjit.moe_combine(y, groups, torch.ones(9, 2).half())
    with pytest.raises(ArgumentTypeError, match="inverse is int64"):
        fkjit.moe_combine(y, groups.inverse.long())
    with pytest.raises(ParameterError, match="y has shape"):
        fkjit.moe_combine(y[0], groups)
    with pytest.raises(ParameterError, match="out overlaps y"):
        fkjit.moe_combine(y, groups, out=y[:9])
    with pytest.raises(ParameterError, match="out is given"):
        fkjit.moe_permute(normal(9, 8).requires_grad_(), groups, out=torch.empty_like(y))
