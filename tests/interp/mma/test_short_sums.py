"""Sums of e4m3 products: those of an H200, to the bit."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from bench.study.tensor_core import BITS, Sums, product
from fkjit.interp.wgmma.short_sums import summed

DATA = Path(__file__).parent / "data" / "e4m3_sums.npz"


def numbers(codes):
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@pytest.fixture(scope="module")
def seen():
    """a [problems, 64, 32], b [problems, 8, 32], c and d [problems, 64, 8]: d = c + a b^T by
    wgmma.m64n8k32: one place of a row and column, products of many exponents below one that is
    large, accumulators below and above, subnormal codes, N(0, 1) of three widths."""
    with np.load(DATA) as data:
        return numbers(data["a"]), numbers(data["b"]), data["c"], data["d"]


def test_sums_are_those_of_an_h200(seen):
    a, b, c, d = seen
    np.testing.assert_array_equal(summed(a, b, c), d)
    exact = (c + np.matmul(a, b.swapaxes(1, 2))).astype(np.float32)
    assert (exact != d).mean() > 0.5


def test_the_study_makes_the_same(seen):
    a, b, _, _ = seen
    for one, other in zip(a, b, strict=True):
        found = product(torch.from_numpy(one), torch.from_numpy(other), Sums(BITS))
        np.testing.assert_array_equal(found.numpy(), summed(one, other, None))


def test_what_is_not_finite_stays_so():
    a, b = np.ones((2, 64, 32), np.float32), np.ones((2, 8, 32), np.float32)
    a[0, 3, 5] = np.nan
    c = np.zeros((2, 64, 8), np.float32)
    c[1, 7, 2] = np.inf
    found = summed(a, b, c)
    assert np.isnan(found[0, 3]).all() and np.isposinf(found[1, 7, 2])
    assert (np.isfinite(found).sum() == found.size - 9) and (found[1, 0] == 32).all()
