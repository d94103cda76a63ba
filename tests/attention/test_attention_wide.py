"""Head dimensions above 256, in the interpreter: blocks share the columns of v; what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.arch import arch  # noqa: E402
from fkjit.errors import ParameterError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.ops.attention.kernels import FLASH, TILES_WIDEST  # noqa: E402
from fkjit.ops.attention.select import parameters  # noqa: E402
from tests.core.mutations import Bug, K  # noqa: E402
from tests.core.test_mutations import check_found  # noqa: E402

SQ, SK, GROUP = 37, 45, 2
CASES = {
    "both": (512, 512, {"causal": True}),
    "odd, rows on no boundary": (301, 259, {}),
    "wide values": (64, 400, {"window": (9, 3)}),
    "wide keys": (320, 40, {"causal": True, "bias": True}),
}


def rows(head_dim, head_dim_v, dtype=torch.float16):
    made = torch.Generator().manual_seed(1)
    shapes = ((1, GROUP, SQ, head_dim), (1, 1, SK, head_dim), (1, 1, SK, head_dim_v))
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def textbook(q, k, v, causal=False, window=(None, None), bias=None):
    score = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    score = score if bias is None else score + bias.double()
    apart = torch.arange(SK) - torch.arange(SQ)[:, None] - (SK - SQ)
    left, right = (SK if side is None else side for side in window)
    seen = (apart >= -left) & (apart <= (0 if causal else right))
    score = score.masked_fill(~seen, -torch.inf)
    return score.softmax(-1) @ v.double(), score.logsumexp(-1)


@one_in(2)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_wide_heads(case):
    head_dim, head_dim_v, options = case
    given = rows(head_dim, head_dim_v)
    if options.get("bias"):
        options = {**options, "bias": torch.randn(1, GROUP, SQ, SK).half()}
    with quiet():
        found = fkjit.attention(*given, return_lse=True, **options)
    for one, exact, bound in zip(found, textbook(*given, **options), (4e-3, 1e-5), strict=True):
        assert one.shape == exact.shape and (one.double() - exact).abs().max() < bound


def test_packed_rows_and_races():
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in rows(512, 300))
    ends = [torch.tensor([0, n], dtype=torch.int32) for n in (SQ, SK)]
    with quiet(), fkjit.sanitize(race=True):
        o = fkjit.attention_varlen(q, k, v, *ends, SQ, SK, causal=True)
    exact = textbook(*rows(512, 300), causal=True)[0][0].transpose(0, 1)
    assert (o.double() - exact).abs().max() < 4e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fkjit.attention(*rows(513, 64)), "head_dim=513 is not in 1 .. 512"),
        (
            lambda: fkjit.attention(*rows(512, 64, torch.float32)),
            "fp16 and bf16 on sm_80 and newer",
        ),
        (lambda: fkjit.attention(*rows(64, 257), impl="naive"), "head_dim_v=257"),
        (
            lambda: fkjit.attention_decode(*(x[:, :, :9] for x in rows(257, 64))),
            "head_dim=257 is not in 1 .. 256",
        ),
        (
            lambda: fkjit.attention(*(x.requires_grad_() for x in rows(512, 512))),
            "head_dim=512 has no backward; allowed: up to 256",
        ),
    ],
)
def test_what_is_refused_is_refused_by_name(call, message):
    with pytest.raises(ParameterError, match=message):
        call()


FORWARD = {"kernel": "attention.flash", "params": {"head_dim": 512, "block": (32, 16)}}
BUGS = (
    Bug("the first columns of v twice", K + "flash.cu", "v += first_column;", "", by="numbers",
        **FORWARD),
    Bug("columns past the end", K + "flash.cu", "min(head_dim_v - column, HEAD_DIM_V)",
        "HEAD_DIM_V", by="race", problem={"head_dim_v": 400}, **FORWARD),
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@pytest.mark.parametrize(
    ("name", "tile"), [("sm_80", 0), ("sm_90a", 0), ("sm_86", 1), ("sm_120a", 1)]
)
def test_the_tile_is_what_shared_memory_holds(name, tile):
    problem = {"head_dim": 512, "head_dim_v": 512, "seqlen_q": 4096, "dtype": "bf16"}
    made = parameters(FLASH, problem, None, True, arch(name))
    assert made["block"] == TILES_WIDEST[tile]
    assert FLASH.grid(made, {**problem, "heads_q": 3, "batch": 1})[0] == 3 * 2 * np.ceil(
        4096 / made["block"][0]
    )
