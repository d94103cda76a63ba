"""fkjit.attention_backward without a GPU: the same kernels in the interpreter."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.arch import DEFAULT_ARCHS, arch  # noqa: E402
from fkjit.errors import ArgumentTypeError, ParameterError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.ops.attention.backward import call  # noqa: E402
from fkjit.ops.attention.backward.problem import Options  # noqa: E402
from fkjit.ops.attention.backward.select import select  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402

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


DIMS = [(64, 64), (40, 24), (96, 111), (192, 128), (256, 200)]


@one_in(5, dims=DIMS, dtype=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_gradients_err_at_most_twice_as_much_as_pytorch(dims, dtype):
    causal = bool((DIMS.index(dims) + len(dtype) + (dtype == "fp16")) % 2)
    check(*tensors(4, 2, 37, 53, *dims, dtype), causal=causal)


@one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        {"heads": 6, "heads_kv": 2, "sq": 70, "sk": 21, "causal": True},  # rows without keys
        {"heads": 2, "heads_kv": 1, "sq": 1, "sk": 70, "causal": True, "dlse": True},
        {"heads": 4, "heads_kv": 4, "sq": 40, "sk": 70, "layout": "bshd", "dlse": True},
        {"heads": 2, "heads_kv": 2, "sq": 33, "sk": 40, "causal": True, "scale": -0.2},
        {"heads": 2, "heads_kv": 1, "sq": 9, "sk": 12, "scale": 0.0},
        {"heads": 2, "heads_kv": 1, "sq": 33, "sk": 40, "causal": True, "deterministic": False},
    ],
    ids=str,
)
def test_masks_groups_layouts_scales(case):
    case = dict(case)
    sizes = [case.pop(name) for name in ("heads", "heads_kv", "sq", "sk")]
    q, k, v, dout = tensors(*sizes, 64, 48, "bf16", batch=2)
    dlse = torch.randn(q.shape[:3]) if case.pop("dlse", False) else None
    check(q, k, v, dout, dlse=dlse, **case)


def test_views_of_any_strides():
    q, k, v, dout = tensors(2, 2, 20, 24, 64, 64)
    wide = [torch.cat([x, x], -1)[..., :64] for x in (q, k, v)]
    shifted = [torch.cat([x, x], -1)[..., 1:65] for x in (q, k, v)]
    check(*wide, dout[:, :1].expand(1, 2, 20, 64))
    check(*shifted, dout)


@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_that_see_no_key_have_no_gradient(deterministic):
    q, k, v, dout = tensors(1, 1, 12, 5, 32, 32)
    o, lse = fkjit.attention(q, k, v, causal=True, return_lse=True)
    options = {"causal": True, "deterministic": deterministic}
    with quiet():
        dq, dk, dv = fkjit.attention_backward(dout, q, k, v, o, lse, **options)
    assert not dq[:, :, :7].any() and dq[:, :, 7:].any() and dk.any() and dv.any()


@pytest.mark.parametrize(("sq", "sk"), [(0, 5), (5, 0), (0, 0)])
def test_gradients_of_nothing(sq, sk):
    q, k, v, dout = tensors(2, 1, sq, sk, 32, 32)
    o, lse = fkjit.attention(q, k, v, return_lse=True)
    for x, dx in zip((q, k, v), fkjit.attention_backward(dout, q, k, v, o, lse), strict=True):
        assert dx.shape == x.shape and not dx.any()


def test_the_same_bits_at_every_call_and_for_numpy():
    q, k, v, dout = tensors(2, 1, 40, 70, 64, 64)
    o, lse = fkjit.attention(q, k, v, return_lse=True)
    first = fkjit.attention_backward(dout, q, k, v, o, lse)
    again = fkjit.attention_backward(dout, q, k, v, o, lse)
    arrays = [x.numpy() for x in (dout, q, k, v, o, lse)]
    other = fkjit.attention_backward(*arrays)
    for one, two, three in zip(first, again, other, strict=True):
        assert torch.equal(one, two) and torch.equal(one, torch.from_numpy(three))


def test_deterministic_algorithms_are_honoured(monkeypatch):
    problem = {
        **dict.fromkeys(("batch", "heads_q", "heads_kv"), 1),
        **{"seqlen_q": 5, "seqlen_k": 5, "head_dim": 64, "head_dim_v": 64},
        **{"dtype": "fp16", "causal": False, "softmax_scale": 0.1},
    }
    for deterministic, names in (
        (True, ["rows", "keys", "queries"]), (False, ["rows", "sums", "dq"]),
    ):  # fmt: skip
        options = Options(deterministic=deterministic)
        chosen = select(dict(problem), options, {}, True, arch("sm_80"))
        assert [launch.spec.name for launch in chosen.launches] == names
    assert not call.torch_is_deterministic()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert call.torch_is_deterministic()


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", [*DEFAULT_ARCHS, "sm_121a"])
def test_every_head_dimension_has_kernels_on_every_architecture(name, dtype, aligned):
    problem = {
        **dict.fromkeys(("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k"), 3),
        **{"dtype": dtype, "causal": False, "softmax_scale": 0.1},
    }
    for head_dim, head_dim_v in itertools.product((1, 64, 65, 128, 129, 192, 256), repeat=2):
        sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v}
        for deterministic in (True, False):
            options = Options(deterministic=deterministic, impl="portable")
            made = select({**problem, **sizes}, options, {}, aligned, arch(name))
            for launch in made.launches:
                assert launch.spec.why_not(launch.params, arch(name)) is None


def wrong(error, match, change=None, **options):
    q, k, v, dout = tensors(2, 1, 6, 8, 16, 24)
    given = {"dout": dout, "q": q, "k": k, "v": v, "o": dout.clone(), "lse": q[..., 0].float()}
    given.update(change(given) if change else {})
    with pytest.raises(error, match=match):
        fkjit.attention_backward(*given.values(), **options)


def test_bad_arguments_are_explained():
    name = "attention_backward: "
    wrong(ParameterError, name + "layout='sbhd' is not one of bhsd, bshd", layout="sbhd")
    wrong(ParameterError, name + "impl='fast' is not one of auto, portable", impl="fast")
    wrong(ArgumentTypeError, name + "causal=2 is not True or False", causal=2)
    wrong(ArgumentTypeError, name + "deterministic='no' is not", deterministic="no")
    wrong(ArgumentTypeError, name + "softmax_scale='1' is not a plain", softmax_scale="1")
    wrong(ParameterError, name + "softmax_scale=inf is not a finite", softmax_scale=float("inf"))
    wrong(ParameterError, name + "k has shape", lambda x: {"k": x["v"]})
    wrong(ParameterError, name + "dout has shape", lambda x: {"dout": x["q"]})
    wrong(ParameterError, name + "v has shape", lambda x: {"v": x["v"][:, :, :3]})
    wrong(ParameterError, name + "q has 3 dimensions", lambda x: {"q": x["q"][0]})
    wrong(ParameterError, name + "o has stride 6", lambda x: {"o": x["o"].mT.contiguous().mT})
    wrong(ParameterError, name + "lse has shape", lambda x: {"lse": x["lse"][:, :1]})
    wrong(ParameterError, name + "lse is not contiguous",
          lambda x: {"lse": x["lse"].mT.contiguous().mT})  # fmt: skip
    wrong(ArgumentTypeError, name + "lse is fp16; allowed: fp32", lambda x: {"lse": x["q"][..., 0]})
    wrong(ArgumentTypeError, name + "o is fp32 but dout is fp16", lambda x: {"o": x["o"].float()})
    wrong(ArgumentTypeError, name + "k is a numpy array but dout is a torch",
          lambda x: {"k": x["k"].numpy()})  # fmt: skip
    wrong(ParameterError, name + "dlse has shape", dlse=torch.zeros(3))
    wrong(ParameterError, name + "q has 3 heads, not a multiple of k's 2", lambda x: {
        "q": torch.zeros(1, 3, 6, 16).half(), "k": torch.zeros(1, 2, 8, 16).half(),
        "v": torch.zeros(1, 2, 8, 24).half(), "o": torch.zeros(1, 3, 6, 24).half(),
        "dout": torch.zeros(1, 3, 6, 24).half(), "lse": torch.zeros(1, 3, 6),
    })  # fmt: skip
