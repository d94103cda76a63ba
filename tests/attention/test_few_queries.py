"""Few queries of many keys on Hopper: which calls get heads that share a tile and keys in parts,
and the two kernels together in the interpreter; planted bugs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fkjit
from fkjit.arch import arch
from fkjit.jit.build import quiet
from fkjit.ops.attention import select_few
from fkjit.ops.attention.kernels_few import COMBINE, FEW, works
from fkjit.ops.attention.select_few import Choice
from tests.attention.kit import assert_close, normal, reference
from tests.core.mutations import SM90_HEADERS, Bug, K
from tests.core.sampling import one_in
from tests.core.test_mutations import check_found, each_planted, outcome

SMS = 132


def chosen(sq, sk, heads_q, heads_kv, batch=1, causal=False, dim=128):
    group = heads_q // heads_kv
    return select_few._fastest(
        sq, select_few._rounded(sk), heads_q, group, batch, SMS, causal, (dim, dim)
    )


@pytest.mark.parametrize(
    ("shape", "expected"),  # as measured on an H200: bench/notes/attention.md
    [
        ((17, 8192, 32, 8), Choice(4, 8, False)),
        ((32, 32768, 32, 8), Choice(4, 16, True)),
        ((128, 32768, 32, 8), Choice(1, 4, True)),
        ((128, 65536, 8, 8), Choice(1, 16, True)),
        ((512, 512, 32, 8), None),
        ((4096, 77, 10, 10), None),
        ((1024, 1024, 16, 16), None),
    ],
)
def test_what_measured_best_is_chosen(shape, expected):
    assert chosen(*shape) == expected


def test_choices_are_legal_and_fill_the_gpu():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(400):
        kv, group = (int(2 ** rng.integers(0, 5)) for _ in "ab")
        sq, sk = int(2 ** rng.uniform(0, 12)), int(2 ** rng.uniform(0, 17))
        dim, causal = int(rng.choice([64, 96, 128, 192, 256])), bool(rng.random() < 0.5)
        choice = chosen(sq, sk, kv * group, kv, int(rng.integers(1, 9)), causal, dim)
        if choice is None:
            continue
        found += 1
        params = select_few.parameters(choice, "bf16", (dim, dim))
        assert FEW.why_not(params, None) is None, params
        assert group % choice.heads == 0 and choice.parts <= sk
        problem = {"heads_q": kv * group, "batch": 1, "seqlen_q": sq, "parts": choice.parts}
        assert choice.parts == 1 or works(params, problem) <= 2 * SMS
        assert choice.heads == 1 or choice.heads * sq <= 128
    assert found > 100


@pytest.mark.parametrize("tuned", [None, {"block": 128, "optimistic": True}])
def test_tuned_values_replace_the_free_ones(tuned, monkeypatch):
    monkeypatch.setattr(select_few.select_sm90, "readable", lambda *given: True)
    monkeypatch.setattr(
        select_few.tuning, "lookup", lambda spec, *given: tuned if spec is FEW else None
    )
    problem = {
        "dtype": "bf16", "seqlen_q": 17, "seqlen_k": 8192, "heads_q": 32, "heads_kv": 8, "batch": 1,
        "head_dim": 128, "head_dim_v": 128, "causal": False, "multiprocessors": SMS,
    }  # fmt: skip
    params, parts = select_few.choice(problem, {}, "auto", None, True, arch("sm_90a"))
    assert parts > 1 and params["parts"] and params["optimistic"] is bool(tuned)


def run(q, k, v, causal, heads, parts, optimistic=False) -> Any:
    """Both kernels, in the interpreter with races, on a GPU of two SMs."""
    b, hq, sq, dim = q.shape
    choice = Choice(heads, parts, optimistic)
    params = select_few.parameters(choice, "fp16", (dim, dim))
    problem = {
        "dtype": "fp16", "batch": b, "heads_q": hq, "heads_kv": k.shape[1], "seqlen_q": sq,
        "seqlen_k": k.shape[2], "head_dim": dim, "head_dim_v": dim, "causal": causal,
        "softmax_scale": dim**-0.5, "multiprocessors": 2, "parts": parts, "width": dim,
    }  # fmt: skip
    arrays = {
        "q": q, "k": k, "v": v, "o": np.full_like(q, np.nan),
        "lse": np.full((b, hq, sq), np.nan, np.float32), "counters": np.zeros(1, np.uint32),
        "o_parts": np.full((parts, *q.shape), np.nan, np.float32),
        "lse_parts": np.full((parts, b, hq, sq), np.nan, np.float32),
    }  # fmt: skip
    with quiet(), fkjit.sanitize(race=True):
        fkjit.launch(FEW, params, problem, arrays)
        if parts > 1:
            fkjit.launch(COMBINE, {"dtype": "fp16", "head_dim_v": dim}, problem, arrays)
    assert arrays["counters"][0] == 0
    return arrays["o"], arrays["lse"]


@pytest.fixture
def hopper_target(monkeypatch):
    monkeypatch.setenv("FKJIT_TARGET", "compute_90a")
    fkjit.settings.settings.cache_clear()
    yield
    monkeypatch.undo()
    fkjit.settings.settings.cache_clear()


@one_in(4)
@pytest.mark.parametrize(
    ("sq", "sk", "heads", "parts", "causal"),
    [(17, 400, 4, 3, True), (70, 300, 2, 2, False), (3, 130, 8, 1, True), (200, 140, 1, 5, True)],
)
def test_agrees_with_float64(hopper_target, sq, sk, heads, parts, causal):
    """Rows before the first key too (200 of 140), and more parts than tiles of keys."""
    q = normal((2, heads * 2 if heads < 8 else 8, sq, 64), "fp16", 1)
    k, v = (normal((2, q.shape[1] // heads, sk, 64), "fp16", i) for i in (2, 3))
    o, lse = run(q, k, v, causal, heads, parts, optimistic=True)
    assert_close(o, lse, *reference(q, k, v, causal), "fp16")


FEW_QUERIES: dict[str, Any] = {
    "kernel": "attention_few.flash_sm90",
    "params": {"head_dim": 64, "heads": 4, "parts": True}, "problem": {"seqlen_k": 400},
}  # fmt: skip
TOGETHER: dict[str, Any] = {"kernel": "attention_few.combine", "params": {}, "problem": {}}
BUGS = (
    Bug("every part sees all keys", SM90_HEADERS + "parts.cuh",
        "first(share(all.end, part, parts))", "first(0)", by="numbers", **FEW_QUERIES),
    Bug("queries of the first head only", SM90_HEADERS + "parts.cuh",
        "tile_head * HEADS + i, batch", "tile_head * HEADS, batch", by="numbers", **FEW_QUERIES),
    Bug("every head where the first is", K + "flash_sm90.cu",
        "place.head * HEADS + warp_head;", "place.head * HEADS;", by="race", **FEW_QUERIES),
    Bug("rows of the next head", SM90_HEADERS + "parts.cuh",
        "if (row >= rows_left) continue;", "", by="race", **FEW_QUERIES),
    Bug("all parts weigh alike", "kernels_cu/attention/combine.cu",
        "exp2_fast((lse_parts[at] - frame) * LOG2E)", "1.f", by="numbers", **TOGETHER),
)  # fmt: skip


@each_planted(BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


def test_without_them_nothing_is_said(monkeypatch):
    assert outcome(BUGS[0], monkeypatch, plant=False) == ""
