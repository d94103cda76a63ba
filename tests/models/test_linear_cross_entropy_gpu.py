"""`fkjit.models.linear_cross_entropy` on a GPU: a real vocabulary, in several chunks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")

from fkjit.jit.build import quiet  # noqa: E402
from fkjit.models import linear_cross_entropy  # noqa: E402


@pytest.mark.parametrize("vocabulary, chunk", [(128256, None), (128256, 300), (50257, 512)])
def test_loss_and_gradients_of_a_real_vocabulary(vocabulary, chunk):
    """Chunks of one size are calls with a plan from the third one on; the last is smaller."""
    made = torch.Generator("cuda").manual_seed(1)
    x, weight = (
        torch.randn(n, 1024, generator=made, device="cuda").mul_(0.05).bfloat16().requires_grad_()
        for n in (2300, vocabulary)
    )
    target = torch.randint(vocabulary, (2300,), generator=made, device="cuda")
    target[::7] = -100
    with quiet():
        loss = linear_cross_entropy(x, weight, target, chunk=chunk)
        found = torch.autograd.grad(loss, (x, weight))
    exact = [a.detach().float().requires_grad_() for a in (x, weight)]
    wanted = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), target)
    gradients = torch.autograd.grad(wanted, exact)
    for one, two in zip((loss.detach(), *found), (wanted.detach(), *gradients), strict=True):
        assert float((one.float() - two).norm() / two.norm()) < 1e-2
