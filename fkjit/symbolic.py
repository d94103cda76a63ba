"""Symbolic numbers: run a function once with symbols in place of sizes, and get a straight-line
program of what it computed from them, and what it assumed.

A `Symbol` stands for a number that has a value now and will have others. Arithmetic with it is
noted as a line of the `Trace`, every comparison as a guard: the values for which the function would
have taken the same way are those for which all guards hold. Where Python needs the number itself
(an index, a conversion, a hash) a guard pins it to its value, or the trace is given up. So there is
no way to look at a symbol without leaving a line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from typing import Any, NamedTuple, NoReturn


class NotTraceable(Exception):
    """The function did something with a symbol that no line stands for."""


class Unhashable(NotTraceable):
    """A symbol was to be a key of a dictionary or a cache."""


class Line(NamedTuple):
    """`name = text`; a guard, which has no name, is true. `uses`: names in the text."""

    name: str
    text: str
    uses: tuple[str, ...]


class Trace:
    """The lines of one run, in their order.

    bound: what the lines know as c0, c1, …
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.bound: list[Any] = []
        self._computed: dict[str, Symbol] = {}
        self._assumed: set[str] = set()
        self._late: set[str] = set()

    def number(self, name: str, value: int, *, late: bool = False) -> Symbol:
        """An input of the program. Nothing may be assumed of a `late` one: guards come before."""
        if late:
            self._late.add(name)
        return Symbol(self, name, value)

    def compute(self, text: str, value: Any, *operands: Any) -> Symbol:
        """A line, or the symbol of the same line before."""
        known = self._computed.get(text)
        if known is None:
            uses = self.names(operands)
            known = Symbol(self, f"t{len(self._computed)}", value)
            self._computed[text] = known
            self.lines.append(Line(known.name, text, uses))
            if not self._late.isdisjoint(uses):
                self._late.add(known.name)
        return known

    def assume(self, text: str, *operands: Any) -> None:
        """A guard: the text is true now."""
        if text in self._assumed:
            return
        uses = self.names(operands)
        if not self._late.isdisjoint(uses):
            raise NotTraceable(f"{text}: known only after the guards")
        self._assumed.add(text)
        self.lines.append(Line("", text, uses))

    def decide(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """What a function says of these numbers; a guard asks it again."""
        result = function(*[value_of(one) for one in given])
        arguments = ", ".join(map(self.text, given))
        self.assume(f"{self.bind(function)}({arguments}) == {self.text(result)}", *given)
        return result

    def bind(self, value: Any) -> str:
        """The name of a constant."""
        for at, one in enumerate(self.bound):
            if one is value:
                return f"c{at}"
        self.bound.append(value)
        return f"c{len(self.bound) - 1}"

    def text(self, value: Any) -> str:
        """Python for a symbol, a number, or a tuple of those; anything else is bound."""
        if type(value) is Symbol:
            return value.name
        if value is None or type(value) in (bool, int, str, bytes):
            return repr(value)
        if type(value) is tuple:
            return f"({''.join(f'{self.text(one)}, ' for one in value)})"
        if self.names([value]):
            raise NotTraceable(f"symbols in a {type(value).__name__}")
        return self.bind(value)

    def names(self, values: Iterable[Any]) -> tuple[str, ...]:
        """Of all symbols in there."""
        found: list[str] = []
        for value in values:
            if type(value) is Symbol:
                if value.trace is not self:
                    raise NotTraceable("a symbol of another trace")
                found.append(value.name)
            elif isinstance(value, (tuple, list)):
                found += self.names(value)
            elif isinstance(value, Mapping):
                found += self.names(value.values())
        return tuple(found)

    def program(self, wanted: Iterable[str]) -> tuple[list[Line], list[Line]]:
        """The lines that guards and these names need: those before the late numbers are there, and
        those after."""
        needed, kept = set(wanted), []
        for line in reversed(self.lines):
            if not line.name or line.name in needed:
                needed.update(line.uses)
                kept.append(line)
        kept.reverse()
        return (
            [line for line in kept if line.name not in self._late],
            [line for line in kept if line.name in self._late],
        )


def value_of(value: Any) -> Any:
    """A symbol's value, now; tuples, lists and dictionaries of them likewise."""
    if type(value) is Symbol:
        return value.value
    if isinstance(value, tuple):
        made = [value_of(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def pinned(value: Any) -> Any:
    """The same without symbols: guards hold them to what they are."""
    if type(value) is Symbol:
        return value._pin()
    if isinstance(value, Mapping):
        return {name: pinned(one) for name, one in value.items()}
    if isinstance(value, tuple):
        made = [pinned(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


class Symbol:
    """A number with a name. `isinstance(symbol, int)` is what it is of the value."""

    __slots__ = ("name", "trace", "value")

    def __init__(self, trace: Trace, name: str, value: Any) -> None:
        self.trace, self.name, self.value = trace, name, value

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.value)

    def _pin(self) -> Any:
        self.trace.assume(f"{self.name} == {self.trace.text(self.value)}", self)
        return self.value

    def __index__(self) -> int:
        return operator.index(self._pin())

    def __int__(self) -> int:
        return int(self._pin())

    def __float__(self) -> float:
        return float(self._pin())

    def __bool__(self) -> bool:
        return not self._holds("==", operator.eq, 0)

    def __hash__(self) -> int:
        raise Unhashable(self.name)

    def __str__(self) -> str:
        return str(self._pin())

    def __format__(self, form: str) -> str:
        return format(self._pin(), form)

    def __repr__(self) -> str:
        return f"Symbol({self.name}={self.value})"

    def bit_length(self) -> Symbol:
        return self.trace.compute(f"{self.name}.bit_length()", self.value.bit_length(), self)

    def __round__(self) -> Symbol:
        return self.trace.compute(f"round({self.name})", round(self.value), self)

    def __neg__(self) -> Symbol:
        return self.trace.compute(f"-{self.name}", -self.value, self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __eq__(self, other: Any) -> Any:
        return self._holds("==", operator.eq, other)

    def __ne__(self, other: Any) -> Any:
        equal = self._holds("==", operator.eq, other)
        return NotImplemented if equal is NotImplemented else not equal

    def __lt__(self, other: Any) -> Any:
        return self._holds("<", operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._holds("<=", operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._holds(">", operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._holds(">=", operator.ge, other)

    def _holds(self, sign: str, test: Callable[[Any, Any], bool], other: Any) -> Any:
        """The comparison, as it is now: from here on a guard."""
        if not _is_number(other):
            return _not_a_number(other)
        if test(self.value, value_of(other)):
            self.trace.assume(f"{self.name} {sign} {self.trace.text(other)}", self, other)
            return True
        self.trace.assume(f"{self.name} {_OPPOSITE[sign]} {self.trace.text(other)}", self, other)
        return False


_OPPOSITE = {"==": "!=", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_NEUTRAL = {("+", 0), ("-", 0), ("*", 1), ("//", 1), ("<<", 0), (">>", 0)}  # x op n is x
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/",
    "lshift": "<<", "rshift": ">>", "and_": "&", "or_": "|", "xor": "^",
}  # fmt: skip


def _is_number(value: Any) -> bool:
    return type(value) in (Symbol, int, float, bool)


def _not_a_number(value: Any) -> Any:
    """What an operator says of it; NumPy's numbers would take a symbol for an array."""
    if value is None or isinstance(value, (str, bytes, tuple, list)):
        return NotImplemented
    raise NotTraceable(f"a symbol and a {type(value).__name__}")


def _binary(name: str, sign: str) -> None:
    act = getattr(operator, name)

    def forward(self: Symbol, other: Any) -> Any:
        if not _is_number(other):
            return _not_a_number(other)
        if type(other) is int and (sign, other) in _NEUTRAL:
            return self
        value = act(self.value, value_of(other))
        text = f"{self.name} {sign} {self.trace.text(other)}"
        return self.trace.compute(text, value, self, other)

    def backward(self: Symbol, other: Any) -> Any:
        if not _is_number(other):
            return _not_a_number(other)
        if type(other) is int and (sign, other) in (("+", 0), ("*", 1)):
            return self
        value = act(value_of(other), self.value)
        text = f"{self.trace.text(other)} {sign} {self.name}"
        return self.trace.compute(text, value, self, other)

    plain = name.rstrip("_")
    setattr(Symbol, f"__{plain}__", forward)
    setattr(Symbol, f"__r{plain}__", backward)


for _name, _sign in _OPERATORS.items():
    _binary(_name, _sign)


def _no_slot(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Symbol, *rest: Any) -> NoReturn:
        raise NotTraceable(name)

    return refuse


for _name in ("__pow__", "__rpow__", "__invert__", "__ceil__", "__floor__"):
    setattr(Symbol, _name, _no_slot(_name))


def cached(maxsize: int) -> Callable[[Callable[..., Any]], Any]:
    """`lru_cache` of a function of numbers that symbols go through: its lines are traced."""

    def decorate(function: Callable[..., Any]) -> Any:
        kept = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*given: Any) -> Any:
            try:
                return kept(*given)
            except Unhashable:
                return function(*given)

        return call

    return decorate


def decision(maxsize: int) -> Callable[[Callable[..., Any]], Any]:
    """`lru_cache` of a function that chooses: with symbols it is one guard, that it chooses the
    same again."""

    def decorate(function: Callable[..., Any]) -> Any:
        kept = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*given: Any) -> Any:
            try:
                return kept(*given)
            except Unhashable:
                return _trace_of(given).decide(kept, given)

        call.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
        return call

    return decorate


def _trace_of(values: Iterable[Any]) -> Trace:
    for value in values:
        if type(value) is Symbol:
            return value.trace
        if isinstance(value, tuple):
            try:
                return _trace_of(value)
            except LookupError:
                continue
    raise LookupError("no symbol")
