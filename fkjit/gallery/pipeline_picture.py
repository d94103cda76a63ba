"""Pipelines: when arrays in shared memory are filled and read, in the interpreter's order."""

from __future__ import annotations

from fkjit.gallery import svg
from fkjit.gallery.pipeline import Fill, Stages

_LEFT, _TOP, _HIGH = 96.0, 58.0, 20.0
_MARK = " stage "


def pipeline(kernel: str, seen: Stages) -> str:
    """A row for each stage of a ring, and for a "Q" that is alone; time goes to the right."""
    rows = [
        (name, fills)
        for name, fills in zip(seen.names, seen.fills, strict=True)
        if _MARK in name or name == "Q"
    ]
    kinds = list(dict.fromkeys(name.partition(_MARK)[0] for name, _ in rows))
    title = f"{kernel}: block 0, its {seen.moments:,} accesses from left to right"
    shapes = [svg.text(0, 14, title, 13), *_legend()]
    scale = (svg.WIDTH - _LEFT) / max(seen.moments, 1)
    cells: list[tuple[float, float, object]] = []
    for row, (name, fills) in enumerate(rows):
        top = _TOP + row * _HIGH
        shapes.append(svg.text(_LEFT - 8, top + 13, name, 11, "end"))
        shapes.append(svg.rect(_LEFT, top + _HIGH - 2, svg.WIDTH - _LEFT, 0.5, svg.GREY))
        for number, fill in enumerate(fills, 1):
            colour = kinds.index(name.partition(_MARK)[0]) + 1
            shapes += _bars(fill, scale, top, colour, f"{name}, content {number}")
            if fill.first is not None:
                cells.append((_LEFT + fill.first * scale + 6, top + 12, number))
    shapes.append(svg.labels(9, cells))
    return svg.drawing(title, _TOP + len(rows) * _HIGH + 4, shapes)


def _legend() -> list[str]:
    words = ("on its way: from the copy's issue until it is there", "in use: first read to last")
    return [
        svg.rect(0, 28, 26, 4, svg.colour(1)),
        svg.text(32, 34, words[0], 11),
        svg.rect(330, 24, 26, 12, svg.colour(1, 0.4)),
        svg.text(362, 34, f"{words[1]}; a number for each content", 11),
    ]


def _bars(fill: Fill, scale: float, top: float, colour: int, words: str) -> list[str]:
    """A thin bar while the copy is under way, a high one while the content is read."""
    x, wide = _LEFT + fill.begins * scale, (fill.lands - fill.begins) * scale
    bars = [svg.rect(x, top + 7, max(wide, 1.5), 4, svg.colour(colour), f"{words}: on its way")]
    if fill.first is not None and fill.last is not None:
        x, wide = _LEFT + fill.first * scale, (fill.last - fill.first) * scale
        shade = svg.colour(colour, 0.4)
        bars.append(svg.rect(x, top + 2, max(wide, 1.5), 14, shade, f"{words}: in use"))
    return bars
