"""Sums of e4m3 products, to the bit as an H200's wgmma made them (NVIDIA H200, 2026-11-23).

e4m3_sums.npz has sets of problems: a [n, 64, 32] and b [n, 8, 32] as bytes, the accumulators
before, c [n, 64, 8], and after, d. One places a small product beside a great one, others vary the
accumulator, its last bits, which products are in between; three are random, with exponents that
lie far apart, or near.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fkjit.interp.wgmma.short_sums import add_products

SETS = ("place", "accumulator", "fraction", "grouping", "sums", "wide", "middle", "narrow")


@pytest.fixture(scope="module")
def measured():
    with np.load(Path(__file__).with_name("e4m3_sums.npz")) as stored:
        return dict(stored)


def numbers(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@pytest.mark.parametrize("name", SETS)
def test_sums_are_those_of_the_gpu(measured, name):
    a, b, c, d = (measured[f"{name}_{part}"] for part in "abcd")
    found = add_products(numbers(a), numbers(b), c)
    assert np.array_equal(found, d)
    exact = np.matmul(numbers(a), numbers(b).swapaxes(1, 2)) + c
    assert not np.array_equal(exact, d)


def test_nothing_and_what_is_no_number():
    ones = np.ones((1, 64, 32), np.float32)
    zero = np.zeros((1, 8, 32), np.float32)
    assert (add_products(ones, zero, None) == 0).all()
    ones[0, 3, 7] = np.nan
    found = add_products(ones, zero + 1, None)
    assert np.isnan(found[0, 3]).all() and np.isfinite(np.delete(found, 3, 1)).all()
