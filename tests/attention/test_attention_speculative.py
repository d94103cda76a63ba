"""Exponentials before anyone has looked for the maximum, on Hopper: maxima that rise from tile to
tile, rows that have seen no key, infinities; which tiles are optimistic; planted bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fkjit
from fkjit.jit.build import quiet
from fkjit.ops.attention import select_sm90
from fkjit.settings import settings
from tests.attention.kit import assert_close, normal, reference
from tests.core.mutations import SM90_HEADERS, Bug, K
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT, one_in
from tests.core.test_mutations import check_found, each_planted, outcome

# head_dim, dtype, queries, keys, causal. Tiles of keys come from the last to the first.
SHAPES = ((64, "fp16", 70, 400, False), (96, "bf16", 64, 330, True))


@pytest.fixture(autouse=True)
def hopper_target(monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )


def run(q, k, v, causal, **options):
    with quiet(), fkjit.sanitize(race=True):
        o, lse = fkjit.attention(q, k, v, causal=causal, return_lse=True, **options)
    return np.asarray(o), np.asarray(lse)


@one_in(2)
@pytest.mark.parametrize(("dim", "dtype", "sq", "sk", "causal"), SHAPES)
def test_maxima_that_rise_in_every_tile(dim, dtype, sq, sk, causal):
    """By more than 2^14, so that scores are made once more, in some rows of a warp and not in
    others; in the last two tiles by more than what an exponential can hold."""
    q, k, v = (normal((1, 1, n, dim), dtype, i) for i, n in enumerate((sq, sk, sk)))
    rise = np.linspace(25, 1, sk) + np.where(np.arange(sk) < 40, 200, 0)
    grown = (k.astype(np.float64) * rise[:, None]).astype(k.dtype)
    assert_close(*run(q, grown, v, causal), *reference(q, grown, v, causal), dtype)


def test_rows_that_meet_their_first_key_in_a_whole_tile():
    """Row 0 sees whole tiles only: nothing is known of its maximum when it gets to the first."""
    q, k, v = (normal((1, 1, n, 64), "fp16", i) for i, n in enumerate((130, 192 + 129, 192 + 129)))
    assert_close(*run(q, k, v, True), *reference(q, k, v, True), "fp16")


def test_infinite_and_undefined_scores():
    """-inf hides a key, whole tiles of it leave rows without a maximum; NaN makes its rows NaN."""
    q, k, v = (normal((1, 1, n, 64), "fp16", i) for i, n in enumerate((20, 300, 300)))
    q[..., 0], k[:, :, 64:, 0] = 1, -np.inf
    assert_close(*run(q, k, v, False), *reference(q, k, v, False), "fp16")
    k[0, 0, 70, 0] = np.nan
    o, lse = run(q, k, v, False)
    assert np.isnan(o).all() and np.isnan(lse).all()


@pytest.mark.parametrize(
    ("dim", "keys", "causal", "choice"),
    [
        (64, 4096, False, ((256, 64), True)),
        (64, 16384, False, ((192, 128), True)),
        (128, 512, False, (128, False)),
        (128, 4096, False, (128, True)),
        (128, 16384, False, ((192, 80), False)),
        (128, 16384, True, (128, True)),
        (96, 4096, True, ((192, 96), True)),
        (256, 4096, True, ((128, 64), False)),
    ],
)
def test_which_tile_a_problem_gets(dim, keys, causal, choice):
    """16k tokens and 2048 columns, the fastest of those measured on an H200."""
    problem = {"seqlen_q": keys, "seqlen_k": keys, "batch": 16384 // keys, "heads_q": 2048 // dim}
    made = select_sm90.plain_tile({**problem, "causal": causal}, dim, dim)
    assert (made["block"], made["optimistic"]) == choice


def test_of_a_tile_asked_for_the_faster_way_is_taken():
    problem = {"seqlen_q": 4096, "batch": 4, "heads_q": 16, "causal": True}
    ways = [
        select_sm90.plain_tile({**problem, "seqlen_k": keys}, 128, 128, 128) for keys in (256, 4096)
    ]
    assert [way["optimistic"] for way in ways] == [False, True]


OPTIMIST: dict[str, Any] = {
    "kernel": "attention.flash_sm90", "params": {"head_dim": 64, "block": (192, 128)},
    "problem": {"softmax_scale": 6.0, "seqlen_k": 400, "head_dim": 64, "head_dim_v": 64},
}  # fmt: skip
BUGS = (
    Bug("nobody looks at the sums", SM90_HEADERS + "speculative_softmax.cuh",
        "sums[0] + sums[1] > limit",
        "false", by="numbers", **OPTIMIST),
    Bug("no __syncwarp() before a tile of K is given back",
        SM90_HEADERS + "speculative_softmax.cuh",
        "__syncwarp();", "", by="race", **OPTIMIST),
    Bug("another tile's scores", K + "flash_sm90.cu",
        "shared + Rings::K + k_place.stage * Rings::K_STAGE);", "shared + Rings::K);", by="race",
        **OPTIMIST),
    Bug("the old maximum again", SM90_HEADERS + "speculative_softmax.cuh",
        "    scores_again();\n    raise_max();", "    scores_again();\n    limit = -NEG_INFINITY;",
        by="numbers", **OPTIMIST),
)  # fmt: skip


@each_planted(BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@ONLY_WITH_EVERY_VARIANT
def test_without_them_nothing_is_said(monkeypatch):
    assert outcome(BUGS[0], monkeypatch, plant=False) == ""
