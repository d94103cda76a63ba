"""Gradients of fkjit.layer_norm and fkjit.rms_norm, in the interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.errors import ParameterError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.norm.kit import DTYPES, EPS, OPS, assert_right, norm, normal, theirs  # noqa: E402

NAMES = ("x", "residual", "weight", "bias")


def made(columns, dtype, *, rows=6, names=NAMES, weight_dtype=None):
    """Leaves that require grad, by name."""
    found = {}
    for seed, name in enumerate(names):
        kind = (weight_dtype or dtype) if name in ("weight", "bias") else dtype
        shape = (columns,) if name in ("weight", "bias") else (rows, columns)
        found[name] = normal(*shape, dtype=kind, seed=seed).requires_grad_()
    return found


def gradients(op, leaves, given, call):
    """Of every leaf, where dy and the gradient of the residual stream are given."""
    found = call(op, leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    given = [g.to(o.dtype) for g, o in zip(given, outputs, strict=False)]
    with quiet():
        torch.autograd.backward(outputs, given)
    found = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return found


def ours(op, leaves):
    return norm(op, **leaves)


def by_torch(op, leaves):
    s = leaves["x"] if "residual" not in leaves else leaves["x"] + leaves["residual"]
    y = theirs(op, s, leaves.get("weight"), leaves.get("bias"))
    return (y, s) if "residual" in leaves else y


def exactly(op, leaves, given):
    """By torch in float64."""
    wide = {n: leaf.detach().double().requires_grad_() for n, leaf in leaves.items()}
    return gradients(op, wide, [g.double() for g in given], by_torch)


def names_of(op, *left_out):
    without = {*left_out, *(() if op == "layer_norm" else ("bias",))}
    return tuple(name for name in NAMES if name not in without)


COLUMNS = [64, 100, 768, 2056, 4096, 9000]


@one_in(6, residual=[False, True], dtype=DTYPES, columns=COLUMNS, op=OPS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("op", OPS)
def test_errs_at_most_twice_as_much_as_pytorch(op, columns, dtype, residual):
    leaves = made(columns, dtype, names=names_of(op, *(() if residual else ("residual",))))
    given = [normal(6, columns, dtype=dtype, seed=9 + i) for i in range(2)]
    exact, peer = exactly(op, leaves, given), gradients(op, leaves, given, by_torch)
    found = gradients(op, leaves, given, ours)
    for name in leaves:
        assert_right(found[name], exact[name], peer[name], dtype)


@one_in(2)
@pytest.mark.parametrize("columns", [320, 10_000])
@pytest.mark.parametrize("op", OPS)
def test_fp32_weights_of_bf16_rows(op, columns):
    leaves = made(columns, "bf16", names=names_of(op), weight_dtype="fp32", rows=40)
    given = [normal(40, columns, dtype="bf16", seed=9 + i) for i in range(2)]
    exact, found = exactly(op, leaves, given), gradients(op, leaves, given, ours)
    for name, tensor in leaves.items():
        assert found[name].dtype == tensor.dtype
        error = (found[name].double() - exact[name]).norm() / exact[name].norm()
        assert error < 5e-3, name


@pytest.mark.parametrize("op", OPS)
def test_the_same_bits_at_every_call(op):
    leaves = made(1032, "fp16", names=names_of(op), rows=50)
    given = [normal(50, 1032, dtype="fp16", seed=i) for i in range(2)]
    first, second = (gradients(op, leaves, given, ours) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in leaves)


@pytest.mark.parametrize("wanted", NAMES)
def test_what_requires_no_grad_gets_none(wanted):
    leaves = made(128, "fp32")
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    given = [normal(6, 128, seed=9 + i) for i in range(2)]
    exact = exactly("layer_norm", leaves, given)[wanted]
    found = gradients("layer_norm", leaves, given, ours)
    assert [name for name in NAMES if found[name] is not None] == [wanted]
    assert (found[wanted].double() - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_may_go_unused(used):
    leaves = made(96, "fp32", names=("x", "residual", "weight"))
    given = normal(6, 96, seed=3)

    def one(call):
        def of(op, leaves):
            return call(op, leaves)[used]

        return of

    exact = {}
    wide = {n: leaf.detach().double().requires_grad_() for n, leaf in leaves.items()}
    exact = gradients("rms_norm", wide, [given.double()], one(by_torch))
    found = gradients("rms_norm", leaves, [given], one(ours))
    for name in ("x", "residual"):
        assert (found[name].double() - exact[name]).abs().max() < 1e-5
    if used == 0:
        assert (found["weight"].double() - exact["weight"]).abs().max() < 1e-5
    else:
        assert not found["weight"].any()


def test_gradients_of_any_strides():
    """An expanded gradient, rows with gaps, leading dimensions."""
    x = normal(4, 3, 100)[..., :64].requires_grad_()
    weight = normal(64).requires_grad_()
    with quiet():
        fkjit.rms_norm(x, weight, EPS).sum().backward()
    wide, scale = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    theirs("rms_norm", wide, scale).sum().backward()
    assert (x.grad.double() - wide.grad).abs().max() < 1e-5
    assert (weight.grad.double() - scale.grad).abs().max() < 1e-5


def test_the_residual_may_be_x():
    x = normal(3, 64).requires_grad_()
    wide = x.detach().double().requires_grad_()
    with quiet():
        y, s = fkjit.layer_norm(x, residual=x)
        (y.sin().sum() + s.sum()).backward()
    z = 2 * wide
    (theirs("layer_norm", z).sin().sum() + z.sum()).backward()
    assert (x.grad.double() - wide.grad).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_gradients_of_nothing(shape):
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
    fkjit.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == shape and not weight.grad.any()


def test_refusals():
    x = normal(3, 64).requires_grad_()
    with pytest.raises(ParameterError, match="layer_norm: out is given and an input requires grad"):
        fkjit.layer_norm(x, out=torch.empty(3, 64))
    with torch.no_grad(), quiet():
        assert not fkjit.layer_norm(x, out=torch.empty(3, 64)).requires_grad
        assert not fkjit.layer_norm(x).requires_grad
    with quiet():
        (found,) = torch.autograd.grad(fkjit.rms_norm(x).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


@pytest.mark.parametrize("op", OPS)
def test_of_packed_heads_with_an_offset_of_the_weight(op):
    packed = normal(4, 6, 64, dtype="bf16").requires_grad_()
    weight = (normal(64, dtype="bf16", seed=1) / 8).requires_grad_()
    dy = normal(4, 2, 64, dtype="bf16", seed=2)
    found = torch.autograd.grad(
        norm(op, packed[:, 1:3], weight, weight_offset=1.0), (packed, weight), dy
    )
    exact = [x.detach().double().requires_grad_() for x in (packed, weight)]
    own = theirs(op, exact[0][:, 1:3], exact[1] + 1)
    for made_, expected in zip(found, torch.autograd.grad(own, exact, dy.double()), strict=True):
        assert made_.dtype == torch.bfloat16
        assert (made_.double() - expected).norm() <= 6e-3 * expected.norm()
