"""Errors about arguments: values in one short line, whole numbers, and who is to blame.

A check compares, counts and converts what it is given, and anything may be given. Where that raises
something of Python's or a framework's own, `blame` finds the arguments that are of no kind that a
call takes, and says so; nothing is looked at as long as all is well.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError

_LONG = 80  # characters of a value
_NUMBERS = "biufU"  # kinds of NumPy's scalars that are as good as Python's
_HUGE = 1 << 63


def shown(value: Any) -> str:
    """A value as an error shows it: one short line, of an array its type, dtype and shape."""
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__qualname__}"
    try:
        if (
            hasattr(value, "shape")
            and hasattr(value, "dtype")
            and not isinstance(value, np.generic)
        ):
            return f"<{kind} {value.dtype} {tuple(value.shape)}>"
        text = repr(value).partition("\n")[0]
    except Exception:  # repr of 10**5000, a nested tensor's shape
        return f"<{kind}>"
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def whole(
    call: str, name: str, value: Any, low: int = 0, high: int = _HUGE, where: str = ""
) -> int:
    """A whole number in a range."""
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = value.__index__()
        except Exception:
            raise ArgumentTypeError(
                f"{call}: {name}={shown(value)} is not a whole number"
            ) from None
    if not low <= value <= high:
        span = f"{low} and above" if high == _HUGE and value < low else f"{low} to {high}"
        raise ParameterError(f"{call}: {name}={shown(value)}; allowed: {span}{where}")
    return value


def one_of(call: str, name: str, value: Any, allowed: Iterable[str]) -> str:
    """A word out of these."""
    if not isinstance(value, str) or value not in allowed:
        raise ParameterError(f"{call}: {name}={shown(value)} is not one of {', '.join(allowed)}")
    return value


def as_list(call: str, name: str, value: Any) -> list[Any]:
    """The items of a sequence of numbers, of an array of one dimension as well."""
    try:
        items = value.tolist() if is_array(value) else list(value)
    except Exception:
        items = None
    if not isinstance(items, list) or isinstance(value, str | bytes | Mapping):
        raise ArgumentTypeError(f"{call}: {name}={shown(value)} is not a list of numbers")
    return items


def is_array(value: Any) -> bool:
    """Whether it is an array of some framework, whatever is in it."""
    return isinstance(value, np.ndarray) or hasattr(type(value), "__dlpack__")


def is_plain(value: Any) -> bool:
    """Whether it is something that an option may be: a number, a word, None, tuples of these."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    if isinstance(value, np.generic):
        return value.dtype.kind in _NUMBERS
    if isinstance(value, int):
        return -_HUGE <= value < _HUGE
    return value is None or isinstance(value, float | str)


def blame(
    call: str, options: Mapping[str, Any], arrays: Mapping[str, Any], error: Exception
) -> Exception:
    """What to raise in the place of `error`: about the arguments that cannot be what they are for;
    the error itself where there are none, or where it says all."""
    if isinstance(error, FkjitError):
        return error
    odd = {name: value for name, value in options.items() if not is_plain(value)}
    odd |= {name: v for name, v in arrays.items() if v is not None and not is_array(v)}
    if not odd:
        return error
    given = ", ".join(f"{name}={shown(value)}" for name, value in odd.items())
    made = ArgumentTypeError(
        f"{call}: {given}: not a kind that it takes ({type(error).__name__}: {shown(error)})"
    )
    made.__cause__ = error
    return made


def bind(
    call: str, signature: inspect.Signature, args: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by name, defaults included. ArgumentTypeError where they are not the call's."""
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise ArgumentTypeError(f"{call}: {error}; it takes {signature}") from None
    bound.apply_defaults()
    return dict(bound.arguments)
