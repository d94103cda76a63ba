"""The pictures of docs/PRECISION.md, drawn as `fkjit report` draws."""

from __future__ import annotations

from typing import Any

from ..report import svg
from ..report.chart import Axis, Chart, Point, Series

Records = list[dict[str, Any]]
FORMS = ("fp16", "bf16", "fp8, tensor", "fp8, block", "fp8, block, smooth, rotated", "int8, block",
         "int8, block, smooth", "int8_fp8, block, smooth")  # fmt: skip
_KEYS = Axis("keys", log=True, base=2)


def ways_to_add(known: Records) -> list[str]:
    """Of the needle: exact ones first, then intervals from never to the shortest."""
    names = dict.fromkeys(r["sums"] for r in known if r["part"] == "needle")
    first = [name for name in names if not name.startswith("every") and name != "never"]
    every = [name for name in names if name.startswith("every")]
    every.sort(key=lambda name: -int(name.removeprefix("every ").replace(",", "")))
    return [*first, *(["never"] if "never" in names else []), *every]


def ways(known: Records) -> list[tuple[str, str, int | None]]:
    """Of the models: products, attention, interval."""
    some = (r for r in known if r["part"] == "models")
    return list(dict.fromkeys((r["products"], r["attention"], r.get("interval")) for r in some))


def pictures(known: Records, source: str) -> dict[str, str]:
    """SVG by file name."""
    charts = {
        "precision_attention.svg": attention(known, "N(0, 1)"),
        "precision_outliers.svg": attention(known, "outlier channels"),
        "precision_sums.svg": sums(known),
        "precision_needle.svg": needle(known),
        "precision_models.svg": models(known),
    }
    return {name: svg.draw(chart, f"{chart.title}; {source}") for name, chart in charts.items()}


def attention(known: Records, kind: str) -> Chart:
    """Error over keys, a line a form."""
    series = []
    for style, form in enumerate(FORMS):
        points = [Point(r["keys"], 100 * r["error"]) for r in known
                  if r["part"] == "attention" and r["scheme"] == form and r["kind"] == kind
                  and not r["causal"]]  # fmt: skip
        series.append(Series(form, points, style))
    title = f"Error of attention, {kind}, sums in fp32"
    return Chart(title, "line", _KEYS, Axis("error [%]", log=True), series)


def sums(known: Records) -> Chart:
    """Values around 1: error over keys, a line an interval."""
    some = [r for r in known if r["part"] == "attention sums" and r["values"] == "around 1"]
    bits = some[0]["bits"]
    some = [r for r in some if r["bits"] == bits]
    intervals = sorted({r["interval"] for r in some}, key=lambda n: (n > 0, -n))
    series = [
        Series(f"every {n:,} keys" if n else "never promoted",
               [Point(r["keys"], 100 * r["error"]) for r in some if r["interval"] == n], style)
        for style, n in enumerate(intervals)
    ]  # fmt: skip
    title = f"What sums of {bits} bits add to attention in fp8, values around 1"
    return Chart(title, "line", _KEYS, Axis("error [%]", log=True), series)


def needle(known: Records) -> Chart:
    """The share of needles that are found over keys."""
    series = []
    for style, name in enumerate(ways_to_add(known)):
        points = [Point(r["keys"], 100 * r["found"]) for r in known
                  if r["part"] == "needle" and r["sums"] == name]  # fmt: skip
        if name != "float64":
            series.append(Series(name, points, style))
    return Chart("Needles found", "line", _KEYS, Axis("found [%]"), series)


def models(known: Records) -> Chart:
    """A row a way, a mark for each trained model."""
    some = [r for r in known if r["part"] == "models" and "trained" in r["model"] and r["error"]]
    rows = [way for way in ways(known) if way[0] != "float64"]
    series = [
        Series(model, [Point(rows.index((r["products"], r["attention"], r.get("interval"))),
                             100 * r["error"]) for r in some if r["model"] == model], style)
        for style, model in enumerate(dict.fromkeys(r["model"] for r in some))
    ]  # fmt: skip
    chart = Chart("Error of trained models' logits", "dots", Axis(""),
                  Axis("error [%]", log=True), series)  # fmt: skip
    chart.categories = [(_named(*way), "") for way in rows]
    return chart


def _named(products: str, attention: str, interval: int | None) -> str:
    short = (
        "" if interval is None else "; 13 bits, " + (f"every {interval}" if interval else "never")
    )
    return f"products {products}; attention {attention}{short}"
