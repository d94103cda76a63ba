"""`fkjit.models.linear_cross_entropy` against PyTorch's cross_entropy of whole logits."""

from __future__ import annotations

import weakref

import pytest

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import linear_cross_entropy, loss  # noqa: E402

TOKENS, HIDDEN, VOCABULARY = 7, 16, 24


def arrays(dtype=torch.float32, vocabulary=VOCABULARY):
    made = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(n, HIDDEN, generator=made).to(dtype).requires_grad_()
        for n in (TOKENS, vocabulary)
    )
    return x, weight, torch.tensor([3, -100, 0, vocabulary - 1, 5, -100, 5])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mean_over_no_target_has_pytorchs_loss_and_gradients(dtype):
    """NaN, and zeros: a batch of padding alone does no harm where gradients are added up."""
    x, weight, target = arrays(dtype)
    with quiet():
        made = linear_cross_entropy(x, weight, torch.full_like(target, -100))
        found = torch.autograd.grad(made, (x, weight))
    assert made.isnan() and not any(one.any() for one in found)


def test_a_graph_that_is_kept_has_the_same_gradients_again():
    """They are scaled in place only where nobody can ask again."""
    x, weight, target = arrays()
    with quiet():
        made = 3 * linear_cross_entropy(x, weight, target)
        found = [torch.autograd.grad(made, (x, weight), retain_graph=n < 2) for n in range(3)]
    for one in found:
        for own, wanted in zip(one, exact(x, weight, target)[1], strict=True):
            assert float((own.double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("vocabulary", [21, 17])
def test_a_vocabulary_that_makes_no_whole_rows_of_16_bytes(vocabulary):
    """The columns that are added have no part in anything."""
    x, weight, target = arrays(torch.float16, vocabulary)
    with quiet():
        made = linear_cross_entropy(x, weight, target, chunk=4)
        found = torch.autograd.grad(3 * made, (x, weight))
    wanted, gradients = exact(x, weight, target)
    assert found[1].shape == weight.shape
    for one, two in zip((made.detach(), *found), (wanted.detach(), *gradients), strict=True):
        assert float((one.double() - two).norm() / two.norm()) < 4e-3


@pytest.mark.parametrize("tokens, vocabulary, rows, parts", [
    (8192, 128256, 8192, 1024), (8192, 50264, 8192, 2048), (5000, 128256, 5120, 1024),
    (300, 32000, 512, 512), (1, 8, 256, 256), (0, 8, 256, 256), (9, 1 << 30, 256, 256),
])  # fmt: skip
def test_rows_are_shared_out_evenly_in_whole_tiles(tokens, vocabulary, rows, parts):
    found = loss._shared_out(tokens, vocabulary, loss._GRADIENTS)
    assert (found, loss._shared_out(found, vocabulary, loss._LOGITS)) == (rows, parts)


def test_logits_in_fp32_are_there_for_a_part_of_a_chunk(monkeypatch):
    """And no two parts of them at a time."""
    x, weight, target = arrays()
    parts, original = [], loss.linear

    def noting(*args, **options):
        made = original(*args, **options)
        if made.shape[1] == VOCABULARY:
            assert not any(part() is not None for _, part in parts)
            parts.append((made.shape[0], weakref.ref(made)))
        return made

    monkeypatch.setattr(loss, "linear", noting)
    monkeypatch.setattr(loss, "_TILE", 2)
    monkeypatch.setattr(loss, "_LOGITS", 2 * VOCABULARY)
    with quiet():
        made = linear_cross_entropy(x, weight, target, chunk=5)
        found = torch.autograd.grad(3 * made, (x, weight))
    assert [rows for rows, _ in parts] == [2, 2, 1, 2]
    for one, two in zip(found, exact(x, weight, target)[1], strict=True):
        assert float((one.double() - two).norm() / two.norm()) < 1e-5


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
        (ArgumentTypeError, r"x is torch\.float64", (x.double(), weight.double(), target), {}),
        (ParameterError, "x has stride 7 in its last dimension; allowed: 1",
         (x.t().contiguous().t(), weight, target), {}),
        (ArgumentTypeError, "ignore_index=None is not a whole number", (x, weight, target),
         {"ignore_index": None}),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            linear_cross_entropy(*given, **options)
