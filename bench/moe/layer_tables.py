"""The tables of whole mixtures of experts out of stored runs, as markdown on standard output.

python -m bench.moe.layer_tables bench/results/FILE.jsonl …    oldest first: the last one counts

Times are medians in a CUDA graph; of gradients, which have none, of calls with a warm cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fkjit.spec import Problem

from ..core.store import read
from ..report.tables import markdown, shown
from . import cases_grouped_linear, cases_moe_layer, cases_moe_layer_backward, layer

Cells = dict[str, dict[str, Any]]  # by candidate
Known = dict[tuple[str, str], Cells]  # by operation and case
OURS, TWIN = "fkjit", "triton"
LAYER, BACKWARD, PRODUCTS = (
    cases_moe_layer.OP, cases_moe_layer_backward.OP, cases_grouped_linear.OP,
)  # fmt: skip


def known_of(paths: Sequence[Path]) -> Known:
    """Every case as the last run has it."""
    found: Known = {}
    for path in paths:
        here: Known = {}
        for run in read(path):
            for cell in run.cells:
                if time_of(cell) is not None:
                    here.setdefault((cell["op"], cell["case"]), {})[cell["candidate"]] = cell
        found |= here
    return found


def time_of(cell: dict[str, Any] | None) -> float | None:
    """Microseconds."""
    for mode in ("graph", "warm"):
        if cell is not None and "p50" in cell.get(mode, {}):
            return cell[mode]["p50"] * 1e3
    return None


def best_peer(cells: Cells) -> tuple[str, float | None]:
    """The fastest of the others that is not ours nor the twin."""
    times = {n: time_of(c) for n, c in cells.items() if c["kind"] == "peer"}
    name = min(times, key=lambda n: times[n] or 0.0, default="")
    return name, times.get(name)


def _ratio(theirs: float | None, ours: float) -> str:
    return "" if theirs is None else f"{theirs / ours:.2f}"


def speeds(known: Known, op: Any, problems: Sequence[Problem], first: str) -> Iterator[list[str]]:
    """A case a row: time and TFLOP/s of ours, the twin, the best peer, how many times as fast."""
    yield [first, "fkjit", "TFLOP/s", "Triton", "best peer", "", "/ fkjit"]
    for p in problems:
        cells = known.get((op.name, op.label(p)), {})
        ours = time_of(cells.get(OURS))
        if ours is not None:
            name, theirs = best_peer(cells)
            rate = f"{op.flops(p) / ours / 1e6:.0f}"
            twin = shown(time_of(cells.get(TWIN)))
            yield [op.label(p), shown(ours), rate, twin, name, shown(theirs), _ratio(theirs, ours)]


def decoding(known: Known) -> Iterator[list[str]]:
    """Few tokens: how fast the active experts' weights are read."""
    yield [
        "decoding",
        "active",
        "fkjit",
        "TB/s",
        "of the copy",
        "Triton",
        "best peer",
        "",
        "/ fkjit",
    ]
    for p in cases_moe_layer.SETS["decode"]:
        cells = known.get((LAYER.name, LAYER.label(p)), {})
        ours = time_of(cells.get(OURS))
        if ours is not None:
            name, theirs = best_peer(cells)
            share = cells[OURS].get("graph", {}).get("share_copy")
            yield [
                LAYER.label(p), str(layer.active(p)), shown(ours),
                f"{LAYER.bytes(p) / ours / 1e6:.2f}", "" if share is None else f"{share:.2f}",
                shown(time_of(cells.get(TWIN))), name, shown(theirs), _ratio(theirs, ours),
            ]  # fmt: skip


def skewed(known: Known) -> Iterator[list[str]]:
    """Experts by Zipf's law: time of a padded row, beside that of even experts."""
    yield ["skew", "padded rows", "fkjit", "ns a padded row", "/ even"]
    even: dict[str, float] = {}
    for p in cases_moe_layer.SETS["skew"]:
        ours = time_of(known.get((LAYER.name, LAYER.label(p)), {}).get(OURS))
        if ours is None:
            continue
        each, plain = ours * 1e3 / layer.padded(p), layer.label({**p, "skew": 0.0})
        if not p["skew"]:
            even[plain] = each
        ratio = f"{each / even[plain]:.3f}" if plain in even else ""
        yield [LAYER.label(p), f"{layer.padded(p):,}", shown(ours), f"{each:.1f}", ratio]


def tables(paths: Sequence[Path]) -> dict[str, str]:
    """Markdown by name; those without a row are left out."""
    known = known_of(paths)
    sets = cases_moe_layer.SETS
    large = [p for p in sets["default"] if p not in sets["decode"]]
    made = {
        "layers": speeds(known, LAYER, large, "layer"),
        "decoding": decoding(known),
        "skew": skewed(known),
        "models": speeds(known, LAYER, sets["models"], "models' layers"),
        "drawn": speeds(known, LAYER, sets["random"], "drawn layers"),
        "gradients": speeds(known, BACKWARD, BACKWARD.sets["default"], "gradients"),
        "products": speeds(known, PRODUCTS, PRODUCTS.sets["default"], "products"),
    }
    found = {name: list(rows) for name, rows in made.items()}
    return {name: markdown(rows) for name, rows in found.items() if len(rows) > 1}


def main() -> None:
    """Print the tables of the runs given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+", help="result files of `fkjit bench`")
    for name, text in tables(parser.parse_args().results).items():
        print(f"{name}\n\n{text}")


if __name__ == "__main__":
    main()
