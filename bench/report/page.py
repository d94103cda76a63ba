"""The HTML page: everything inline, nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..core.store import Run
from .chart import PALETTE
from .matrix import html
from .section import Section, Table

_HERE = Path(__file__).resolve().parent
_MATRIX = (
    "Time of a peer over the time of {}, in the same run: at 2.00 ours is twice as fast as that "
    "peer, below 1 the peer is faster."
)


def page(
    title: str,
    parts: Sequence[tuple[str, Sequence[Section]]],
    runs: Sequence[Run],
    styles: dict[str, int],
    ours: Sequence[str],
) -> str:
    """The page of some parts (one for each operation and GPU), each with its sections.

    The script shows one part at a time, with the choices of the bar on top, which are in the
    address too; without scripts all parts stand below one another.
    """
    charts: dict[str, Any] = {}
    colours = {name: PALETTE[style % len(PALETTE)] for name, style in styles.items()}
    body = []
    for number, (name, sections) in enumerate(parts):
        body.append(f'<article class="part" data-part="{escape(name)}">')
        body.append(f'<h2 id="part{number}">{escape(name)}</h2>')
        first, *rest = ((s, f"{s.name}{number or ''}") for s in sections)
        body.append(_section(*first, charts, colours))
        links = " ".join(f'<a href="#{at}">{escape(s.title)}</a>' for s, at in rest)
        body.append(f"<nav>{links}</nav>")
        body += [_section(section, at, charts, colours) for section, at in rest]
        body.append("</article>")
    made = {**_shared(charts), "ours": list(ours)}
    data = json.dumps(made, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>
{(_HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><button id="theme" type="button">light / dark</button></header>
<form id="choice" hidden=""></form>
{"".join(body)}
{_runs(runs)}
<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>
{(_HERE / "choice.js").read_text(encoding="utf-8")}
{(_HERE / "chart.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _shared(charts: dict[str, Any]) -> dict[str, Any]:
    """The charts with their notes in one list, each once: most stand in several charts."""
    notes: dict[str, int] = {}
    for some in charts.values():
        for series in (series for chart in some for series in chart["series"]):
            series["points"] = [
                [x, y, notes.setdefault(note, len(notes))] for x, y, note in series["points"]
            ]
    return {"charts": charts, "notes": list(notes)}


def _section(
    section: Section, address: str, charts: dict[str, Any], colours: dict[str, str]
) -> str:
    """Heading, matrices, text, one picture with its choices, tables."""
    parts = [f'<section><h3 id="{address}">{escape(section.title)}</h3>']
    if section.matrices:
        parts.append(f'<p class="quiet">{escape(_MATRIX.format(section.matrices[0].own))}</p>')
    parts += [html(matrix, colours) for matrix in section.matrices]
    if section.missing:
        parts.append(f'<p class="missing">{escape(section.missing)}.</p>')
    if section.name == "summary":
        parts.append("<ul>" + "".join(f"<li>{escape(t)}</li>" for t in section.text) + "</ul>")
    else:
        parts += [f"<p>{escape(text)}</p>" for text in section.text]
    if section.charts:
        charts[address] = [chart.to_dict() for chart in section.charts]
        parts.append(f'<div class="chart" data-charts="{address}"></div>')
    parts += [table(one) for one in section.tables]
    return "\n".join([*parts, "</section>\n"])


def table(given: Table) -> str:
    """A table; a head that begins with ">" makes a column of numbers."""
    numbers = [head.startswith(">") for head in given.head]

    def cells(tag: str, row: Sequence[Any]) -> str:
        return "".join(
            f'<{tag} class="number">{escape(str(cell))}</{tag}>'
            if number
            else f"<{tag}>{escape(str(cell))}</{tag}>"
            for cell, number in zip(row, numbers, strict=True)
        )

    head = cells("th", [name.removeprefix(">") for name in given.head])
    rows = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in given.rows)
    caption = "" if given.fold else f'<p class="quiet">{escape(given.caption)}</p>'
    made = (
        f'{caption}<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if given.fold:
        return f"<details><summary>{escape(given.caption)}</summary>{made}</details>"
    return made


def _runs(runs: Sequence[Run]) -> str:
    """What was measured where, a row a run."""
    fields = [_run(run) for run in runs]
    head = ("", *(run["date"] for run in fields))
    rows = [(name, *(run[name] for run in fields)) for name in fields[0] if name != "date"]
    return table(Table(head, rows, f"What was measured: {_count(runs)}", fold=True))


def _count(runs: Sequence[Run]) -> str:
    cells = sum(len(run.cells) for run in runs)
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {cells} results"


def _run(run: Run) -> dict[str, str]:
    """What there is to know of a run, by the name of the row."""
    header = run.header
    limits = header.get("ceilings") or {}
    gemm = ", ".join(f"{name} {rate:.0f}" for name, rate in limits.get("gemm_tflops", {}).items())
    ceilings = (
        f"copy {limits['copy_gbs']:.0f} GB/s; GEMM {gemm} TFLOP/s" if limits else "not measured"
    )
    versions = ", ".join(f"{name} {text}" for name, text in header.get("versions", {}).items())
    changed = " with changes" if header.get("modified") else ""
    return {
        "date": str(header.get("date") or "?").replace("T", " "),
        "GPU": str(header.get("gpu") or "?"),
        "driver": str(header.get("driver") or "?"),
        "NVRTC": str(header.get("nvrtc") or "?"),
        "versions": versions or "?",
        "commit": f"{header.get('commit') or '?'}{changed}",
        "command": str(header.get("command") or "?"),
        "ceilings": ceilings,
        "ended": (run.end or {}).get("reason", "does not say"),
        "results": str(len(run.cells)),
    }
