"""Gradients of fkjit.linear in PyTorch, against float64; autocast, torch.compile, prepare."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.errors import ParameterError  # noqa: E402
from fkjit.ops.gemm import autograd  # noqa: E402
from fkjit.ops.gemm import call as gemm  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.gemm.kit import (  # noqa: E402
    ACTIVATIONS,
    DTYPES,
    assert_close,
    inputs,
    linear,
    normal,
    theirs,
)


def leaves(m, n, k, dtype="fp32", gate=False, layout="nk"):
    """x, weight, bias and residual, which require grad."""
    made = (*inputs(m, n, k, dtype, gate, layout=layout), normal(m, n, dtype=dtype, seed=3))
    return [t.requires_grad_() for t in made]


def gradients(call, tensors, given, **options):
    x, weight, bias, residual = tensors
    y = call(x, weight, bias, residual=residual, **options)
    return torch.autograd.grad(y, tensors, given.to(y.dtype))


def assert_gradients(tensors, dtype, **options):
    """Ours are those in float64, and the same bits a second time."""
    save = options.pop("save_pre_activation", True)
    given = normal(*tensors[3].shape, dtype=dtype, seed=4)
    found, again = (
        gradients(linear, tensors, given, **options, save_pre_activation=save) for _ in range(2)
    )
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = gradients(theirs, wide, given, **options)
    for ours, second, want in zip(found, again, expected, strict=True):
        assert_close(ours, want, dtype)
        assert torch.equal(ours, second)


@one_in(4)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_of_every_activation(activation, gate):
    assert_gradients(leaves(19, 24, 40, gate=gate), "fp32", activation=activation, gate=gate)


@one_in(4)
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_every_dtype_and_layout(dtype, layout, save):
    tensors = leaves(21, 24, 40, dtype, layout=layout)
    assert_gradients(
        tensors, dtype, activation="silu", scale=0.5, weight_layout=layout, save_pre_activation=save
    )


@one_in(2)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 7, 3), (33, 66, 9)])
def test_of_odd_sizes(sizes):
    assert_gradients(leaves(*sizes), "fp32", activation="gelu_tanh")


def test_of_leading_dimensions_and_views():
    x, weight = normal(3, 4, 5, 40).requires_grad_(), normal(24, 40).requires_grad_()
    rows = x.transpose(0, 2)  # at no one distance
    y = linear(rows, weight, activation="relu")
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))  # dy is one element
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = theirs(wide[0].transpose(0, 2), wide[1], activation="relu").sum()
    for found, exact in zip((dx, dw), torch.autograd.grad(want, wide), strict=True):
        assert_close(found, exact, "fp32")


def test_of_fp32_results_of_16_bits():
    x, weight, bias, _ = leaves(9, 24, 40, "bf16")
    y = linear(x, weight, bias, out_dtype="fp32")
    given = normal(9, 24)
    found = torch.autograd.grad(y, (x, weight, bias), given)
    assert [t.dtype for t in found] == [torch.bfloat16] * 3
    assert_close(found[2], given.double().sum(0), "bf16")


def test_no_rows_have_gradients_of_zero():
    x, weight, bias, residual = leaves(0, 24, 40)
    y = linear(x, weight, bias, residual=residual, activation="gelu")
    dx, dw, db, dr = torch.autograd.grad(y.sum(), (x, weight, bias, residual))
    assert dx.shape == (0, 40) and dr.shape == (0, 24)
    assert not dw.any() and not db.any() and dw.shape == weight.shape


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2)])
def test_only_what_is_wanted(wanted):
    tensors = [t.detach() for t in leaves(9, 24, 40)]
    for at in wanted:
        tensors[at].requires_grad_()
    x, weight, bias, residual = tensors
    y = linear(x, weight, bias, residual=residual, activation="silu")
    y.sum().backward()
    assert [t.grad is not None for t in tensors] == [at in wanted for at in range(4)]


def test_of_an_expression_needs_its_derivative():
    x, weight, _, _ = leaves(9, 24, 40)
    options = {"epilogue_mod": "x * x"}
    y = linear(x, weight, **options, epilogue_mod_grad="2.f * x")
    (dx,) = torch.autograd.grad(y.sum(), x)
    z = (x.double() @ weight.double().t()).detach()
    assert_close(dx, 2 * z @ weight.detach().double(), "fp32")
    with pytest.raises(ParameterError, match=r"^linear: .*epilogue_mod='x \* x' has no derivative"):
        linear(x, weight, **options)
    with torch.no_grad():
        assert linear(x, weight, **options).shape == (9, 24)


def test_out_is_refused():
    x, weight, bias, _ = leaves(9, 24, 40)
    with pytest.raises(ParameterError, match=r"^linear: out is given and an input requires grad"):
        linear(x, weight, bias, out=torch.empty(9, 24))


def test_what_is_saved_is_what_was_asked_for():
    """z, or nothing beside the inputs."""
    x, weight, bias, _ = leaves(9, 24, 40)
    kept, again = (
        linear(x, weight, bias, activation="gelu", save_pre_activation=save).grad_fn.saved_tensors
        for save in (True, False)
    )
    assert kept[-1].shape == (9, 24) and again[-1] is None


def test_autocast_casts_as_for_pytorchs_linear():
    x, weight, bias, _ = leaves(9, 24, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, same = linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
    assert y.dtype == same.dtype == torch.bfloat16
    assert (y - same).abs().max() < 0.05
    (dw,) = torch.autograd.grad(y.float().sum(), weight)
    assert dw.dtype == torch.float32


@one_in(2)
@pytest.mark.parametrize("gate", [False, True])
def test_is_traced_without_a_break(gate):
    tensors = leaves(9, 24, 40, gate=gate)

    def model(x, weight, bias, residual):
        return fkjit.linear(x, weight, bias, activation="silu", gate=gate, residual=residual).sin()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, want = (torch.autograd.grad(f(*tensors).sum(), tensors) for f in (compiled, model))
    for ours, exact in zip(found, want, strict=True):
        assert torch.equal(ours, exact)


def test_prepare_compiles_what_forward_and_backward_launch(monkeypatch):
    """The very kernels, whatever the call."""
    tensors = leaves(9, 24, 40)
    ops = {"product": gemm._LINEAR, "with_pre": gemm._WITH_PRE, "activation": autograd.ACTIVATION}
    prepared, ran = [], []
    for name, op in ops.items():
        real = op._request

        def seen(views, options, real=real, name=name):
            request = real(views, options)
            into.append((name, *[(one.spec.id, dict(one.params)) for one in request.launches]))
            return request

        monkeypatch.setattr(op, "_request", seen)
    into = prepared
    x, weight, bias, residual = tensors
    options = {"activation": "gelu", "residual": residual}
    fkjit.linear.prepare(x, weight, bias, **options)
    into = ran
    linear(x, weight, bias, **options).sum().backward()
    assert prepared == ran and len(ran) == 4
