"""What calls under others' names check alike."""

from __future__ import annotations

from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op import torch_ops

NO_WINDOW = (-1, -1)


def window_of(window_size: Any) -> Any:
    """None where neither side has a bound: such a call has no score feature."""
    return None if tuple(window_size) == NO_WINDOW else tuple(window_size)


def check_tensors(call: str, **arrays: Any) -> None:
    torch = torch_ops.torch_seen()
    for name, array in arrays.items():
        if torch is None or not isinstance(array, torch.Tensor):
            raise ArgumentTypeError(
                f"{call}: {name} is a {type(array).__name__}; allowed: torch tensors "
                "(fkjit.attention takes other arrays)"
            )


def refuse(call: str, **values: tuple[Any, Any]) -> None:
    """ParameterError for the first argument that is not the one value allowed."""
    for name, (value, allowed) in values.items():
        same = value is allowed if allowed is None else value == allowed
        if not same:
            shown = "a tensor" if hasattr(value, "shape") else repr(value)
            raise ParameterError(f"{call}: {name}={shown}: not supported; allowed: {allowed!r}")
