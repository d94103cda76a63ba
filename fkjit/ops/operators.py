"""Public calls as operators that PyTorch knows: torch.compile without graph breaks, fake tensors.

A call asks `compiling()` first. While torch.compile traces it that is true, and it returns what its
operator returns, which stands in the graph as one node and makes the same call when the graph runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fkjit.errors import ParameterError

NAMESPACE = "fkjit"


@dataclass(frozen=True)
class Operator:
    """One operator: torch.ops.fkjit.<name>.

    schema: arguments and results in PyTorch's notation. run: on tensors with data. fake: results
    without data, of the same shapes and strides. vmap: as torch.library.register_vmap wants it.
    """

    name: str
    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    vmap: Callable[..., Any] | None = None


def _not_compiling() -> bool:
    return False


compiling: Callable[[], bool]  # torch's, once torch is there; until then see __getattr__
known: Any = None  # torch.ops.fkjit
_waiting: list[Operator] = []  # for torch to be imported
_library: Any = None


def __getattr__(name: str) -> Any:
    """`compiling` until torch was seen: it may have come since, even while it traces the call."""
    if name != "compiling":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "torch" not in sys.modules:
        return _not_compiling
    arrived()
    return globals().get(name, _not_compiling)


def define(operator: Operator) -> None:
    """Make an operator known to PyTorch, now or once it has been imported (`arrived`)."""
    _waiting.append(operator)
    if "torch" in sys.modules:
        arrived()


def arrived() -> None:
    """PyTorch is there: tell it of the operators that wait."""
    global compiling, known, _library
    if not _waiting:
        return
    torch = sys.modules["torch"]
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "DEF")
        known = getattr(torch.ops, NAMESPACE)
    while _waiting:
        _register(torch, _waiting.pop())
    compiling = torch.compiler.is_compiling


def wrapped(*arrays: Any) -> bool:
    """Whether one is a tensor of torch.func.vmap and the like, without memory of its own."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(array, torch.Tensor) and is_wrapped(array) for array in arrays)


def _register(torch: Any, operator: Operator) -> None:
    _library.define(operator.name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(operator.name, operator.run, "CompositeExplicitAutograd")
    packet = getattr(known, operator.name)

    def without_gradients(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
            raise ParameterError(
                f"{operator.name}: an input requires grad, but there is no backward yet; call it "
                "under torch.no_grad() or pass detached tensors"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return packet.default(*args, **kwargs)

    _library.impl(operator.name, without_gradients, "Autograd")
    _library.impl(operator.name, operator.fake, "Meta")  # register_fake takes milliseconds
    if operator.vmap is not None:
        name = f"{NAMESPACE}::{operator.name}"
        torch.library.register_vmap(name, operator.vmap, lib=_library)
