"""What a page is made of: sections with text, charts and tables; what is missing is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .chart import Chart
from .matrix import Matrix


@dataclass
class Table:
    """`head`: names; one that begins with ">" is of numbers. `fold`: closed until it is opened."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    fold: bool = False


@dataclass
class Section:
    """`charts` are one picture with choices when there are several."""

    name: str  # short, for its address: "latency"
    title: str
    text: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)  # one for each mode
    missing: str = ""  # why there is nothing else

    def empty(self) -> bool:
        """Nothing to draw and no table."""
        return not (self.charts or self.tables)
