"""What the tests of LayerNorm and RMSNorm share: inputs, references by torch, allowed errors."""

from __future__ import annotations

import torch

import fkjit
from fkjit.jit.build import quiet

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OPS = ("layer_norm", "rms_norm")
EPS = 1e-5
FLOOR = {"fp16": 1e-4, "bf16": 1e-3, "fp32": 5e-7}  # of the largest element


def normal(*shape, dtype="fp32", seed=0, device="cpu", mean=0.0):
    """N(mean, 1), other numbers for another seed or shape."""
    generator = torch.Generator(device).manual_seed(seed + 7 * sum(shape))
    return (mean + torch.randn(*shape, device=device, generator=generator)).to(DTYPES[dtype])


def norm(op, x, weight=None, bias=None, residual=None, eps=EPS, **options):
    """Ours; a bias is for LayerNorm only."""
    with quiet():
        if op == "layer_norm":
            return fkjit.layer_norm(x, weight, bias, eps, residual, **options)
        return fkjit.rms_norm(x, weight, eps, residual, **options)


def theirs(op, x, weight=None, bias=None, eps=EPS):
    """torch's, in x's dtype."""
    functional, width = torch.nn.functional, (x.shape[-1],)
    if op == "layer_norm":
        return functional.layer_norm(x, width, weight, bias, eps)
    return functional.rms_norm(x, width, weight, eps)


def double(*tensors):
    return [None if t is None else t.detach().double() for t in tensors]


def assert_right(found, expected, peer, dtype):
    """At most twice as wrong as torch in the same dtype, at the worst element and by norm."""
    assert found.dtype == DTYPES[dtype] and found.shape == expected.shape
    ours, other = found.double() - expected, peer.double() - expected
    floor = FLOOR[dtype] * expected.abs().max().item()
    assert ours.abs().max() <= 2 * other.abs().max() + floor
    assert ours.norm() <= 2 * other.norm() + floor
