"""Sets of problems that a run draws anew, by a seed that it tells: nobody tunes to a list."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, overload

from fkjit.spec import Problem


class Drawn(Sequence[Problem]):
    """What `draw(rng)` makes. `Drawn.seed`, the same for all sets, may be set until one is read."""

    seed: ClassVar[int] = random.SystemRandom().randrange(1_000_000)

    def __init__(self, draw: Callable[[random.Random], Sequence[Problem]]) -> None:
        self._draw = draw

    @cached_property
    def _problems(self) -> Sequence[Problem]:
        return self._draw(random.Random(Drawn.seed))

    def __len__(self) -> int:
        return len(self._problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._problems)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._problems[index]
