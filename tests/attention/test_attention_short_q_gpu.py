"""Few queries in `fkjit.attention` with a form on a GPU: decoding's kernel, against float64, warm
and cold, in graphs, with gradients."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.jit.build import quiet
from fkjit.ops.attention.decode.call import _CONTIGUOUS
from fkjit.ops.attention.forward import _ATTENTION
from tests.attention.decode.test_decode_features_gpu import LIMITS, there
from tests.attention.feature_kit import FEATURES, draw, exact

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu

SHAPES = (  # batch, heads, lengths, dims, dtype, features
    (1, (32, 8), (1, 5000), (128, 128), "bf16", {"window", "softcap", "sinks"}),
    (2, (8, 2), (4, 3001), (64, 64), "fp16", FEATURES),
    (1, (16, 4), (16, 4096), (128, 96), "bf16", {"alibi_slopes", "mask", "score_mod"}),
    (3, (4, 4), (2, 2000), (256, 256), "fp16", {"softcap", "sinks", "score_mod"}),
    (1, (40, 8), (3, 777), (96, 96), "bf16", {"bias", "alibi_slopes"}),
)


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def launched():
    """The kernels that calls have plans for."""
    plans = [plan for op in (_ATTENTION, _CONTIGUOUS) for plan in op.plans.known]
    return {start.kernel.spec.op for plan in plans for start in plan.steps.starts}


def forget():
    for op in (_ATTENTION, _CONTIGUOUS):
        op.plans.forget()


def assert_right(found, case, dtype):
    want, want_lse = exact(case)
    o, lse = (x.detach().double().cpu().numpy() for x in found)
    limit = LIMITS[dtype] * max(1, np.abs(want).max(initial=0))
    assert np.abs(o - want).max(initial=0) <= limit
    seen = np.isfinite(want_lse)
    assert np.array_equal(np.isneginf(lse), ~seen)
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= 1e-3


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda one: " ".join(map(str, [*one[:-1], *sorted(one[-1])]))
)
def test_compositions(shape):
    *_, dtype, features = shape
    case = draw(sum(shape[2]), *shape[:4], dtype, features)
    rows, options = [there(x) for x in case[:3]], there(case.options)
    if "window" in options:
        options["window"] = case.options["window"] = (1000, 1)
    forget()
    fkjit.attention.prepare(*rows, **options, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fkjit.attention(*rows, **options, return_lse=True)
    graph.replay()
    for found in (captured, fkjit.attention(*rows, **options, return_lse=True)):
        assert_right(found, case, dtype)
    turned = [x.transpose(1, 2).contiguous() for x in rows]
    o, lse = fkjit.attention(*turned, **options, return_lse=True, layout="bshd")
    assert_right((o.transpose(1, 2), lse), case, dtype)
    assert launched() == {"decode_form"}


def test_other_calls_stay_as_they_are():
    q, k = (torch.randn(1, 8, n, 64, device="cuda", dtype=torch.float16) for n in (1, 600))
    for options in ({"impl": "flash"}, {"block": 64}, {"window": (9, 0)}):
        forget()
        fkjit.attention.prepare(q, k, k, softcap=3.0, **options)
        assert launched() == {"attention_form"}


def test_gradients_are_those_of_the_other_kernel():
    rows = [torch.randn(1, h, n, 64, device="cuda") for h, n in ((8, 3), (2, 900), (2, 900))]
    sinks = torch.randn(8, device="cuda")
    found = []
    for impl in ("auto", "flash"):
        own = [x.to(torch.float16).requires_grad_() for x in rows]
        o = fkjit.attention(*own, causal=True, sinks=sinks, softcap=4.0, impl=impl)
        o.float().square().sum().backward()
        found.append([o.detach(), *(x.grad for x in own)])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() <= 5e-3 * other.float().norm()
