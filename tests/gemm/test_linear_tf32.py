"""fkjit.linear(precision="tf32"): factors rounded to nearest, exact sums; gradients; refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from fkjit.arch import arch  # noqa: E402
from fkjit.errors import ParameterError  # noqa: E402
from fkjit.ops.gemm import select  # noqa: E402
from fkjit.ops.gemm.cost import Shape  # noqa: E402
from fkjit.settings import settings  # noqa: E402
from tests.gemm.kit import assert_close, inputs, linear, normal, theirs  # noqa: E402

SIZES = (72, 80, 200)


def rounded(tensor):
    """To ten bits of fraction, ties away from zero, in float64."""
    bits = tensor.detach().contiguous().numpy().view(np.uint32)
    kept = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return torch.from_numpy(kept.view(np.float32)).double()


def is_rounded(y, x, weight):
    """Whether y is the product of rounded factors: far nearer to it than to the exact one."""
    exact = (x.double() @ weight.double().T - y).abs().max()
    near = (rounded(x) @ rounded(weight).T - y).abs().max()
    return 50 * near < exact and exact > 1e-4


@pytest.mark.parametrize(
    ("layout", "transposed", "aligned"),
    [("nk", False, True), ("kn", True, True), ("nk", True, False), ("kn", False, False)],
)
def test_factors_are_rounded_to_nearest(layout, transposed, aligned):
    m, n, k = SIZES if aligned else (71, 79, 201)
    x, weight, _ = inputs(m, n, k, "fp32")
    given = weight.T.contiguous() if layout == "kn" else weight
    x = x.T.contiguous().T if transposed else x
    y = linear(x, given, weight_layout=layout, precision="tf32", impl="mma")
    assert is_rounded(y, x, weight)


def test_the_default_is_exact():
    x, weight, _ = inputs(*SIZES, "fp32")
    for options in ({}, {"precision": "ieee"}, {"precision": "tf32", "impl": "fma"}):
        assert not is_rounded(linear(x, weight, **options), x, weight)
        assert_close(linear(x, weight, **options), theirs(x.double(), weight.double()), "fp32")


def test_gradients_are_rounded_too():
    x, weight, _ = (t.requires_grad_() for t in inputs(*SIZES, "fp32"))
    dy = normal(72, 80, dtype="fp32", seed=4)
    y = linear(x, weight, precision="tf32", impl="mma")
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    chosen = select.best(Shape(72, 200, 80, *_TAIL), "auto", None, arch("sm_80"))[0]
    assert chosen == "mma"  # of the gradients, too: otherwise the next lines say nothing
    assert is_rounded(dx, dy, weight.detach().T)
    assert is_rounded(dweight.T, x.detach().T, dy.T)


_TAIL = ("fp32", "fp32", "mk", "kn", "none", False, True, True, False, False, 108, "tf32")


def test_of_16_bit_types_nothing_changes():
    x, weight, bias = inputs(*SIZES, "bf16")
    assert torch.equal(linear(x, weight, bias, precision="tf32"), linear(x, weight, bias))


def test_the_operator_and_its_default():
    x, weight, _ = inputs(*SIZES, "fp32")
    options = (None, False, None, None, None, "mma", True, "nk", None, None, True)
    y = torch.ops.fkjit.linear(x, weight, None, None, *options, "tf32")
    assert torch.equal(y, linear(x, weight, precision="tf32", impl="mma"))
    y = torch.ops.fkjit.linear(x, weight, None, None, *options[:5], "fma", *options[6:])
    assert torch.equal(y, linear(x, weight, impl="fma"))


def test_what_is_refused(monkeypatch):
    x, weight, _ = inputs(*SIZES, "fp32")
    with pytest.raises(ParameterError, match=r"precision='bf16' is not one of ieee, tf32"):
        linear(x, weight, precision="bf16")
    with pytest.raises(ParameterError, match=r"impl='mma' rounds fp32 to tf32: pass precision="):
        linear(x, weight, impl="mma")
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_75")
    )
    with pytest.raises(ParameterError, match=r"precision='tf32' needs .*sm_75 has not"):
        linear(x, weight, precision="tf32")
