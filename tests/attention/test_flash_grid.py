"""flash-attn's functions with arguments drawn at random, in the interpreter: none is refused."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet
from tests.attention.flash_grid import CALLS, DIMS, check, draw

pytest.importorskip("torch", reason="needs torch")
MOST = 40  # tokens of a sequence
FEW, MANY = 3, 150


def test_draws_have_every_argument():
    drawn = [draw(seed, MOST) for seed in range(1000)]
    assert {case.call for case in drawn} == set(CALLS)
    assert {case.dim for case in drawn} == set(DIMS)
    options = {name for case in drawn for name in case.options}
    assert options == {
        "causal", "window_size", "softcap", "alibi_slopes", "softmax_scale", "num_splits",
        "deterministic",
    }  # fmt: skip
    caches = [case.cache for case in drawn if case.cache]
    assert {cache["kind"] for cache in caches} == {"pages", "rows", "plain"}
    assert all(any(name in cache for cache in caches) for name in ("pads", "rotary"))


@pytest.mark.sampled(key=lambda seed: seed if seed < FEW else None)
@pytest.mark.parametrize("seed", range(MANY))
def test_a_draw(seed):
    with quiet():
        check(seed, MOST, "cpu")
