"""Few queries in `fkjit.attention` with a form: decoding's kernel, for calls that it is the faster
one of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fkjit
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.attention import select
from tests.attention.feature_kit import draw, exact
from tests.attention.kit import assert_close

fkjit.attention  # noqa: B018  imports the module
PROBLEM = {
    **{"dtype": "bf16", "heads_q": 32, "heads_kv": 8, "batch": 1, "seqlen_q": 4},
    **{"seqlen_k": 4096, "window": (4096, 0), "multiprocessors": 132},
    **{"head_dim": 128, "head_dim_v": 128},
}


@pytest.fixture
def handed_over(monkeypatch):
    """As if every call were faster so; the kernels that calls then launch."""
    from fkjit.ops.op import op as simple

    seen, interpret = [], simple.interpret
    monkeypatch.setattr(select, "is_for_decode", lambda *problem: True)
    monkeypatch.setattr(
        simple, "interpret", lambda spec, *rest: (seen.append(spec.op), interpret(spec, *rest))
    )
    return seen


CASES = [  # heads, queries and keys, head_dim and that of v, layout, features
    ((4, 2), (3, 70), (64, 64), "bshd", None),
    ((2, 1), (16, 40), (32, 64), "bhsd", {"window", "sinks", "alibi_slopes"}),
    ((2, 2), (5, 3), (64, 40), "bhsd", {"softcap", "mask", "bias", "score_mod"}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_forms_mean_the_same_to_decoding(handed_over, case):
    heads, lengths, dims, layout, features = CASES[case]
    dtype = "bf16" if case else "fp16"
    drawn = draw(case + 3, 2, heads, lengths, dims, dtype, features)
    turned = (lambda x: x.swapaxes(1, 2).copy()) if layout == "bshd" else (lambda x: x)
    rows = [turned(x) for x in drawn[:3]]
    with quiet():
        o, lse = fkjit.attention(*rows, **drawn.options, layout=layout, return_lse=True)
    assert_close(turned(o), lse, *exact(drawn), dtype)
    assert handed_over == ["decode_form"]


def test_what_decoding_refuses_stays_with_attention(handed_over):
    """Rows off 16-byte boundaries; a bias beside 192 columns. Errors are attention's own."""
    wide = draw(5, 1, (2, 1), (3, 40), (192, 192), "fp16", {"bias"})
    odd = draw(6, 1, (2, 1), (3, 40), (33, 33), "fp16", {"sinks"})
    for case in (wide, odd):
        with quiet():
            o, lse = fkjit.attention(*case[:3], **case.options, return_lse=True)
        assert_close(o, lse, *exact(case), "fp16")
    assert handed_over == ["attention_form"] * 2
    with pytest.raises(ParameterError, match=r"^attention: sinks has shape"):
        fkjit.attention(*odd[:3], sinks=np.zeros(3, np.float32))


def test_calls_that_are_faster_so():
    def takes(impl="auto", block=None, **other: Any):
        return select.is_for_decode({**PROBLEM, **other}, impl, block)

    assert takes() and takes(seqlen_q=1, seqlen_k=256) and takes(seqlen_q=16)
    assert takes(window=(300, 0)) and not takes(window=(200, 0))
    assert not takes("flash") and not takes(block=64)
    assert not takes(dtype="fp32") and not takes(seqlen_q=17)
    for queries, keys in ((16, 2048), (8, 1024)):  # rows of several small tiles
        assert takes(seqlen_q=queries, window=(keys - queries, 0), batch=64)
        assert not takes(seqlen_q=queries, window=(keys - queries - 1, 0))
    assert takes(seqlen_q=16, heads_q=128) and not takes(seqlen_q=16, heads_q=128, seqlen_k=4000)
    for dims, batch in (({"head_dim": 64, "head_dim_v": 64}, 16), ({"head_dim_v": 192}, 4)):
        assert takes(seqlen_q=16, batch=batch, **dims)
        assert not takes(seqlen_q=16, batch=batch + 1, **dims)
    on_cpu = {name: value for name, value in PROBLEM.items() if name != "multiprocessors"}
    assert not select.is_for_decode(on_cpu, "auto", None)
