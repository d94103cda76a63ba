"""fkjit.attention_backward without a GPU: the same kernels in the interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.build import quiet  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = ("dq", "dk", "dv")


def tensors(heads, heads_kv, sq, sk, d, dv, dtype="fp16", seed=0, batch=1):
    """q, k, v and dout, N(0, 1)."""
    made = torch.Generator().manual_seed(seed)
    shapes = ((heads, sq, d), (heads_kv, sk, d), (heads_kv, sk, dv), (heads, sq, dv))
    return [torch.randn((batch, *s), generator=made).to(DTYPES[dtype]) for s in shapes]


def textbook(q, k, v, causal, scale):
    """(o, lse) as PyTorch computes them in the dtype of its inputs; rows without keys are 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    sq, sk = scores.shape[-2:]
    if causal:
        hidden = torch.arange(sk) > torch.arange(sq)[:, None] + sk - sq
        scores = scores.masked_fill(hidden, float("-inf"))
    seen = torch.isfinite(scores).any(-1, keepdim=True)
    p = torch.softmax(torch.where(seen, scores, torch.zeros_like(scores)), -1)
    lse = torch.logsumexp(scores, -1)
    return torch.where(seen, p, torch.zeros_like(p)) @ v, lse


def gradients(q, k, v, dout, causal, scale, dlse=None):
    """(o, lse, dq, dk, dv) by PyTorch's autograd in the dtype of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o, lse = textbook(*leaves, causal, scale)
    loss = (o * dout.to(o.dtype)).sum()
    if dlse is not None:
        finite = torch.isfinite(lse)
        loss = loss + (lse[finite] * dlse.to(lse.dtype)[finite]).sum()
    loss.backward()
    return o.detach(), lse.detach(), *(x.grad for x in leaves)


def check(q, k, v, dout, *, causal=False, scale=None, dlse=None, layout="bhsd", **options):
    """Gradients err at most twice as much as PyTorch's own in this dtype."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse, *exact = gradients(*(x.double() for x in (q, k, v, dout)), causal, factor, dlse)
    peer = gradients(q, k, v, dout, causal, factor, dlse)[2:]

    def turned(x):
        return x.transpose(1, 2).contiguous() if layout == "bshd" else x

    given = [turned(x) for x in (dout, q, k, v, o.to(q.dtype))]
    with quiet():
        found = fkjit.attention_backward(
            *given, lse.float(), dlse=dlse, causal=causal, softmax_scale=scale, layout=layout,
            **options,
        )  # fmt: skip
    for name, one, expected, other in zip(NAMES, found, exact, peer, strict=True):
        one = one.transpose(1, 2) if layout == "bshd" else one
        assert one.dtype == q.dtype and one.shape == expected.shape
        error, theirs = ((x.double() - expected).norm() for x in (one, other))
        assert error <= 2 * theirs + 1e-6 * expected.norm() + 1e-30, (name, error, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (40, 24), (128, 128), (96, 111), (192, 128), (256, 200)]
)
def test_gradients_err_at_most_twice_as_much_as_pytorch(dims, dtype, causal):
    check(*tensors(4, 2, 37, 53, *dims, dtype), causal=causal)
