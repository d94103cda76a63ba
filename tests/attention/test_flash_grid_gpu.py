"""flash-attn's functions with arguments drawn at random, on a GPU: none is refused."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet
from tests.attention.flash_grid import check

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
PARTS, EACH, FIRST = 28, 12, 10_000
MOST = 700  # tokens of a sequence


@pytest.mark.parametrize("part", range(PARTS))
def test_draws(part):
    wrong = []
    for seed in range(FIRST + part * EACH, FIRST + (part + 1) * EACH):
        try:
            with quiet():
                check(seed, MOST, "cuda")
        except Exception as error:  # all of them are told
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
