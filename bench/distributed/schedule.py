"""`python -m bench.distributed.schedule`: what the simulator predicts, as tables and pictures.

python -m bench.distributed.schedule --write          # docs/DISTRIBUTED.md and its pictures
python -m bench.distributed.schedule --link 250e9     # another machine's rates
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from fkjit.distributed import forms, schedule
from fkjit.distributed.schedule import Attention, Experts, Machine, Product, Timeline

from .timeline import draw

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "DISTRIBUTED.md"
TOKENS = (8192, 32768)  # of a rank
RANKS = (2, 4, 8, 16, 32)


def attention_rows(machine: Machine) -> list[str]:
    """A table: milliseconds of each form, and the scaling of the fastest."""
    made = [
        "| ranks | tokens a rank | pass | ring | gather | Ulysses | ring, no overlap | scaling |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for size in RANKS:
        for tokens in TOKENS:
            for backward in (False, True):
                made.append(_attention_row(machine, size, Attention(tokens), backward))
    return made


def _attention_row(machine: Machine, size: int, a: Attention, backward: bool) -> str:
    found = forms.times(a, machine, size, "zigzag", backward)
    naive = schedule.ring(a, machine, size, "zigzag", backward, overlap=False).seconds
    best = min(found.values(), key=lambda line: line.seconds).seconds
    cells = [f"{found[n].seconds * 1e3:.2f}" if n in found else "–" for n in forms.FORMS]
    scaling = schedule.whole(a, machine, size, backward) / size / best
    which = "backward" if backward else "forward"
    return (
        f"| {size} | {a.tokens:,} | {which} | {' | '.join(cells)} | {naive * 1e3:.2f} | "
        f"{scaling:.0%} |"
    )


def layer_rows(machine: Machine) -> list[str]:
    """A table: experts and products, the share of the time in which products run."""
    made = [
        "| layer | ranks | ms | without overlap | products' share |",
        "|---|---:|---:|---:|---:|",
    ]
    for size in (2, 4, 8):
        a = Experts()
        one, whole = (schedule.experts(a, machine, size, chunks) for chunks in (4, 1))
        made.append(_layer_row("MoE T4096 E128 K8 H7168 F2048, 4 chunks", size, one, whole))
    for column, make in ((True, schedule.column_linear), (False, schedule.row_linear)):
        for size in (2, 4, 8):
            pieces = forms.best_pieces(column, Product(), size)
            lines = (make(Product(), machine, size, overlap, pieces) for overlap in (True, False))
            name = f"{'column' if column else 'row'}-parallel 8192 x 28672 x 8192"
            one, plain = lines
            made.append(_layer_row(f"{name}, pieces={pieces}", size, one, plain))
            tiles = schedule.in_step(Product(), machine, size, column)
            made.append(_layer_row(f"{name}, tiles", size, tiles, plain))
    return made


def _layer_row(name: str, size: int, line: Timeline, plain: Timeline) -> str:
    share = line.busy(0) / line.seconds
    return (
        f"| {name} | {size} | {line.seconds * 1e3:.2f} | {plain.seconds * 1e3:.2f} | {share:.0%} |"
    )


def pictures(machine: Machine) -> dict[str, str]:
    """File name -> SVG."""
    a, e, p = Attention(8192), Experts(), Product()
    ring = [
        ("overlapped", schedule.ring(a, machine, 4)),
        ("naive", schedule.ring(a, machine, 4, overlap=False)),
    ]
    layers = [
        ("MoE layer, 4 chunks", schedule.experts(e, machine, 2, 4)),
        ("MoE layer, one", schedule.experts(e, machine, 2, 1)),
    ]
    products = [
        ("column-parallel", schedule.column_linear(p, machine, 4)),
        ("row-parallel", schedule.row_linear(p, machine, 4)),
    ]
    return {
        "distributed_ring.svg": draw(
            "Predicted: causal zigzag ring, 4 ranks of 8,192 tokens, forward", ring
        ),
        "distributed_experts.svg": draw("Predicted: experts of two ranks, forward", layers),
        "distributed_products.svg": draw(
            "Predicted: products of four ranks, 8192 x 28672 x 8192", products
        ),
    }


def put(page: str, name: str, rows: Sequence[str]) -> str:
    """The page with a table between its two marks."""
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    inside = "\n".join(rows)
    found = re.sub(
        rf"(?s){marks[0]}.*?{marks[1]}", lambda _: f"{marks[0]}\n{inside}\n{marks[1]}", page
    )
    if marks[0] not in found:
        raise ValueError(f"{PAGE.name} has no mark {marks[0]}")
    return found


def written(machine: Machine) -> dict[Path, str]:
    """All files that --write writes."""
    page = PAGE.read_text()
    page = put(page, "attention", attention_rows(machine))
    page = put(page, "layers", layer_rows(machine))
    found = {PAGE.parent / name: text for name, text in pictures(machine).items()}
    return {PAGE: page, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="the page and its pictures")
    for one in fields(Machine):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=float, help=f"{one.default:g}")
    given = vars(parser.parse_args(arguments))
    rates = {
        one.name: type(one.default)(given[one.name])
        for one in fields(Machine)
        if given[one.name] is not None
    }
    machine = replace(Machine(), **rates)
    if not given["write"]:
        print(*attention_rows(machine), "", *layer_rows(machine), sep="\n")
        return 0
    for path, text in written(machine).items():
        path.write_text(text)
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
