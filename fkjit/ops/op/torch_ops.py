"""Public calls as operators that PyTorch knows: torch.compile without graph breaks, fake tensors.

A call asks `compiling()` first. While torch.compile traces it that is true, and it returns what its
operator returns, which stands in the graph as one node and makes the same call when the graph runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fkjit.errors import ParameterError

NAMESPACE = "fkjit"


@dataclass(frozen=True)
class Operator:
    """One operator: torch.ops.fkjit.<name>.

    schema: arguments and results in PyTorch's notation. run: on tensors with data. fake: results
    without data, of the same shapes and strides. vmap: as torch.library.register_vmap wants it.
    gradients: the call where an input requires grad, with a graph behind its results; None:
    refused. autocast: how many of the first inputs torch.autocast casts, as PyTorch's attention's.
    """

    name: str
    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    vmap: Callable[..., Any] | None = None
    gradients: Callable[..., Any] | None = None
    autocast: int = 0


def _not_compiling() -> bool:
    return False


# torch's, once torch is there; until then see __getattr__
compiling: Callable[[], bool]
autocasting: Callable[[], bool]  # whether torch.autocast is on, for whatever device
known: Any = None  # torch.ops.fkjit
_waiting: list[Operator] = []  # for torch to be imported
_library: Any = None
_torch: Any = None  # once it is there
_AUTOCASTS = ("CUDA", "CPU")


def __getattr__(name: str) -> Any:
    """What asks torch until it was seen: it may have come since, even while it traces the call."""
    if name not in ("compiling", "autocasting"):
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
    global autocasting, compiling, known, _library, _torch
    if not _waiting:
        return
    torch = _torch = sys.modules["torch"]
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "DEF")
        known = getattr(torch.ops, NAMESPACE)
    while _waiting:
        _register(torch, _waiting.pop())
    compiling, autocasting = torch.compiler.is_compiling, torch._C._is_any_autocast_enabled


def torch_seen() -> Any:
    """The module torch, None where it was not imported. torch.compile traces this where it does not
    always trace a look into sys.modules."""
    return sys.modules.get("torch") if _torch is None else _torch


def autocast(*arrays: Any) -> tuple[Any, ...]:
    """Arrays as torch.autocast has them for PyTorch's attention: tensors of 16 or 32 bits in the
    dtype of autocast, where it is on for their device. Can be traced."""
    torch = torch_seen()
    casts: list[Any] = []
    for array in arrays:
        if isinstance(array, torch.Tensor) and array.dtype in (
            torch.float32, torch.float16, torch.bfloat16,
        ):  # fmt: skip
            kind = array.device.type
            if torch.is_autocast_enabled(kind):
                array = array.to(torch.get_autocast_dtype(kind))
        casts.append(array)
    return tuple(casts)


def wants_grad(arrays: Sequence[Any]) -> bool:
    """Whether torch wants a gradient of what is made of these arrays, and asks for it here:
    torch.func.vmap asks the operator, for the whole batch."""
    torch = sys.modules.get("torch") if _torch is None else _torch
    if torch is None or not torch.is_grad_enabled():
        return False
    tensors = [x for x in arrays if x is not None and isinstance(x, torch.Tensor)]
    if True not in [x.requires_grad for x in tensors]:
        return False
    return not any(map(torch._C._functorch.is_batchedtensor, tensors))


def wants_grad_plainly(arrays: Sequence[Any]) -> bool:
    """Whether torch wants a gradient of what is made of these, which are all tensors with data."""
    if _torch is None or not _torch.is_grad_enabled():
        return False
    tensor, parameter, found = _torch.Tensor, _torch.nn.Parameter, False
    for array in arrays:
        if array is None:
            continue
        kind = type(array)
        if kind is not tensor and kind is not parameter:
            return False
        found = found or array.requires_grad
    return found and not _torch._C._are_functorch_transforms_active()


def are_tensors(arrays: Sequence[Any]) -> bool:
    """Whether all that there are come from torch."""
    tensor = sys.modules["torch"].Tensor
    return all(array is None or isinstance(array, tensor) for array in arrays)


def abstract(*arrays: Any) -> bool:
    """Whether one is a tensor that only stands for another: in a graph that is being traced. A
    nested one stands for itself."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensor = torch.Tensor
    others = [array for array in arrays if type(array) is not tensor and isinstance(array, tensor)]
    return any(
        [
            type(array).__torch_dispatch__ is not tensor.__torch_dispatch__ and not array.is_nested
            for array in others
        ]
    )


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

    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
            if operator.gradients is not None:
                return operator.gradients(*args, **kwargs)
            raise ParameterError(
                f"{operator.name}: an input requires grad, but there is no backward yet; call it "
                "under torch.no_grad() or pass detached tensors"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return packet.default(*args, **kwargs)

    _library.impl(operator.name, with_gradients, "Autograd")
    for device in _AUTOCASTS if operator.autocast else ():
        cast = _casting(torch, packet, device, operator.autocast)
        _library.impl(operator.name, cast, f"Autocast{device}")
    _library.impl(operator.name, operator.fake, "Meta")  # register_fake takes milliseconds
    if operator.vmap is not None:
        name = f"{NAMESPACE}::{operator.name}"
        torch.library.register_vmap(name, operator.vmap, lib=_library)


def _casting(torch: Any, packet: Any, device: str, inputs: int) -> Callable[..., Any]:
    """The operator under torch.autocast, which casts the first so many inputs."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def cast(*args: Any, **kwargs: Any) -> Any:
        casts = autocast(*args[:inputs])  # before the guard, which turns autocast off
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return packet.default(*casts, *args[inputs:], **kwargs)

    return cast
