"""Bugs planted in the forms of attention: each is found, by its report or by its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from fkjit import ops
from fkjit.ops.attention.features import SHIPPED
from tests.core.mutations import ONE_HEAD, Bug, D, K
from tests.core.test_mutations import check_found, each_planted, outcome

ops.load()
FP32 = "flash_fp32"
A = D + "attention/"


def of(form: str, kernel: str = "flash") -> dict[str, Any]:
    """A kernel with a form; fp32 is shipped with none but the band, or all."""
    text = next(text for text in SHIPPED if text.startswith(form))
    if kernel == FP32 and form != "window":
        text = SHIPPED[-1]
    return {"kernel": f"attention_form.{kernel}", "params": {"form": text}}


BUGS = (
    # -- the rules
    Bug("a soft cap too low", A + "score.cuh", "fmaf(-2.f * cap,", "fmaf(-2.1f * cap,",
        by="numbers", **of("softcap")),
    Bug("ALiBi aligned to the top left", A + "score.cuh", "shift(seqlen_k - seqlen_q) {}",
        "shift(0) {}", by="numbers", **of("alibi")),
    Bug("one slope for all batches", K + "flash_fp32.cu", "form.alibi_batch_stride", "0",
        by="numbers", **of("alibi", FP32)),
    Bug("a bias of rows past the end", A + "score.cuh", "min(q_idx, last_q) * row_stride",
        "q_idx * row_stride", by="memory", problem=ONE_HEAD, **of("bias")),
    Bug("a mask of keys past the end", A + "score.cuh", "offset + i < keys ?",
        "offset + i <= keys ?", by="memory", problem=ONE_HEAD, **of("mask")),
    Bug("pairs past the end", A + "score.cuh", "offset < seqlen_k - k_idx ?",
        "offset <= seqlen_k - k_idx ?", by="memory", problem=ONE_HEAD, **of("bias")),
    Bug("a mask upside down", A + "score.cuh", "return visible ? x : NEG_INFINITY",
        "return visible ? NEG_INFINITY : x", by="numbers", **of("mask")),
    Bug("a score_mod is asked for keys past the end", A + "score.cuh",
        "min(k_idx + offset + i, last_k)", "k_idx + offset + i", by="memory",
        **of("score_mod")),
    Bug("the scale left out", A + "score.cuh", "s[m][n][2 * half] * softmax_scale",
        "s[m][n][2 * half]", by="numbers", **of("alibi")),
    Bug("a tile's bias for the next one", K + "flash.cu", "(tile - 1) * BLOCK_K", "tile * BLOCK_K",
        by="numbers", **of("bias")),
    Bug("a row's bias for the other one", A + "score.cuh", "rules.begin_row(2 * m + half);",
        "rules.begin_row(2 * m);", by="numbers", **of("bias")),
    # -- the band
    Bug("a window too narrow by one", A + "score.cuh", "q_idx + shift - left, 0)",
        "q_idx + shift - left + 1, 0)", by="numbers", **of("window")),
    Bug("a window too wide by one", A + "score.cuh", "q_idx + shift + right + 1, seqlen_k",
        "q_idx + shift + right + 2, seqlen_k", by="numbers", **of("window")),
    Bug("the first tile is left out", A + "features.cuh",
        "first = band.first(q_first) / BLOCK_K", "first = ceil_div(band.first(q_first), BLOCK_K)",
        by="numbers", **of("window")),
    Bug("a tile too few is masked", A + "features.cuh",
        "first_whole = ceil_div(band.first(q_last), BLOCK_K)",
        "first_whole = band.first(q_last) / BLOCK_K", by="numbers", **of("window")),
    Bug("the other end is not masked", A + "features.cuh",
        "first_whole <= tile && tile < end_whole", "first_whole <= tile", by="numbers",
        **of("window")),
    Bug("fp32 begins with another tile", K + "flash_fp32.cu", "fetch_k(first_tile);",
        "fetch_k(0);", by="numbers", problem={"window": (1, 0), "seqlen_k": 90, **ONE_HEAD},
        **of("window", FP32)),
    # -- sinks
    Bug("sinks left out", K + "flash.cu", "if (SINKS) softmax.begin_with", "if (false) "
        "softmax.begin_with", by="numbers", **of("sinks")),
    Bug("a sink for each lane", A + "online_softmax.cuh", "lane % 4 == 0 && logit", "logit",
        by="numbers", **of("sinks")),
    Bug("a sink for each lane of fp32", K + "flash_fp32.cu", "x == 0 && row_max[i]", "row_max[i]",
        by="numbers", **of("sinks", FP32)),
    # -- packed sequences
    Bug("keys of the first sequence", K + "flash.cu", "k += held.start * k_strides.row;", "",
        by="numbers", **of("varlen")),
    Bug("rows of the first sequence", K + "flash.cu", "o += mine.start * o_strides.row;", "",
        by="race", **of("varlen")),
    Bug("lse of the first sequence", K + "flash.cu", "if (VARLEN && lse != nullptr) "
        "lse += mine.start;", "", by="race", **of("varlen")),
    Bug("lse of fp32 by batches", K + "flash_fp32.cu",
        "static_cast<i64>(head) * form.total_q + queries.start", "head * max_seqlen_q",
        by="race", **of("varlen", FP32)),
    Bug("a sequence too long", A + "sequence_rows.cuh", "cu_seqlens[index + 1] - start",
        "cu_seqlens[index + 1] - start + 1", by="memory", **of("varlen")),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@pytest.mark.parametrize("bug", [b for b in BUGS if b.problem], ids=lambda bug: bug.name)
def test_without_it_nothing_is_said(bug, monkeypatch):
    assert outcome(bug, monkeypatch, plant=False) == ""
