"""Gradients of a gated MLP in the way out of their first product: Hopper's kernel, bugs planted in
it, and what becomes of gate | up where a graph is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fkjit.arch import target
from fkjit.jit.build import build, quiet
from fkjit.ops.gemm import slopes
from fkjit.ops.gemm.slopes import SLOPES
from fkjit.settings import settings
from tests.core.mutations import Bug
from tests.core.sampling import ONE_OF_EACH_KIND
from tests.core.test_mutations import KINDS, outcome

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import gated  # noqa: E402
from fkjit.models.joined import _join  # noqa: E402

FILE = "templates/gemm/slopes.cuh"
KERNEL = {"kernel": "gated_slopes.wgmma", "params": {"cluster": 1, "weight_layout": "kn"}}
BUGS = (
    Bug("gate's column for up's", FILE, "pre + place + n", "pre + place", by="numbers", **KERNEL),
    Bug("the value for the slope", FILE, "Activation::slope(gate.x)", "Activation::value(gate.x)",
        by="numbers", **KERNEL),
    Bug("columns that are not there", FILE, "left = n - column", "left = 2", by="race",
        **KERNEL),
)  # fmt: skip


@ONE_OF_EACH_KIND
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    said = outcome(bug, monkeypatch, plant=True)
    assert said.startswith(KINDS[bug.by]), said or "nothing was found"


class Mlp(torch.nn.Module):
    def __init__(self, hidden, wide):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16)
            for sizes in ((hidden, wide), (hidden, wide), (wide, hidden))
        )


def test_gradients_of_a_gated_mlp_twice_and_once(monkeypatch):
    """The second time, the last one, writes over gate | up."""
    hopper = replace(settings(), target="compute_90a")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: hopper)
    calls, original = [], gated.gated_slopes
    monkeypatch.setattr(
        gated, "gated_slopes", lambda *a: calls.append(a[-1] is not None) or original(*a)
    )
    torch.manual_seed(3)
    mlp, x = Mlp(64, 72), torch.randn(5, 64).bfloat16().requires_grad_()
    _join([mlp.gate_proj.weight, mlp.up_proj.weight])
    inputs = (x, *mlp.parameters())
    with quiet():
        y = gated.gated_mlp(mlp, "silu", x)
        dy = torch.randn(5, 64).bfloat16()
        found = [torch.autograd.grad(y, inputs, dy, retain_graph=n == 0) for n in range(2)]
    assert calls == [False, True]
    exact = [a.detach().double().requires_grad_() for a in inputs]
    wide = torch.nn.functional.silu(exact[0] @ exact[1].t()) * (exact[0] @ exact[2].t())
    wanted = torch.autograd.grad(wide @ exact[3].t(), exact, dy.double())
    for one in found:
        for own, other in zip(one, wanted, strict=True):
            assert float((own.double() - other).norm() / other.norm()) < 1e-2


def test_arrays_of_the_call_stand_behind_the_maps_in_the_kernels_order():
    """A plan of a call on a GPU writes their addresses there."""
    params = next(iter(SLOPES.variants(target("sm_90a").arch)))
    with quiet():
        entry = build(SLOPES, params, target("sm_90a"))
    names = [name for name, _, _ in entry.meta["arguments"]]
    maps = sum("map" in name for name in names)
    own = [name for name in names if name in slopes._OP.names]
    assert names[maps : maps + len(own)] == own == ["bias", "out", "dz", "residual", "pre"]
