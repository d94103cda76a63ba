"""`fkjit.models.linear_cross_entropy` against PyTorch's cross_entropy of whole logits."""

from __future__ import annotations

import pytest

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import linear_cross_entropy, loss  # noqa: E402

TOKENS, HIDDEN, VOCABULARY = 7, 16, 24


def arrays(dtype=torch.float32):
    made = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(n, HIDDEN, generator=made).to(dtype).requires_grad_()
        for n in (TOKENS, VOCABULARY)
    )
    return x, weight, torch.tensor([3, -100, 0, 23, 5, -100, 5])


def exact(x, weight, target, **options):
    x, weight = (a.detach().double().requires_grad_() for a in (x, weight))
    made = torch.nn.functional.cross_entropy(x @ weight.t(), target, **options)
    return made, torch.autograd.grad(3 * made, (x, weight))


@one_in(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_loss_and_gradients_in_three_chunks(dtype, tolerance, reduction):
    x, weight, target = arrays(dtype)
    with quiet():
        made = linear_cross_entropy(x, weight, target, chunk=3, reduction=reduction)
        found = torch.autograd.grad(3 * made, (x, weight))
    wanted, gradients = exact(x, weight, target, reduction=reduction)
    assert made.dtype is torch.float32
    for one, two in zip((made.detach(), *found), (wanted.detach(), *gradients), strict=True):
        assert float((one.double() - two).norm() / two.norm()) < tolerance
    assert not found[0][target == -100].any()


def test_no_array_has_all_logits(monkeypatch):
    x, weight, target = arrays()
    rows, original = [], loss.linear

    def noting(*args, **options):
        made = original(*args, **options)
        rows.append(tuple(made.shape))
        return made

    monkeypatch.setattr(loss, "linear", noting)
    with quiet():
        linear_cross_entropy(x, weight, target, chunk=3).backward()
    assert [shape[0] for shape in rows if shape[1] == VOCABULARY] == [3, 3, 1]


def test_what_needs_no_gradient_gets_none(monkeypatch):
    x, weight, target = arrays()
    calls, original = [], loss.linear
    monkeypatch.setattr(loss, "linear", lambda *a, **k: calls.append(1) or original(*a, **k))
    with quiet():
        frozen = linear_cross_entropy(x, weight.detach(), target)
        assert len(calls) == 2 and torch.autograd.grad(frozen, x)[0].any()
        with torch.no_grad():
            assert not linear_cross_entropy(x, weight, target).requires_grad
    assert len(calls) == 3


def test_what_is_refused():
    x, weight, target = arrays()
    for error, match, given, options in [
        (ArgumentTypeError, "target is a list", (x, weight, [1]), {}),
        (ArgumentTypeError, r"weight torch\.float16; allowed: one of",
         (x, weight.half(), target), {}),
        (ArgumentTypeError, r"target is torch\.int32", (x, weight, target.int()), {}),
        (ParameterError, r"weight \(24, 8\)", (x, weight[:, :8], target), {}),
        (ParameterError, r"target has shape \(3,\)", (x, weight, target[:3]), {}),
        (ParameterError, "reduction='none'", (x, weight, target), {"reduction": "none"}),
        (ParameterError, "chunk=0", (x, weight, target), {"chunk": 0}),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            linear_cross_entropy(*given, **options)
