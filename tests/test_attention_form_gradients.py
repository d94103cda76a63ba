"""Gradients of fkjit.attention with a form, against float64 autograd, in the interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.build import quiet  # noqa: E402
from fkjit.errors import ParameterError  # noqa: E402
from tests.test_attention_backward import tensors  # noqa: E402

HEADS, SQ, SK = 4, 37, 53


def arrays(seed=3):
    """alibi_slopes, bias, mask and sinks."""
    made = torch.Generator().manual_seed(seed)
    bias = torch.randn((1, HEADS, SQ, SK), generator=made)
    mask = torch.rand((2, 1, SQ, SK), generator=made) < 0.8
    slopes, sinks = (torch.rand(HEADS, generator=made) for _ in range(2))
    return {"alibi_slopes": slopes, "bias": bias, "mask": mask, "sinks": sinks}


def textbook(q, k, v, *, causal=False, window=None, softcap=None, alibi_slopes=None, bias=None,
             mask=None, sinks=None):  # fmt: skip
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    apart = torch.arange(SK) - (torch.arange(SQ)[:, None] + SK - SQ)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s)[:, None, None] * apart.abs()
    s = s if bias is None else s + bias.to(s)
    left, right = (SK + SQ if x is None else x for x in window or (None, None))
    seen = (apart >= -left) & (apart <= (0 if causal else right))
    seen = seen if mask is None else seen & mask
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[:, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1).nan_to_num()[..., :SK]
    return p @ v


def grads(call, given, dout):
    leaves = [x.detach().clone().requires_grad_() for x in given]
    call(*leaves).backward(dout.to(leaves[0].dtype))
    return [x.grad for x in leaves]


CASES = (
    (("window",), {"window": (9, 4)}), (("window causal",), {"window": (20, None), "causal": True}),
    (("softcap",), {"softcap": 1.5}), (("alibi_slopes",), {"causal": True}), (("bias",), {}),
    (("mask",), {}), (("sinks",), {"causal": True}),
    (("alibi_slopes", "bias", "mask", "sinks"), {"softcap": 2.0, "window": (25, 3)}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "bf16") for case in CASES), *((case, "fp32") for case in CASES[::7])],
    ids=str,
)
def test_gradients_err_at_most_twice_as_much_as_pytorch(case, dtype):
    names, options = case
    options = options | {name: x for name, x in arrays().items() if name in names}
    *given, dout = tensors(HEADS, 2, SQ, SK, 40, 24, dtype, batch=2)
    with quiet():
        found = grads(lambda *x: fkjit.attention(*x, **options), given, dout)
    exact = grads(lambda *x: textbook(*x, **options), [x.double() for x in given], dout)
    peer = grads(lambda *x: textbook(*x, **options), given, dout)
    for one, other, expected in zip(found, peer, exact, strict=True):
        error, theirs = ((x.double() - expected).norm() for x in (one, other))
        assert error <= 2 * theirs + 2e-6 * expected.norm(), (error, theirs)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_wide_heads_have_tiles_of_their_own(dims):
    options = {"softcap": 2.0, **{n: x for n, x in arrays().items() if n != "sinks"}}
    *given, dout = tensors(HEADS, 2, SQ, SK, *dims, "fp16", batch=2)
    with quiet():
        found = grads(lambda *x: fkjit.attention(*x, **options), given, dout)
    exact = grads(lambda *x: textbook(*x, **options), [x.double() for x in given], dout)
    for one, expected in zip(found, exact, strict=True):
        assert (one.double() - expected).norm() <= 3e-3 * expected.norm()


def test_what_has_no_gradient_is_refused():
    q, k, v, _ = tensors(HEADS, 2, SQ, SK, 16, 16, "fp32")
    bias = arrays()["bias"].requires_grad_()
    with pytest.raises(ParameterError, match="bias requires grad, but has no gradient yet"):
        fkjit.attention(q, k, v, bias=bias)
    with pytest.raises(ParameterError, match="score_mod has no derivative"):
        fkjit.attention(q.requires_grad_(), k, v, score_mod="score * 2")
