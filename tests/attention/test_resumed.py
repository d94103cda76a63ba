"""Attention that goes on where other keys left it: in parts against in one, rows that are done at
different times, bits; against partial results that are merged; what is refused; planted bugs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.forward import attention_into
from fkjit.ops.attention.resumed.call import resume_attention
from tests.attention.kit import assert_close, normal, reference
from tests.core.mutations import Bug, D, K
from tests.core.test_mutations import check_found, each_planted

Part = tuple[slice, slice, bool, tuple[int, int]]  # rows, keys, causal, those of the rows done


def run(q: Any, k: Any, v: Any, parts: list[Part]) -> Any:
    """(o, lse) of keys that come in parts."""
    shape = (*q.shape[:3], v.shape[-1])
    o, sums = np.full(shape, np.nan, q.dtype), np.full(shape, np.nan, np.float32)
    lse = np.full(shape[:3], -np.inf, np.float32)
    for rows, keys, causal, done in parts:
        state = (x[:, :, rows] for x in (sums, lse, o))
        resume_attention(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], *state, done=done, causal=causal
        )
    return o, lse


def arrays(dtype: str, dims: tuple[int, int]) -> tuple[Any, Any, Any]:
    q = normal((2, 4, 37, dims[0]), dtype, 1)
    return q, normal((2, 2, 101, dims[0]), dtype, 2), normal((2, 2, 101, dims[1]), dtype, 3)


EVERY = slice(None)
# Own keys first, then those before them; the first rows are done a part earlier, as those of a
# rank's first chunk in a zigzag ring are.
ZIGZAG: list[Part] = [
    (EVERY, slice(64, 101), True, (0, 0)),
    (EVERY, slice(30, 64), False, (0, 11)),
    (slice(11, 37), slice(0, 30), False, (0, 26)),
]


@pytest.mark.parametrize(
    "dtype,dims", [("fp16", (64, 64)), ("bf16", (40, 24)), ("bf16", (72, 104))]
)
def test_parts_are_as_exact_as_one_call(dtype, dims):
    q, k, v = arrays(dtype, dims)
    o, lse = run(q, k, v, ZIGZAG)
    for rows, keys in ((slice(0, 11), slice(30, 101)), (slice(11, 37), EVERY)):
        wanted = reference(q, k[:, :, keys], v[:, :, keys], True)
        assert_close(o[:, :, rows], lse[:, :, rows], *(x[:, :, rows] for x in wanted), dtype)
    again = run(q, k, v, ZIGZAG)
    assert o.tobytes() == again[0].tobytes() and lse.tobytes() == again[1].tobytes()


def test_many_parts_lose_less_than_merging_them():
    """Of bf16: o is rounded once, merged partial results twice."""
    q, k, v = (normal((1, 2, 64, 64), "bf16", n) for n in range(3))
    k, v = (np.concatenate([x, normal(x.shape, "bf16", 7)], 2) for x in (k, v))
    parts = [slice(n, n + 16) for n in range(0, 128, 16)]
    last = len(parts) - 1
    carried, lse = run(
        q, k, v, [(EVERY, keys, False, (0, 64 * (n == last))) for n, keys in enumerate(parts)]
    )
    made = [fkjit.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True) for keys in parts]
    merged, merged_lse = fkjit.merge_states(*(np.stack(x) for x in zip(*made, strict=True)))
    exact, wanted = reference(q, k, v)
    errors = [np.sqrt(((x.astype(np.float64) - exact) ** 2).mean()) for x in (carried, merged)]
    assert errors[0] < 0.9 * errors[1]
    assert np.allclose(lse, wanted, atol=2e-6) and np.allclose(lse, merged_lse, atol=2e-6)


@pytest.mark.parametrize("given", [{"causal": True}, {"window": (9, 2), "softcap": 3.0}], ids=str)
def test_results_are_written_where_they_are_wanted(given):
    """`attention_into`: rows of a longer array, which is not touched elsewhere."""
    q, k, v = arrays("fp16", (64, 64))
    room, lse = np.full((2, 4, 50, 64), np.nan, np.float16), np.full((2, 4, 37), np.nan, np.float32)
    attention_into(room[:, :, 5:42], lse, q, k, v, **given)
    o, wanted = fkjit.attention(q, k, v, return_lse=True, **given)
    assert np.array_equal(room[:, :, 5:42], o) and np.array_equal(lse, wanted)
    assert np.isnan(room[:, :, :5]).all() and np.isnan(room[:, :, 42:]).all()
    for wrong in ((room[:, :, :37], lse[:, :, ::-1]), (room, lse), (room[:, :, :37], lse[:1])):
        with pytest.raises(ParameterError, match=r"attention: .*allowed"):
            attention_into(*wrong, q, k, v)


def test_rows_that_see_no_key_keep_what_they_have():
    """Causal with more queries than keys: some have seen keys before, some none."""
    q, k, v = arrays("fp16", (64, 64))
    state = normal((2, 4, 37, 64), "fp32", 4), normal((2, 4, 37), "fp32", 5)
    state[1][:, :, ::2], state[0][:, :, ::2] = -np.inf, np.nan
    before = [x.copy() for x in state]
    o = np.full((2, 4, 37, 64), np.nan, np.float16)
    resume_attention(q, k[:, :, :5], v[:, :, :5], *state, o, done=(0, 16), causal=True)
    assert np.array_equal(o[:, :, 1:16:2], before[0][:, :, 1:16:2].astype(np.float16))
    assert not o[:, :, :16:2].any() and np.isnan(o[:, :, 16:]).all()
    assert np.array_equal(state[1][:, :, :32:2], before[1][:, :, :32:2])  # -inf stays
    assert np.allclose(state[1][:, :, 1:32:2], before[1][:, :, 1:32:2], atol=1e-6)
    assert not state[0][:, :, 16:32:2].any()


def test_a_state_far_from_zero_and_one_that_is_none():
    """Scores of 2^27, where a maximum is no longer exact; a NaN stays one."""
    q, k, v = arrays("bf16", (64, 64))
    q[:, :, 0] *= 2.0**15
    k = (k * 2.0**9).astype(k.dtype)
    o, lse = run(q, k, v, [(EVERY, slice(50, 101), False, (0, 0)),
                           (EVERY, slice(0, 50), False, (0, 37))])  # fmt: skip
    assert np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
    state = np.zeros(o.shape, np.float32), np.zeros(lse.shape, np.float32)
    state[1][:, :, 3] = np.nan
    resume_attention(q, k, v, *state, o, done=(0, 37))
    assert np.isnan(o[:, :, 3].astype(np.float32)).all() and np.isnan(state[1][:, :, 3]).all()


def test_what_is_refused():
    q, k, v = arrays("fp16", (64, 64))
    o, sums = np.zeros_like(q), np.zeros(q.shape, np.float32)
    lse = np.zeros(q.shape[:3], np.float32)

    def refused(kind: Any, *given: Any, done: tuple[int, int] = (0, 1)) -> None:
        with pytest.raises(kind, match=r"resume_attention: .*allowed"):
            resume_attention(*given, done=done)

    refused(ParameterError, q, k, v, sums[:, :, 1:], lse, o)
    refused(ParameterError, q, k, v, sums, lse, o, done=(0, 38))
    refused(ParameterError, q, k, v, sums, lse, o, done=(-1, 3))
    refused(ParameterError, q, k, v, sums, lse.transpose(1, 0, 2).copy().transpose(1, 0, 2), o)
    refused(ParameterError, *(x[..., :20] for x in (q, k, v, sums)), lse, o[..., :20][..., ::-1])
    refused(ParameterError, q, k[:, :, :0], v[:, :, :0], sums, lse, o)
    refused(ArgumentTypeError, q, k, v, sums.astype(np.float64), lse, o)
    refused(ArgumentTypeError, *(x.astype(np.float32) for x in (q, k, v)), sums, lse, o)


HERE, SM90 = "attention_resumed.flash", "attention_resumed.flash_sm90"
STATE = D + "attention/row_state.cuh"
NARROW = {"head_dim": 64}
BUGS = (
    Bug("what was before is forgotten", STATE, "nothing ? 0.f : exp2_fast(before",
        "true ? 0.f : exp2_fast(before", HERE, "numbers", params=NARROW),
    Bug("a row with keys now and none before", STATE, "sum == 0.f ? before : fmaxf(before, top)",
        "before", SM90, "numbers", params=NARROW),
    Bug("sums of rows that saw nothing", STATE, "seen && (n + j) * 8", "(n + j) * 8", HERE,
        "memory", params=NARROW),
    Bug("lse is written while a lane reads it", STATE, "__syncwarp();", "", SM90, "race",
        params=NARROW),
    Bug("rows of the next head", STATE, "kept = i < rows && ", "kept = ", HERE, "memory",
        params=NARROW),
    Bug("rows that go on are rounded", STATE, "row0 + i < done_end; };", "true; };", HERE,
        "memory", params=NARROW),
    Bug("lse twice", K + "flash_sm90.cu", "RESUMED ? nullptr : ${lse};", "${lse};", SM90, "race",
        params=NARROW),
)  # fmt: skip


@each_planted(BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
