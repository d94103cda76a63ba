"""`fkjit.models.patch_optimizer`: the numbers and the state of PyTorch's fused AdamW."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.errors import ArgumentTypeError

torch = pytest.importorskip("torch", reason="needs torch")

SHAPES = ((7, 5), (33,), (2, 3, 4), (), (1, 8))


def _parameters(dtype, seed=0):
    """The last one lies transposed, as GPT-2's weights do."""
    made = torch.Generator().manual_seed(seed)
    shapes = [torch.randn(shape, generator=made) for shape in (*SHAPES, (9, 6))]
    shapes[-1] = shapes[-1].t()
    return [torch.nn.Parameter(x.to(dtype)) for x in shapes]


def _run(parameters, optimizer, steps, odd=None):
    """Steps with gradients that are the same for a seed, and lie as the parameters do; `odd`: the
    number of one whose gradient lies otherwise."""
    made = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for number, one in enumerate(parameters):
            gradient = torch.randn(one.shape, generator=made).to(one.dtype)
            one.grad = gradient if number == odd else torch.empty_like(one).copy_(gradient)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_and_state_are_those_of_pytorch(dtype):
    """With a rate in a tensor, another group, a scheduler, and a gradient that lies otherwise."""
    states = []
    for patched in (True, False):
        parameters = _parameters(dtype)
        groups = [
            {"params": parameters[:2], "weight_decay": 0.0, "betas": (0.8, 0.95)},
            {"params": parameters[2:], "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.05), weight_decay=0.1, fused=True)
        if patched:
            fkjit.models.patch_optimizer(optimizer)
        _run(parameters, optimizer, 3, odd=5)
        optimizer.param_groups[1]["lr"] = 0.01
        _run(parameters, optimizer, 1)
        states.append(([one.detach() for one in parameters], optimizer.state_dict()["state"]))
    tolerance = {"rtol": 1e-5 if dtype is torch.float32 else 1e-2, "atol": 1e-5}
    torch.testing.assert_close(*states, **tolerance)


def test_our_kernel_is_called_where_it_can_be(monkeypatch):
    called = []
    monkeypatch.setattr(
        "fkjit.models.training.optimizer.adamw", lambda param, *_: called.append(param.numel())
    )
    parameters = [*_parameters(torch.float32), torch.nn.Parameter(torch.ones(2).double())]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    fkjit.models.patch_optimizer(optimizer)
    fkjit.models.patch_optimizer(optimizer)
    _run(parameters, optimizer, 1, odd=5)
    assert called == [35, 33, 24, 1, 8]  # neither the one that lies otherwise nor fp64
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state.clear()
    _run(parameters, optimizer, 1)
    assert len(called) == 5


def test_other_optimizers_are_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ArgumentTypeError, match="optimizer is a SGD; allowed: a torch"):
        fkjit.models.patch_optimizer(torch.optim.SGD([weight]))
    with pytest.raises(ArgumentTypeError, match="fused=False; allowed: fused=True"):
        fkjit.models.patch_optimizer(torch.optim.AdamW([weight]))
