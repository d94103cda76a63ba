"""What the tests of products share: inputs, the reference by torch, allowed errors."""

from __future__ import annotations

import torch

import fkjit
from fkjit.jit.build import quiet

F = torch.nn.functional
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ACTIVATIONS = {
    None: lambda z: z, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu, "relu": torch.relu,
}  # fmt: skip
FLOOR = {"fp16": 5e-4, "bf16": 4e-3, "fp32": 1e-6}  # of the largest element


def normal(*shape, dtype="fp32", seed=0, device="cpu", scale=1.0):
    """N(0, scale^2), other numbers for another seed or shape."""
    generator = torch.Generator(device).manual_seed(seed + 7 * sum(shape))
    return (scale * torch.randn(*shape, device=device, generator=generator)).to(DTYPES[dtype])


def inputs(m, n, k, dtype="fp32", gate=False, device="cpu", layout="nk"):
    """x [m, k], weight (of outputs about N(0, 1)) and bias; `layout` in memory and in the call."""
    wide = 2 * n if gate else n
    x = normal(m, k, dtype=dtype, device=device)
    weight = normal(wide, k, dtype=dtype, seed=1, device=device, scale=k**-0.5)
    bias = normal(wide, dtype=dtype, seed=2, device=device)
    return x, weight if layout == "nk" else weight.t().contiguous(), bias


def linear(*args, **options):
    with quiet():
        return fkjit.linear(*args, **options)


def theirs(x, weight, bias=None, *, activation=None, gate=False, residual=None, scale=1.0,
           weight_layout="nk"):  # fmt: skip
    """The same by torch, in the dtype of what it is given."""
    product = scale * (x @ (weight.t() if weight_layout == "nk" else weight))
    z = product if bias is None else product + bias
    y = ACTIVATIONS[activation](z.chunk(2, -1)[0]) * z.chunk(2, -1)[1] if gate else (
        ACTIVATIONS[activation](z)
    )  # fmt: skip
    return y if residual is None else y + residual


def double(*tensors):
    return [None if t is None else t.detach().double() for t in tensors]


def assert_close(found, expected, dtype):
    """Within what one rounding to the dtype and sums in fp32 make of it."""
    assert found.dtype == DTYPES[dtype] and found.shape == expected.shape
    error = (found.double() - expected).abs().max().item() if found.numel() else 0.0
    assert error <= FLOOR[dtype] * max(1.0, expected.abs().max().item() if found.numel() else 0.0)


def assert_right(found, expected, peer, dtype):
    """At most twice as wrong as torch in the same dtype, at the worst element and by norm."""
    assert found.dtype == peer.dtype and found.shape == expected.shape
    ours, other = found.double() - expected, peer.double() - expected
    floor = 1e-6 if dtype == "fp32" else 1e-4
    floor *= expected.abs().max().item()
    assert ours.abs().max() <= 2 * other.abs().max() + floor
    assert ours.norm() <= 2 * other.norm() + floor
