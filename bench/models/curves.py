"""Loss curves of training steps: docs/training_curves.svg and the distances in docs/MODELS.md.

    python -m bench.models.train --curve 200 --out curves.jsonl …   # on a GPU
    python -m bench.models.curves --store curves.jsonl              # keeps them, draws the picture

A curve lies on another one where it is not much farther from it than a third one, which computes
the same and rounds otherwise: Hugging Face's own with another attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..report.chart import Axis, Chart, Point, Series
from ..report.svg import draw
from .training import Apart, apart

STORED = Path(__file__).with_name("curves.json")
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "training_curves.svg"
BASE = "sdpa"
_EVERY = 10  # steps of a point
_NAMES = {"sdpa": "Hugging Face, SDPA", "eager": "Hugging Face, eager", "fkjit": "fkjit",
          "graph": "fkjit, a graph", "adamw": "fkjit, its AdamW",
          "adamw-graph": "fkjit, its AdamW, a graph"}  # fmt: skip


class Curves(NamedTuple):
    """Losses of each candidate, of one model, size and learning rate."""

    config: str
    batch: int
    length: int
    rate: float
    device: str
    losses: dict[str, list[float]]


def read(lines: Iterable[str]) -> list[Curves]:
    """What `bench.models.train --out` wrote, together by model and size; the last of each."""
    found: dict[Any, Curves] = {}
    for one in map(json.loads, lines):
        if one.get("curve"):
            said = {name: one[name] for name in Curves._fields[:-1]}
            curves = found.setdefault(tuple(said.values()), Curves(**said, losses={}))
            curves.losses[one["candidate"]] = [round(loss, 5) for loss in one["curve"]]
    return list(found.values())


def store(curves: Sequence[Curves]) -> None:
    """A line for each model."""
    lines = ",\n".join(json.dumps(one._asdict()) for one in curves)
    STORED.write_text(f"[\n{lines}\n]\n")


def stored() -> list[Curves]:
    return [Curves(**one) for one in json.loads(STORED.read_text())]


def distances(curves: Curves) -> dict[str, Apart]:
    """Of each from Hugging Face's with `scaled_dot_product_attention`."""
    return apart(curves.losses, BASE)


def table(every: Sequence[Curves]) -> str:
    """Rows of docs/MODELS.md."""
    return "\n".join(
        f"| {one.config} | {one.batch} x {one.length} | {_NAMES.get(name, name)} | "
        f"{one.losses[name][0]:.4f} | {one.losses[name][-1]:.4f} | {100 * found.most:.2f} % | "
        f"{100 * found.mean:.3f} % |"
        for one in every
        for name, found in distances(one).items()
    )


def picture(every: Sequence[Curves]) -> str:
    series = [
        Series(
            f"{one.config}: {_NAMES.get(name, name)}",
            [Point(n + 1, loss) for n, loss in enumerate(losses) if (n + 1) % _EVERY == 0],
            number,
            hollow=name != BASE,
        )
        for number, (one, name, losses) in enumerate(
            (one, name, losses) for one in every for name, losses in one.losses.items()
        )
    ]
    steps = Axis("step", zero=False)
    title = "Losses of training steps, the same weights and batches"
    return draw(Chart(title, "line", steps, Axis("loss", log=True), series))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; with --store keep the curves and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--store", type=Path, nargs="+", metavar="FILE", help="curves to keep")
    said = parser.parse_args(arguments)
    if said.store:
        store(read(line for path in said.store for line in path.read_text().splitlines()))
        PICTURE.write_text(picture(stored()))
    print(table(stored()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
