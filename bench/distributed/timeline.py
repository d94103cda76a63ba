"""A schedule as a picture: a row for each lane of each rank, time to the right."""

from __future__ import annotations

from html import escape

from fkjit.distributed.schedule import Timeline

from ..report.chart import PALETTE
from ..report.svg import TEXT, WIDTH

_LANES = ("compute", "link", "network")
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 118, 14, 52, 24, 17
_LETTER = 6.2  # width of a small one


def draw(title: str, parts: list[tuple[str, Timeline]]) -> str:
    """The picture: timelines of one scale, one below the other, each with its name."""
    longest = max(line.seconds for _, line in parts)
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    body, y = [_text(0, 18, title, 15), *_legend()], _TOP
    for name, line in parts:
        body.append(_text(0, y + 12, f"{name}: {line.seconds * 1e3:.2f} ms", 12))
        y += 20
        for rank, lane in _rows(line):
            body.append(_text(8, y + 12, f"rank {rank} {lane}", 11))
            for task in line.tasks:
                if (task.rank, task.lane) == (rank, lane):
                    x, width = _LEFT + task.begin * scale, (task.end - task.begin) * scale
                    body += _bar(x, y, width, lane, task.name)
            y += _ROW
        y += 14
    inside = "\n  ".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'role="img" font-family="system-ui, sans-serif" fill="{TEXT}">\n'
        f"  <title>{escape(title)}</title>\n  {inside}\n</svg>\n"
    )


def _rows(line: Timeline) -> list[tuple[int, str]]:
    found = {(task.rank, task.lane) for task in line.tasks}
    return sorted(found, key=lambda row: (row[0], _LANES.index(row[1])))


def _legend() -> list[str]:
    made = []
    for n, lane in enumerate(_LANES):
        x = 8 + 110 * n
        made.append(
            f'<rect x="{x}" y="28" width="11" height="11" fill="{PALETTE[n]}"/>'
            + _text(x + 16, 38, lane, 12)
        )
    return made


def _bar(x: float, y: float, width: float, lane: str, name: str) -> list[str]:
    colour = PALETTE[_LANES.index(lane)]
    made = [
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 0.8):.1f}" height="{_BAR}" '
        f'fill="{colour}"><title>{escape(name)}</title></rect>'
    ]
    if len(name) * _LETTER < width - 6:
        text = escape(name)
        made.append(f'<text x="{x + 4:.1f}" y="{y + 12}" font-size="11" fill="#fff">{text}</text>')
    return made


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'
