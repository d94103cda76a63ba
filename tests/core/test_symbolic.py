"""Symbols note what is computed from them and assumed of them; nothing else can be had of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fkjit.symbolic import NotTraceable, Symbol, Trace, Unhashable, cached, decision, pinned


def answers(trace: Trace, wanted: Any, **inputs: int) -> Any:
    """What the program gives for other inputs; None where a guard does not hold."""
    names = dict(inputs) | {f"c{at}": one for at, one in enumerate(trace.bound)}
    early, late = trace.program(trace.names([wanted]))
    for line in (*early, *late):
        if not line.name:
            if not eval(line.text, {}, names):
                return None
        else:
            names[line.name] = eval(line.text, {}, names)
    return eval(trace.text(wanted), {}, names)


def collatz(x: Any, y: Any) -> Any:
    """Any use of all operators, with branches."""
    z = x * 3 + y if x % 2 else x // 2 - -y
    if z > y * 4 or x == y:
        z = (z << 2) ^ (y & 7) | 1
    return min(z, 100 - x), -z, abs(y - x), (z >> 1).bit_length(), divmod(z, y or 1), 7 % (x + 1)


@given(*[st.integers(0, 40)] * 4)
def test_a_program_does_what_its_function_does(x: int, y: int, other_x: int, other_y: int) -> None:
    trace = Trace()
    traced = collatz(trace.number("x", x), trace.number("y", y))
    flat = tuple(one for part in traced for one in (part if isinstance(part, tuple) else (part,)))
    wanted = collatz(other_x, other_y)
    plain = tuple(one for part in wanted for one in (part if isinstance(part, tuple) else (part,)))
    assert answers(trace, flat, x=other_x, y=other_y) in (None, plain)
    mine = collatz(x, y)
    assert answers(trace, flat, x=x, y=y) == tuple(
        one for part in mine for one in (part if isinstance(part, tuple) else (part,))
    )


PINS = {
    "an index": lambda x: list(range(100))[x],
    "a length": lambda x: len(range(x)),
    "a repetition": lambda x: len((1,) * x),
    "a float": math.sqrt,
    "an int": int,
    "a text": str,
    "a format": lambda x: f"{x:>4}",
    "gcd": lambda x: math.gcd(x, 12),
    "pinned": lambda x: pinned({"a": (x, 1)})["a"][0],
}


@pytest.mark.parametrize("way", PINS)
def test_what_needs_the_number_pins_it(way: str) -> None:
    trace = Trace()
    found = PINS[way](trace.number("x", 9))
    assert type(found) is not Symbol and found == PINS[way](9)
    assert answers(trace, (), x=9) == () and answers(trace, (), x=8) is None


@pytest.mark.parametrize("use", [lambda x: x**2, lambda x: x == np.int64(3), lambda x: ~x])
def test_what_no_line_stands_for_is_refused(use: Any) -> None:
    trace = Trace()
    x = trace.number("x", 3)
    try:
        found = use(x)
    except (NotTraceable, TypeError):
        return
    assert type(found) is not Symbol and answers(trace, (), x=4) is None


def test_a_symbol_is_no_key() -> None:
    with pytest.raises(Unhashable):
        {Trace().number("x", 3): 1}


def test_an_int_is_an_int_and_no_bool() -> None:
    x = Trace().number("x", 3)
    assert isinstance(x, int) and not isinstance(x, bool) and x is not None


def test_late_numbers_come_after_guards() -> None:
    trace = Trace()
    x, late = trace.number("x", 3), trace.number("p", 1 << 30, late=True)
    moved = late + x * 2
    assert x < 5
    with pytest.raises(NotTraceable):
        bool(moved % 16)
    before, after = trace.program(trace.names([moved]))
    assert [line.text for line in before] == ["x * 2", "x < 5"]
    assert [line.text for line in after] == ["p + t0", "t1 % 16"][:1]


def test_lines_that_nobody_wants_are_left_out() -> None:
    trace = Trace()
    x = trace.number("x", 3)
    x * 5
    assert trace.program(()) == ([], [])


class TestCaches:
    def test_a_cached_function_is_gone_through(self) -> None:
        asked = []

        @cached(4)
        def twice(n: int) -> int:
            asked.append(n)
            return 2 * n if n < 10 else 0

        trace = Trace()
        assert twice(4) == twice(4) == 8 and len(asked) == 1
        found = twice(trace.number("x", 4))
        assert answers(trace, found, x=7) == 14 and answers(trace, found, x=10) is None

    def test_a_decision_is_asked_again(self) -> None:
        @decision(4)
        def tile(rows: int, heads: tuple[int, ...]) -> tuple[int, str]:
            return (64, "small") if rows * heads[0] < 100 else (128, "large")

        trace = Trace()
        chosen = tile(trace.number("x", 4), (trace.number("h", 2), 1))
        assert chosen == (64, "small") and answers(trace, chosen, x=49, h=2) == chosen
        assert answers(trace, chosen, x=50, h=2) is None
