"""The ratio matrix: of each case and peer, how many times as fast ours is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from .cells import Study, median

# From this ratio on a cell has a class of its own, worst first.
_STEPS = ((0.0, "l3"), (0.67, "l2"), (0.9, "l1"), (0.98, "even"), (1.02, "w1"), (1.11, "w2"),
          (1.5, "w3"))  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Of one case: milliseconds of ours, and by peer its time over ours; None: not measured."""

    case: str
    own: float
    ratios: tuple[float | None, ...]


@dataclass(frozen=True)
class Matrix:
    """Of one mode of timing."""

    mode: str
    own: str
    peers: tuple[str, ...]
    rows: tuple[Row, ...]


def matrices(study: Study) -> list[Matrix]:
    """One for each mode in which ours and a peer have a time."""
    own = study.own
    return [made for mode in study.modes if own and (made := _matrix(study, own, mode)).peers]


def _matrix(study: Study, own: str, mode: str) -> Matrix:
    found: dict[str, dict[str, float]] = {}
    for case in study.cases:
        for name, cell in study.cells(case).items():
            ratio = None if cell["kind"] == "ours" else study.speedup(case, name, mode)
            if ratio:
                found.setdefault(case, {})[name] = ratio
    peers = tuple(name for name in study.candidates if any(name in row for row in found.values()))
    rows = tuple(
        Row(case, time, tuple(row.get(name) for name in peers))
        for case, row in found.items()
        if (time := median(study.cells(case).get(own, {}), mode))
    )
    return Matrix(mode, own, peers, rows)


def html(matrix: Matrix, colours: dict[str, str]) -> str:
    """As a table; the page's script shows the one of the chosen mode, and the cases asked for."""
    return "\n".join(_lines(matrix, colours))


def _lines(matrix: Matrix, colours: dict[str, str]) -> Iterator[str]:
    yield f'<div class="scroll matrix" data-mode="{escape(matrix.mode)}"><table><thead><tr>'
    unit, factor = _unit(matrix)
    own = escape(f"{matrix.own} [{unit}]")
    yield f'<th>case ({escape(matrix.mode)})</th><th class="number">{own}</th>'
    for name in matrix.peers:
        dot = f'<i style="background:{colours.get(name, "none")}"></i>'
        yield f'<th class="number">{dot}{escape(name)}</th>'
    yield "</tr></thead><tbody>"
    for row in matrix.rows:
        cells = "".join(map(_cell, row.ratios))
        case = escape(row.case)
        own = f'<td class="number">{row.own * factor:.4g}</td>'
        yield f'<tr data-case="{case}"><td>{case}</td>{own}{cells}</tr>'
    yield "</tbody></table></div>"


def _unit(matrix: Matrix) -> tuple[str, float]:
    """Of ours: microseconds where most cases take less than a tenth of a millisecond."""
    times = sorted(row.own for row in matrix.rows)
    return ("us", 1e3) if times and times[len(times) // 2] < 0.1 else ("ms", 1.0)


def _cell(ratio: float | None) -> str:
    if ratio is None:
        return '<td class="number none">–</td>'
    name = [name for least, name in _STEPS if ratio >= least][-1]
    return f'<td class="number {name}">{ratio:.2f}</td>'
