"""dz and dbias by PyTorch: its own kernels, and the same compiled."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared

Gradients = Callable[[Any, Any], tuple[Any, ...]]


def _slope(aten: Any, activation: str, dy: Any, z: Any) -> Any:
    """dy * act'(z) by the kernels that autograd takes."""
    if activation in ("gelu", "gelu_tanh"):
        form = "tanh" if activation == "gelu_tanh" else "none"
        return aten.gelu_backward(dy, z, approximate=form)
    return aten.silu_backward(dy, z) if activation == "silu" else aten.threshold_backward(dy, z, 0)


def gradients(problem: Problem) -> Gradients:
    """(dz, dbias) of dy and z, or (dbias,) where there is no activation."""
    torch = import_module("torch")
    aten, functional = torch.ops.aten, torch.nn.functional
    activation, n = problem["activation"], problem["n"]

    def plain(dy: Any, z: Any) -> tuple[Any, ...]:
        return (dy.sum(0),)

    def simple(dy: Any, z: Any) -> tuple[Any, ...]:
        dz = _slope(aten, activation, dy, z)
        return dz, dz.sum(0)

    def gated(dy: Any, z: Any) -> tuple[Any, ...]:
        gate, up = z[:, :n], z[:, n:]
        kept = getattr(functional, activation)(gate)
        dz = torch.cat([_slope(aten, activation, dy * up, gate), dy * kept], 1)
        return dz, dz.sum(0)

    return gated if problem["gate"] else plain if activation == "none" else simple


def _torch(problem: Problem, arrays: Arrays) -> Prepared:
    made, dy, z = gradients(problem), arrays["dy"], arrays.get("pre")
    return Prepared(lambda: made(dy, z), lambda returned: returned[0])


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    torch, dy, z = import_module("torch"), arrays["dy"], arrays.get("pre")
    made = torch.compile(gradients(problem), fullgraph=True, dynamic=False)
    made(dy, z)
    return Prepared(lambda: made(dy, z), lambda returned: returned[0])


PEERS = (
    Candidate(name="torch", package="torch", module="torch", prepare=_torch),
    Candidate(name="compiled", package="torch", module="torch", prepare=_compiled),
)
