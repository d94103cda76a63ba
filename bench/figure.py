"""The README's table and picture of attention, out of a run of the suite.

    fkjit bench attention --set readme --peers sdpa-flash,sdpa-cudnn --out docs/attention_h200.jsonl
    python -m bench.figure docs/attention_h200.jsonl

Writes the `.svg` beside the file and the table between the README's two markers. Colours and greys
are of middling brightness, legible on a white page and on a dark one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .store import read as read_runs

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NAMES = {"fkjit": "fkjit", "sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN"}
COLOURS = {"fkjit": "#3b82f6", "sdpa-flash": "#7d7264", "sdpa-cudnn": "#a8712a"}
FA2 = "sdpa-flash"
TEXT, LINE = "#7b8491", "#7b849155"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 860, 330, 46, 56, 58
_STEP = 100  # TFLOP/s between two lines

Cell = tuple[int, bool, int]  # head_dim, causal, seqlen


def read(path: Path) -> tuple[dict[Cell, dict[str, float]], dict[str, Any]]:
    """{cell: {candidate: TFLOP/s}} in the order head_dim, full before causal, length; the header.

    TFLOP/s are those of warm calls. Of a candidate that was measured more than once in a cell the
    last line counts.
    """
    cells: dict[Cell, dict[str, float]] = {}
    runs = read_runs(path)
    for run in runs:
        for found in run.cells:
            if found["op"] == "attention" and found["candidate"] in NAMES and "warm" in found:
                problem = found["problem"]
                cell = (problem["head_dim"], problem["causal"], problem["seqlen_k"])
                cells.setdefault(cell, {})[found["candidate"]] = found["warm"]["tflops"]
    return dict(sorted(cells.items())), runs[-1].header


def candidates(cells: dict[Cell, dict[str, float]]) -> list[str]:
    """Those that were measured in any cell, ours first."""
    return [name for name in NAMES if any(name in found for found in cells.values())]


def table(cells: dict[Cell, dict[str, float]], environment: dict[str, Any]) -> str:
    """The Markdown table, with its caption below."""
    names = candidates(cells)
    head = ["head_dim", "mask", "length", *(NAMES[name] for name in names), "fkjit / FA2"]
    lines = [_line(head), _line(["---:", "---", *["---:"] * (len(head) - 2)])]
    for (dim, causal, length), found in cells.items():
        speeds = [f"{found[name]:.0f}" if name in found else "" for name in names]
        ratio = f"{found['fkjit'] / found[FA2]:.2f}" if FA2 in found else ""
        mask = "causal" if causal else "full"
        lines.append(_line([str(dim), mask, _thousands(length), *speeds, ratio]))
    return "\n".join(lines) + f"\n\n{caption(environment)}\n"


def caption(environment: dict[str, Any]) -> str:
    """What was measured, where and when."""
    torch = environment["versions"]["torch"].split("+")[0]
    return (
        f"Attention forward, TFLOP/s, bf16, 16k tokens in a batch, heads x head_dim = 2048; "
        f"{environment['gpu']}, {environment['date'][:10]}, NVRTC {environment['nvrtc']}; "
        f"FlashAttention-2 is PyTorch {torch}'s, measured in turns with fkjit."
    )


def _line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def picture(cells: dict[Cell, dict[str, float]], environment: dict[str, Any]) -> str:
    """The bars as an SVG with a transparent background."""
    names = candidates(cells)
    highest = max(max(found.values()) for found in cells.values())
    top = _STEP * -(-highest // _STEP)
    scale = (_HEIGHT - _TOP - _BOTTOM) / top
    parts = [
        _text(0, 18, f"Attention forward by length on {environment['gpu']}, bf16, TFLOP/s", size=15)
    ]
    for index, name in enumerate(names):
        x = _LEFT + (0, 80, 240)[index]
        parts.append(f'<rect x="{x}" y="29" width="11" height="11" fill="{COLOURS[name]}"/>')
        parts.append(_text(x + 16, 39, NAMES[name]))
    for value in range(0, int(top) + 1, _STEP):
        y = _HEIGHT - _BOTTOM - value * scale
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH}" stroke="{LINE}"/>')
        parts.append(_text(_LEFT - 6, y + 4, str(value), anchor="end"))
    parts += _bars(cells, names, scale)
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" fill="{TEXT}">\n'
        f"  <title>{escape(caption(environment))}</title>\n  {body}\n</svg>\n"
    )


def _bars(cells: dict[Cell, dict[str, float]], names: list[str], scale: float) -> list[str]:
    """The groups of bars; a gap where head_dim or mask change, with what they are below."""
    parts, groups = [], sorted({cell[:2] for cell in cells})
    gap = 26
    room = (_WIDTH - _LEFT - gap * len(groups)) / len(cells)
    bar = min(30.0, room * 0.9 / len(names))
    x, floor = _LEFT + gap / 2, _HEIGHT - _BOTTOM
    for dim, causal in groups:
        members = {cell: found for cell, found in cells.items() if cell[:2] == (dim, causal)}
        middle = x + room * len(members) / 2
        below = f"head_dim {dim}" + (", causal" if causal else "")
        parts.append(_text(middle, floor + 42, below, anchor="middle"))
        for (_, _, length), found in members.items():
            left = x + (room - bar * len(names)) / 2
            parts.append(_text(x + room / 2, floor + 18, _thousands(length), anchor="middle"))
            for index, name in enumerate(names):
                height = found.get(name, 0) * scale
                at = f'x="{left + index * bar:.1f}" y="{floor - height:.1f}"'
                size = f'width="{bar - 2:.1f}" height="{height:.1f}"'
                parts.append(f'<rect {at} {size} fill="{COLOURS[name]}"/>')
                if name in found:
                    centre = left + (index + 0.5) * bar + 3
                    turned = f'transform="rotate(-90 {centre:.1f} {floor - height + 6:.1f})"'
                    label = _text(centre, floor - height + 6, f"{found[name]:.0f}", 11, "end")
                    parts.append(label.replace("<text", f'<text fill="#fff" {turned}'))
            x += room
        x += gap
    return parts


def _text(x: float, y: float, text: str, size: int = 13, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def with_table(readme: str, made: str) -> str:
    """The README's text with the table between the markers replaced."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{made}{END}{rest.split(END)[1]}"


def main() -> None:
    """Write the picture and the table of the run given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a result file of `fkjit bench`")
    results = parser.parse_args().results
    cells, environment = read(results)
    results.with_suffix(".svg").write_text(picture(cells, environment))
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), table(cells, environment)))


if __name__ == "__main__":
    main()
