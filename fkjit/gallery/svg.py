"""Shapes of a picture that is legible on a white page and on a dark one: the ground is transparent,
text on it is grey, and what is coloured is light with dark text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

GREY, INK = "#7b8491", "#1c2128"
WIDTH = 760
_GOLDEN = 137.508  # degrees: neighbours differ


def colour(number: int, shade: float = 0.0) -> str:
    """Of a block, an array, a lane; `shade`: 0 to 1, darker."""
    return f"hsl({number * _GOLDEN % 360:.0f} 62% {80 - 26 * shade:.0f}%)"


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A filled rectangle; `title` is shown to who points at it."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    inside = f"<title>{escape(title)}</title></rect>" if title else ""
    return f'<rect {size} fill="{fill}"' + (f">{inside}" if inside else "/>")


def frame(x: float, y: float, width: float, height: float) -> str:
    """An outline."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} fill="none" stroke="{GREY}"/>'


def text(
    x: float, y: float, words: object, size: float = 12, anchor: str = "start", fill: str = GREY
) -> str:
    """A line of text."""
    own = "" if fill == GREY else f' fill="{fill}"'
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    at = f'x="{x:g}" y="{y:g}" font-size="{size:g}"'
    return f"<text {at}{place}{own}>{escape(str(words))}</text>"


def labels(size: float, cells: Sequence[tuple[float, float, object]]) -> str:
    """Dark words in the middle of coloured cells, at (x, y) each."""
    each = (f'<text x="{x:g}" y="{y:g}">{escape(str(words))}</text>' for x, y, words in cells)
    return f'<g font-size="{size:g}" text-anchor="middle" fill="{INK}">{"".join(each)}</g>'


def drawing(title: str, height: float, shapes: Sequence[str], width: float = WIDTH) -> str:
    """The file. `title` is what a screen reader says."""
    inside = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" role="img" font-family="system-ui, sans-serif" fill="{GREY}">\n'
        f"<title>{escape(title)}</title>\n{inside}\n</svg>\n"
    )
