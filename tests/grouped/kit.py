"""What the tests of grouped products share: groups, and experts one after the other in torch."""

from __future__ import annotations

import numpy as np
import torch

import fkjit
from fkjit.jit.build import quiet
from tests.gemm.kit import ACTIVATIONS, DTYPES, normal

F = torch.nn.functional
SCORES = {
    "softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}  # fmt: skip


def choices(tokens, experts, top_k, how="even", seed=0):
    """Ids [tokens, top_k], different within a token: spread evenly, all on the first experts, or
    on few of them."""
    rng = np.random.default_rng(seed)
    weights = {"even": np.ones(experts), "zipf": 1 / np.arange(1, experts + 1) ** 1.2}
    if how == "first":
        ids = np.tile(np.arange(top_k), (tokens, 1))
    else:
        p = weights[how] / weights[how].sum()
        ids = [rng.choice(experts, top_k, replace=False, p=p) for _ in range(tokens)]
    return torch.as_tensor(np.asarray(ids, np.int32).reshape(tokens, top_k))


def grouped(ids, experts, block_size=64, **options):
    with quiet():
        return fkjit.moe_regroup(ids, experts, block_size, **options)


def arrays(tokens, experts, n, k, dtype="fp32", gate=False, device="cpu", layout="nk"):
    """x [tokens, k], weight of outputs about N(0, 1), bias."""
    wide = 2 * n if gate else n
    x = normal(tokens, k, dtype=dtype, device=device)
    said = {"dtype": dtype, "device": device, "scale": k**-0.5}
    if experts * wide * k < 1 << 28:
        weight = normal(experts, wide, k, seed=1, **said)
    else:  # not twice 30 GB beside other tests
        weight = torch.empty(experts, wide, k, dtype=DTYPES[dtype], device=device)
        for expert in range(experts):
            weight[expert] = normal(wide, k, seed=1 + expert, **said)
    bias = normal(experts, wide, dtype=dtype, seed=2, device=device)
    return x, weight if layout == "nk" else weight.transpose(1, 2).contiguous(), bias


def by_choice(x, weight, bias, ids, *, activation=None, gate=False, layout="nk"):
    """[tokens, top_k, N]: what each token's experts make of it, in the dtype of x."""
    own = weight[ids.long()] if layout == "nk" else weight[ids.long()].transpose(-1, -2)
    z = torch.einsum("tk,tcnk->tcn", x, own)
    z = z if bias is None else z + bias[ids.long()]
    if not gate:
        return ACTIVATIONS[activation](z)
    first, up = z.chunk(2, -1)
    return ACTIVATIONS[activation](first) * up


def layer(x, logits, up, down, top_k, *, renormalize=False, scoring="softmax", activation="silu",
          ids=None):  # fmt: skip
    """A mixture of experts in torch, expert by expert; `ids`: the choice, if it is made already."""
    scores = SCORES[scoring](logits)
    ids = scores.topk(top_k, -1).indices if ids is None else ids.long()
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    out = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        first, second = (x[token] @ up[expert].t()).chunk(2, -1)
        y = (ACTIVATIONS[activation](first) * second) @ down[expert].t()
        out = out.index_add(0, token, y * weights[token, choice, None].to(y.dtype))
    return out


def layer_arrays(tokens, experts, hidden, inner, dtype="fp32", device="cpu"):
    """x, logits (fp32, different), w_gate_up, w_down."""
    x = normal(tokens, hidden, dtype=dtype, device=device)
    logits = normal(tokens, experts, seed=3, device=device)
    up = normal(experts, 2 * inner, hidden, dtype=dtype, seed=1, device=device, scale=hidden**-0.5)
    down = normal(experts, hidden, inner, dtype=dtype, seed=2, device=device, scale=inner**-0.5)
    return x, logits, up, down
