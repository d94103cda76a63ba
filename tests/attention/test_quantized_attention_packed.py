"""Packed sequences in attention on codes: each is what it is alone, whatever its neighbours are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.settings import settings
from tests.core.mutations import Bug
from tests.core.sampling import one_in
from tests.core.test_mutations import check_found

ROWS, KEYS = [5, 0, 70, 33], [130, 64, 0, 201]
HEADS, DIM = (2, 1), 64


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


@pytest.fixture
def on(monkeypatch):
    """Run as a GPU of this name would."""

    def choose(target):
        monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=target))

    return choose


def ends(lengths, dtype=torch.int32):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)


def arrays():
    made = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=made)  # noqa: E731
    k = normal(sum(KEYS), HEADS[1], DIM) + 2 * normal(DIM)
    return (normal(sum(ROWS), HEADS[0], DIM).bfloat16(), k.bfloat16(),
            normal(sum(KEYS), HEADS[1], DIM).bfloat16())  # fmt: skip


def said(rows=ROWS, keys=KEYS):
    return {"cu_seqlens_q": ends(rows), "cu_seqlens_k": ends(keys), "max_seqlen_q": max(rows),
            "max_seqlen_k": max(keys)}  # fmt: skip


@one_in(4)
@pytest.mark.parametrize(("scheme", "target", "more"), [
    ("int8", "compute_80", {}), ("int8_fp8", "compute_89", {"window": (60, 5)}),
    ("fp8", "compute_90a", {"causal": True}), ("int8", "compute_90a", {"causal": True}),
    ("fp8_e5m2", "compute_89", {"causal": True}), ("int8_fp8", "compute_90a", {"promote": 0}),
])  # fmt: skip
@pytest.mark.parametrize("how", [{}, {"scales": "head", "rotate": True}])
def test_each_sequence_is_as_it_is_alone(on, scheme, target, more, how):
    on(target)
    q, k, v = arrays()
    more = {"scheme": scheme, "return_lse": True, **more, **how}
    o, lse = fkjit.quantized_attention(q, k, v, **said(), **more)
    assert o.shape == q.shape and lse.shape == (HEADS[0], len(q))
    first_q = first_k = 0
    for rows, keys in zip(ROWS, KEYS, strict=True):
        if rows:
            alone = (x[None, first : first + count].transpose(1, 2).contiguous()
                     for x, first, count in ((q, first_q, rows), (k, first_k, keys),
                                             (v, first_k, keys)))  # fmt: skip
            wanted, wanted_lse = fkjit.quantized_attention(*alone, **more)
            assert torch.equal(o[first_q : first_q + rows].transpose(0, 1), wanted[0])
            assert torch.equal(lse[:, first_q : first_q + rows], wanted_lse[0])
        first_q, first_k = first_q + rows, first_k + keys


@one_in(2)
@pytest.mark.parametrize(("scheme", "target"), [("fp8", "compute_90a"), ("int8", "compute_90a")])
def test_a_neighbours_nan_stays_there(on, scheme, target):
    on(target)
    q, k, v = arrays()
    before = fkjit.quantized_attention(q, k, v, scheme=scheme, **said())
    q[5:], k[130:], v[130:] = torch.nan, torch.inf, torch.nan
    after = fkjit.quantized_attention(q, k, v, scheme=scheme, **said())
    assert torch.equal(after[:5], before[:5]) and after[75:].isnan().all()


def test_scales_of_the_tensor_and_codes_made_before(on):
    on("compute_80")
    q, k, v = arrays()
    codes = fkjit.quantize_attention(q, k, v, scales="tensor", smooth_k=False, **said())
    assert codes.q.shape == (1, HEADS[0], len(q), DIM) and codes.max_seqlen_k == 201
    assert codes.q_scales.unique().numel() == 1
    found = fkjit.quantized_attention(codes, causal=True)
    wanted = fkjit.attention_varlen(q, k, v, ends(ROWS), ends(KEYS), 70, 201, causal=True)
    assert (found.double() - wanted.double()).norm() < 0.05 * wanted.double().norm()


def test_what_is_beyond_the_longest_is_left_out(on):
    on("compute_80")
    q, k, v = arrays()
    less = {**said(), "max_seqlen_k": 100}
    found = fkjit.quantized_attention(q, k, v, **less)
    short = torch.cat([k[:100], k[130:194], k[194:294]])
    values = torch.cat([v[:100], v[130:194], v[194:294]])
    wanted = fkjit.quantized_attention(q, short, values, **said(keys=[100, 64, 0, 100]))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"max_seqlen_q": None}, "max_seqlen_q=None with packed sequences; allowed: all of"),
    ({"cu_seqlens_k": ends(KEYS[:-1])}, "cu_seqlens_q has 5 elements, cu_seqlens_k 4"),
    ({"max_seqlen_k": -1}, "max_seqlen_k=-1 is not in 0"),
])  # fmt: skip
def test_ends_are_checked(wrong, message):
    with pytest.raises(ParameterError) as caught:
        fkjit.quantized_attention(*arrays(), **{**said(), **wrong})
    assert message in str(caught.value)


def test_dtypes_and_rows_that_are_not_there():
    q, k, v = arrays()
    with pytest.raises(ArgumentTypeError, match="cu_seqlens_q is int64; allowed: int32"):
        fkjit.quantized_attention(q, k, v, **{**said(), "cu_seqlens_q": ends(ROWS, torch.int64)})
    with pytest.raises(ParameterError, match="three dimensions"):
        fkjit.quantized_attention(q[None], k[None], v[None], **said())
    codes = fkjit.quantize_attention(q, k, v, **said())
    beyond = {**said(), "cu_seqlens_k": ends([130, 64, 0, 999])}
    with fkjit.sanitize(indices=True):
        with pytest.raises(ParameterError, match=r"cu_seqlens_k\[4\]=1193"):
            fkjit.quantize_attention(q, k, v, **beyond)
        with pytest.raises(ParameterError, match=r"quantized_attention: cu_seqlens_k\[4\]=1193"):
            fkjit.quantized_attention(codes._replace(cu_seqlens_k=beyond["cu_seqlens_k"]))
    with pytest.raises(ParameterError, match="cu_seqlens_q is given beside AttentionCodes"):
        fkjit.quantized_attention(codes, cu_seqlens_q=ends(ROWS))


# ------------------------------------------------------------------ planted bugs

K, T = "kernels_cu/attention/", "templates/attention/"
FINE = {"dtype": "fp16", "head_dim": 64, "packed": True}
SM90 = {"kernel": "quantized_attention.flash_sm90",
        "params": {**FINE, "code": "fp8", "values": "fp8", "promote": 0,
                   "block": (192, 64)}}  # fmt: skip
HALF_SM90 = {**SM90, "params": {**SM90["params"], "code": "int8", "values": "half"}}
PORTABLE = {"kernel": "quantized_attention.flash",
            "params": {**FINE, "code": "int8", "values": "fp8", "weights": "fp8", "promote": 0,
                       "block": (64, 64)}}  # fmt: skip
CODES = {"kernel": "quantize_attention.codes",
         "params": {**FINE, "code": "int8", "values": "fp8", "smooth": True, "rotate": False,
                    "given": False}}  # fmt: skip
CHANNELS = {"kernel": "quantize_attention.channels",
            "params": {**FINE, "means": True, "mosts": True}}  # fmt: skip
BUGS = (
    Bug("keys of the first sequence", K + "flash_codes.cu", "key_head * total_k + held.start",
        "key_head * total_k", by="numbers", **PORTABLE),
    Bug("scales of the first sequence", K + "flash_codes.cu", "(key_head * v_keys + first_key)",
        "(key_head * v_keys)", by="numbers", **PORTABLE),
    Bug("rows of the next sequence are written", K + "flash_codes.cu", "length - row0",
        "BLOCK_Q", by="memory", **PORTABLE),
    Bug("V of the first sequence", K + "flash_codes_sm90.cu",
        "first_place<PACKED>(cu_seqlens_k, piece.batch) + tile", "tile", by="numbers", **SM90),
    Bug("the lse of another row", K + "flash_codes_sm90.cu",
        "total_q + mine.start + end_row", "total_q + end_row", by="race",
        **SM90),
    Bug("rows of the next sequence are stored", K + "flash_codes_sm90.cu", "mine.length - end_row",
        "16", by="memory", **HALF_SM90),
    Bug("no zeros behind the last key", K + "quantize_codes.cu",
        "place >= first_place<PACKED>(cu_seqlens_k, tile.sequence + 1)",
        "tile.first >= tile.length", by="numbers", **CODES),
    Bug("a sequence begins where another ends", T + "packed_codes.cuh", "+ sequence * KEY_ROOM",
        "", by="race", **CODES),
    Bug("all keys are looked through", K + "quantize_channels.cu", "key < held.length",
        "key < seqlen_k", by="numbers", **CHANNELS),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.kernel)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
