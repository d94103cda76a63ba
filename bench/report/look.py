"""How each candidate is drawn: one style a name, the same in every chart of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .cells import Study
from .chart import PALETTE

_OURS = len(PALETTE)  # style numbers that share ours' colour are its multiples


def styles(studies: Sequence[Study]) -> dict[str, int]:
    """A style for each candidate of some studies.

    Ours have the first colour, and no other has. Peers that are measured side by side have
    different ones as far as there are colours; those that most studies have choose first.
    """
    ours = ours_of(studies)
    made = {name: _OURS * number for number, name in enumerate(ours)}
    count = Counter(name for study in studies for name in study.candidates if name not in made)
    beside = {
        name: {other for s in studies if name in s.candidates for other in s.candidates}
        for name in count
    }
    for name, _ in sorted(count.items(), key=lambda item: (-item[1], item[0])):
        colours = Counter(made[other] % _OURS for other in beside[name] if other in made)
        used = set(made.values())
        free = (style for style in range(1, 100 * _OURS) if style % _OURS and style not in used)
        made[name] = min(
            (next(free) for _ in range(_OURS)), key=lambda style: (colours[style % _OURS], style)
        )
    return made


def ours_of(studies: Sequence[Study]) -> list[str]:
    """Candidates of ours, the public call first."""
    found = {
        name
        for study in studies
        for case in study.cases
        for name, cell in study.cells(case).items()
        if cell["kind"] == "ours" and name in study.candidates
    }
    return sorted(found, key=lambda name: (name != "fkjit", name))
