"""ops/op/autograd.py: one factory of PyTorch's autograd functions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from fkjit.ops.op.autograd import Differentiable  # noqa: E402


def forward(inputs, scale):
    x, y, bias = inputs
    product = x * y * scale
    inner = product.exp()  # neither an input nor a result
    sums = product.sum(-1)
    return (inner if bias is None else inner + bias, sums), (x, y, bias, sums, inner)


def backward(saved, gradients, needed, scale):
    (x, y, bias, sums, inner), (d_first, d_sums) = saved, gradients
    torch.testing.assert_close(sums, (x * y * scale).sum(-1))
    total = torch.zeros_like(x)
    if d_first is not None:
        total = total + d_first * inner
    if d_sums is not None:
        total = total + d_sums[..., None]
    assert len(needed) == 3
    of_bias = d_first if bias is not None and needed[2] else None
    return total * y * scale if needed[0] else None, total * x * scale, of_bias


CALL = Differentiable("Example", forward, backward)


def arguments(bias=True):
    made = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    return made if bias else [*made[:2], None]


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_function(bias):
    x, y, b = arguments(bias)
    given = [t for t in (x, y, b) if t is not None]
    assert torch.autograd.gradcheck(lambda *g: CALL((*g, None)[:3], 0.5), given)


def test_a_result_that_nothing_depends_on_has_no_gradient():
    x, y, b = arguments()
    CALL((x, y, b), 2.0)[1].sum().backward()
    torch.testing.assert_close(x.grad, 2.0 * y.detach())
    assert b.grad is None or not b.grad.any()


def test_what_needs_no_gradient_gets_none():
    x, y, b = arguments()
    x.requires_grad_(False)
    CALL((x, y, b), 2.0)[0].sum().backward()
    assert x.grad is None and y.grad is not None


def test_the_second_derivative_is_refused():
    x, y, b = arguments()
    (first,) = torch.autograd.grad(CALL((x, y, b), 1.0)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_torch_func_sees_the_same_gradients():
    x, y, b = (t.detach() for t in arguments())

    def loss(x, y, b):
        first, sums = CALL((x, y, b), 0.5)
        return first.sin().sum() + sums.square().sum()

    def plain(x, y, b):
        product = x * y * 0.5
        return (product.exp() + b).sin().sum() + product.sum(-1).square().sum()

    for one, other in zip(
        torch.func.grad(loss, (0, 1, 2))(x, y, b),
        torch.func.grad(plain, (0, 1, 2))(x, y, b),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_the_node_has_its_name():
    assert type(CALL(tuple(arguments()), 1.0)[0].grad_fn).__name__ == "ExampleBackward"
