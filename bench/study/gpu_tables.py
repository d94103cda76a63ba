"""The tables of docs/PRECISION.md that a GPU's records make (on_gpu.py, device.py).

python -m bench.study.gpu_tables bench/results/study/gpu/FILE.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..core.store import read
from ..report.tables import markdown, with_tables
from .on_gpu import DIM, FORMS, HALVES, HEADS
from .tables import KEYS, PAGE, Records, found, of, percent, values


def forms(known: Records) -> Iterator[list[str]]:
    """Forms down, kinds across, each in full and causal: the kernels' errors."""
    part = "kernel forms"
    kinds = values(known, part, "kind")
    yield ["form", *(f"{kind}{', causal' * c}" for kind in kinds for c in (0, 1))]
    for form in values(known, part, "scheme"):
        where = {"scheme": form, "keys": KEYS}
        cells = (_error(known, part, **where, kind=kind, causal=causal)
                 for kind in kinds for causal in (False, True))  # fmt: skip
        yield [form, *cells]


def lengths(known: Records) -> Iterator[list[str]]:
    """Forms down, keys across: N(0, 1), full."""
    part = "kernel forms"
    keys = values(known, part, "keys")
    yield ["form", *(f"{n:,}" for n in keys)]
    for form in values(known, part, "scheme"):
        where = {"scheme": form, "kind": "N(0, 1)", "causal": False}
        yield [form, *(_error(known, part, **where, keys=n) for n in keys)]


def needle(known: Records) -> Iterator[list[str]]:
    """Sums down, keys across: the share that is found, and the output's error."""
    part = "kernel needle"
    keys = values(known, part, "keys")
    yield ["sums", *(f"{n:,}" for n in keys)]
    for sums in values(known, part, "sums"):
        cells = [of(known, part, sums=sums, keys=n) for n in keys]
        yield [sums, *(f"{100 * c[-1]['found']:.0f} %, {percent(c[-1]['error'])}" if c else ""
                       for c in cells)]  # fmt: skip


def sums(known: Records) -> Iterator[list[str]]:
    """Products of wgmma beside their emulation."""
    part = "kernel sums"
    yield ["numbers", "k", "promoted", "error", "emulated", "sums with the same bits"]
    for r in of(known, part):
        interval = f"every {r['interval']:,}" if r["interval"] else "never"
        yield [r["sign"], f"{r['k']:,}", interval, percent(r["error"]), percent(r["emulated"]),
               f"{100 * r['same']:.0f} %"]  # fmt: skip


def speed(known: Records) -> Iterator[list[str]]:
    """Forms down, lengths across: TFLOP/s of codes made before, and what making them takes."""
    part = "attention speed"
    keys = values(known, part, "keys")
    across = [(n, causal) for n in keys for causal in (False, True)]
    yield ["form", "bytes a key", *(f"{n:,}{', causal' * c}" for n, c in across),
           *(f"codes of {n:,}, us" for n in keys)]  # fmt: skip
    for form in values(known, part, "scheme"):
        cells = [of(known, part, scheme=form, keys=n, causal=c) for n, c in across]
        rates = [f"{c[-1]['flops'] / c[-1]['seconds'] / 1e12:.0f}" if c else "" for c in cells]
        made = [of(known, part, scheme=form, keys=n, causal=False)[-1] for n in keys]
        times = [f"{r['quantize_seconds'] * 1e6:.0f}" if r["quantize_seconds"] else ""
                 for r in made]  # fmt: skip
        yield [form, bytes_a_key(form), *rates, *times]


def bytes_a_key(form: str) -> str:
    """Of a row of K and one of V, as they lie in memory."""
    if form in HALVES:
        return str(4 * DIM)
    scheme = FORMS[form][0]["scheme"]
    return f"{DIM * (3 if scheme == 'int8' else 2) + 4 / 64:g}"


def products(known: Records) -> Iterator[list[str]]:
    """Schemes down, products across: us and TFLOP/s."""
    part = "product speed"
    names = values(known, part, "product")
    yield ["scheme", *(f"{name}, {unit}" for name in names for unit in ("us", "TFLOP/s"))]
    for scheme in values(known, part, "scheme"):
        cells: list[str] = []
        for name in names:
            r = of(known, part, scheme=scheme, product=name)[-1]
            rate = r["flops"] / r["seconds"] / 1e12
            cells += [f"{r['seconds'] * 1e6:.1f}", f"{rate:,.0f}" if rate > 100 else f"{rate:.1f}"]
        yield [f"`{scheme}`", *cells]


def _error(known: Records, part: str, **where: object) -> str:
    some = of(known, part, **where)
    return percent(some[-1]["error"]) if some else ""


def run(path: Path) -> str:
    """Which file, where, when."""
    header = read(path)[0].header
    return (
        f"`bench/results/study/gpu/{path.name}`: {header['date'][:10]}, {HEADS[0]} query heads on "
        f"{HEADS[1]} of {DIM} in what is timed, batch 1; NVIDIA H200, PyTorch "
        f"{header['versions']['torch']}, CUDA graphs, medians in turns.\n"
    )


def tables(path: Path) -> dict[str, str]:
    """Markdown by the name of its markers."""
    known = found(path)
    made = {"gpu forms": forms, "gpu lengths": lengths, "gpu needle": needle, "gpu sums": sums,
            "gpu speed": speed}  # fmt: skip
    if of(known, "product speed"):  # a run may have ended before
        made["gpu products"] = products
    return {name: markdown(list(lines(known))) for name, lines in made.items()} | {
        "gpu run": run(path)
    }


def main() -> None:
    """Write the tables of the file given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("result", type=Path, help="of `python -m bench study` on a GPU")
    path = parser.parse_args().result
    PAGE.write_text(with_tables(PAGE.read_text(), tables(path)))


if __name__ == "__main__":
    main()
