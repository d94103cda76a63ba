"""What calls under others' names check alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from fkjit.arguments import bind, is_plain, shown
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError
from fkjit.ops.op import torch_ops

NO_WINDOW = (-1, -1)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def explained(call: str, tensors: tuple[str, ...]) -> Callable[[_Function], _Function]:
    """A decorator: what Python or torch raises over arguments becomes an error of ours, which names
    them. A call without an error costs nothing more.

    tensors: the parameters that take tensors; the others take numbers, words, flags, pairs.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            try:
                return function(*args, **named)
            except FkjitError:
                raise
            except Exception as error:
                found = _about(call, bind(call, signature, args, named), tensors, error)
                raise found from (error.__cause__ if found is error else error)

        return checked  # type: ignore[return-value]

    return decorate


def _about(
    call: str, given: dict[str, Any], tensors: tuple[str, ...], error: Exception
) -> Exception:
    """What to raise in the place of `error`."""
    arrays = {name: given[name] for name in tensors if given[name] is not None}
    odd = {name: value for name, value in arrays.items() if not _is_tensor(value)}
    odd |= {n: v for n, v in given.items() if n not in tensors and not is_plain(v)}
    if odd:
        named = ", ".join(f"{name}={shown(value)}" for name, value in odd.items())
        what = f"not a kind that it takes ({type(error).__name__}: {shown(error)})"
        return ArgumentTypeError(f"{call}: {named}: {what}")
    if type(error) in (IndexError, RuntimeError, ValueError):  # torch's, over shapes and dtypes
        named = ", ".join(f"{name}={shown(value)}" for name, value in arrays.items())
        return ParameterError(f"{call}: {error}; given: {named}")
    return error


def _is_tensor(value: Any) -> bool:
    torch = torch_ops.torch_seen()
    return torch is not None and isinstance(value, torch.Tensor)


def window_of(call: str, window_size: Any) -> Any:
    """None where neither side has a bound: such a call has no score feature."""
    if not isinstance(window_size, tuple | list):
        raise ArgumentTypeError(
            f"{call}: window_size={shown(window_size)} is not a pair (left, right)"
        )
    return None if tuple(window_size) == NO_WINDOW else tuple(window_size)


def check_tensors(call: str, **arrays: Any) -> None:
    for name, array in arrays.items():
        if not _is_tensor(array):
            raise ArgumentTypeError(
                f"{call}: {name} is a {type(array).__name__}; allowed: torch tensors "
                "(fkjit.attention takes other arrays)"
            )


def refuse(call: str, **values: tuple[Any, Any]) -> None:
    """ParameterError for the first argument that is not the one value allowed."""
    for name, (value, allowed) in values.items():
        same = value is None if allowed is None else is_plain(value) and value == allowed
        if not same:
            raise ParameterError(
                f"{call}: {name}={shown(value)}: not supported; allowed: {allowed!r}"
            )
