"""The tables and the pictures of docs/PRECISION.md out of a result file of the study.

python -m bench.study.tables bench/results/study/FILE.jsonl

Rows and columns are what the file has: a scheme or form with records of its own is one more row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fkjit.ops.quantize.schemes import SCHEMES, WIDTH

from ..core.store import read, records
from ..report.tables import markdown, with_tables
from . import pictures
from .attention import DIM, FORMS
from .codes import HALVES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "PRECISION.md"
KEYS = 16384  # of the table of forms, and of that of bits
Records = list[dict[str, Any]]


def found(path: Path) -> Records:
    """The study's records of a file; of a part that several runs have those of the last one."""
    made: dict[str, Records] = {}
    new: set[str] = set()  # parts of the run that is read
    for record in records(path):
        if record["record"] == "run":
            new = set()
        elif record["record"] == "study":
            if record["part"] not in new:
                new.add(record["part"])
                made[record["part"]] = []
            made[record["part"]].append(record)
    return [record for part in made.values() for record in part]


def of(known: Records, part: str, **where: Any) -> Records:
    """Those of a part with such values."""
    return [r for r in known if r["part"] == part and all(r.get(k) == v for k, v in where.items())]


def values(known: Records, part: str, name: str) -> list[Any]:
    """What a field has, in the order in which it came."""
    return list(dict.fromkeys(record[name] for record in of(known, part)))


def percent(value: float) -> str:
    """Three figures, less where they would be zeros."""
    hundred = 100 * value
    if not hundred:
        return "0"
    return f"{hundred:.3g} %" if hundred >= 0.001 else f"{hundred:.1g} %"


def _error(known: Records, part: str, **where: Any) -> str:
    some = of(known, part, **where)
    return percent(some[-1]["error"]) if some else ""


def bytes_of(scheme: str) -> str:
    """Of a number with its share of a scale, in long rows."""
    if scheme in HALVES:
        return "2"
    how = SCHEMES[scheme]
    size = 0.5 if how.code == "int4" else 1
    scale = {"fp8": 4, "int8": 2, "int4": 2}[how.code] / WIDTH if how.span == "group" else 0
    return f"{size + scale:.3g}"


def bytes_a_key(form: str) -> str:
    """Of a row of K and one of V; scales of 64 keys count, those of heads and columns do not."""
    kinds = {one.name: one for one in FORMS}
    if form not in kinds:
        return ""
    one = kinds[form]
    sizes = {"fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
    scale = 4 / 64 if one.scales == "block" else 0
    return f"{DIM * (sizes[one.scores] + sizes[one.values]) + scale:g}"


def products(known: Records) -> Iterator[list[str]]:
    """Schemes down, kinds of x across."""
    kinds = values(known, "products", "kind")
    yield ["scheme", "bytes a number", *kinds]
    for scheme in values(known, "products", "scheme"):
        errors = [_error(known, "products", scheme=scheme, kind=kind) for kind in kinds]
        yield [f"`{scheme}`", bytes_of(scheme), *errors]


def product_sums(known: Records) -> Iterator[list[str]]:
    """Signs and k down, intervals across."""
    part = "product sums"
    intervals = sorted(values(known, part, "interval"), key=lambda n: (n > 0, -n))
    yield ["numbers", "k", *map(_interval, intervals)]
    for sign in values(known, part, "sign"):
        for k in values(known, part, "k"):
            errors = [_error(known, part, sign=sign, k=k, interval=n) for n in intervals]
            yield [sign, f"{k:,}", *errors]


def forms(known: Records) -> Iterator[list[str]]:
    """Forms of attention down, kinds across, each in full and causal."""
    kinds = values(known, "attention", "kind")
    yield ["form", "bytes a key", *(f"{kind}{', causal' * c}" for kind in kinds for c in (0, 1))]
    for form in values(known, "attention", "scheme"):
        errors = [
            _error(known, "attention", scheme=form, kind=kind, causal=causal, keys=KEYS)
            for kind in kinds for causal in (False, True)
        ]  # fmt: skip
        yield [form, bytes_a_key(form), *errors]


def lengths(known: Records) -> Iterator[list[str]]:
    """Forms down, keys across."""
    keys = values(known, "attention", "keys")
    yield ["form", *(f"{n:,}" for n in keys)]
    for form in values(known, "attention", "scheme"):
        where = {"scheme": form, "kind": "N(0, 1)", "causal": False}
        yield [form, *(_error(known, "attention", **where, keys=n) for n in keys)]


def attention_sums(known: Records) -> Iterator[list[str]]:
    """What values lie around and keys down, intervals across."""
    part = "attention sums"
    intervals = sorted(values(known, part, "interval"), key=lambda n: (n > 0, -n))
    bits = values(known, part, "bits")[0]
    yield ["values", "keys", *map(_interval, intervals)]
    for lie in values(known, part, "values"):
        for n in values(known, part, "keys"):
            where = {"values": lie, "keys": n, "bits": bits}
            yield [lie, f"{n:,}", *(_error(known, part, **where, interval=i) for i in intervals)]


def bits_kept(known: Records) -> Iterator[list[str]]:
    """Bits down; values around 0 and 1, with two intervals, across."""
    part = "attention sums"
    lies, both = values(known, part, "values"), (0, 128)
    yield ["bits", *(f"{lie}, {_interval(n)}" for lie in lies for n in both)]
    for bits in sorted(values(known, part, "bits")):
        where = {"keys": KEYS, "bits": bits}
        cells = (_error(known, part, **where, values=v, interval=n) for v in lies for n in both)
        yield [str(bits), *cells]


def needle(known: Records) -> Iterator[list[str]]:
    """Sums down, keys across: the share that is found, and the output's error."""
    keys = values(known, "needle", "keys")
    yield ["sums", *(f"{n:,}" for n in keys)]
    for sums in pictures.ways_to_add(known):
        cells = [of(known, "needle", sums=sums, keys=n) for n in keys]
        shown = [f"{100 * c[-1]['found']:.0f} %, {percent(c[-1]['error'])}" if c else ""
                 for c in cells]  # fmt: skip
        yield [sums, *shown]


def models(known: Records, name: str) -> Iterator[list[str]]:
    """Ways down, models across: `name` is "error" or "perplexity"."""
    every = values(known, "models", "model")
    if name == "perplexity":  # that of random weights means nothing
        every = [model for model in every if "random" not in model]
    yield ["products", "attention", *every]
    for products_of, attention, interval in pictures.ways(known):
        where = {"products": products_of, "attention": attention, "interval": interval}
        cells = [of(known, "models", model=model, **where) for model in every]
        shown = [_figure(c[-1][name], name) if c else "" for c in cells]
        sums = "" if interval is None else f", sums of 13 bits, {_interval(interval)}"
        yield [products_of, f"{attention}{sums}", *shown]


def _figure(value: float, name: str) -> str:
    return percent(value) if name == "error" else f"{value:.3f}"


def _interval(n: int) -> str:
    return f"every {n:,}" if n else "never"


def run(path: Path) -> str:
    """Which file, when, how long, what of."""
    runs = read(path)
    one = runs[0]
    text = of(found(path), "text")[-1]
    versions = one.header["versions"]
    minutes = sum((run.end or {"seconds": 0})["seconds"] for run in runs) / 60
    return (
        f"All numbers below are of `bench/results/study/{path.name}`: {one.header['date'][:10]}, "
        f"seed {one.header['configuration']['seed']}, one core of a CPU, {minutes:.0f} minutes, "
        f"PyTorch {versions['torch']}, Python {one.header['python']}, whose docstrings are "
        f"{text['bytes']:,} bytes.\n"
    )


def tables(path: Path) -> dict[str, str]:
    """Markdown by the name of its markers."""
    known = found(path)
    made = {
        "products": products(known), "product sums": product_sums(known), "forms": forms(known),
        "lengths": lengths(known), "attention sums": attention_sums(known),
        "bits": bits_kept(known), "needle": needle(known),
        "logits": models(known, "error"), "perplexity": models(known, "perplexity"),
    }  # fmt: skip
    return {name: markdown(lines) for name, lines in made.items()} | {"run": run(path)}


def main() -> None:
    """Write the tables and the pictures of the file given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("result", type=Path, help="of `python -m bench study`")
    path = parser.parse_args().result
    PAGE.write_text(with_tables(PAGE.read_text(), tables(path)))
    for name, drawn in pictures.pictures(found(path), path.name).items():
        (PAGE.parent / name).write_text(drawn)


if __name__ == "__main__":
    main()
