"""`fkjit.models.sampling`: which tokens are drawn, and how often."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models.sampling import (  # noqa: E402
    FEW,
    GREEDY,
    PLAIN,
    SORTED,
    Draws,
    Logits,
    Sampling,
    mode_of,
    pick,
)

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.4, 0.9])
GRID = 4000  # uniform numbers from 0 up to 1, evenly


def frequencies(mode: str, temperature=1.0, top_k=5, top_p=1.0) -> torch.Tensor:
    """How often each token is drawn by all numbers of the grid."""
    uniform = torch.arange(GRID) / GRID
    draws = Draws(
        torch.full((GRID,), temperature), torch.full((GRID,), top_k), torch.full((GRID,), top_p),
        uniform,
    )  # fmt: skip
    found = pick(LOGITS.expand(GRID, -1), draws, mode)
    return found.bincount(minlength=5) / GRID


def assert_frequencies(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=2 / GRID)
    assert not found[wanted == 0].any()


@pytest.mark.parametrize("mode", [PLAIN, FEW, SORTED])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_softmax_says(mode, temperature):
    assert_frequencies(frequencies(mode, temperature), (LOGITS / temperature).softmax(-1))


@pytest.mark.parametrize("mode", [FEW, SORTED])
def test_top_k_keeps_the_largest(mode):
    kept = LOGITS.masked_fill(torch.tensor([True, False, True, False, True]), float("-inf"))
    assert_frequencies(frequencies(mode, top_k=2), kept.softmax(-1))


@pytest.mark.parametrize("mode", [FEW, SORTED])
def test_top_p_keeps_the_fewest_that_reach_it_and_one_at_least(mode):
    probabilities = LOGITS.softmax(-1)  # 0.106, 0.482, 0.023, 0.265, 0.160: sorted 1, 3, 4, 0, 2
    wanted = torch.tensor([0.0, 1, 0, 1, 0]) * probabilities
    assert_frequencies(frequencies(mode, top_p=0.7), wanted / wanted.sum())
    assert_frequencies(frequencies(mode, top_p=0.01), torch.tensor([0.0, 1, 0, 0, 0]))


@pytest.mark.parametrize("mode", [FEW, SORTED])
def test_top_p_counts_what_top_k_left(mode):
    """Of two, the first has 0.645: enough for 0.6, where of all five it has 0.482."""
    found = frequencies(mode, top_k=2, top_p=0.6)
    assert_frequencies(found, torch.tensor([0.0, 1, 0, 0, 0]))


@pytest.mark.parametrize("mode", [GREEDY, PLAIN, FEW, SORTED])
def test_temperature_0_is_greedy_beside_others(mode):
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    draws = Draws(torch.zeros(2), torch.full((2,), 5), torch.ones(2), torch.full((2,), 0.99))
    assert pick(logits, draws, mode).tolist() == [1, 3]


def test_draws_at_the_ends_find_a_token_that_can_be():
    logits = torch.full((2, 300), float("-inf"))
    logits[:, 100:200] = 0.0
    draws = Draws(torch.ones(2), torch.full((2,), 300), torch.ones(2),
                  torch.tensor([0.0, 1 - 2**-24]))  # fmt: skip
    for mode in (PLAIN, FEW, SORTED):
        assert all(100 <= token < 200 for token in pick(logits, draws, mode).tolist())


@pytest.mark.parametrize("mode", [GREEDY, PLAIN, FEW, SORTED])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary(mode):
    draws = Draws(torch.ones(1), torch.full((1,), 5), torch.ones(1), torch.full((1,), 0.5))
    assert 0 <= int(pick(torch.full((1, 5), float("nan")), draws, mode)) < 5


@pytest.mark.parametrize("vocabulary", [5, 512, 1000, 50257])
def test_the_largest_logit_is_found_by_groups(vocabulary):
    made = Logits(3, vocabulary, "cpu")
    for seed in range(3):
        torch.manual_seed(seed)
        values = torch.randn(2, vocabulary) - 100
        values[1, -1] = 0  # the last one of all
        made.rows(2).copy_(values)
        assert made.largest(2).tolist() == values.argmax(-1).tolist()


def test_the_mode_is_the_cheapest_that_a_batch_permits():
    greedy, plain = Sampling(), Sampling(0.7)
    few, many, nucleus = Sampling(1.0, 50, 0.9), Sampling(1.0, 5000), Sampling(1.0, None, 0.9)
    assert mode_of([greedy, greedy._replace(top_k=3)]) == GREEDY
    assert mode_of([greedy, plain]) == mode_of([Sampling(1.0, None, 1.0)]) == PLAIN
    assert mode_of([greedy, few]) == FEW
    assert mode_of([few, plain]) == mode_of([many]) == mode_of([nucleus, few]) == SORTED


def test_numpys_numbers_are_pythons():
    given = Sampling(np.float32(0.5), np.int64(3), np.float64(0.9), np.int32(7))
    assert list(map(type, given.checked())) == [float, int, float, int]
    assert given.checked() == Sampling(0.5, 3, 0.9, 7)
