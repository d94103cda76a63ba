"""attention/score.cuh: rules of a score and their derivatives, each against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import CompileError
from fkjit.jit.build import quiet

SOURCE = """
#include "attention/score.cuh"
struct Twice {
  __device__ float operator()(float x, int q_idx, int k_idx) const { return 2.f * x + q_idx - k_idx; }
};
struct Squared {
  __device__ float operator()(float x, int q_idx, int k_idx) const { return x * x + k_idx; }
  __device__ float derivative(float x, int q_idx, int k_idx) const { return 2.f * x; }
};
extern "C" __global__ void rules(const float* scores, const float* slopes, const float* bias,
                                 const unsigned char* mask, float* final, float* slope, float softcap,
                                 int seqlen_q, int seqlen_k) {
  const int q_idx = blockIdx.x, k_idx = 2 * threadIdx.x;
  const Strides rows{0, 0, seqlen_k};
  const auto all = score_rules(${rules});
  float x[2], d[2] = {1.f, 1.f};
  for (int i = 0; i < 2; ++i) x[i] = scores[q_idx * seqlen_k + min(k_idx + i, seqlen_k - 1)];
  all.apply(x, ${given});
  for (int i = 0; i < 2; ++i)
    if (k_idx + i < seqlen_k) final[q_idx * seqlen_k + k_idx + i] = x[i], slope[q_idx * seqlen_k + k_idx + i] = d[i];
}
"""  # noqa: E501
SQ, SK, CAP = 5, 9, 2.5
SHIFT = SK - SQ
Q_IDX, K_IDX = np.ogrid[:SQ, :SK]
APART = K_IDX - Q_IDX - SHIFT
RULES = {  # in CUDA; in NumPy, of scores x, slopes, bias, mask; its derivative, of capped ones
    "no rule": ("Unchanged{}", lambda x, s, b, m: x, None),
    "a soft cap": ("SoftCap<false>(softcap)", lambda x, s, b, m: CAP * np.tanh(x / CAP),
                   lambda y, x: 1 - (y / CAP) ** 2),
    "an exact one": ("SoftCap<true>(softcap)", lambda x, s, b, m: CAP * np.tanh(x / CAP),
                     lambda y, x: 1 - (y / CAP) ** 2),
    "a function": ("PerScore<Squared>(Squared{}, seqlen_q, seqlen_k)",
                   lambda x, s, b, m: x * x + K_IDX, lambda y, x: 2 * x),
    "a function of a capped score": (
        "SoftCap<true>(softcap), PerScore<Squared>(Squared{}, seqlen_q, seqlen_k)",
        lambda x, s, b, m: (CAP * np.tanh(x / CAP)) ** 2 + K_IDX,
        lambda y, x: (1 - (y / CAP) ** 2) * 2 * y),
    "ALiBi": ("Alibi(slopes, 2, 1, 1, seqlen_q, seqlen_k)",
              lambda x, s, b, m: x - s[3] * abs(APART), None),
    "a bias": ("Bias<float, false>(bias, rows, 0, 0, seqlen_q, seqlen_k)",
               lambda x, s, b, m: x + b, None),
    "a mask": ("Where<unsigned char, false>(mask, rows, 0, 0, seqlen_q, seqlen_k)",
               lambda x, s, b, m: np.where(m, x, -np.inf), None),
    "a band": ("KeyBand(seqlen_q, seqlen_k, 2, 1)",
               lambda x, s, b, m: np.where((APART >= -2) & (APART <= 1), x, -np.inf),
               None),
    "several": ("SoftCap<false>(softcap), Bias<float, false>(bias, rows, 0, 0, seqlen_q, "
                "seqlen_k), KeyBand(seqlen_q, seqlen_k, 9, 0)",
                lambda x, s, b, m: np.where(APART <= 0, CAP * np.tanh(x / CAP) + b, -np.inf),
                "first"),
}  # fmt: skip


def run(rules, differentiate, x, slopes, bias, mask):
    final, slope = np.full((SQ, SK), np.nan, "f4"), np.full((SQ, SK), np.nan, "f4")
    given = "d, q_idx, k_idx" if differentiate else "q_idx, k_idx"
    with quiet():
        fkjit.launch_cpu(
            SOURCE, SQ, (SK + 1) // 2, [x, slopes, bias, mask, final, slope, CAP, SQ, SK],
            params={"rules": rules, "given": given},
        )  # fmt: skip
    return final, slope


@pytest.mark.parametrize("name", RULES)
def test_a_rule_and_its_derivative(name):
    text, expected, derivative = RULES[name]
    rng = np.random.default_rng(len(name))
    x, bias = (3 * rng.standard_normal((SQ, SK), dtype="f4") for _ in range(2))
    slopes, mask = rng.random(4, dtype="f4"), (rng.random((SQ, SK)) < 0.6).astype(np.uint8)
    want = expected(x.astype("f8"), slopes.astype("f8"), bias.astype("f8"), mask)
    capped = CAP * np.tanh(x.astype("f8") / CAP)
    for differentiate in (False, True):
        final, slope = run(text, differentiate, x, slopes, bias, mask)
        assert np.array_equal(np.isneginf(final), np.isneginf(want))
        seen = np.isfinite(want)
        assert np.allclose(final[seen], want[seen], rtol=1e-6, atol=3e-6)
    exact = np.ones_like(want)
    if derivative is not None:
        exact = (1 - (capped / CAP) ** 2) if derivative == "first" else derivative(capped, x)
    assert np.isfinite(slope).all() and np.allclose(slope, exact, atol=2e-6)


def test_a_function_is_asked_for_what_exists_only():
    x = np.zeros((SQ, SK), "f4")
    final, _ = run("PerScore<Twice>(Twice{}, seqlen_q, seqlen_k)", False, x, x, x, x.astype("u1"))
    assert np.array_equal(final, Q_IDX - K_IDX)


def test_a_function_without_a_derivative_has_none():
    x = np.zeros((SQ, SK), "f4")
    with pytest.raises(CompileError, match="derivative"):
        run("PerScore<Twice>(Twice{}, seqlen_q, seqlen_k)", True, x, x, x, x.astype("u1"))


def test_rows_and_keys_of_a_band_agree():
    """first and end of a row, first_row and end_row of a key: the same pairs."""
    source = """
    #include "attention/score.cuh"
    extern "C" __global__ void band(int* pairs, int seqlen_q, int seqlen_k, int left, int right) {
      const KeyBand band(seqlen_q, seqlen_k, left, right);
      const int i = blockIdx.x, j = threadIdx.x;
      pairs[(2 * i) * seqlen_k + j] = band.first(i) <= j && j < band.end(i);
      pairs[(2 * i + 1) * seqlen_k + j] = band.first_row(j) <= i && i < band.end_row(j);
    }
    """
    for sq, sk, left, right in (
        (5, 9, 2, 1),
        (9, 5, 0, 0),
        (7, 7, 7, 0),
        (3, 8, 0, 8),
        (8, 3, 1, 2),
    ):
        pairs = np.full((sq, 2, sk), -1, np.int32)
        with quiet():
            fkjit.launch_cpu(source, sq, sk, [pairs, sq, sk, left, right])
        i, j = np.ogrid[:sq, :sk]
        apart = j - (i + sk - sq)
        assert np.array_equal(pairs[:, 0], pairs[:, 1])
        assert np.array_equal(pairs[:, 0], (apart >= -left) & (apart <= right))
