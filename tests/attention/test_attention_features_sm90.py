"""Attention's forms on Hopper's kernel without a GPU: whole calls in the interpreter with race
checks, packed sequences among others' NaN, when the kernel is chosen, planted bugs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fkjit
from fkjit.arch import arch, target
from fkjit.jit.build import build, quiet
from fkjit.ops.attention import select_sm90
from fkjit.ops.attention.feature_kernels import kernel_with
from fkjit.ops.attention.features import SHIPPED_SM90, ScoreFeatures
from fkjit.ops.attention.kernels_sm90 import FEATURE_TILES, FLASH_SM90
from fkjit.settings import settings
from tests.attention.feature_kit import draw, exact
from tests.attention.kit import assert_close, normal
from tests.core.mutations import SM90_HEADERS, Bug, D, K
from tests.core.sampling import one_in
from tests.core.test_mutations import check_found, each_planted

TAKEN = ("window", "softcap", "alibi_slopes", "sinks", "score_mod")
# batch, heads, lengths, dims, dtype, features
SHAPES = (
    (1, (2, 1), (113, 203), (64, 64), "fp16", ("window", "sinks")),
    (1, (2, 2), (140, 203), (40, 40), "bf16", ("window", "softcap", "alibi_slopes")),
    (1, (2, 1), (40, 300), (128, 128), "bf16", TAKEN),
    (1, (1, 1), (66, 90), (192, 128), "fp16", ("alibi_slopes",)),
    (2, (2, 1), (70, 160), (64, 64), "bf16", ("bias", "mask", "window")),
    (1, (1, 1), (70, 144), (256, 256), "bf16", ("bias", "mask", "window")),
    (1, (1, 1), (40, 112), (192, 128), "fp16", ("mask", "softcap", "score_mod")),
)


@pytest.fixture(autouse=True)
def hopper_target(monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )


@one_in(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compositions(shape):
    *sizes, features = shape
    case = draw(sizes[2][0], *sizes, features)
    with quiet(), fkjit.sanitize(race=True):
        o, lse = fkjit.attention(*case[:3], **case.options, return_lse=True)
    assert_close(o, lse, *exact(case), sizes[-1])


def test_a_soft_cap_far_above_the_scores_and_among_them():
    """A polynomial where all of a warp's scores are small, else not: a large one in one warp."""
    case = draw(4, 1, (1, 1), (90, 140), (64, 64), "fp16", ("softcap",))
    case.q[0, 0, 70] *= 40
    case.options["softcap"] = 9.0
    with quiet(), fkjit.sanitize(race=True):
        o, lse = fkjit.attention(*case[:3], **case.options, return_lse=True)
    assert_close(o, lse, *exact(case), "fp16")


LENGTHS = ((130, 50), (0, 7), (5, 0), (64, 128), (1, 90))


def test_packed_sequences_are_what_each_is_alone_whatever_lies_behind_them():
    """To the bit: rows that a tile shares with the next sequence have no say, nor NaN behind the
    last one."""
    cases = [draw(9, 1, (2, 1), pair, (40, 24), "bf16", ()) for pair in LENGTHS]
    slopes, sinks = np.linspace(0, 0.2, 2, dtype="f4"), np.zeros(2, "f4")
    more = {"causal": True, "alibi_slopes": slopes, "sinks": sinks, "window": (40, 0)}
    cases = [case._replace(options=more) for case in cases]
    rows = [np.concatenate([c[i][0].swapaxes(0, 1) for c in cases]) for i in range(3)]
    ends = [np.cumsum([0, *(pair[i] for pair in LENGTHS)]).astype(np.int32) for i in (0, 1)]
    q, k, v = (np.concatenate([x, np.full((9, *x.shape[1:]), np.nan, x.dtype)]) for x in rows)
    with quiet(), fkjit.sanitize(race=True):
        o, lse = fkjit.attention_varlen(
            q, k, v, *ends, 130, 128, return_lse=True, block=128, **more
        )
        for index, case in enumerate(cases):
            own = slice(*ends[0][index : index + 2])
            if LENGTHS[index][0]:
                found = o[own].swapaxes(0, 1)[None]
                assert_close(found, lse[None, :, own], *exact(case), "bf16")
            if min(LENGTHS[index]) and LENGTHS[index][0] > 32:
                alone = fkjit.attention(*case[:3], block=128, **more)
                assert np.array_equal(alone.view("u2"), found.view("u2"))


PROBLEM: dict[str, Any] = {
    "dtype": "bf16", "batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 4096, "seqlen_k": 4096,
    "head_dim": 128, "head_dim_v": 128, "softmax_scale": 0.1, "axes": (0, 1, 2, 3),
    "window": (1024, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "form", "block", "taken"),
    [
        ({}, ScoreFeatures(), None, True),
        ({}, ScoreFeatures(True, True, sinks=True, score_mod="score"), 128, True),
        ({}, ScoreFeatures(), 32, False),
        ({}, ScoreFeatures(bias="bf16"), None, True),
        ({}, ScoreFeatures(bias="fp32", mask=True), 128, False),
        ({"head_dim": 192}, ScoreFeatures(mask=True), None, True),
        ({"head_dim": 256}, ScoreFeatures(bias="bf16", mask=True), (128, 64), True),
        # too wide for the rest
        ({"head_dim": 256}, ScoreFeatures(bias="fp32", mask=True), None, False),
        ({"head_dim": 256}, ScoreFeatures(mask=True, score_mod="score"), None, False),
        ({"softmax_scale": -0.1}, ScoreFeatures(), None, False),
        ({"softmax_scale": 0.0}, ScoreFeatures(), None, False),
        ({"seqlen_q": 32}, ScoreFeatures(), None, False),
        ({"seqlen_k": 0}, ScoreFeatures(), None, False),
        ({"dtype": "fp32"}, ScoreFeatures(), None, False),
        ({"total_q": 90, "axes": (None, 1, 0)}, ScoreFeatures(varlen=True), None, True),
    ],
)
def test_which_problems_it_takes(changes, form, block, taken):
    view = SimpleNamespace(
        shape=(2, 4, 4096, 128), strides=(2**21, 2**19, 128, 1), pointer=0, dtype="bf16"
    )
    views = dict.fromkeys(("q", "k", "v", "bias"), view)
    assert select_sm90.takes({**PROBLEM, **changes}, views, form, block) == taken


@pytest.mark.parametrize("shape, step", [((2, 4, 4096, 128), 0), ((2, 4, 0, 128), 2**19)])
def test_which_arrays_it_leaves_to_the_portable_kernel(shape, step):
    """Rows repeated by a stride of 0, packed keys of which there are none."""
    view = SimpleNamespace(shape=shape, strides=(2**21, step, 128, 1), pointer=0, dtype="bf16")
    assert not select_sm90.takes(PROBLEM, dict.fromkeys("qkv", view), ScoreFeatures(), None)


@pytest.mark.parametrize("row, pointer", [(4100, 0), (4096, 8)])
def test_biases_off_16_byte_boundaries_go_to_the_portable_kernel(row, pointer):
    view = SimpleNamespace(shape=(2, 4, 4096, 128), strides=(2**21, 2**19, 128, 1))
    shape, strides = (1, 1, 4096, row), (0, 0, row, 1)
    bias = SimpleNamespace(shape=shape, strides=strides, pointer=pointer, dtype="bf16")
    views = {**dict.fromkeys("qkv", view), "bias": bias}
    assert not select_sm90.takes(PROBLEM, views, ScoreFeatures(bias="bf16"), None)


@one_in(6)
@pytest.mark.parametrize(
    ("dim", "form"),
    [
        (64, "alibi sinks varlen"),
        (128, SHIPPED_SM90[-1]),
        (256, "softcap alibi bias=fp32 varlen"),
        (128, "varlen paged codes=fp8"),
        (256, "sinks varlen paged mixed codes=int8"),
    ],
)
def test_what_is_compiled_when_called_does_not_spill(dim, form):
    spec = kernel_with(FLASH_SM90, form)
    params = {"dtype": "bf16", "head_dim": dim, "head_dim_v": dim, "form": form}
    params["block"] = next(
        b for b in FEATURE_TILES[dim] if not spec.why_not({**params, "block": b})
    )
    spec.check(params, arch("sm_90a"))
    with quiet():
        assert build(spec, params, target("sm_90a")).meta["problems"] == []


SM90 = {"kernel": "attention_form.flash_sm90", "params": {"form": SHIPPED_SM90[-1]}}
WINDOW = {"kernel": "attention_form.flash_sm90", "params": {"form": SHIPPED_SM90[0]}}
BIAS = {"kernel": "attention_form.flash_sm90", "params": {"form": SHIPPED_SM90[1]}}
FP8 = {"kernel": "attention_form.flash_sm90", "params": {"form": "varlen paged codes=fp8"}}
CODES = SM90_HEADERS + "page_codes.cuh"
BUGS = (
    Bug("codes read without a wait", CODES,
        "mbarrier_wait(barriers.codes_full(codes.stage), codes.parity);", "", by="race", **FP8),
    Bug("codes brought before others are read", CODES,
        "mbarrier_wait(barriers.codes_empty(place.stage), place.parity ^ 1);", "", by="race",
        **FP8),
    Bug("K made before it is free", CODES,
        "mbarrier_wait(barriers.k_empty(stage), k_place.parity ^ 1);", "", by="race", **FP8),
    Bug("V made before it is free", CODES,
        "mbarrier_wait(barriers.v_empty(stage), v_place.parity ^ 1);", "", by="race",
        problem={"window": (999, 999), "lengths": ((0, 67, 5), (9, 261, 9))}, **FP8),
    Bug("numbers of codes that products may not see", CODES, "  proxy_fence();\n", "", by="race",
        **FP8),
    Bug("a tile of codes that nobody gives back", CODES,
        "release(codes, barriers.codes_empty(codes.stage), arrives);", "codes.advance();",
        by="hang", **FP8),
    Bug("codes behind the last key", CODES, "(WHOLE ? Tile::ROWS : rows)", "Tile::ROWS",
        by="memory", **FP8),
    Bug("no scale of keys", K + "flash_sm90.cu", "unscaled_log2 * key_scale", "unscaled_log2",
        by="numbers", **FP8),
    Bug("no scale of values", SM90_HEADERS + "epilogue.cuh", "value_scale / sum", "1.f / sum",
        by="numbers", **FP8),
    Bug("the sign of the other code", CODES, "0x1804", "0x1904", by="numbers", **FP8),
    Bug("chunks changed", CODES, "store_shared_chunk((target ^ 16)",
        "store_shared_chunk((target ^ 32)", by="race", **FP8),
    Bug("rows cut that nobody waits for", SM90_HEADERS + "work.cuh", "  proxy_fence();\n", "",
        by="race", **SM90),
    Bug("a tile of bias that nobody gives back", K + "flash_sm90.cu",
        "release(score_place, barriers.scores_empty(score_place.stage), signals);",
        "score_place.advance();", by="hang",
        **SM90),
    Bug("a bias read without a wait", K + "flash_sm90.cu",
        "mbarrier_wait(barriers.scores_full(score_place.stage), score_place.parity);", "",
        by="race", **SM90),
    Bug("the other panel", SM90_HEADERS + "score_tile.cuh",
        "byte / Tile::ROW_BYTES * Tile::PANEL_BYTES", "0",
        by="numbers", **BIAS),
    Bug("O of the next sequence", K + "flash_sm90.cu", "VARLEN && rows_left < 16", "false",
        by="race", **SM90),
    Bug("a tile of keys too few", D + "attention/features.cuh",
        "first = band.first(q_first) / BLOCK_K",
        "first = band.first(q_first) / BLOCK_K + 1", by="numbers", **WINDOW),
    Bug("a sink in natural units", K + "flash_sm90.cu", "1.f / form.softmax_scale;", "1.f;",
        by="numbers", problem={"seqlen_k": 8}, **WINDOW),
)  # fmt: skip


@each_planted(BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


def test_a_window_reads_no_key_outside_it():
    """NaN in keys that no row of a tile sees."""
    q, k, v = (normal((1, 1, 400, 64), "fp16", i) for i in range(3))
    k[:, :, :128] = v[:, :, :128] = np.nan
    with quiet():
        o = fkjit.attention(q, k, v, window=(20, 0))
    assert np.isfinite(o[:, :, 256:].astype(np.float32)).all()
