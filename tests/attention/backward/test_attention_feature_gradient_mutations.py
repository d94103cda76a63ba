"""Bugs planted in the backward of attention's forms: each is found, by its report or numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fkjit import ops
from fkjit.ops.attention.backward.features import SHOWN_SEEDED
from tests.core.mutations import SYNC, Bug, D, K
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT
from tests.core.test_mutations import check_found, each_planted, outcome

ops.load()
OF = "attention_backward_form."
KEYS: dict[str, Any] = {"kernel": OF + "keys"}
QUERIES: dict[str, Any] = {"kernel": OF + "queries"}
BIAS: dict[str, Any] = {"kernel": OF + "bias"}
HEADS: dict[str, Any] = {"kernel": OF + "heads", "params": {"varlen": True}}
B = D + "attention/backward/"
FORM, SEEDS = B + "features.cuh", B + "accumulator_init.cuh"
SEEDED_KEYS: dict[str, Any] = {**KEYS, "params": {"form": SHOWN_SEEDED}}
SEEDED_QUERIES: dict[str, Any] = {**QUERIES, "params": {"form": SHOWN_SEEDED}}
SHARED = {"bias_shape": (1, 1, 1)}  # of the gradient: all heads and rows walk

BUGS = (
    Bug("no barrier before a step's tiles are read", K + "backward_bias.cu", SYNC, "", nth=1,
        by="race", **BIAS),
    Bug("no wait for a step's tiles", K + "backward_bias.cu", "cp_async_wait<0>();", "", by="race",
        **BIAS),
    Bug("a step's tiles over the ones that are read", K + "backward_bias.cu",
        "fetch(next, number ^ 1)", "fetch(next, number)", by="race", problem=SHARED, **BIAS),
    Bug("steps of the first head alone", B + "bias_walk.cuh",
        "head = tile.head + step / tiles_q % heads;", "head = tile.head;", by="numbers",
        problem=SHARED, **BIAS),
    Bug("a key too many is stored", B + "bias_walk.cuh", "if (column + 1 < columns)",
        "if (column + 1 <= columns)", by="memory", **BIAS),
    Bug("hidden keys have a slope", FORM, "slopes[m][n][i] = hidden ? 0.f : slope",
        "slopes[m][n][i] = 2.f * slope", by="numbers", **KEYS),
    Bug("a hidden key is seen", FORM, "x = hidden ? NEG_INFINITY : x +", "x = hidden ? x : x +",
        by="numbers", **QUERIES),
    Bug("the derivative of another score", D + "attention/score.cuh", "function.derivative(x[i],",
        "2.f * function.derivative(x[i],", by="numbers", **KEYS),
    Bug("rows of the sequence before", B + "padded_rows.cuh", "start / ROW_STEP + batch",
        "start / ROW_STEP", by="race", **QUERIES),
    Bug("keys of the first sequence", K + "backward_dkdv.cu",
        "k += held.start * k_strides.row;", "", by="numbers", **KEYS),
    Bug("dk of the first sequence", K + "backward_dkdv.cu",
        "dk += held.start * dk_strides.row;", "", by="race", **KEYS),
    Bug("distances to the wrong side", K + "backward_dq.cu",
        "q0 + warp * ROWS_A_WARP + seqlen_k - seqlen_q", "q0 + warp * ROWS_A_WARP", by="numbers",
        **QUERIES),
    Bug("slopes of all batches in one", K + "backward_heads.cu", "of_slope = 0.f;\n      __sync",
        "__sync", by="numbers", **HEADS),
    Bug("keys in another order", D + "tile/row_order.cuh",
        "place % 8 * (2 * M) + place / 8 % (2 * M)",
        "place % (16 * M)", by="numbers", **SEEDED_KEYS),
    Bug("sums of the last head as well", SEEDS, "sums[m][half] = 0.f;", "", by="numbers",
        **SEEDED_KEYS),
    Bug("dS of rows past the end", SEEDS, "if (query < seqlen_q && key < seqlen_k)",
        "if (key < seqlen_k)", by="memory", **SEEDED_QUERIES),
    Bug("no zeros outside of the band", SEEDS, "i < zeros", "i < 0", by="numbers",
        problem={"seqlen_k": 200, "window": (9, 4)}, **SEEDED_QUERIES),
    Bug("no barrier between batches", K + "backward_heads.cu", SYNC, "", by="race", **HEADS),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@ONLY_WITH_EVERY_VARIANT
@pytest.mark.parametrize("kernel", [KEYS, QUERIES, BIAS, HEADS], ids=lambda one: one["kernel"])
def test_without_it_nothing_is_said(kernel, monkeypatch):
    bug = Bug("none", "", "", "", by="", **kernel)
    assert outcome(bug, monkeypatch, plant=False) == ""
